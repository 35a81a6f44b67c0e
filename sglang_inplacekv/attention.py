"""Partial attention in torch, with LSE: the arithmetic of the GPU side on hosts without one."""

from __future__ import annotations

import torch

from sparse_attn.attend import LOG2E, empty_state, weigh

_SCORE_ROWS = 8192  # bounds the score matrix to so many rows, a head's query each, of fp32 keys


def partial_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend q over one token set.

    q [queries, q_heads, head_dim], k [keys, kv_heads, head_dim], v [keys, kv_heads, out_dim], any float dtype, q_heads a
    multiple of kv_heads; computed in fp32. causal: query i sees keys 0..i (queries = keys). Returns out
    [queries, q_heads, out_dim] fp32 and lse [queries, q_heads] fp32, base 2; no keys give zeros and -inf.
    """
    queries, q_heads, head_dim = q.shape
    keys, kv_heads, out_dim = v.shape
    if keys == 0:
        return empty_state(queries, q_heads, out_dim)
    group = q_heads // kv_heads
    q = q.float().view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3) * (scale * LOG2E)
    k, v = k.float().permute(1, 2, 0), v.float().permute(1, 0, 2)
    step = max(1, _SCORE_ROWS // q_heads)
    out = torch.empty(kv_heads, group, queries, out_dim)
    lse = torch.empty(kv_heads, group, queries)
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        seen = stop if causal else keys
        # Heads of a group share k: fold them into the query axis, one product per kv head.
        block = q[:, :, start:stop].reshape(kv_heads, group * (stop - start), head_dim)
        scores = (block @ k[:, :, :seen]).view(kv_heads, group, stop - start, seen)
        if causal:
            hidden = torch.ones(stop - start, seen, dtype=torch.bool).triu_(start + 1)
            scores.masked_fill_(hidden, -torch.inf)
        weights, divisor, lse[:, :, start:stop] = weigh(scores)
        mixed = weights.view(kv_heads, group * (stop - start), seen) @ v[:, :seen]
        out[:, :, start:stop] = mixed.view(kv_heads, group, stop - start, out_dim) / divisor
    return out.permute(2, 0, 1, 3).reshape(queries, q_heads, out_dim), lse.permute(2, 0, 1).reshape(
        queries, q_heads
    )
