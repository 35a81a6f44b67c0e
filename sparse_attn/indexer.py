"""The lightning indexer of DeepSeek-V3.2 and V4: a light score of every entry, and the top-k of them.

    score(t, w) = sum over heads h of weight[t, h] * relu(q[t, h] . key[w])

Weights may be negative, so scores may be; nothing is cut off at 0. relu makes scores that are exactly 0, so ties are real: of
equal scores the lowest entry goes first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_attn.base import LayerInputs

_SCORES = 2**24  # fp32 scores of single heads held at once


def index_queries(x: LayerInputs, query: Tensor, head_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Queries fp32 [T, heads, dim], not yet rotated, and head weights fp32 [T, heads] with both scales of the score in them.

    query [heads * dim, q_lora_rank], head_weights [heads, hidden]; both products run in their weight's dtype.
    """
    if x.h is None or x.q_resid is None or not len(x.h) == len(x.q_resid) == x.tokens:
        raise ValueError(f"an indexer needs h and q_resid of {x.tokens} tokens to select")
    heads = len(head_weights)
    queries = F.linear(x.q_resid.to(query.dtype), query).float().view(x.tokens, heads, -1)
    weights = F.linear(x.h.to(head_weights.dtype), head_weights).float()
    return queries, weights * (heads * queries.shape[2]) ** -0.5


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
        ids[start:stop] = top_ids(scores, limits[start:stop], k)
        start = stop
    return ids


def _scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """fp32 [T, entries]."""
    tokens, heads, dim = queries.shape
    by_head = queries.float().reshape(tokens * heads, dim) @ keys.float().T
    return torch.bmm(weights.float()[:, None], by_head.relu_().view(tokens, heads, -1)).squeeze(1)


def top_ids(scores: Tensor, limits: Tensor, k: int) -> Tensor:
    """Ids of the k highest of scores [rows, entries], below a row's limit [rows, 1]; lowest id first among equals.

    Returns int32 [rows, min(k, entries)], ascending, with -1 behind them where a row's limit is less. Scores may be infinite.
    """
    rows, entries = scores.shape
    k = min(k, entries)
    ids = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    if not ids.numel():
        return ids
    visible = torch.arange(entries, device=scores.device) < limits
    scores = scores.masked_fill(~visible, -torch.inf)
    least = scores.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores > least, (scores == least) & visible
    room = k - above.sum(-1, keepdim=True)
    taken = above | (level & (level.cumsum(-1) <= room))
    row, entry = taken.nonzero(as_tuple=True)
    wanted = int(limits.clamp(max=k).sum())
    if len(entry) != wanted:
        raise RuntimeError(
            f"{len(entry)} entries picked for {rows} queries instead of {wanted}: a score is NaN"
        )
    ids[row, taken.cumsum(-1)[row, entry] - 1] = entry.int()
    return ids
