"""Two families of requests whose vocabularies have no token in common: neither ever sees the other's KV."""

from __future__ import annotations

import random

import pytest

from tests.harness import Result, Runner, compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    PAGE,
    TOLERANCE,
    assert_all_returned,
    prompts,
    server,
    stock,
)

NEW_TOKENS, CYCLES = 10, 6
UNTOUCHED = 1e-5  # between two runs of our own backend
FAMILY_A = prompts(PAGE + 3, CHUNK, CHUNK + 41, 2 * PAGE, vocabulary=range(5, 256))
FAMILY_B = prompts(CHUNK + 9, PAGE, 2 * CHUNK + 1, 3 * PAGE + 1, vocabulary=range(256, 512))


def serve(share: float, device: int, radix: bool) -> Runner:
    """A capacity of some 30 pages: a cycle of both families needs about twice that, so pages change hands."""
    args = {"host_memory": "1200KB", "disable_radix_cache": not radix, "max_running_requests": 3}
    return server("qwen3_moe", share=share, device_tokens=device, **args)


def assert_same(alone: list[Result], again: list[Result]) -> None:
    compare(alone, again, tolerance=UNTOUCHED)


@pytest.mark.parametrize(
    ("share", "device", "radix"),
    [(0, 0, True), (0.37, 6 * PAGE, True), (0.37, 6 * PAGE, False), (1, 0, False)],
)
def test_family_b_leaves_no_trace_in_family_a(share, device, radix):
    expected = stock("qwen3_moe", FAMILY_A, NEW_TOKENS)
    with serve(share, device, radix) as runner:
        alone = [runner.generate([prompt], max_new_tokens=NEW_TOKENS)[0] for prompt in FAMILY_A]
    compare(expected, alone, tolerance=TOLERANCE)
    draw = random.Random(f"{share} {radix}")
    with serve(share, device, radix) as runner:
        handed_out = count_pages_handed_out(runner)
        for _ in range(CYCLES):
            runner.generate(draw.sample(FAMILY_B, 2), max_new_tokens=NEW_TOKENS)
            (after,) = runner.generate(FAMILY_A[:1], max_new_tokens=NEW_TOKENS)
            assert_same(alone[:1], [after])
            beside = draw.sample(range(1, len(FAMILY_A)), 2)
            mixed = [FAMILY_A[i] for i in beside] + draw.sample(FAMILY_B, 2)
            order = draw.sample(range(4), 4)
            results = runner.generate(
                [mixed[i] for i in order], max_new_tokens=NEW_TOKENS, stagger=draw.randint(0, 3)
            )
            assert_same([alone[i] for i in beside], [results[order.index(i)] for i in range(2)])
        assert handed_out() > 4 * runner.kv_pool.regions.sizes.pages
        assert_all_returned(runner)


def count_pages_handed_out(runner: Runner):
    homes, total = runner.kv_pool.regions.homes, 0
    allocate = homes.allocate

    def counting(count: int):
        nonlocal total
        total += count
        return allocate(count)

    homes.allocate = counting
    return lambda: total


@pytest.mark.parametrize(("share", "device"), [(0, 0), (0.37, 6 * PAGE), (1, 0)])
def test_freed_pages_hold_nothing(share, device):
    """Poison really is where a former owner was: no byte of a free page, window or tile is a number."""
    with serve(share, device, radix=False) as runner:
        runner.generate(FAMILY_B, max_new_tokens=NEW_TOKENS)
        pool = runner.kv_pool
        pool.executor.drain()
        regions = pool.regions
        for page in regions.homes.all_free():
            if regions.sizes.is_device(page):
                rows = slice(page * PAGE, (page + 1) * PAGE)
                assert all(k[rows].isnan().all() for k in regions.device_k + regions.device_v)
                continue
            held = regions.arena.page_bytes_view(page)
            never_used = not held.any()
            assert never_used or held.isnan().all(), page
        first_window = regions.sizes.first_host_page * PAGE
        assert all(k[first_window:].isnan().all() for k in regions.device_k + regions.device_v)
        assert all(tile.isnan().all() for tile in pool.executor._tiles)
