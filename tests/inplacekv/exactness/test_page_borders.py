"""Reuse right after the write, answers of one token, and extends that start inside a page."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from tests.harness import compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    PAGE,
    TOLERANCE,
    assert_all_returned,
    prompts,
    server,
    slow_queues,
    stock,
    watch,
)

SHARES = pytest.mark.parametrize("share", [0, 0.37, 1])


@SHARES
@pytest.mark.parametrize("device", [0, 2 * PAGE])
def test_one_token_answers_are_reused_at_once(monkeypatch, share, device):
    """The next request arrives in the very step that follows, and reads pages whose write is still under way."""
    slow_queues(monkeypatch, 0.03, "write", "flush")
    chain = [prompts(5 * PAGE + 9)[0]]
    for tail in prompts(PAGE + 1, 7, 2 * PAGE, seed=1):
        chain.append(chain[-1] + tail)
    chain.append(chain[-1])
    expected = stock("qwen3_moe", chain)
    with server("qwen3_moe", share=share, device_tokens=device, chunked_prefill_size=256) as runner:
        seen = watch(runner)
        handles = [
            runner.submit(prompt, max_new_tokens=1, delay=i, want_prompt_logprobs=False)
            for i, prompt in enumerate(chain)
        ]
        runner.run_until_idle()
        whole_pages = [(len(prompt) - 1) // PAGE * PAGE for prompt in chain]
        assert [handle.cached_tokens for handle in handles] == [0, *whole_pages[:-2], whole_pages[-1]]
        assert seen.pending_reads > 0
        for handle, result in zip(handles, expected):
            assert handle.output_ids == result.output_ids[:1]
            assert handle.output_logprobs == pytest.approx(result.output_logprobs[:1], abs=TOLERANCE)
        assert_all_returned(runner)


@SHARES
def test_second_turn_reads_what_was_just_decoded(monkeypatch, share):
    """A page filled by decoding is in its window, then in flight, then at home: each turn finds it somewhere else."""
    slow_queues(monkeypatch, 0.01, "write", "flush")
    (prompt,) = prompts(PAGE - 2)
    tails = prompts(3, PAGE, 1, seed=2)
    with server("qwen3_moe", share=share, device_tokens=0) as runner:
        seen = watch(runner)
        turns, results = [prompt], []
        for tail in tails:
            results += runner.generate(turns[-1:], want_prompt_logprobs=False)
            turns.append(turns[-1] + results[-1].output_ids + tail)
        results += runner.generate(turns[-1:], want_prompt_logprobs=False)
        # The last token of an answer has no KV yet.
        known = [len(turn) + len(result.output_ids) - 1 for turn, result in zip(turns, results)]
        assert [r.cached_tokens for r in results] == [0, *(n // PAGE * PAGE for n in known[:-1])]
        assert seen.held["window"]
        assert_all_returned(runner)
    compare(stock("qwen3_moe", turns), results, tolerance=TOLERANCE)


@SHARES
@pytest.mark.parametrize(("radix", "limit"), [(True, PAGE + 5), (True, 7), (False, PAGE + 5)])
def test_extends_that_start_inside_a_page(monkeypatch, share, radix, limit):
    """SGLang cuts a continued chunk at the tokens that are left in the pool, in tokens and not in pages.

    Admission reserves the whole prompt, so a single server hardly gets there; here the cut is always at `limit`.
    """
    monkeypatch.setattr(PrefillBudget, "available_chunk_tokens", lambda self, chunk: min(chunk, limit))
    batch = prompts(2 * CHUNK + 3, PAGE + 2, 9, CHUNK + 41)
    expected = stock("qwen3_moe", batch)
    with server("qwen3_moe", share=share, device_tokens=4 * PAGE, disable_radix_cache=not radix) as runner:
        seen = watch(runner)
        # What fits into the rest of a chunk may join it, but SGLang cuts only one prompt at a time.
        handles = [runner.submit(prompt, delay=delay) for prompt, delay in zip(batch, (0, 2, 3, 16))]
        runner.run_until_idle()
        compare(expected, [handle.result() for handle in handles], tolerance=TOLERANCE)
        assert seen.mid_page_extends >= 4, seen
        assert_all_returned(runner)


@SHARES
def test_many_short_answers_without_radix(share):
    """Pages change hands every few steps; no answer may depend on who had them before."""
    batch = prompts(*[5, PAGE, 30, CHUNK, 33, 2, 47, CHUNK + PAGE] * 3)
    expected = stock("qwen3_moe", batch, new_tokens=4)
    sizes = {"host_memory": "2MB", "device_tokens": 2 * PAGE}
    with server("qwen3_moe", share=share, disable_radix_cache=True, **sizes) as runner:
        assert sum(map(len, batch)) > 1.2 * runner.scheduler.max_total_num_tokens
        compare(expected, runner.generate(batch, stagger=1, max_new_tokens=4), tolerance=TOLERANCE)
        assert_all_returned(runner)
