"""The reference for MLA models: stock's torch_native against Hugging Face, and the trap without our changes to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_inplacekv.models import TINY_KINDS, make_tiny
from tests.harness import Result, Runner, compare, lifecycle
from tests.test_harness_stock import assert_nothing_held, prompts

TOLERANCE = 1e-4
NEW_TOKENS = 32
# DeepSeek-V4 has latents of another kind, and stock SGLang serves it on a GPU alone.
KINDS = sorted(kind for kind in TINY_KINDS if kind.startswith("deepseek") and kind != "deepseek_v4")
PROMPTS = prompts(7, 16, 17, 131, 300)
# They leave the longest prompt on a page border, inside a page, past its end, and not at all.
RELATED = [PROMPTS[4][:128] + PROMPTS[0], PROMPTS[4][:141] + PROMPTS[0], PROMPTS[4] + PROMPTS[0], PROMPTS[4]]
HITS = [128, 128, 288, 288]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def expected(model) -> Callable[[list[int]], Result]:
    """Greedy answers of transformers, each prompt alone."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    known: dict[tuple[int, ...], Result] = {}

    def of(prompt: list[int]) -> Result:
        key = tuple(prompt)
        if key not in known:
            known[key] = hugging_face(network, prompt)
        return known[key]

    return of


@torch.no_grad()
def hugging_face(network: PreTrainedModel, prompt: list[int]) -> Result:
    start = len(prompt)
    tokens = torch.tensor([prompt])
    cache = None
    for _ in range(NEW_TOKENS):
        step = network(tokens if cache is None else tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        tokens = torch.cat([tokens, step.logits[:, -1:].argmax(-1)], dim=1)
    logprobs = network(tokens).logits[0, :-1].log_softmax(-1)
    chosen = logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    return Result(tokens[0, start:].tolist(), chosen[start - 1 :], chosen[: start - 1], {}, 0)


def test_one_by_one(model, expected):
    with Runner(model, page_size=1, disable_radix_cache=True) as runner:
        assert type(runner.kv_pool) is MLATokenToKVPool
        assert runner.kv_pool.get_key_buffer(0).shape[1:] == (1, 64 + 16)
        for prompt in PROMPTS:
            results = runner.generate([prompt], max_new_tokens=NEW_TOKENS)
            assert len(results[0].prompt_logprobs) == len(prompt) - 1
            compare([expected(prompt)], results, tolerance=TOLERANCE)
        assert_nothing_held(runner)


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunked_batch_with_shared_prefixes(model, expected, page_size):
    with Runner(model, page_size=page_size, chunked_prefill_size=64) as runner:
        cold = runner.generate(PROMPTS, stagger=2, max_new_tokens=NEW_TOKENS)
        compare([expected(prompt) for prompt in PROMPTS], cold, tolerance=TOLERANCE)
        warm = runner.generate(RELATED, stagger=3, want_prompt_logprobs=False, max_new_tokens=NEW_TOKENS)
        compare([expected(prompt) for prompt in RELATED], warm, tolerance=TOLERANCE)
        if page_size == 16:
            assert [result.cached_tokens for result in warm] == HITS
        assert all(result.cached_tokens >= hit for result, hit in zip(warm, HITS))
        assert_nothing_held(runner)


def test_retraction_changes_nothing(model, expected):
    with Runner(model, page_size=16, chunked_prefill_size=64, retract_every=5) as runner:
        handles = [runner.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        runner.run_until_idle()
        assert sum(handle.retractions for handle in handles) > 0
        results = [handle.result() for handle in handles]
        compare([expected(prompt) for prompt in PROMPTS], results, tolerance=TOLERANCE)
        assert_nothing_held(runner)


def test_unchanged_stock_is_wrong_and_silent(tmp_path):
    """Once this fails, SGLang dispatches torch_native rightly by itself and mla_reference can go."""
    path = make_tiny("deepseek_v2_yarn", tmp_path / "m", kv_lora_rank=32)
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    right = hugging_face(network, PROMPTS[1])
    with Runner(path) as runner:
        compare([right], runner.generate(PROMPTS[1:2], max_new_tokens=NEW_TOKENS), tolerance=TOLERANCE)
    with mock.patch.object(lifecycle, "mla_reference", contextlib.nullcontext), Runner(path) as runner:
        (wrong,) = runner.generate(PROMPTS[1:2], max_new_tokens=NEW_TOKENS)
    with pytest.raises(AssertionError, match="request 0"):
        compare([right], [wrong], tolerance=1.0, allow_near_ties=True)
