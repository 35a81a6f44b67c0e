"""The harness against Hugging Face, with SGLang's own attention backend."""

from __future__ import annotations

import os
import random
import weakref
from pathlib import Path

import pytest
import torch

from sglang_inplacekv.models import make_tiny
from tests.harness import Handle, Result, Runner, compare

TOLERANCE = 1e-5
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("models") / "qwen3_moe")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    return make_tiny("mixtral", tmp_path_factory.mktemp("models") / "mixtral")


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, 512) for _ in range(length)] for length in lengths]


PROMPTS = prompts(7, 100, 300, 33)


@pytest.fixture(scope="module")
def one_by_one(model) -> list[Result]:
    """Whole-prompt prefill of one request at a time, no reuse of prefixes."""
    with Runner(model, page_size=1, disable_radix_cache=True) as runner:
        return [runner.generate([p], max_new_tokens=NEW_TOKENS)[0] for p in PROMPTS]


@torch.no_grad()
def hugging_face(path: Path, prompt: list[int], output_ids: list[int]) -> Result:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor([prompt + output_ids])
    logprobs = network(tokens).logits[0, :-1].log_softmax(-1)
    chosen = logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    greedy = logprobs.argmax(-1).tolist()
    start = len(prompt) - 1
    return Result(greedy[start:], chosen[start:], chosen[:start], {}, 0)


def assert_nothing_held(runner: Runner) -> None:
    runner.idle_check()
    runner.flush_cache()
    assert runner.allocator.available_size() == runner.scheduler.max_total_num_tokens
    assert runner.scheduler.req_to_token_pool.available_size() == 8


@pytest.mark.parametrize("which", range(3))
def test_equals_hugging_face(model, one_by_one, which):
    ours = one_by_one[which]
    theirs = hugging_face(model, PROMPTS[which], ours.output_ids)
    assert len(ours.prompt_logprobs) == len(PROMPTS[which]) - 1
    assert len(ours.output_logprobs) == NEW_TOKENS
    compare([ours], [theirs], tolerance=TOLERANCE)


def test_batch_equals_one_by_one(model, one_by_one):
    with Runner(model, page_size=16) as runner:
        compare(one_by_one, runner.generate(PROMPTS, max_new_tokens=NEW_TOKENS), tolerance=TOLERANCE)
        assert_nothing_held(runner)


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunked_staggered_prefill_equals_whole(model, one_by_one, page_size):
    with Runner(model, page_size=page_size, chunked_prefill_size=64) as runner:
        results = runner.generate(PROMPTS, stagger=2, max_new_tokens=NEW_TOKENS)
        compare(one_by_one, results, tolerance=TOLERANCE)
        assert_nothing_held(runner)


def test_cached_prefix_equals_computed(model, one_by_one):
    with Runner(model, page_size=16) as runner:
        cold = runner.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        warm = runner.generate(PROMPTS, want_prompt_logprobs=False, max_new_tokens=NEW_TOKENS)
        assert [r.cached_tokens for r in cold] == [0, 0, 0, 0]
        assert [r.cached_tokens for r in warm] == [0, 96, 288, 32]
        assert all(r.prompt_logprobs is None for r in warm)
        compare(one_by_one, warm, tolerance=TOLERANCE)
        assert_nothing_held(runner)


def test_retraction_changes_nothing(model, one_by_one):
    with Runner(model, page_size=16, retract_every=5) as runner:
        handles = [runner.submit(p, max_new_tokens=NEW_TOKENS) for p in PROMPTS]
        runner.run_until_idle()
        assert sum(handle.retractions for handle in handles) > 0
        compare(one_by_one, [handle.result() for handle in handles], tolerance=TOLERANCE)
        assert_nothing_held(runner)


def test_full_pool_retracts_and_recovers(model):
    pair = prompts(120, 30)
    # SGLang reserves the whole of max_new_tokens for requests that ignore the end-of-text token.
    sampling = {"max_new_tokens": 100, "ignore_eos": False}
    with Runner(model, page_size=16) as runner:
        expected = runner.generate(pair, **sampling)
    assert sum(len(result.output_ids) for result in expected) == 200
    with Runner(model, page_size=16, max_total_tokens=320, schedule_conservativeness=0.01) as runner:
        handles = [runner.submit(p, delay=2 * i, **sampling) for i, p in enumerate(pair)]
        runner.run_until_idle()
        assert sum(handle.retractions for handle in handles) > 0
        compare(expected, [handle.result() for handle in handles], tolerance=TOLERANCE)
        assert_nothing_held(runner)


