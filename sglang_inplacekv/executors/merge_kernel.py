"""One kernel that merges up to three partial attention states on the GPU. LSE base 2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

State = tuple[torch.Tensor, torch.Tensor]
MAX_PARTS = 3
_ROWS = 8  # states of one head handled by one program


@triton.jit
def _fold(out, lse, part, part_lse):
    top = tl.maximum(lse, part_lse)
    # Where both are empty any finite anchor gives weights 0 and 0 instead of NaN.
    anchor = tl.where(top == -float("inf"), 0.0, top)
    weight, part_weight = tl.exp2(lse - anchor), tl.exp2(part_lse - anchor)
    total = weight + part_weight
    scale = tl.where(total > 0, 1.0 / total, 0.0)
    return out * (weight * scale)[:, None] + part * (part_weight * scale)[:, None], tl.log2(total) + anchor


@triton.jit
def _load(out, lse, inside, real):
    """An empty state's value is not looked at: it may be in host memory, and may be anything."""
    weight = tl.load(lse, mask=real, other=-float("inf"))
    taken = inside & (weight > -float("inf"))[:, None]
    return tl.load(out, mask=taken, other=0.0).to(tl.float32), weight


@triton.jit
def _merge(
    out,
    lse,
    out_a,
    lse_a,
    out_b,
    lse_b,
    out_c,
    lse_c,
    rows,
    head_dim,
    PARTS: tl.constexpr,
    STORE_LSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    real = row < rows
    inside = real[:, None] & (column < head_dim)[None, :]
    place = row.to(tl.int64)[:, None] * head_dim + column[None, :]
    value, weight = _load(out_a + place, lse_a + row, inside, real)
    if PARTS >= 2:
        part, part_weight = _load(out_b + place, lse_b + row, inside, real)
        value, weight = _fold(value, weight, part, part_weight)
    if PARTS >= 3:
        part, part_weight = _load(out_c + place, lse_c + row, inside, real)
        value, weight = _fold(value, weight, part, part_weight)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    if STORE_LSE:
        tl.store(lse + row, weight, mask=real)


def merge(out: torch.Tensor, parts: Sequence[State], lse: torch.Tensor | None = None) -> None:
    """Merge up to three partial states into `out` and, if given, `lse`; none gives zeros.

    out [rows, heads, head_dim] contiguous, any float dtype; each part has out of the same shape, any float dtype, and lse
    [rows, heads] fp32, both contiguous. An empty state has lse -inf; its out may be anything. Accumulates in fp32.
    """
    if parts:
        _launch(out, lse, parts)
        return
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)


def fold(parts: list[State]) -> list[State]:
    """`parts` as they are while one more may join them, else merged into one fp32 state."""
    if len(parts) < MAX_PARTS:
        return parts
    state = (torch.empty_like(parts[0][0], dtype=torch.float32), torch.empty_like(parts[0][1]))
    _launch(*state, parts)
    return [state]


def _launch(out: torch.Tensor, lse: torch.Tensor | None, parts: Sequence[State]) -> None:
    if len(parts) > MAX_PARTS:
        raise ValueError(f"at most {MAX_PARTS} states can be merged at a time, got {len(parts)}")
    padded = [*parts, *[parts[0]] * (MAX_PARTS - len(parts))]
    rows, head_dim = parts[0][1].numel(), out.shape[-1]
    if rows:
        _merge[(triton.cdiv(rows, _ROWS),)](
            out,
            parts[0][1] if lse is None else lse,
            *(tensor for part in padded for tensor in part),
            rows,
            head_dim,
            PARTS=len(parts),
            STORE_LSE=lse is not None,
            ROWS=_ROWS,
            BLOCK=triton.next_power_of_2(head_dim),
        )
