"""Whole tiny DeepSeek-V4 models through SGLang, held to transformers: logprobs of prompts and answers, experts, entries."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

from sglang_inplacekv.models import make_tiny
from sglang_inplacekv.models.deepseek_v4 import ARCHITECTURE, MODEL_TYPE
from tests.inplacekv.exactness.support import assert_all_returned, prompts, slow_queues
from tests.inplacekv.exactness.v4_support import PAGE, model, server
from tests.models.v4_checkpoints import (
    QUANTISED_WIDTHS,
    log_probabilities,
    transformers_model,
    write_released,
)

NEW_TOKENS = 64
# Several pages, less than a block of CSA, the window (32) less one, and just more than a page and a block of HCA.
LENGTHS = (700, 3, 31, 130)


@functools.cache
def batch() -> list[list[int]]:
    return prompts(*LENGTHS)


@pytest.mark.parametrize(
    ("share", "device_tokens", "chunk"),
    [
        (0, 0, PAGE),
        (0.3, 2 * PAGE, 2 * PAGE),
        (1, 0, 5 * PAGE),
        (0.3, 0, 3 * PAGE),
        ("auto", 2 * PAGE, 8 * PAGE),
        (0.3, 32 * PAGE, -1),
    ],
)
def test_mixed_batch(share, device_tokens, chunk) -> None:
    with server(share=share, device_tokens=device_tokens, chunk=chunk) as served:
        runner = served.runner
        handles = [
            runner.submit(prompt, delay=2 * i, max_new_tokens=NEW_TOKENS) for i, prompt in enumerate(batch())
        ]
        runner.run_until_idle()
        attended = runner.kv_pool.attended
        assert_all_returned(runner)
    served.assert_equals_transformers(*handles)
    assert not any(handle.cached_tokens for handle in handles)
    sides = {side for side, count in attended.items() if count}
    if device_tokens > 8 * PAGE:
        assert sides == {"D"}
    else:
        # Entries of open pages are in windows, which count as D.
        assert sides == {"D"} | ({"C"} if share else set()) | ({"T"} if share != 1 else set())


def test_long_prompt_is_cut_into_many_chunks() -> None:
    (prompt,) = prompts(4000, seed=4)
    with server(share=0.3, device_tokens=4 * PAGE, chunk=3 * PAGE) as served:
        handle = served.runner.submit(prompt, max_new_tokens=NEW_TOKENS)
        served.runner.run_until_idle()
        assert_all_returned(served.runner)
    served.assert_equals_transformers(handle)


def test_late_writes_are_waited_for(monkeypatch) -> None:
    """Copies home that take longer than a forward: prefixes are read, and windows reused, only behind them."""
    slow_queues(monkeypatch, 0.03, "write", "flush")
    with server(share=0.5, device_tokens=0, chunk=PAGE, max_running_requests=2) as served:
        handles = [served.runner.submit(prompt, max_new_tokens=130) for prompt in prompts(520, 250, seed=12)]
        served.runner.run_until_idle()
        assert served.runner.kv_pool.regions.windows.flushed_pages >= 2
        assert_all_returned(served.runner)
    served.assert_equals_transformers(*handles)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_retracted_and_computed_again(share) -> None:
    with server(share=share, device_tokens=PAGE, retract_every=7) as served:
        handles = [
            served.runner.submit(prompt, max_new_tokens=24) for prompt in prompts(140, 20, 300, 61, seed=2)
        ]
        served.runner.run_until_idle()
        assert sum(handle.retractions for handle in handles), "nothing was retracted"
        assert_all_returned(served.runner)
    served.assert_equals_transformers(*handles)


def test_aborted_requests_leave_nothing_behind() -> None:
    """Aborted in the middle of a prompt and of an answer; rows and pages go to others, poisoned before."""
    first = prompts(600, 200, 90, seed=3)
    with server(share=0.5, device_tokens=0, chunk=PAGE, max_running_requests=2) as served:
        runner = served.runner
        handles = [runner.submit(p, max_new_tokens=n) for p, n in zip(first, (400, 400, NEW_TOKENS))]
        runner.step(2)
        assert not handles[0].output_ids
        runner.abort(handles[0])
        runner.step_until(lambda: len(handles[1].output_ids) >= 5)
        runner.abort(handles[1])
        runner.step(3)
        later = [runner.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts(257, 40, seed=5)]
        runner.run_until_idle()
        assert [handle.finish_reason["type"] for handle in handles] == ["abort", "abort", "length"]
        assert_all_returned(runner)
    served.assert_equals_transformers(*handles[1:], *later)


def test_capacity_is_pages_and_nothing_else() -> None:
    """As many tokens as D and the host hold, exactly."""
    with server(share=0.5, device_tokens=3 * PAGE, max_total_tokens=8 * PAGE) as served:
        runner = served.runner
        assert runner.scheduler.max_total_num_tokens == 8 * PAGE
        assert runner.kv_pool.regions.sizes.host_pages == 5
        held = runner.kv_pool.states.nbytes + runner.kv_pool.records.nbytes
        assert held > 0 and runner.kv_pool.get_kv_size_bytes() == runner.kv_pool.nbytes + held
        (prompt,) = prompts(6 * PAGE - 20, seed=6)
        handle = runner.submit(prompt, max_new_tokens=40)
        runner.run_until_idle()
        assert_all_returned(runner)
    served.assert_equals_transformers(handle)


@pytest.mark.parametrize("quantised", [False, True], ids=["released names", "FP8 and FP4"])
def test_released_checkpoint(tmp_path: Path, quantised: bool) -> None:
    source = make_tiny("deepseek_v4", tmp_path / "source", **(QUANTISED_WIDTHS if quantised else {}))
    path = write_released(source, tmp_path / "released", quantised=quantised)
    with server(share=0.5, device_tokens=0, path=path) as served:
        (prompt,) = prompts(300, seed=8)
        handle = served.runner.submit(prompt, max_new_tokens=8)
        served.runner.run_until_idle()
    served.path = tmp_path / "plain"
    served.assert_equals_transformers(handle)


def test_bfloat16() -> None:
    """In bf16 the tiny model's router and top-k choose otherwise than in fp32: so means, and another share, are compared."""
    (prompt,) = prompts(500, seed=9)
    answers = []
    for share, device_tokens in ((1, 0), (0, 64 * PAGE)):
        with server(share=share, device_tokens=device_tokens, dtype="bfloat16") as served:
            assert served.runner.kv_pool.dtype == torch.bfloat16
            (result,) = served.runner.generate([prompt], max_new_tokens=NEW_TOKENS)
            answers.append(torch.tensor(result.prompt_logprobs))
            assert_all_returned(served.runner)
    assert (answers[0] - answers[1]).abs().mean() < 0.01, "they differ by nothing but where entries lie"
    wanted = log_probabilities(transformers_model(model()), prompt)
    assert (answers[0] - wanted).abs().mean() < 0.2


