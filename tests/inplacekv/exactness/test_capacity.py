"""D is small: long prompts still finish, and idle prefixes never keep new requests out of D."""

from __future__ import annotations

import pytest

from tests.harness import compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    NEW_TOKENS,
    PAGE,
    TOLERANCE,
    assert_all_returned,
    page_ids,
    prompts,
    server,
    stock,
    tokens_needed,
    watch,
)

D_TOKENS = 256


@pytest.mark.parametrize(
    ("share", "chunk"),
    [(0.37, CHUNK), (0.37, 2 * D_TOKENS), (0.37, -1), (0, CHUNK), (1, 2 * D_TOKENS)],
)
def test_prompt_of_four_times_d(share, chunk):
    batch = prompts(4 * D_TOKENS)
    expected = stock("qwen3_moe", batch)
    args = {"share": share, "chunked_prefill_size": chunk, "tile_tokens": 8 * PAGE}
    if chunk == -1:
        # SGLang's default for whole-prompt prefill is below zero on a host of a few GB.
        args["mem_fraction_static"] = 0.5
    with server("qwen3_moe", device_tokens=2 * tokens_needed(batch), **args) as runner:
        seen = watch(runner)
        fits = runner.generate(batch)
        assert not (seen.held["C"] or seen.held["T"])
    with server("qwen3_moe", device_tokens=D_TOKENS, **args) as runner:
        seen = watch(runner)
        spilled = runner.generate(batch)
        assert seen.held["D"] == D_TOKENS
        assert seen.held["C"] + seen.held["T"] == tokens_needed(batch) - D_TOKENS
        assert_all_returned(runner)
    compare(fits, spilled, tolerance=TOLERANCE)
    compare(expected, spilled, tolerance=TOLERANCE)
    assert len(spilled[0].output_ids) == NEW_TOKENS


@pytest.mark.parametrize(("share", "at_once"), [(0.37, 1), (0, 4), (0.37, 4), (1, 4)])
def test_fresh_prompt_lands_in_d_after_three_times_d_of_finished_ones(share, at_once):
    """With four at once the finished prompts spill as well; their idle pages must make room all the same."""
    finished = prompts(*[4 * PAGE] * 12, seed=1)
    fresh = prompts(D_TOKENS - 2 * PAGE)
    assert tokens_needed(finished) >= 3 * D_TOKENS >= tokens_needed(fresh)
    expected = stock("qwen3_moe", finished + fresh)
    with server("qwen3_moe", share=share, device_tokens=D_TOKENS) as runner:
        results = []
        for i in range(0, len(finished), at_once):
            results += runner.generate(finished[i : i + at_once])
        assert runner.tree_cache.evictable_size() > 0
        seen = watch(runner)
        handle = runner.submit(fresh[0])
        runner.step_until(lambda: len(handle.output_ids) == NEW_TOKENS - 1)
        ids = page_ids(runner, handle)
        assert ids.max() < runner.kv_pool.regions.sizes.first_host_page, ids
        runner.run_until_idle()
        assert not any(seen.decode[region] + seen.extend[region] for region in ("C", "T")), seen
        compare(expected, [*results, handle.result()], tolerance=TOLERANCE)
        assert_all_returned(runner)


@pytest.mark.parametrize("max_running", [1, 2])
def test_each_prompt_of_d_s_size_evicts_the_one_before(max_running):
    """Request rows and pages are the same ones each time; what they held before must not count as in use."""
    batch = prompts(*[D_TOKENS - PAGE] * 5)
    expected = stock("qwen3_moe", batch, PAGE)
    args = {"chunked_prefill_size": D_TOKENS, "max_running_requests": max_running}
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, **args) as runner:
        seen = watch(runner)
        results = [runner.generate([prompt], max_new_tokens=PAGE)[0] for prompt in batch]
        assert seen.held["D"] == D_TOKENS
        assert not (seen.held["C"] or seen.held["T"]), seen
        compare(expected, results, tolerance=TOLERANCE)
        assert_all_returned(runner)


def test_prefix_in_host_memory_serves_a_request_in_d():
    """A cached prefix stays in the region it was written to and is read there."""
    base, tail = prompts(6 * PAGE, PAGE + 5)
    expected = stock("qwen3_moe", [base, base + tail])
    with server("qwen3_moe", share=0.5, device_tokens=0) as runner:
        seen = watch(runner)
        first = runner.generate([base])
        second = runner.generate([base + tail], want_prompt_logprobs=False)
        assert second[0].cached_tokens == 6 * PAGE
        assert seen.extend["C"] and seen.extend["T"], seen
        compare(expected, first + second, tolerance=TOLERANCE)
        assert_all_returned(runner)
