"""What the other tests of this folder promise to notice, planted on purpose."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from sglang_inplacekv.executors.tile_stream import TileStream
from sglang_inplacekv.homes import HomeTable
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.step_plan import Planner, Reads
from sglang_inplacekv.windows import WindowTable
from tests.harness import Result, compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    PAGE,
    TOLERANCE,
    prompts,
    server,
    slow_queues,
    so_far,
    stock,
)

NOTICED = 10 * TOLERANCE


def largest_error(expected: list[Result], results: list[Result]) -> float:
    """Largest difference of logprobs up to the first other token; infinite if one is not a number."""
    worst = 0.0
    for left, right in zip(expected, results):
        same = next((i for i, (a, b) in enumerate(zip(left.output_ids, right.output_ids)) if a != b), None)
        last = None if same is None else same + 1
        a = left.prompt_logprobs + left.output_logprobs[:last]
        b = (right.prompt_logprobs or []) + right.output_logprobs[:last]
        differences = [abs(x - y) for x, y in zip(a, b)]
        worst = max([worst, *(math.inf if math.isnan(d) else d for d in differences)])
    return worst


def assert_noticed(expected: list[Result], results: list[Result]) -> None:
    assert largest_error(expected, results) > NOTICED
    with pytest.raises(AssertionError):
        compare(expected, results, tolerance=TOLERANCE)


FIELDS = {"D": "device_pages", "C": "compute_pages", "T": "transfer_pages"}


def misread(reads: Reads, region: str, fault: str) -> None:
    """Leave the first page of `region` out, read it twice, or read it as if it were in the other host region."""
    pages = getattr(reads, FIELDS[region])
    if len(pages) < 2:
        return
    setattr(reads, FIELDS[region], np.concatenate((pages[:1], pages)) if fault == "repeated" else pages[1:])
    if region == "D":
        reads.device_tokens += PAGE if fault == "repeated" else -PAGE
    if fault == "wrong-layout":
        other = FIELDS["T" if region == "C" else "C"]
        setattr(reads, other, np.concatenate((pages[:1], getattr(reads, other))))


@pytest.mark.parametrize("phase", ["decode", "extend"])
@pytest.mark.parametrize(
    ("fault", "region"),
    [(fault, region) for fault in ("lost", "repeated") for region in "DCT"]
    + [("wrong-layout", "C"), ("wrong-layout", "T")],
)
def test_one_page_misread(monkeypatch, phase, region, fault):
    batch = prompts(2 * CHUNK + 3)
    expected = stock("qwen3_moe", batch, 12)
    build = Planner.build

    def faulty(planner, spans, is_decode):
        plan = build(planner, spans, is_decode)
        if is_decode == (phase == "decode"):
            for reads in plan.reads:
                misread(reads, region, fault)
        return plan

    monkeypatch.setattr(Planner, "build", faulty)
    with server("qwen3_moe", share=0.37, device_tokens=3 * PAGE) as runner:
        assert_noticed(expected, runner.generate(batch, max_new_tokens=12))


@pytest.fixture
def busy(monkeypatch):
    """Serve two requests one after the other on a server whose queues are all late; return (expected, results)."""
    first, second = prompts(2 * CHUNK + 12, CHUNK + 12)
    second = first[: 2 * PAGE] + second[2 * PAGE :]
    expected = stock("qwen3_moe", [first, second], new_tokens=10)

    def serve(share: float) -> tuple[list[Result], list[Result]]:
        slow_queues(monkeypatch, 0.005, "compute")
        slow_queues(monkeypatch, 0.08, "write", "flush")
        with server("qwen3_moe", share=share, device_tokens=0, tile_tokens=PAGE) as runner:
            handles = [
                runner.submit(prompt, delay=i, max_new_tokens=10) for i, prompt in enumerate((first, second))
            ]
            runner.run_until_idle()
            return expected, [so_far(handle) for handle in handles]

    return serve


BOTH_SHARES = pytest.mark.parametrize("share", [0, 1])


@BOTH_SHARES
def test_late_queues_alone_change_nothing(busy, share):
    compare(*busy(share), tolerance=TOLERANCE)


@BOTH_SHARES
def test_home_read_before_it_is_written(monkeypatch, busy, share):
    build = Planner.build

    def without_pending(planner, spans, is_decode):
        plan = build(planner, spans, is_decode)
        plan.pending = {}
        return plan

    monkeypatch.setattr(Planner, "build", without_pending)
    assert_noticed(*busy(share))


@BOTH_SHARES
def test_window_taken_back_before_its_flush(monkeypatch, busy, share):
    def acknowledge_everything(windows):
        while windows._flushes:
            flush = windows._flushes.popleft()
            if windows._window_of.get(flush.page) == flush.window:
                del windows._window_of[flush.page]
            windows._release(flush.window)

    monkeypatch.setattr(WindowTable, "acknowledge", acknowledge_everything)
    assert_noticed(*busy(share))


def test_tile_overwritten_while_it_is_read(monkeypatch, busy):
    read_by = TileStream.read_by
    monkeypatch.setattr(TileStream, "read_by", lambda stream, reader: read_by(stream, None))
    assert_noticed(*busy(0))


@BOTH_SHARES
@pytest.mark.parametrize("waits", [True, False])
def test_page_handed_out_while_its_former_owner_is_still_flushed(monkeypatch, share, waits):
    """Without poison, whose overwriting of freed pages waits as well."""
    (short,), (prompt,) = prompts(PAGE - 1), prompts(5 * PAGE + 1)
    expected = stock("qwen3_moe", [prompt])
    if not waits:
        monkeypatch.setattr(HomeTable, "_take", take_at_once)
    gate = threading.Event()
    gate.set()
    monkeypatch.setattr(WorkQueue, "_delay", lambda queue: queue.name == "flush" and gate.wait(60))
    args = {"disable_radix_cache": True, "host_memory": "1MB", "poison": False}
    with server("qwen3_moe", share=share, device_tokens=0, **args) as runner:
        gate.clear()
        leaver = runner.submit(short)
        runner.step_until(lambda: len(leaver.output_ids) == 4)
        runner.abort(leaver)
        runner.step_until(lambda: leaver.done)
        assert runner.kv_pool.regions.homes.outstanding()
        heir = runner.submit(prompt)
        if waits:
            threading.Timer(0.2, gate.set).start()
        else:
            runner.step_until(lambda: len(heir.output_ids) == 1)
            gate.set()
            runner.kv_pool.executor.drain()
        runner.run_until_idle()
    if waits:
        compare(expected, [heir.result()], tolerance=TOLERANCE)
    else:
        assert_noticed(expected, [heir.result()])


def take_at_once(homes: HomeTable, free) -> int:
    page = free.popleft()
    homes.tickets.pop(page, None)
    homes._used[page] = 1
    return page