@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_abort_in_every_phase_frees_everything(model, disable_radix_cache):
    with Runner(
        model,
        page_size=16,
        chunked_prefill_size=64,
        max_running_requests=2,
        disable_radix_cache=disable_radix_cache,
    ) as runner:
        prompt = PROMPTS[2]
        decoding = runner.submit(prompt)
        runner.step_until(lambda: len(decoding.output_ids) == 5)
        prefilling = runner.submit(prompt[::-1])
        runner.step(2)
        queued: Handle = runner.submit(prompt)
        runner.step()
        assert runner.scheduler.chunked_req is prefilling.req
        assert runner.scheduler.waiting_queue == [queued.req]
        for handle in (decoding, prefilling, queued):
            runner.abort(handle)
        runner.run_until_idle()
        for handle in (decoding, prefilling, queued):
            assert handle.finish_reason["type"] == "abort", handle
        assert not queued.output_ids
        runner.idle_check()
        runner.flush_cache()
        assert runner.allocator.available_size() == runner.scheduler.max_total_num_tokens


def test_another_model_in_the_same_process(mixtral, model, one_by_one):
    prompt = PROMPTS[1]
    with Runner(mixtral, page_size=1, chunked_prefill_size=32, max_total_tokens=1024) as runner:
        (ours,) = runner.generate([prompt], max_new_tokens=NEW_TOKENS)
        assert runner.model_runner.model_config.hf_config.model_type == "mixtral"
        assert runner.scheduler.max_total_num_tokens == 1024
    compare([ours], [hugging_face(mixtral, prompt, ours.output_ids)], tolerance=TOLERANCE)
    with Runner(model, page_size=1) as runner:
        again = runner.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        compare(one_by_one, again, tolerance=TOLERANCE)


def test_second_open_runner_is_refused(model):
    with Runner(model), pytest.raises(RuntimeError, match="one configuration per process"):
        Runner(model).__enter__()


def test_closing_restores_the_process(model):
    before = dict(os.environ), torch.get_num_threads()
    with Runner(model, env={"SGLANG_LOG_GC": "0"}) as runner:
        runner.generate(PROMPTS[:1], max_new_tokens=2)
        assert os.environ["SGLANG_LOG_GC"] == "0"
        freed = weakref.ref(runner.scheduler), weakref.ref(runner.kv_pool)
    assert (dict(os.environ), torch.get_num_threads()) == before
    assert [ref() for ref in freed] == [None, None]


def test_failed_start_leaves_the_process_usable(model):
    with pytest.raises(Exception, match="no_such_field"):
        Runner(model, no_such_field=1).__enter__()
    with Runner(model) as runner:
        runner.generate(PROMPTS[:1], max_new_tokens=1)


def test_leak_is_found(model):
    with Runner(model, page_size=16) as runner:
        runner.allocator.alloc(16)
        with pytest.raises(ValueError, match="leak"):
            runner.idle_check()


def test_compare_names_the_place():
    a = Result([1, 2, 3], [-1.0, -2.0, -3.0], [-1.0], {"type": "length"}, 0)
    off = Result([1, 2, 3], [-1.0, -2.5, -3.0], [-1.0], {"type": "length"}, 0)
    tie = Result([1, 9, 4], [-1.0, -2.0, -7.0], [-1.0], {"type": "length"}, 0)
    assert compare([a], [a]).first_divergence is None
    with pytest.raises(AssertionError, match="request 1: 1 of 3 output token logprobs .* first at 1"):
        compare([a, a], [a, off])
    with pytest.raises(AssertionError, match="request 0, output token 1: 2 at .* against 9"):
        compare([a], [tie])
    assert compare([a], [tie], allow_near_ties=True).first_divergence == (0, 1)