def test_embeddings_are_answered_with_an_error() -> None:
    with server(share=0, device_tokens=0) as served:
        runner = served.runner
        inbox, put = runner.scheduler.inbox, runner.scheduler.inbox.put

        def with_embeddings(message, *, delay: int = 0) -> None:
            message.input_embeds = torch.zeros(len(message.input_ids), 128).tolist()
            put(message, delay=delay)

        inbox.put = with_embeddings
        handle = runner.submit(list(range(5, 150)))
        inbox.put = put
        other = runner.submit(batch()[3], max_new_tokens=4)
        runner.run_until_idle()
        assert handle.finish_reason["type"] == "abort"
        assert "input_embeds are not supported" in handle.finish_reason["message"]
        assert_all_returned(runner)
    served.assert_equals_transformers(other)


def test_no_branch_for_the_released_architecture_fires(monkeypatch) -> None:
    """SGLang asks by name in many places; whatever it asks in a served request, our model is none of those."""
    import sglang.srt.configs.model_config as stock

    asked, original = [], stock.is_deepseek_v4

    def recorded(config) -> bool:
        asked.append(original(config))
        return asked[-1]

    for module in tuple(sys.modules.values()):
        if getattr(module, "is_deepseek_v4", None) is original:
            monkeypatch.setattr(module, "is_deepseek_v4", recorded)
    with server(share=0, device_tokens=0, page_size=2 * PAGE) as served:
        runner = served.runner
        config, args = runner.scheduler.model_config, runner.scheduler.server_args
        runner.generate([batch()[1]], max_new_tokens=2)
        assert type(runner.model_runner.model).__name__ == ARCHITECTURE
    assert asked and not any(asked)
    assert config.hf_config.architectures == [ARCHITECTURE] and config.hf_config.model_type == MODEL_TYPE
    assert not (config.is_hybrid_swa or config.has_attention_sinks or config.is_fp4_experts)
    assert config.attention_arch is stock.AttentionArch.MHA and not hasattr(config, "compress_ratios")
    assert (args.page_size, args.attention_backend) == (2 * PAGE, "inplacekv")
