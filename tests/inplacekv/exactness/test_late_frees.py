"""What SGLang frees on a GPU comes back later, and a prefill's result is processed after the next step's launch.

Both here on the CPU, the first with a stand-in for the device's events. Page ids are verified in every forward.
"""

from __future__ import annotations

import random

import pytest

from sglang_inplacekv import server_defaults
from sglang_inplacekv.page_lists import PageLists
from tests.harness import Runner, compare
from tests.inplacekv.exactness.late_frees import LateFrees
from tests.inplacekv.exactness.support import (
    CHUNK,
    PAGE,
    TOLERANCE,
    assert_all_returned,
    compare_first_tokens,
    prompts,
    server,
    stock,
)

D_TOKENS = 16 * PAGE


@pytest.fixture
def late(monkeypatch) -> type[LateFrees]:
    monkeypatch.setattr("sglang_inplacekv.pool.FreedPages", LateFrees)
    return LateFrees


@pytest.fixture(params=[True, False], ids=["overlap", "no-overlap"])
def overlap(request, monkeypatch) -> bool:
    """Whether SGLang's overlapped loop runs, as it does on a GPU. Without one our defaults turn it off."""
    fill = server_defaults._fill_for_cpu

    def fill_but_overlap(args) -> None:
        fill(args)
        args.disable_overlap_schedule = not request.param

    monkeypatch.setattr(server_defaults, "_fill_for_cpu", fill_but_overlap)
    return request.param


def frees(runner: Runner) -> LateFrees:
    return runner.kv_pool.freed


@pytest.mark.parametrize(
    ("admission", "host_memory", "radix"),
    [("queue", "24MB", True), ("queue", "6MB", True), ("spill", "6MB", True), ("spill", "24MB", False)],
)
def test_a_mix_is_answered_as_by_stock(late, overlap, admission, host_memory, radix) -> None:
    """Larger than D, with common prefixes, chunked, retracted; in 6 MB all pages are taken now and then."""
    batch = prompts(D_TOKENS + 40, 30, CHUNK + 1, D_TOKENS - 40, 3, 2 * CHUNK + 9, D_TOKENS + 3)
    batch += [batch[3][: 5 * PAGE + 3] + batch[1], batch[5] + batch[4]]
    wanted = [24, 20, 12, 6, 20, 9, 15, 30, 10]
    expected = stock("qwen3_moe", batch, max(wanted))
    args = {"admission": admission, "disable_radix_cache": not radix, "retract_every": 11}
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, host_memory=host_memory, **args) as runner:
        for delay in (2, 0):
            handles = [
                runner.submit(prompt, delay=delay * i, max_new_tokens=n, want_prompt_logprobs=i < 3)
                for i, (prompt, n) in enumerate(zip(batch, wanted))
            ]
            runner.run_until_idle()
            compare_first_tokens(expected, handles, wanted)
        assert frees(runner).waits and runner.scheduler.enable_overlap == overlap
        assert_all_returned(runner)


def test_rounds_that_end_half_way(late, overlap) -> None:
    """Aborted while queued, in a prefill or decoding, and retracted, with common prefixes in the cache and D full."""
    draw = random.Random(f"late {overlap}")
    pool = prompts(PAGE - 1, 2 * PAGE, CHUNK + 1, CHUNK + 37)
    pool += [pool[3][: 3 * PAGE] + tail for tail in prompts(1, PAGE, seed=1)]
    expected = stock("qwen3_moe", pool)
    args = {"retract_every": 7, "max_running_requests": 4, "admission": "queue", "host_memory": "6MB"}
    with server("qwen3_moe", share=0.37, device_tokens=8 * PAGE, **args) as runner:
        aborted = retracted = 0
        for _ in range(60):
            picked = draw.choices(range(len(pool)), k=draw.randint(1, 4))
            handles = [
                runner.submit(pool[i], delay=draw.randint(0, 6), max_new_tokens=draw.randint(1, 20))
                for i in picked
            ]
            for handle in handles:
                if draw.random() < 0.4:
                    runner.abort(handle, delay=draw.randint(0, 20))
            runner.run_until_idle()
            for i, handle in zip(picked, handles, strict=True):
                assert handle.output_ids == expected[i].output_ids[: len(handle.output_ids)]
                aborted += handle.finish_reason["type"] == "abort"
                retracted += handle.retractions
        assert aborted > 5 and retracted, (aborted, retracted)
        assert_all_returned(runner)


def count_reads(monkeypatch) -> list[list[int]]:
    """Lengths of the requests of each read of SGLang's table from here on. Each waits for the step before."""
    reads: list[list[int]] = []
    read = PageLists._read
    monkeypatch.setattr(PageLists, "_read", lambda self, index, n: reads.append(n) or read(self, index, n))
    return reads


