"""Attention of many heads over listed rows of one pool, on a GPU. A row is key and value of all heads, as in DeepSeek-V4.

The list may hold anything in any order: a window, a hot set, what has just been fetched. LSE base 2. Weights are rounded to the
rows' dtype before the second product, as FlashInfer's are. Nothing waits for the GPU, so a CUDA graph may hold it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from sglang_inplacekv.executors import packed_rows
from sparse_attn.attend import LOG2E

_HEADS, _ROWS = 16, 32  # of a product: the least that tensor cores take, and rows that fit beside it
_JOINED = 16  # states of one head that are read at once
_COLUMNS = 128  # of a head's output, by one program
_NO_GPU = 20  # processors of Triton's interpreter: some lists are then split, as on a GPU


@triton.jit
def _unpack(pool, halves, slot, there, column, WIDTH: tl.constexpr, CODED: tl.constexpr, BYTES: tl.constexpr):
    """packed_rows.unpack of rows `slot`, [rows, WIDTH] bf16. halves: the pool as bf16."""
    first = slot.to(tl.int64)[:, None] * BYTES
    coded = column < CODED
    bits = tl.load(pool + first + column[None, :], mask=there[:, None] & coded[None, :], other=0).to(tl.int32)
    # An e4m3's bits, moved, are those of the fp16 that is its 2**-8th, subnormal ones too.
    small = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    block = tl.arange(0, WIDTH // 64)
    power = tl.load(
        pool + first + (2 * WIDTH - CODED) + block[None, :],
        mask=there[:, None] & (block < CODED // 64)[None, :],
        other=0,
    ).to(tl.int32)
    factor = ((power + 8) << 23).to(tl.float32, bitcast=True)
    factors = tl.broadcast_to(factor[:, :, None], [slot.shape[0], WIDTH // 64, 64])
    values = small.to(tl.float32) * tl.reshape(factors, [slot.shape[0], WIDTH])
    rotary = tl.load(
        halves + slot.to(tl.int64)[:, None] * (BYTES // 2) + (column - CODED // 2)[None, :],
        mask=there[:, None] & (column >= CODED)[None, :],
        other=0.0,
    )
    return tl.where(coded[None, :], values.to(tl.bfloat16), rotary)


@triton.jit
def _attend(
    q,
    pool,
    halves,
    slots,
    out,
    lse,
    heads,
    listed,
    split_rows,
    scale_log2,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    CODED: tl.constexpr,
    BYTES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """CODED, BYTES: of packed rows; 0 where rows are not packed."""
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
    for first in range(0, split_rows, ROWS):
        place = split * split_rows + first + tl.arange(0, ROWS)
        slot = tl.load(slots + token * listed + place, mask=place < listed, other=-1)
        there = slot >= 0
        if BYTES:
            rows = _unpack(pool, halves, slot, there, column, WIDTH, CODED, BYTES)
        else:
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
def _join(
    parts,
    part_lse,
    out,
    lse,
    splits,
    heads,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    JOINED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.arange(0, SPLITS)
    level = tl.load(
        part_lse + (token * splits + split) * heads + head, mask=split < splits, other=-float("inf")
    )
    top = tl.max(level, 0)
    anchor = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(level - anchor), 0)
    sums = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, splits, JOINED):
        joined = first + tl.arange(0, JOINED)
        real = joined < splits
        state = (token * splits + joined) * heads + head
        weight = tl.exp2(tl.load(part_lse + state, mask=real, other=-float("inf")) - anchor)
        part = tl.load(
            parts + state.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=real[:, None], other=0.0
        )
        sums += tl.sum(weight[:, None] * part, 0)
    place = token * heads + head
    tl.store(out + place.to(tl.int64) * WIDTH + column, sums / tl.where(total == 0.0, 1.0, total))
    if tl.program_id(2) == 0:
        tl.store(lse + place, tl.where(total == 0.0, -float("inf"), tl.log2(total) + anchor))


def split_of(programs: int, listed: int, processors: int) -> tuple[int, int]:
    """(splits, rows of each) of a list, where `programs` attend each split.

    As many as make one program for each processor: fewer leave processors idle, and more would only wait their turn, then to
    be joined.
    """
    tiles = max(1, triton.cdiv(listed, _ROWS))
    splits = min(tiles, max(1, processors // programs))
    each = triton.cdiv(tiles, splits)
    return triton.cdiv(tiles, each), each * _ROWS


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _NO_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend_listed(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend q [tokens, heads, width] to the rows of pool [rows, width] that slots [tokens, listed] int32 names, -1 for none.

    width is a power of two; q and pool are of one dtype, or q is bf16 and pool packed rows, uint8 [rows, 584]. Returns
    (out [tokens, heads, width], lse [tokens, heads]), both fp32; no row at all gives zeros and -inf. Raises ValueError on
    other shapes and dtypes.
    """
    if (
        q.dim() != 3
        or pool.dim() != 2
        or slots.dim() != 2
        or len(slots) != len(q)
        or slots.dtype != torch.int32
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, pool {tuple(pool.shape)} and slots {tuple(slots.shape)} {slots.dtype}: slots must be int32, "
            "a list for each of q's tokens"
        )
    tokens, heads, width = q.shape
    listed = slots.shape[1]
    packed = pool.dtype == torch.uint8
    row = (packed_rows.WIDTH, torch.bfloat16) if packed else (pool.shape[1], pool.dtype)
    if row != (width, q.dtype) or width & (width - 1) or (packed and pool.shape[1] != packed_rows.ROW_BYTES):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} does not fit rows {tuple(pool.shape)} {pool.dtype}")
    if not (q.is_contiguous() and pool.is_contiguous() and slots.is_contiguous()):
        raise ValueError("q, pool and slots must be contiguous")
    out, lse = torch.empty(tokens, heads, width, device=q.device), torch.empty(tokens, heads, device=q.device)
    blocks = triton.cdiv(heads, _HEADS)
    splits, split_rows = split_of(max(1, tokens * blocks), listed, _processors(q.device))
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(tokens, splits, heads, width, device=q.device)
        part_lse = torch.empty(tokens, splits, heads, device=q.device)
    coded, row_bytes = (packed_rows.CODED, packed_rows.ROW_BYTES) if packed else (0, 0)
    _attend[(tokens, blocks, splits)](
        q, pool, pool.view(torch.bfloat16) if packed else pool, slots, parts, part_lse, heads, listed, split_rows,
        scale * LOG2E, WIDTH=width, HEADS=_HEADS, ROWS=_ROWS, CODED=coded, BYTES=row_bytes, WIDEN=not q.is_cuda,
        num_stages=2 if packed else 3,
    )  # fmt: skip
    if splits > 1:
        columns = min(width, _COLUMNS)
        _join[(tokens, heads, width // columns)](
            parts, part_lse, out, lse, splits, heads,
            WIDTH=width, SPLITS=triton.next_power_of_2(splits), JOINED=_JOINED, COLUMNS=columns,
        )  # fmt: skip
    return out, lse
