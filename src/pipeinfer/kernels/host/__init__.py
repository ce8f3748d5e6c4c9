"""The Kernels of the host, in NumPy: its vectorised loops need no thread pool."""

from pipeinfer.kernels.host.sampling import choose, offer, sample
from pipeinfer.kernels.host.scores import own_keys, scores, survey, tell
from pipeinfer.kernels.host.steps import edit, expand, mask, write_words

__all__ = [
    "choose",
    "edit",
    "expand",
    "mask",
    "offer",
    "own_keys",
    "sample",
    "scores",
    "survey",
    "tell",
    "write_words",
]
