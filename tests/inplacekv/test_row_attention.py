"""Attention over listed rows: by Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from sglang_inplacekv.executors.packed_rows import ROW_BYTES, pack, unpack
from sglang_inplacekv.executors.row_attention import attend_listed, split_of
from tests.inplacekv.interpreted import run_interpreted
from tests.inplacekv.row_attention_checks import check


def test_interpreted() -> None:
    run_interpreted("row_attention_checks")


def test_what_does_not_fit_is_refused() -> None:
    slots = torch.zeros(1, 3, dtype=torch.int32)
    for q, pool, message in (
        (torch.ones(1, 2, 64), torch.ones(5, 32), "does not fit"),
        (torch.ones(1, 2, 48), torch.ones(5, 48), "does not fit"),
        (torch.ones(1, 2, 64), torch.ones(5, 64).bfloat16(), "does not fit"),
        (torch.ones(1, 2, 512), torch.zeros(5, 584, dtype=torch.uint8), "does not fit"),
        (torch.ones(1, 2, 512).bfloat16(), torch.zeros(5, 576, dtype=torch.uint8), "does not fit"),
        (torch.ones(1, 64, 2).mT, torch.ones(5, 64), "contiguous"),
        (
            torch.ones(2, 2, 64),
            torch.ones(5, 64),
            r"slots \(1, 3\) torch.int32: slots must be int32, a list for",
        ),
        (torch.ones(2, 64), torch.ones(5, 64), "slots must be"),
        (torch.ones(1, 2, 64), torch.ones(5, 1, 64), "slots must be"),
    ):
        with pytest.raises(ValueError, match=message):
            attend_listed(q, pool, slots, 1.0)
    for wrong in (slots.long(), slots.float(), slots[0], slots.repeat(2, 1)):
        with pytest.raises(ValueError, match="slots must be int32, a list for each of q's tokens"):
            attend_listed(torch.ones(1, 2, 64), torch.ones(5, 64), wrong, 1.0)


@pytest.mark.parametrize("rows", [torch.zeros(3, 511), torch.zeros(512), torch.zeros(1, 3, 512)])
def test_other_rows_are_not_packed(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="packed ones have 512 channels"):
        pack(rows)
    with pytest.raises(ValueError, match="not of 584 bytes"):
        unpack(torch.zeros(3, 584))
    with pytest.raises(ValueError, match="not of 584 bytes"):
        unpack(torch.zeros(584, dtype=torch.uint8))


def test_a_list_is_split_for_the_processors_there_are() -> None:
    # 64 heads are 4 programs. One sequence: a tile each; 8 and 32: one wave of 132; 1M tokens of HCA.
    assert split_of(4, 640, 132) == (20, 32)
    assert split_of(32, 640, 132) == (4, 160)
    assert split_of(128, 8320, 132) == (1, 8320)
    assert split_of(4, 8320, 132) == (33, 256)
    assert split_of(400, 640, 132) == (1, 640)
    for programs, listed in ((1, 0), (1, 33), (7, 1000), (40, 4097)):
        splits, rows = split_of(programs, listed, 132)
        assert splits * rows >= listed > (splits - 1) * rows or (listed, splits) == (0, 1)


def test_packed_rows_are_e4m3_and_a_power_of_two() -> None:
    rows = torch.randn(50, 512) * torch.exp2(torch.randint(-20, 20, (50, 1)))
    rows[3, 64:128], rows[4, :64] = 0, 448.0
    packed = pack(rows)
    assert packed.shape == (50, ROW_BYTES) and ROW_BYTES == 584
    back = unpack(packed).float()
    assert torch.equal(back[:, 448:], rows[:, 448:].bfloat16().float())
    assert torch.equal(back[4, :64], rows[4, :64]) and not back[3, 64:128].any()
    blocks, found = (part[:, :448].view(50, 7, 64) for part in (rows, back))
    # 3 bits of mantissa; below the least normal value, 2**-6 of a unit of at most 2/448 of the largest, halves of 2**-9.
    largest = blocks.abs().amax(-1, keepdim=True)
    assert ((found - blocks).abs() <= torch.maximum(2**-4 * blocks.abs(), largest * 2 / 448 * 2**-10)).all()
    assert torch.equal(unpack(pack(back)).float(), back), "what is packed again does not change"
    with pytest.raises(ValueError, match=r"rows \(50, 64\)"):
        pack(rows[:, :64])
    with pytest.raises(ValueError, match=r"packed rows \(50, 576\)"):
        unpack(packed[:, :576])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(1, 64, 512, 640), (8, 64, 512, 640), (1, 64, 512, 8320), (2, 128, 512, 1153), (3, 20, 64, 150)],
)
def test_compiled(shape: tuple[int, int, int, int]) -> None:
    # A weight's rounding to bf16 is 2**-9 of it at most, and outputs are means of rows of order one.
    check(*shape, torch.bfloat16, "cuda", 2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 64, 512, 640), (8, 64, 512, 640), (2, 20, 512, 70)])
def test_packed_rows_compiled(shape: tuple[int, int, int, int]) -> None:
    # As above; some channels are four times as large.
    check(*shape, torch.bfloat16, "cuda", 2**-6, packed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_graph_holds_it(packed: bool) -> None:
    rows = torch.randn(2000, 512, device="cuda").bfloat16()
    pool, q = pack(rows) if packed else rows, torch.randn(2, 64, 512, device="cuda").bfloat16()
    slots = torch.randint(0, 2000, (2, 640), dtype=torch.int32, device="cuda")
    attend_listed(q, pool, slots, 0.05)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend_listed(q, pool, slots, 0.05)
    for _ in range(2):
        q.normal_()
        slots.random_(-1, 2000)
        graph.replay()
        wanted = attend_listed(q, pool, slots, 0.05)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
