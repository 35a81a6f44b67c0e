"""One kernel that merges up to three partial attention states on the GPU. LSE base 2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _fold(out, lse, part, part_lse):
    top = tl.maximum(lse, part_lse)
    # Where both are empty any finite anchor gives weights 0 and 0 instead of NaN.
    anchor = tl.where(top == -float("inf"), 0.0, top)
    weight, part_weight = tl.exp2(lse - anchor), tl.exp2(part_lse - anchor)
    total = weight + part_weight
    scale = tl.where(total > 0, 1.0 / total, 0.0)
    return out * (weight * scale) + part * (part_weight * scale), tl.log2(total) + anchor


@triton.jit
def _merge(out, lse, out_a, lse_a, out_b, lse_b, head_dim, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < head_dim
    place = row * head_dim + column
    value = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(lse + row)
    part = tl.load(out_a + place, mask=inside, other=0.0).to(tl.float32)
    value, weight = _fold(value, weight, part, tl.load(lse_a + row))
    if PARTS == 3:
        part = tl.load(out_b + place, mask=inside, other=0.0).to(tl.float32)
        value, weight = _fold(value, weight, part, tl.load(lse_b + row))
    tl.store(out + place, value, mask=inside)
    tl.store(lse + row, weight)


def merge_into(out: torch.Tensor, lse: torch.Tensor, *parts: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Merge one or two more states into `out`, `lse`, in place.

    out [rows, heads, head_dim] fp32 and lse [rows, heads] fp32, contiguous; parts of the same shapes, any float dtype for
    their out. An empty state has lse -inf and finite out.
    """
    if not 1 <= len(parts) <= 2:
        raise ValueError(f"one or two parts can be merged at a time, got {len(parts)}")
    (out_a, lse_a), (out_b, lse_b) = parts[0], parts[-1]
    rows, head_dim = lse.numel(), out.shape[-1]
    if rows:
        _merge[(rows,)](
            out,
            lse,
            out_a,
            lse_a,
            out_b,
            lse_b,
            head_dim,
            PARTS=1 + len(parts),
            BLOCK=triton.next_power_of_2(head_dim),
        )
