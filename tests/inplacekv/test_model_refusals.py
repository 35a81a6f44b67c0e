"""What only the built model or the scheduler's process can tell: refused there, before the first request."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_inplacekv.config import ConfigError
from tests.harness import Runner
from tests.inplacekv.startup import write_config

BUDGETS = {"SGLANG_INPLACEKV_GPU_MEMORY": "64tok", "SGLANG_INPLACEKV_HOST_MEMORY": "8MB"}


def refusal(model: Path, **env: str) -> str:
    runner = Runner(
        model, backend="inplacekv", load_format="dummy", max_running_requests=2, env=BUDGETS | env
    )
    with pytest.raises(ConfigError) as refused:
        runner.__enter__()
    return str(refused.value)


def test_sliding_window_layer(tmp_path: Path) -> None:
    gemma = write_config(
        tmp_path, "gemma3_text", "Gemma3ForCausalLM", sliding_window=128, sliding_window_pattern=2
    )
    line = refusal(gemma)
    assert line.startswith(
        "--attention-backend inplacekv: layer model.layers.0.self_attn.attn asks a sliding window"
    )
    assert line.endswith("possible is full attention")


def test_soft_capped_logits(tmp_path: Path) -> None:
    fields = {"attn_logit_softcapping": 50.0, "sliding_window": 0, "hidden_act": "gelu_pytorch_tanh"}
    line = refusal(write_config(tmp_path, "gemma2", "Gemma2ForCausalLM", **fields))
    assert line.startswith(
        "--attention-backend inplacekv: layer model.layers.0.self_attn.attn asks logit soft-capping"
    )
    assert line.endswith("at 50.0, possible is plain softmax")


def test_more_threads_than_cores(tmp_path: Path) -> None:
    line = refusal(write_config(tmp_path), SGLANG_INPLACEKV_THREADS="4097")
    assert line.startswith("--inplacekv-threads: asked 4097, possible are 1 to ")


def test_the_same_model_without_these_starts(tmp_path: Path) -> None:
    model = write_config(tmp_path)
    with Runner(
        model, backend="inplacekv", load_format="dummy", max_running_requests=2, env=BUDGETS
    ) as runner:
        runner.generate([[5, 6, 7]], max_new_tokens=2)
