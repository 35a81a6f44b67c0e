"""Two hundred rounds of requests that leave half-way: nothing stays behind, and nobody's answer changes."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest

from tests.harness import Runner, compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    PAGE,
    TOLERANCE,
    assert_all_returned,
    first_tokens,
    prompts,
    server,
    so_far,
    stock,
)

ROUNDS, WARM_UP = 200, 80
GROWTH_MB = 4.0  # 34 KB a round, less than the KV of one page


def resident_mb() -> float:
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def assert_returned_but_cached(runner: Runner) -> None:
    runner.idle_check()
    regions = runner.kv_pool.regions
    runner.kv_pool.executor.drain()
    regions.check_integrity()
    assert regions.windows.free_count == regions.windows.count
    cached = runner.tree_cache.evictable_size()
    assert sum(regions.tokens_by_region().values()) == cached


@pytest.mark.parametrize(
    ("share", "device", "radix"),
    [(0.37, 4 * PAGE, True), (0.37, 4 * PAGE, False), (0, 0, True), (1, 0, True)],
)
def test_rounds_that_end_half_way(share, device, radix):
    draw = random.Random(f"{share} {device} {radix}")
    pool = prompts(PAGE - 1, 2 * PAGE, CHUNK + 1, CHUNK + 37)
    pool += [pool[3][: 3 * PAGE] + tail for tail in prompts(1, PAGE, seed=1)]
    expected = dict(enumerate(stock("qwen3_moe", pool)))
    args = {"retract_every": 7, "max_running_requests": 4, "disable_radix_cache": not radix}
    aborted = retracted = 0
    with server("qwen3_moe", share=share, device_tokens=device, host_memory="6MB", **args) as runner:
        for round_number in range(ROUNDS if radix and device else 20):
            picked = draw.choices(range(len(pool)), k=draw.randint(1, 3))
            wanted = [draw.randint(1, 10) for _ in picked]
            handles = [
                runner.submit(pool[i], max_new_tokens=n, want_prompt_logprobs=draw.random() < 0.3)
                for i, n in zip(picked, wanted)
            ]
            runner.step(draw.randint(1, 6))
            for handle in handles:
                if not handle.done and draw.random() < 0.5:
                    runner.abort(handle)
            runner.run_until_idle()
            for i, n, handle in zip(picked, wanted, handles):
                answered = so_far(handle)
                if handle.finish_reason["type"] != "abort":
                    assert len(answered.output_ids) == n
                aborted += handle.finish_reason["type"] == "abort"
                retracted += handle.retractions
                compare(
                    [first_tokens(expected[i], len(answered.output_ids))], [answered], tolerance=TOLERANCE
                )
            runner.scheduler.outbox.handles.clear()
            assert_returned_but_cached(runner)
            if round_number % 25 == 24:
                assert_all_returned(runner)
            if round_number == WARM_UP:
                before = resident_mb()
        if round_number > WARM_UP:
            assert resident_mb() - before < GROWTH_MB
    assert aborted > 5 and retracted, (aborted, retracted)