def test_pages_are_not_read_when_others_end(late, monkeypatch, overlap) -> None:
    """What a decoding request has is known, whoever frees pages beside it."""
    reads = count_reads(monkeypatch)
    batch, wanted = prompts(*[CHUNK] * 8), [40, 4, 6, 8, 10, 12, 14, 16]
    with server("qwen3_moe", share=0.37, device_tokens=0) as runner:
        runner.kv_pool.page_lists._verify = False
        reads.clear()
        for prompt, n in zip(batch, wanted, strict=True):
            runner.submit(prompt, max_new_tokens=n)
        runner.run_until_idle()
        # The prefills are one chunk each, and a free may come until each result has been processed.
        assert len(reads) <= 2, reads
        assert_all_returned(runner)


def queued(runner: Runner, batch: list[list[int]]) -> int:
    """Serve `batch`, handed in at once to a D that is full of idle prefixes; how often frees were waited for."""
    before = frees(runner).waits
    for prompt in batch:
        runner.submit(prompt, max_new_tokens=3)
    runner.run_until_idle()
    return frees(runner).waits - before


@pytest.mark.parametrize("chunks", [1, 3], ids=["whole", "chunked"])
def test_room_is_made_for_the_next_prompt_while_this_one_runs(late, monkeypatch, chunks) -> None:
    """Each prompt of the queue displaces another one's pages. Only the first waits for them, and the server once it idles."""
    monkeypatch.setattr(late, "polls", [1])
    reads = count_reads(monkeypatch)
    batch = prompts(*[chunks * CHUNK] * 10)
    device_tokens = 3 * (chunks * CHUNK + PAGE)
    args = {"device_tokens": device_tokens, "admission": "queue", "max_running_requests": 1}
    with server("qwen3_moe", share=0.37, **args) as runner:
        runner.kv_pool.page_lists._verify = False
        runner.generate(batch[:3], max_new_tokens=3)
        reads.clear()
        assert queued(runner, batch[3:]) <= 2 and not reads
        monkeypatch.setattr(type(runner.kv_pool.gate), "make_room_ahead", lambda *_: None)
        assert queued(runner, prompts(*[chunks * CHUNK] * 7, seed=1)) >= 7
        assert_all_returned(runner)


@pytest.mark.parametrize("policy", ["queue", "auto"])
def test_a_request_is_not_held_back_for_pages_on_their_way(late, monkeypatch, policy) -> None:
    """Twins: the second one's copies of their common pages are freed while a third request wants just those."""
    monkeypatch.setattr(late, "polls", [10**9])
    common, third = prompts(3 * PAGE, 4 * PAGE - 2)
    with server("qwen3_moe", share=0.37, device_tokens=9 * PAGE, admission=policy) as runner:
        for _ in range(2):
            runner.submit(common, max_new_tokens=15)
        handle = runner.submit(third, max_new_tokens=2, delay=2)
        runner.run_until_idle()
        assert handle.finish_reason["type"] == "length"
        assert runner.kv_pool.gate.queued_requests == 0
        assert_all_returned(runner)


@pytest.mark.parametrize(
    "first", [CHUNK + 2 * PAGE, CHUNK, 2 * PAGE], ids=["chunked", "a full pass", "half a pass"]
)
def test_prefixes_of_the_next_pass_are_kept(late, monkeypatch, first) -> None:
    """The first that would go is that of a request which the next pass adds to one without a prefix."""
    monkeypatch.setattr(late, "polls", [1])
    base, idle, ahead, beside = prompts(4 * PAGE, 8 * PAGE, first, PAGE)
    device_tokens = 16 * PAGE + (0 if first > CHUNK else PAGE)
    args = {"device_tokens": device_tokens, "admission": "queue", "radix_eviction_policy": "fifo"}
    with server("qwen3_moe", share=0.37, **args) as runner:
        for prompt in (base, idle):
            runner.generate([prompt], max_new_tokens=1, want_prompt_logprobs=False)
        batch = [ahead, *([] if first > CHUNK else [beside]), base + beside[:4]]
        results = runner.generate(batch, max_new_tokens=2, want_prompt_logprobs=False)
        assert results[-1].cached_tokens == 4 * PAGE
        assert_all_returned(runner)


def test_a_prefix_that_the_next_request_has_in_the_cache_is_kept(late) -> None:
    base, other = prompts(8 * PAGE, 8 * PAGE)
    batch = [other, base + prompts(PAGE, seed=2)[0]]
    expected = stock("qwen3_moe", [base, *batch])
    args = {"device_tokens": 18 * PAGE, "admission": "queue", "max_running_requests": 1}
    with server("qwen3_moe", share=0.37, **args) as runner:
        first = runner.generate([base], want_prompt_logprobs=False)
        results = runner.generate(batch, want_prompt_logprobs=False)
        assert results[1].cached_tokens == 8 * PAGE
        compare(expected, first + results, tolerance=TOLERANCE)
        assert_all_returned(runner)
