"""Attention of each query over a run of adjacent rows: windows and HCA. What sparse_attn does for lists, without gathering."""

from __future__ import annotations

import torch

from sparse_attn.attend import LOG2E, State, empty_state, weigh

_SCORES = 2**22  # fp32 scores held at once


def attend_spans(
    q: torch.Tensor, rows: torch.Tensor, first: torch.Tensor, last: torch.Tensor, scale: float
) -> State:
    """Attend query i to rows first[i] .. last[i], key and value alike.

    q [queries, heads, width] and rows [n, width] of any float dtype, computed in fp32; first and last [queries] int64, neither
    falling from one query to the next. Returns out [queries, heads, width] and lse [queries, heads], fp32, base 2; an empty run
    gives zeros and -inf.
    """
    queries, heads, width = q.shape
    out, lse = empty_state(queries, heads, width, q.device)
    firsts, lasts = torch.stack((first, last)).tolist()
    start = 0
    while start < queries:
        stop = _block_end(start, firsts, lasts, heads)
        low, high = firsts[start], lasts[stop - 1]
        if high > low:
            seen = rows[low:high].float()
            scores = (q[start:stop].float().flatten(0, 1) * (scale * LOG2E)) @ seen.T
            scores = scores.view(stop - start, heads, -1)
            places = torch.arange(low, high, device=q.device)
            hidden = (places < first[start:stop, None]) | (places >= last[start:stop, None])
            scores.masked_fill_(hidden[:, None], -torch.inf)
            weights, divisor, lse[start:stop] = weigh(scores)
            mixed = weights.flatten(0, 1) @ seen
            out[start:stop] = mixed.view(stop - start, heads, width) / divisor
        start = stop
    return out, lse


def _block_end(start: int, first: list[int], last: list[int], heads: int) -> int:
    """As many queries as the bound on scores allows, and at least one; no more than their own runs are long."""
    stop = start + 1
    longest = max(64, last[start] - first[start])
    while stop < len(first):
        rows = last[stop] - first[start]
        if rows > 2 * longest or (stop + 1 - start) * heads * rows > _SCORES:
            break
        stop += 1
    return stop
