"""The copies of the CUDA executor with fakes for CUDA: which bytes go where, who waits for whom, and what failures say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_inplacekv.executors import cuda_homes, cuda_tiles, dma
from sglang_inplacekv.executors.cuda_tiles import TransferClocks, TransferTimings
from sglang_inplacekv.executors.dma import CopyBatch
from sglang_inplacekv.feedback import Costs
from tests.inplacekv import copy_checks
from tests.inplacekv.copy_checks import SHAPE, Bench, bench
from tests.inplacekv.fake_cuda import FakeStream, fake_library, install


@pytest.fixture(params=[13000, 12080], ids=["batched", "one by one"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return install(monkeypatch, fake_library(request.param))


@pytest.fixture
def b(library: SimpleNamespace) -> Iterator[Bench]:
    with bench("cpu", FakeStream) as own:
        yield own


def test_batches(library: SimpleNamespace) -> None:
    with bench("cpu", FakeStream, share=0.0) as b:
        copy_checks.check_batch(b)
    assert library.calls == (SHAPE.layers if dma.runtime().batched else len(library.copied))


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("is_decode", [True, False])
def test_tiles(b: Bench, is_decode: bool, timed: bool) -> None:
    copy_checks.check_tiles(b, is_decode, timed)


def test_events_are_reused(b: Bench) -> None:
    copy_checks.check_tiles(b, True, True)
    made = list(cuda_tiles._EVENTS._free)
    copy_checks.check_tiles(b, True, True)
    assert set(map(id, cuda_tiles._EVENTS._free)) == set(map(id, made))


def test_clocks_are_read_once_and_never_waited_for(b: Bench) -> None:
    """Of two forwards the GPU is behind with the second, and then nothing follows: the server idles."""
    clocks, late = TransferClocks(SHAPE.layers), FakeStream()

    def costs() -> Costs:
        now = Costs()
        clocks.read_finished(now)
        return now

    forwards = [copy_checks.tile_stream(b, True)]
    clocks.add(*forwards[0])
    assert costs() == Costs(), "it has only begun"
    copy_checks.read_all(forwards[0][0])
    forwards.append(copy_checks.tile_stream(b, True))
    clocks.add(*forwards[1])
    copy_checks.read_all(forwards[1][0])
    late.add(lambda: None)
    forwards[1][0]._wanted[-1].record(late)
    first = costs()
    assert first.transfer_bytes == 7 * SHAPE.layers * 2 * SHAPE.block_bytes and first.transfer_s > 0
    assert first.transfer_tokens == forwards[0][1].transfer_tokens * SHAPE.layers
    assert costs() == Costs() and not late.ran
    late.synchronize()
    assert costs().transfer_tokens == first.transfer_tokens and costs() == Costs()
    assert clocks.take()["decode"].bytes == 2 * first.transfer_bytes and not clocks.take()["decode"].bytes
    for stream, _ in forwards:
        assert stream.finished and stream.timings() == TransferTimings(0, 0.0, 0.0)
    free = list(map(id, cuda_tiles._EVENTS._free))
    assert len(free) == len(set(free)), "none was given back twice"


def test_clocks_read_within_the_forward_count_once(b: Bench) -> None:
    def sums(events: slice) -> list[float]:
        copied, begun, wanted = (each[events] for each in (stream._copied, stream._begun, stream._wanted))
        transfer = sum(one.elapsed_time(other) for one, other in zip(begun, copied, strict=True))
        exposed = sum(max(0, one.elapsed_time(other)) for one, other in zip(wanted, copied, strict=True))
        return [transfer / 1e3, exposed / 1e3]

    stream, _ = copy_checks.tile_stream(b, True)
    copy_checks.read_all(stream)
    b.stream.synchronize()
    expected, tiles = sums(slice(None)), len(stream.tiles)
    assert expected[0] > 0 and SHAPE.layers > 1 and tiles > 1
    for layers in (0, 1):
        stream.read_clocks(layers)
    for event in stream._begun[:tiles]:
        event.at -= 5000  # read again, or not yet read, they count for more
    stream.read_clocks(1)
    timings = stream.timings()
    assert timings is not None and [timings.transfer_s, timings.exposed_s] == pytest.approx(expected)


def test_a_forward_that_was_cut_short_does_not_hold_up_the_clocks(b: Bench) -> None:
    clocks, costs = TransferClocks(SHAPE.layers), Costs()
    for cut in (True, False):
        stream, plan = copy_checks.tile_stream(b, True)
        clocks.add(stream, plan)
        if not cut:
            copy_checks.read_all(stream)
    clocks.read_finished(costs)
    assert costs == Costs()
    clocks.read_all(costs, but=1)
    assert costs == Costs(), "nothing of the first was read"
    clocks.read_finished(costs)
    assert costs.transfer_tokens == plan.transfer_tokens * SHAPE.layers


def test_a_failed_fill_names_layer_and_region(b: Bench) -> None:
    b.team.close()
    what = r"^requests r0, r1, layer 0, waited for the copy of region C, tile 2, layer 0, which failed: "
    with pytest.raises(RuntimeError, match=what):
        copy_checks.check_tiles(b, False, True)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("slot_bytes", [2**24, 3 * 2 * SHAPE.block_bytes])
def test_prefill_goes_home(
    b: Bench, scattered: bool, slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_homes, "_SLOT_BYTES", slot_bytes)
    copy_checks.check_home_writer(b, scattered)


def test_bounce_slots_stay_with_the_queue(b: Bench) -> None:
    copy_checks.check_home_writer(b, False)
    slots = cuda_homes._BOUNCES[b.queue].slots
    copy_checks.check_home_writer(b, True)
    assert cuda_homes._BOUNCES[b.queue].slots is slots


def test_windows_go_home(b: Bench) -> None:
    copy_checks.check_flush(b)


def _one(nbytes: int = 16) -> tuple[CopyBatch, torch.Tensor, torch.Tensor]:
    source, target = torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    return (
        CopyBatch(np.array([target.data_ptr()]), np.array([source.data_ptr()]), np.array([nbytes])),
        source,
        target,
    )


def test_shifts_move_both_ends(library: SimpleNamespace) -> None:
    batch, source, target = _one(4)
    stream = FakeStream()
    batch.issue(stream, source_shift=2, target_shift=np.array([5]))
    stream.synchronize()
    assert target.tolist() == [0, 0, 0, 0, 0, *source[2:6].tolist(), 0, 0, 0, 0, 0, 0, 0]


def test_no_copies_no_call(library: SimpleNamespace) -> None:
    empty = np.empty(0, dtype=np.uint64)
    CopyBatch(empty, empty, empty).issue(FakeStream(), 8, 8)
    assert library.calls == 0


def test_ends_must_match() -> None:
    with pytest.raises(ValueError, match="as many targets as sources and sizes"):
        CopyBatch(np.zeros(2), np.zeros(2), np.zeros(1))


def test_the_default_stream_is_refused(library: SimpleNamespace) -> None:
    batch, _, _ = _one()
    with pytest.raises(ValueError, match="not the default stream"):
        batch.issue(SimpleNamespace(cuda_stream=0))


def test_an_error_has_cudas_text(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_library(13000, fail=1))
    batch, _, _ = _one()
    with pytest.raises(
        RuntimeError,
        match=r"^cudaMemcpyBatchAsync of 1 copies, 16 bytes failed with CUDA error 1 \(invalid argument\)$",
    ):
        batch.issue(FakeStream())


def test_an_old_runtime_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runtime = dma.Runtime(fake_library(12090))
        for _ in range(3):
            nowhere = np.zeros(1, dtype=np.uint64)
            runtime.copy(nowhere, nowhere, nowhere, FakeStream().cuda_stream)
    assert [r.message for r in caplog.records if "batched" in r.message] == [
        "CUDA runtime 12090 has no batched copies (13000 has): every run of pages is a copy of its own"
    ]


def test_the_structs_are_those_of_the_header() -> None:
    attributes = dma._Attributes
    assert (dma.ctypes.sizeof(dma._Location), dma.ctypes.sizeof(attributes)) == (8, 24)
    assert [getattr(attributes, name).offset for name, _ in attributes._fields_] == [0, 4, 12, 20]
