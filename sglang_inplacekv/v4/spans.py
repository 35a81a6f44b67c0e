"""Attention of each query over a run of adjacent rows: windows and HCA. What sparse_attn does for lists, without gathering."""

from __future__ import annotations

import torch

from sparse_attn.attend import State

_LOG2E = 1.4426950408889634
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
    out = torch.zeros(queries, heads, width, device=q.device)
    lse = torch.full((queries, heads), -torch.inf, device=q.device)
    firsts, lasts = torch.stack((first, last)).tolist()
    start = 0
    while start < queries:
        stop = _block_end(start, firsts, lasts, heads)
        low, high = firsts[start], lasts[stop - 1]
        if high > low:
            seen = rows[low:high].float()
            scores = (q[start:stop].float().flatten(0, 1) * (scale * _LOG2E)) @ seen.T
            scores = scores.view(stop - start, heads, -1)
            places = torch.arange(low, high, device=q.device)
            hidden = (places < first[start:stop, None]) | (places >= last[start:stop, None])
            scores.masked_fill_(hidden[:, None], -torch.inf)
            top = scores.amax(-1, keepdim=True)
            # -inf minus -inf is NaN: where a run is empty any finite anchor gives weights 0.
            anchor = torch.where(top == -torch.inf, 0.0, top)
            weights = torch.exp2(scores - anchor)
            total = weights.sum(-1, keepdim=True)
            mixed = weights.flatten(0, 1) @ seen
            out[start:stop] = mixed.view(stop - start, heads, width) / torch.where(total > 0, total, 1.0)
            lse[start:stop] = (torch.log2(total) + anchor).squeeze(-1)
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
