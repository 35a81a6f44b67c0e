"""Listed rows against fp64. As a program it checks the kernel on Triton's interpreter, which is chosen before the import."""

from __future__ import annotations

import math

import torch

from sglang_inplacekv.executors.packed_rows import WIDTH, pack, unpack
from sglang_inplacekv.executors.row_attention import attend_listed

# tokens, heads, width, rows listed: parts of tiles and of splits, an exact split, more heads than one program has, more splits
# than are joined at once
SHAPES = ((1, 16, 64, 5), (3, 20, 64, 150), (2, 64, 128, 128), (1, 1, 64, 1), (1, 16, 64, 530))
PACKED_SHAPE = (2, 20, WIDTH, 40)


def check(
    tokens: int,
    heads: int,
    width: int,
    listed: int,
    dtype: torch.dtype,
    device: str,
    tolerance: float,
    packed: bool = False,
) -> None:
    """Lists in any order with gaps; of several tokens the second has none at all. tolerance: of out; of lse
    3e-6, or 3e-5 where some rows are four times as large."""
    generator = torch.Generator().manual_seed(listed)
    pool = torch.randn(4 * listed, width, generator=generator).to(dtype)
    q = torch.randn(tokens, heads, width, generator=generator).to(dtype)
    slots = torch.stack([torch.randperm(len(pool), generator=generator)[:listed] for _ in range(tokens)])
    slots[torch.rand(slots.shape, generator=generator) < 0.2] = -1
    slots[1:2] = -1
    if tokens == 1:
        slots[0, 0] = 3
    kept = pool
    if packed:
        # Exponents of blocks differ; one block is all zeros.
        pool = pool * torch.exp2(torch.randint(-3, 3, (1, width), generator=generator))
        pool[:, 64:128] = 0
        kept = pack(pool)
        pool = unpack(kept)
    # What is not listed is not read into a result.
    unlisted = torch.ones(len(pool), dtype=torch.bool)
    unlisted[slots[slots >= 0]] = False
    pool[unlisted] = torch.nan
    kept[unlisted] = 0x7F if packed else torch.nan  # bytes that are no finite e4m3
    scale = width**-0.5
    out, lse = attend_listed(q.to(device), kept.to(device), slots.int().to(device), scale)
    for token in range(tokens):
        rows = pool[slots[token][slots[token] >= 0]].double()
        own_out, own_lse = out[token].cpu().double(), lse[token].cpu().double()
        if not len(rows):
            assert (own_out == 0).all() and (own_lse == -torch.inf).all()
            continue
        scores = q[token].double() @ rows.T * scale
        torch.testing.assert_close(own_out, scores.softmax(-1) @ rows, rtol=0, atol=tolerance)
        torch.testing.assert_close(
            own_lse, scores.logsumexp(-1) / math.log(2), rtol=0, atol=3e-5 if packed else 3e-6
        )


if __name__ == "__main__":
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            check(*shape, dtype, "cpu", 3e-6)
    check(*PACKED_SHAPE, torch.bfloat16, "cpu", 3e-5, packed=True)
    print("rows agree")
