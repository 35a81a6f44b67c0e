"""Drawn weights: the same for the same seed, others for another, and a model that heeds its context."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from sglang_inplacekv.models import TINY_KINDS, checkpoint_path, make_tiny
from tests.harness import Runner

STD = 0.1
PROMPT_TOKENS = 40


# Stock SGLang serves DeepSeek-V4 on a GPU alone.
@pytest.fixture(params=sorted(set(TINY_KINDS) - {"deepseek_v4"}))
def config_only(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model's directory without its weights."""
    checkpoint = make_tiny(request.param, checkpoint_path(f"tiny-{request.param}"))
    shutil.copy(checkpoint / "config.json", tmp_path)
    return tmp_path


def last_logprobs(model: Path, seed: int, prompts: list[list[int]]) -> list[float]:
    """Of each prompt's last token, given the others."""
    with Runner(model, dummy_std=STD, dummy_seed=seed, disable_radix_cache=True) as runner:
        check_parameters(runner.model_runner.model)
        results = runner.generate(prompts, max_new_tokens=1)
    return [result.prompt_logprobs[-1] for result in results]


def check_parameters(model: torch.nn.Module) -> None:
    drawn = {}
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        else:
            drawn[name] = parameter.flatten()[:64].tolist()
            assert parameter.std().item() == pytest.approx(STD, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.1 * STD, name
    sparse = len(model.model.layers) - getattr(model.config, "first_k_dense_replace", 0)
    assert sum("w13_weight" in name or "w2_weight" in name for name in drawn) == 2 * sparse
    assert len({tuple(values) for values in drawn.values()}) == len(drawn), "two parameters are equal"


def test_seeds_and_context(config_only: Path) -> None:
    draw = random.Random(0)
    prompt = [draw.randrange(5, 512) for _ in range(PROMPT_TOKENS)]
    other = [prompt[0] ^ 1, *prompt[1:]]
    first, again, changed = (last_logprobs(config_only, seed, [prompt, other]) for seed in (1, 1, 2))
    assert first == again
    assert abs(first[0] - changed[0]) > 0.01
    assert abs(first[0] - first[1]) > 1e-3, "the first token does not reach the last one's logits"
