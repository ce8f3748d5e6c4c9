"""The Kernels of the host, in NumPy: its vectorised loops need no thread pool."""

from pipeinfer.kernels.host.sampling import global_argmax, local_argmax, sample
from pipeinfer.kernels.host.scores import local_topk, logit_keys, logprobs, merge_topk
from pipeinfer.kernels.host.steps import (
    apply_logit_bias,
    apply_token_bitmask,
    prepare_inputs,
    scatter_words,
)

__all__ = [
    "apply_logit_bias",
    "apply_token_bitmask",
    "global_argmax",
    "local_argmax",
    "local_topk",
    "logit_keys",
    "logprobs",
    "merge_topk",
    "prepare_inputs",
    "sample",
    "scatter_words",
]
