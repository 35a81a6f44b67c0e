"""Whole tiny DeepSeek-V4 models through SGLang, held to transformers: logprobs of prompts and of answers.

The reference computes each sequence at once, without a cache, in fp32.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from sglang_inplacekv.models import checkpoint_path, make_tiny
from sglang_inplacekv.models.deepseek_v4 import ARCHITECTURE, MODEL_TYPE
from tests.harness import Result, Runner
from tests.inplacekv.exactness.support import TOLERANCE, assert_all_returned, prompts
from tests.models.v4_checkpoints import Reference, reference, transformers_model, write_released

PAGE, NEW_TOKENS = 128, 64
# Scores are near 1, and differ from the reference's by some units in the last place.
NEAR_TIE = 3e-6
# Page borders, the window (32), a block of each kind, and one page more than fits what runs beside it.
LENGTHS = (700, 3, 31, 130)


@functools.cache
def model() -> Path:
    return make_tiny("deepseek_v4", checkpoint_path("tiny-deepseek_v4"))


def server(
    *,
    share: float | str,
    device_tokens: int,
    chunk: int = 2 * PAGE,
    path: Path | None = None,
    seed: int = 7,
    admission: str = "spill",
    **runner_args,
) -> Runner:
    env = {
        "SGLANG_INPLACEKV_CPU_SHARE": str(share),
        "SGLANG_INPLACEKV_ADMISSION": admission,
        "SGLANG_INPLACEKV_GPU_MEMORY": f"{device_tokens}tok",
        "SGLANG_INPLACEKV_HOST_MEMORY": "8MB",
        "SGLANG_INPLACEKV_POISON": "1",
        "SGLANG_INPLACEKV_VERIFY": "1",
        "SGLANG_INPLACEKV_JITTER_SEED": str(seed),
        "SGLANG_INPLACEKV_WAIT_TIMEOUT_S": "60",
    }
    args = {"page_size": PAGE, "chunked_prefill_size": chunk, "max_total_tokens": None} | runner_args
    return Runner(path or model(), backend="inplacekv", env=env, **args)


@functools.cache
def _reference(path: Path, tokens: tuple[int, ...]) -> Reference:
    return reference(transformers_model(path), list(tokens))


def assert_equals_transformers(prompt: list[int], result: Result, path: Path | None = None) -> None:
    """Prompt and answer, whose tokens are given to the reference: a near tie of logits does not end the comparison.

    One of experts or entries does, where both sides do choose otherwise, and only in the last tenth of the tokens.
    """
    wanted = _reference(path or model(), (*prompt, *result.output_ids))
    found = torch.tensor([*(result.prompt_logprobs or []), *result.output_logprobs])
    first = len(wanted.log_probabilities) - len(found)
    differences = (found - wanted.log_probabilities[first:]).abs()
    bad = (differences > TOLERANCE).nonzero()[:, 0].tolist()
    if bad and wanted.least_gap[first + bad[0]] < NEAR_TIE and first + bad[0] > 0.9 * (first + len(found)):
        bad = []
    assert not bad, (
        f"{len(prompt)} + {len(result.output_ids)} tokens: logprob {bad[0]} is {found[bad[0]]:.6f}, off by "
        f"{differences[bad[0]]:.1e}; least gap of a choice there {wanted.least_gap[first + bad[0]]:.1e}"
    )


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
def test_mixed_batch_equals_transformers(share, device_tokens, chunk) -> None:
    with server(share=share, device_tokens=device_tokens, chunk=chunk) as runner:
        results = runner.generate(batch(), stagger=2, max_new_tokens=NEW_TOKENS)
        attended = runner.kv_pool.attended
        assert_all_returned(runner)
    for prompt, result in zip(batch(), results, strict=True):
        assert_equals_transformers(prompt, result)
        assert result.cached_tokens == 0
    sides = {side for side, count in attended.items() if count}
    if device_tokens > 8 * PAGE:
        assert sides == {"D"}
    else:
        # Entries of open pages are in windows, which count as D.
        assert sides == {"D"} | ({"C"} if share else set()) | ({"T"} if share != 1 else set())


def test_long_prompt_is_cut_into_many_chunks() -> None:
    (prompt,) = prompts(4000, seed=4)
    with server(share=0.3, device_tokens=4 * PAGE, chunk=3 * PAGE) as runner:
        (result,) = runner.generate([prompt], max_new_tokens=NEW_TOKENS)
        assert_all_returned(runner)
    assert_equals_transformers(prompt, result)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_retracted_and_computed_again(share) -> None:
    first = prompts(140, 20, 300, 61, seed=2)
    with server(share=share, device_tokens=PAGE, retract_every=7) as runner:
        handles = [runner.submit(prompt, max_new_tokens=24) for prompt in first]
        runner.run_until_idle()
        assert sum(handle.retractions for handle in handles), "nothing was retracted"
        assert_all_returned(runner)
    for prompt, handle in zip(first, handles, strict=True):
        assert_equals_transformers(prompt, handle.result())


def test_aborted_requests_leave_nothing_behind() -> None:
    """Aborted while it waits, in the middle of its prompt and of its answer; rows and pages go to others, poisoned before."""
    first = prompts(600, 200, 90, seed=3)
    with server(share=0.5, device_tokens=0, chunk=PAGE, max_running_requests=2) as runner:
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
    for handle in (handles[2], *later):
        assert_equals_transformers(handle.prompt, handle.result())
    assert_equals_transformers(
        first[1], Result(handles[1].output_ids, handles[1].output_logprobs, None, {}, 0)
    )


def test_capacity_is_pages_and_nothing_else() -> None:
    """As many tokens as D and the host hold, exactly."""
    with server(share=0.5, device_tokens=3 * PAGE, max_total_tokens=8 * PAGE) as runner:
        assert runner.scheduler.max_total_num_tokens == 8 * PAGE
        assert runner.kv_pool.regions.sizes.host_pages == 5
        # SGLang starts no request that would fill the last page.
        (prompt,) = prompts(7 * PAGE - 20, seed=6)
        (result,) = runner.generate([prompt], max_new_tokens=16)
        held = runner.kv_pool.states.nbytes
        assert held > 0 and runner.kv_pool.get_kv_size_bytes() == runner.kv_pool.nbytes + held
        assert_all_returned(runner)
    assert_equals_transformers(prompt, result)


@pytest.mark.parametrize("quantised", [False, True], ids=["released names", "FP8 and FP4"])
def test_released_checkpoint(tmp_path: Path, quantised: bool) -> None:
    widths = {"hidden_size": 160, "moe_intermediate_size": 96} if quantised else {}
    source = make_tiny("deepseek_v4", tmp_path / "source", **widths)
    path = write_released(source, tmp_path / "released", quantised=quantised)
    with server(share=0.5, device_tokens=0, path=path) as runner:
        (prompt,) = prompts(300, seed=8)
        (result,) = runner.generate([prompt], max_new_tokens=8)
    assert_equals_transformers(prompt, result, tmp_path / "plain")


def test_bfloat16() -> None:
    """Served in bf16 the tiny model's router and top-k flip, so what is compared is the model itself at another share."""
    (prompt,) = prompts(500, seed=9)
    answers = []
    for share, device_tokens in ((1, 0), (0, 64 * PAGE)):
        with server(share=share, device_tokens=device_tokens, dtype="bfloat16") as runner:
            assert runner.kv_pool.dtype == torch.bfloat16
            (result,) = runner.generate([prompt], max_new_tokens=NEW_TOKENS)
            answers.append(result)
            assert_all_returned(runner)
    one, two = (torch.tensor(answer.prompt_logprobs) for answer in answers)
    wanted = _reference(model(), tuple(prompt)).log_probabilities
    assert (one - two).abs().mean() < 0.01, "prefills differ by nothing but where entries lie"
    assert (one - wanted).abs().mean() < 0.2


