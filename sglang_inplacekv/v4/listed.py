"""Attention over listed entries: by the Triton kernel where it takes them, else in torch, as on a CPU."""

from __future__ import annotations

import torch

from sparse_attn import Space
from sparse_attn.attend import State, attend_rows

_LEAST_WIDTH = 16  # of a product on tensor cores


def attend_list(
    q: torch.Tensor, space: Space, rows: torch.Tensor, places: torch.Tensor, scale: float
) -> State:
    """Attend q [queries, heads, width] to the rows [n, 1, width] that places [queries, K] names, -1 for none.

    Returns out [queries, heads, width] and lse [queries, heads], fp32, base 2. In 16-bit dtypes on a GPU weights are rounded to
    the rows' dtype, elsewhere all is computed in fp32.
    """
    if q.is_cuda and _kernel_takes(q, rows):
        from sglang_inplacekv.executors.row_attention import attend_listed

        return attend_listed(q.contiguous(), rows.squeeze(1), places.int(), scale)
    return attend_rows(q, space, rows, places.unsqueeze(1), scale)


def _kernel_takes(q: torch.Tensor, rows: torch.Tensor) -> bool:
    """Rows of 32 bits would not fit beside each other in a processor's memory."""
    width = q.shape[2]
    fits = width >= _LEAST_WIDTH and width & (width - 1) == 0 and q.dtype.itemsize == 2
    return fits and q.dtype == rows.dtype and rows.is_contiguous()
