"""The Kernels of the host, in NumPy: its vectorised loops need no thread pool."""

from pipeinfer.kernels.host.sampling import global_argmax, local_argmax, sample
from pipeinfer.kernels.host.scores import logit_keys, logprobs, local_topk, merge_topk
from pipeinfer.kernels.host.steps import apply_logit_bias, prepare_inputs, apply_token_bitmask, scatter_words

__all__ = [
    "global_argmax",
    "apply_logit_bias",
    "prepare_inputs",
    "apply_token_bitmask",
    "local_argmax",
    "logit_keys",
    "sample",
    "logprobs",
    "local_topk",
    "merge_topk",
    "scatter_words",
]
