"""Attention of many heads over listed rows of one pool, on a GPU. A row is key and value of all heads, as in DeepSeek-V4.

The list may hold anything in any order: a window, a hot set, what has just been fetched. LSE base 2. Weights are rounded to the
rows' dtype before the second product, as FlashInfer's are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS, _ROWS = 16, 32  # of a product: the least that tensor cores take, and rows that fit beside it
_SPLIT_ROWS = 64  # of the list, by one program
_LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    q,
    pool,
    slots,
    out,
    lse,
    heads,
    listed,
    scale_log2,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    token, split = tl.program_id(0), tl.program_id(2)
    splits = tl.num_programs(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    real = head < heads
    queries = tl.load(
        q + (token * heads + head)[:, None].to(tl.int64) * WIDTH + column[None, :],
        mask=real[:, None],
        other=0.0,
    )
    if WIDEN:  # triton's interpreter, which has no products of bf16
        queries = queries.to(tl.float32)
    top = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, WIDTH], tl.float32)
    for first in range(0, SPLIT, ROWS):
        place = split * SPLIT + first + tl.arange(0, ROWS)
        slot = tl.load(slots + token * listed + place, mask=place < listed, other=-1)
        there = slot >= 0
        rows = tl.load(
            pool + slot.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=there[:, None], other=0.0
        )
        if WIDEN:
            rows = rows.to(tl.float32)
        scores = tl.dot(queries, tl.trans(rows), input_precision="ieee") * scale_log2
        scores = tl.where(there[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - anchor[:, None])
        factor = tl.exp2(top - anchor)
        total = total * factor + tl.sum(weights, 1)
        sums = sums * factor[:, None] + tl.dot(weights.to(rows.dtype), rows, input_precision="ieee")
        top = new_top
    empty = total == 0.0
    sums = sums / tl.where(empty, 1.0, total)[:, None]
    state = (token * splits + split) * heads + head
    tl.store(out + state.to(tl.int64)[:, None] * WIDTH + column[None, :], sums, mask=real[:, None])
    tl.store(lse + state, tl.where(empty, -float("inf"), tl.log2(total) + top), mask=real)


@triton.jit
def _join(parts, part_lse, out, lse, splits, heads, WIDTH: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    top = -float("inf")
    for split in range(splits):
        top = tl.maximum(top, tl.load(part_lse + (token * splits + split) * heads + head))
    anchor = tl.where(top == -float("inf"), 0.0, top)
    total, sums = 0.0, tl.zeros([WIDTH], tl.float32)
    for split in range(splits):
        state = (token * splits + split) * heads + head
        weight = tl.exp2(tl.load(part_lse + state) - anchor)
        total += weight
        sums += weight * tl.load(parts + state.to(tl.int64) * WIDTH + column)
    place = (token * heads + head).to(tl.int64)
    tl.store(out + place * WIDTH + column, sums / tl.where(total == 0.0, 1.0, total))
    tl.store(lse + place, tl.where(total == 0.0, -float("inf"), tl.log2(total) + anchor))


def attend_listed(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend q [tokens, heads, width] to the rows of pool [rows, width] that slots [tokens, listed] int32 names, -1 for none.

    width is a power of two; q and pool are of one dtype. Returns (out [tokens, heads, width], lse [tokens, heads]), both fp32;
    no row at all gives zeros and -inf.
    """
    tokens, heads, width = q.shape
    listed = slots.shape[1]
    if pool.shape[1] != width or width & (width - 1) or q.dtype != pool.dtype:
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} does not fit rows {tuple(pool.shape)} {pool.dtype}")
    if not (q.is_contiguous() and pool.is_contiguous() and slots.is_contiguous()):
        raise ValueError("q, pool and slots must be contiguous")
    splits = max(1, triton.cdiv(listed, _SPLIT_ROWS))
    parts = torch.empty(tokens, splits, heads, width, device=q.device)
    part_lse = torch.empty(tokens, splits, heads, device=q.device)
    _attend[(tokens, triton.cdiv(heads, _HEADS), splits)](
        q, pool, slots, parts, part_lse, heads, listed, scale * _LOG2_E,
        WIDTH=width, HEADS=_HEADS, ROWS=_ROWS, SPLIT=_SPLIT_ROWS, WIDEN=not q.is_cuda,
    )  # fmt: skip
    if splits == 1:
        return parts[:, 0], part_lse[:, 0]
    out, lse = torch.empty(tokens, heads, width, device=q.device), torch.empty(tokens, heads, device=q.device)
    _join[(tokens, heads)](parts, part_lse, out, lse, splits, heads, WIDTH=width)
    return out, lse
