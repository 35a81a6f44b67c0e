"""MLA models are held to Hugging Face as well, and come through retraction as the others do."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness import Result, compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    PAGE,
    TOLERANCE,
    assert_all_returned,
    model,
    prompts,
    server,
    stock,
    tokens_needed,
    watch,
)
from tests.inplacekv.exactness.test_matrix import LENGTHS, family, serve_mixed
from tests.test_harness_stock_mla import hugging_face

KINDS = pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v2_yarn"])


@functools.cache
def network(kind: str):
    return AutoModelForCausalLM.from_pretrained(model(kind), dtype=torch.float32)


@functools.cache
def by_hugging_face(kind: str, prompt: tuple[int, ...]) -> Result:
    return hugging_face(network(kind), list(prompt))


@KINDS
@pytest.mark.parametrize("budget", [0, 0.5, 1])
@pytest.mark.parametrize("share", [0, 0.37, 1])
def test_mixed_batch_equals_hugging_face(kind, share, budget):
    first = prompts(*LENGTHS)
    related = family(first[-1], PAGE)
    device = int(budget * tokens_needed(first + related)) // PAGE * PAGE
    with server(kind, share=share, device_tokens=device) as runner:
        results = serve_mixed(runner, first, related)
        compare([by_hugging_face(kind, tuple(p)) for p in first + related], results, tolerance=TOLERANCE)
        assert [result.cached_tokens for result in results][4:] == [PAGE, 2 * PAGE, 2 * CHUNK, 2 * CHUNK]
        assert_all_returned(runner)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_retracted_and_computed_again(share):
    batch = prompts(20, 70, 131, 40)
    expected = stock("deepseek_v2", batch)
    with server("deepseek_v2", share=share, device_tokens=4 * PAGE, retract_every=7) as runner:
        seen = watch(runner)
        handles = [runner.submit(prompt) for prompt in batch]
        runner.run_until_idle()
        assert sum(handle.retractions for handle in handles), "nothing was retracted"
        compare(expected, [handle.result() for handle in handles], tolerance=TOLERANCE)
        assert seen.decode["C"] if share else seen.decode["T"]
        assert_all_returned(runner)
