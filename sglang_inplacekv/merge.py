"""Merging partial attention states by log-sum-exp. LSE is base 2 everywhere in this project (FlashInfer's convention)."""

from __future__ import annotations

import torch


def empty_state(
    rows: int, heads: int, head_dim: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the neutral element: out [rows, heads, head_dim] fp32 zeros, lse [rows, heads] fp32 -inf."""
    return (
        torch.zeros(rows, heads, head_dim, dtype=torch.float32, device=device),
        torch.full((rows, heads), -torch.inf, dtype=torch.float32, device=device),
    )


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint token sets.

    out_* [rows, heads, head_dim] fp32, lse_* [rows, heads] fp32 base 2. Commutative and associative up to rounding; an
    empty side (lse -inf) is neutral, two empty sides give zeros and -inf.
    """
    top = torch.maximum(lse_a, lse_b)
    # -inf minus -inf is NaN: where both sides are empty any finite anchor gives weights 0 and 0.
    anchor = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weight_a, weight_b = torch.exp2(lse_a - anchor), torch.exp2(lse_b - anchor)
    total = weight_a + weight_b
    scale = torch.where(total > 0, 1.0 / total, torch.zeros_like(total))
    out = out_a * (weight_a * scale).unsqueeze(-1) + out_b * (weight_b * scale).unsqueeze(-1)
    return out, torch.log2(total) + anchor
