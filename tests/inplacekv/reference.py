"""Dense fp64 attention, the yardstick of every test in this folder."""

from __future__ import annotations

import torch


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, first: int
) -> torch.Tensor:
    """q [n, q_heads, d] at positions first..first+n-1 over k, v [m, kv_heads, d]; causal; fp64 result as fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * scale
    hidden = torch.arange(k.shape[0])[None] > first + torch.arange(q.shape[0])[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).float()