def test_embeddings_are_answered_with_an_error() -> None:
    with server(share=0, device_tokens=0) as runner:
        inbox, submitted = runner.scheduler.inbox, []
        put = inbox.put

        def with_embeddings(message, *, delay: int = 0) -> None:
            message.input_embeds = torch.zeros(len(message.input_ids), 128).tolist()
            submitted.append(message)
            put(message, delay=delay)

        inbox.put = with_embeddings
        handle = runner.submit(list(range(5, 150)))
        inbox.put = put
        other = runner.submit(batch()[3], max_new_tokens=4)
        runner.run_until_idle()
        assert submitted and handle.finish_reason["type"] == "abort"
        assert "input_embeds are not supported" in handle.finish_reason["message"]
        assert_all_returned(runner)
    assert_equals_transformers(batch()[3], other.result())


def test_no_branch_for_the_released_architecture_fires(monkeypatch) -> None:
    """SGLang asks by name in many places; whatever it asks in a served request, our model is none of those."""
    import sglang.srt.configs.model_config as stock

    asked = []
    original = stock.is_deepseek_v4

    def recorded(config) -> bool:
        asked.append(original(config))
        return asked[-1]

    for module in tuple(__import__("sys").modules.values()):
        if getattr(module, "is_deepseek_v4", None) is original:
            monkeypatch.setattr(module, "is_deepseek_v4", recorded)
    with server(share=0, device_tokens=0, page_size=2 * PAGE) as runner:
        config = runner.scheduler.model_config
        runner.generate([batch()[1]], max_new_tokens=2)
        args = runner.scheduler.server_args
        assert type(runner.model_runner.model).__name__ == ARCHITECTURE
    assert asked and not any(asked)
    assert config.hf_config.architectures == [ARCHITECTURE] and config.hf_config.model_type == MODEL_TYPE
    assert not (config.is_hybrid_swa or config.has_attention_sinks or config.is_fp4_experts)
    assert config.attention_arch is stock.AttentionArch.MHA and not hasattr(config, "compress_ratios")
    assert (args.page_size, args.attention_backend) == (2 * PAGE, "inplacekv")
