"""Copies between a GPU and the host arena, and the arena as the GPU itself reads it: the bytes are exactly the right ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sglang_inplacekv.executors import dma
from tests.inplacekv import copy_checks
from tests.inplacekv.copy_checks import SHAPE, Bench, bench

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture
def b() -> Iterator[Bench]:
    with bench("cuda", torch.cuda.Stream) as own:
        yield own
        torch.cuda.synchronize()


@pytest.fixture
def all_transferred() -> Iterator[Bench]:
    with bench("cuda", torch.cuda.Stream, share=0.0) as own:
        yield own
        torch.cuda.synchronize()


def test_the_runtime_has_batched_copies() -> None:
    assert dma.runtime().batched == (int(torch.version.cuda.split(".")[0]) >= 13)


def test_batches(all_transferred: Bench) -> None:
    copy_checks.check_batch(all_transferred)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("is_decode", [True, False])
def test_tiles(b: Bench, is_decode: bool, timed: bool) -> None:
    copy_checks.check_tiles(b, is_decode, timed)


@pytest.mark.parametrize("scattered", [True, False])
def test_prefill_goes_home(b: Bench, scattered: bool) -> None:
    copy_checks.check_home_writer(b, scattered)


def test_windows_go_home(b: Bench) -> None:
    copy_checks.check_flush(b)


def test_the_gpu_reads_transfer_pages_in_place(all_transferred: Bench) -> None:
    b = all_transferred
    b.fill_homes()
    arena, pages = b.regions.arena, b.transferred
    rows = torch.from_numpy(arena.zero_copy_index(pages).astype(np.int64)).cuda()
    for layer in range(SHAPE.layers):
        k, v = arena.zero_copy_layer(layer)
        assert k.is_cuda and k.dtype == SHAPE.dtype and k.stride() == v.stride()
        for place, page in enumerate(pages):
            home = arena.page_bytes_view(page)[layer]
            assert torch.equal(k[rows[place]].cpu().flatten(), home[0])
            assert torch.equal(v[rows].cpu()[place].flatten(), home[1])
    arena.page_bytes_view(pages[0]).fill_(5)
    assert bool((arena.zero_copy_layer(0)[0][rows[0]] == 5).all()), "what the host writes later is seen too"


def test_clocks_may_be_read_backwards() -> None:
    """CudaTileStream takes a negative time for a copy that was not waited for."""
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.zeros(2**26, device="cuda").sum()
    second.record()
    torch.cuda.synchronize()
    assert second.elapsed_time(first) < 0 < first.elapsed_time(second)
