"""The lightning indexer of DeepSeek-V3.2 and V4: a light score of every entry, and the top-k of them.

    score(t, w) = sum over heads h of weight[t, h] * relu(q[t, h] . key[w])

Weights may be negative, so scores may be; nothing is cut off at 0. relu makes scores that are exactly 0, so ties are real: of
equal scores the lowest entry goes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCORES = 2**24  # fp32 scores of single heads held at once


def top_entries(queries: Tensor, weights: Tensor, keys: Tensor, first: int, stride: int, k: int) -> Tensor:
    """Pick for each query the k best of the entries it may see.

    queries [T, heads, dim] of tokens first .. first + T; weights [T, heads]; keys [entries, dim], of which token t sees the
    first (t + 1) // stride. Computed in fp32. Returns int32 [T, K], ascending, behind them -1 where a query sees fewer than K;
    K is k or the number that the last query sees.
    """
    tokens, heads, _ = queries.shape
    most = (first + tokens) // stride
    columns = min(k, most)
    ids = torch.full((tokens, columns), -1, dtype=torch.int32, device=queries.device)
    # Whoever sees no more than k sees all of them, at no cost.
    whole = min(max((k + 1) * stride - 1 - first, 0), tokens)
    entries = torch.arange(columns, dtype=torch.int32, device=queries.device)
    limits = (torch.arange(first + 1, first + tokens + 1, device=queries.device) // stride)[:, None]
    ids[:whole] = torch.where(entries < limits[:whole], entries, -1)
    start = whole
    while start < tokens:
        stop = min(tokens, start + max(1, _SCORES // (heads * most)))
        scores = _scores(queries[start:stop], weights[start:stop], keys[: (first + stop) // stride])
        ids[start:stop] = _top(scores, limits[start:stop], k)
        start = stop
    return ids


def _scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """fp32 [T, entries]."""
    tokens, heads, dim = queries.shape
    by_head = queries.float().reshape(tokens * heads, dim) @ keys.float().T
    return torch.bmm(weights.float()[:, None], by_head.relu_().view(tokens, heads, -1)).squeeze(1)


def _top(scores: Tensor, limits: Tensor, k: int) -> Tensor:
    """Ids int32 [T, k] of the k highest of scores [T, entries], each query's below its limit [T, 1], which is at least k."""
    hidden = torch.arange(scores.shape[1], device=scores.device) >= limits
    scores = scores.masked_fill(hidden, -torch.inf)
    least = scores.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores > least, scores == least
    room = k - above.sum(-1, keepdim=True)
    taken = above | (level & (level.cumsum(-1) <= room))
    picked = taken.nonzero()[:, 1]
    if len(picked) != k * len(scores):
        raise RuntimeError(
            f"{len(picked)} entries picked for {len(scores)} queries of {k}: scores are not finite"
        )
    return picked.view(-1, k).int()
