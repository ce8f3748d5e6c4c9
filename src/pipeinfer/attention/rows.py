"""A step's rows as attention sees them: index arrays, on the host and on the device.

The one description from which every backend plans. Knows no backend, no model and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class RowArrays:
    """Index arrays of R rows, all int32, on the host or on the device.

    lengths [R]: keys of each row, this step's included. last_page [R]: keys in its last page.
    q_indptr [R + 1]: where a row's queries begin. prefill_indptr [prefill rows + 1]: q_indptr of
    the rows after the decodes; see PagedRows. kv_indptr [R + 1]: where a row's pages begin in
    `indices`, which are those of row 0, of row 1 ... if the backend's traits say `listed`, and else
    the whole page table of all slots. table [R, P]: the same by row, padded, for the rows that the
    traits have `gathered`, which are the last ones. lines, seats [R]: what decodes begin with in
    common, as in Step.runs; only on the device.
    """

    lengths: torch.Tensor
    last_page: torch.Tensor
    q_indptr: torch.Tensor
    prefill_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    indices: torch.Tensor
    table: torch.Tensor
    lines: torch.Tensor | None = None
    seats: torch.Tensor | None = None

    def queries(self, begin: int, end: int) -> torch.Tensor:
        """[end - begin + 1] of rows begin..end-1, which are the decodes or all the others."""
        if begin == 0:
            return self.q_indptr[: end + 1]
        return self.prefill_indptr[: end - begin + 1]

    def page_table(self, begin: int, end: int) -> torch.Tensor:
        """int32 [end - begin, P] of rows begin..end-1."""
        missing = len(self.lengths) - len(self.table)
        return self.table[begin - missing : end - missing]


@dataclass(frozen=True)
class PagedRows:
    """`decodes` rows with one query, then rows with more. parity: which step-private buffers.

    host: of backends that read lengths there, with all of the rows' pages in `table` unless fixed,
    and without `indices`. fixed: the device arrays stand at addresses that a
    graph has captured. Prefill rows of a graph count their queries from the step's first token,
    because how many decode rows are real changes from replay to replay; those that are not have no
    keys, and must not write anything. Else they count from the first token behind the decodes.
    """

    decodes: int
    longest_query: int
    parity: int
    host: RowArrays | None
    device: RowArrays
    fixed: bool = False

    @property
    def on_host(self) -> RowArrays:
        """Raises AssertionError for a backend whose traits do not say that it wants them."""
        assert self.host is not None
        return self.host


def offsets(sizes: np.ndarray) -> np.ndarray:
    """int32 [n + 1]: where each of them begins, and the end."""
    found = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=found[1:])
    return found
