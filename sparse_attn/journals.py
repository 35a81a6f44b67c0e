"""Rings of the last rows that a compressor took in: row of token t in slot t % len. Going back overwrites nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def write(ring: Tensor, first: int, rows: Tensor) -> None:
    """Enter rows [n, width] of tokens first .. first + n; of more than the ring holds, the last ones."""
    last = first + len(rows)
    kept = min(len(rows), len(ring))
    ring[torch.arange(last - kept, last, device=ring.device) % len(ring)] = rows[len(rows) - kept :]


def read(ring: Tensor, first: int, last: int) -> Tensor:
    """Rows of tokens first .. last, [last - first, width]; a copy."""
    if last - first > len(ring):
        raise RuntimeError(f"{last - first} rows asked of a journal of {len(ring)}")
    return ring[torch.arange(first, last, device=ring.device) % len(ring)]
