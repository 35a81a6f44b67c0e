"""Requests join and leave while most KV streams, and the pool runs out of pages: retract or refuse, never crash."""

from __future__ import annotations

import pytest

from tests.harness import compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    PAGE,
    TOLERANCE,
    assert_all_returned,
    compare_first_tokens,
    first_tokens,
    prompts,
    server,
    slow_queues,
    stock,
    watch,
)


@pytest.mark.parametrize(("tile_pages", "most_tiles"), [(1, 30), (3, 10)])
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
def test_many_tiles_while_requests_join_and_leave(tile_pages, most_tiles, radix):
    """All of the host part is T; later requests share a prefix with running ones, so tiles have several readers."""
    batch = prompts(4 * CHUNK, 30, CHUNK + 1, 2 * CHUNK + 9, 3)
    batch += [batch[0][: 5 * PAGE + 3] + batch[2], batch[3] + batch[1]]
    wanted = [24, 3, 12, 6, 20, 9, 15]
    expected = stock("qwen3_moe", batch, max(wanted))
    args = {"tile_tokens": tile_pages * PAGE, "disable_radix_cache": not radix}
    with server("qwen3_moe", share=0, device_tokens=2 * PAGE, **args) as runner:
        seen = watch(runner)
        handles = [
            runner.submit(prompt, delay=3 * i, max_new_tokens=n, want_prompt_logprobs=i < 3)
            for i, (prompt, n) in enumerate(zip(batch, wanted))
        ]
        runner.run_until_idle()
        compare_first_tokens(expected, handles, wanted)
        assert not seen.decode["C"] and seen.most_tiles >= most_tiles, seen
        assert_all_returned(runner)


@pytest.mark.parametrize(
    ("share", "device", "radix"),
    [(0, 0, True), (0.37, 4 * PAGE, True), (0.37, 4 * PAGE, False), (1, 4 * PAGE, False)],
)
def test_full_pool_retracts_and_recovers(share, device, radix):
    """SGLang reserves max_new_tokens only for requests that ignore the end of text, and only as far as it is told to."""
    batch, new_tokens = prompts(70, 30, 45, 60), 60
    expected = stock("qwen3_moe", batch, new_tokens)
    assert all(1 not in result.output_ids for result in expected), "an answer ends early"
    # Host chunks of five pages: the two roles compete for them.
    args = {"host_memory": "4MB", "max_total_tokens": 16 * PAGE}
    args |= {"disable_radix_cache": not radix, "schedule_conservativeness": 0.01}
    with server("qwen3_moe", share=share, device_tokens=device, **args) as runner:
        assert runner.scheduler.max_total_num_tokens == 16 * PAGE
        handles = [
            runner.submit(prompt, delay=2 * i, max_new_tokens=new_tokens, ignore_eos=False)
            for i, prompt in enumerate(batch)
        ]
        runner.run_until_idle()
        assert sum(handle.retractions for handle in handles) > 0
        assert share in (0, 1) or runner.kv_pool.regions.scope.fallback_pages
        compare(expected, [handle.result() for handle in handles], tolerance=TOLERANCE)
        assert_all_returned(runner)


@pytest.mark.parametrize("share", [0, 0.37, 1])
def test_prompt_past_capacity_fails_alone(share):
    batch = prompts(50, 20, 70)
    (too_long,) = prompts(25 * PAGE, seed=1)
    expected = stock("qwen3_moe", batch)
    with server("qwen3_moe", share=share, device_tokens=4 * PAGE, host_memory="1MB") as runner:
        capacity = runner.scheduler.max_total_num_tokens
        assert capacity == 24 * PAGE
        handles = [runner.submit(prompt, delay=3 * i) for i, prompt in enumerate(batch)]
        refused = runner.submit(too_long, delay=4)
        runner.run_until_idle()
        assert refused.finish_reason["type"] == "abort"
        message = refused.finish_reason["message"]
        assert f"({len(too_long)} tokens) exceeds the maximum allowed length" in message, message
        compare(expected, [handle.result() for handle in handles], tolerance=TOLERANCE)
        assert_all_returned(runner)


@pytest.mark.parametrize("share", [0, 1])
def test_answer_is_cut_where_the_pool_ends(share):
    """A request alone that would outgrow the whole pool ends at its edge, with every token before it right."""
    (prompt,) = prompts(5 * PAGE)
    expected = stock("qwen3_moe", [prompt], 120)
    with server("qwen3_moe", share=share, device_tokens=2 * PAGE, host_memory=f"{8 * 49152}b") as runner:
        (result,) = runner.generate([prompt], max_new_tokens=400)
        count = len(result.output_ids)
        assert 8 * PAGE <= len(prompt) + count <= 10 * PAGE == runner.scheduler.max_total_num_tokens
        compare([first_tokens(expected[0], count)], [result], tolerance=TOLERANCE)
        assert_all_returned(runner)


@pytest.mark.parametrize("share", [0, 1])
def test_more_open_pages_than_windows_can_be(monkeypatch, share):
    """Every running request opens pages faster than slow flushes give windows back: it waits, and nothing changes."""
    slow_queues(monkeypatch, 0.1, "flush")
    batch = prompts(*[PAGE - 3] * 4, seed=3)
    expected = stock("qwen3_moe", batch, 3 * PAGE)
    with server("qwen3_moe", share=share, device_tokens=0, max_running_requests=4) as runner:
        windows = runner.kv_pool.regions.windows
        least = windows.count
        handles = [runner.submit(prompt, max_new_tokens=3 * PAGE) for prompt in batch]
        while not all(handle.done for handle in handles):
            runner.step()
            least = min(least, windows.free_count)
        assert least == 0
        compare(expected, [handle.result() for handle in handles], tolerance=TOLERANCE)
        assert_all_returned(runner)
