"""A step's rows as attention sees them: index arrays, on the host and on the device.

The one description from which every backend plans. Knows no backend, no model and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pipeinfer.steps.step import Step


@dataclass(frozen=True)
class RowArrays:
    """Index arrays of R rows, all int32, on the host or on the device.

    lengths [R]: keys of each row, this step's included. last_page [R]: keys in its last page.
    q_indptr [R + 1], kv_indptr [R + 1]: where a row's queries, and its pages in `indices`, begin.
    prefill_indptr [prefill rows + 1]: q_indptr of the rows after the decodes, from 0 on.
    indices [n]: all pages of row 0, of row 1 ... table [R, P]: the same by row, padded; it may hold
    the last rows only.
    """

    lengths: torch.Tensor
    last_page: torch.Tensor
    q_indptr: torch.Tensor
    prefill_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    indices: torch.Tensor
    table: torch.Tensor

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

    fixed: the device arrays stand at addresses that a CUDA graph has captured. Prefill rows of a
    graph count their queries from the step's first token, because how many decode rows are real
    changes from replay to replay; those that are not have no keys, and must not write anything.
    """

    decodes: int
    longest_query: int
    parity: int
    host: RowArrays
    device: RowArrays
    fixed: bool = False


_NONE = torch.empty(0, dtype=torch.int32)


def host_rows(step: Step) -> PagedRows:
    """The rows of a step that stays on the host, where backends read no other arrays than lengths,
    q_indptr and table: the others are empty. Views of the step's own arrays where there are some.
    """
    queries = np.zeros(len(step.counts) + 1, dtype=np.int32)
    np.cumsum(step.counts, out=queries[1:])
    arrays = RowArrays(
        lengths=torch.from_numpy(step.starts + step.counts),
        last_page=_NONE,
        q_indptr=torch.from_numpy(queries),
        prefill_indptr=_NONE,
        kv_indptr=_NONE,
        indices=_NONE,
        table=torch.from_numpy(step.pages),
    )
    longest = int(step.counts.max()) if step.decodes < len(step.counts) else 1
    return PagedRows(step.decodes, longest, 0, arrays, arrays)
