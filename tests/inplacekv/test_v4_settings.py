"""SGLang's own resolution of settings over DeepSeek-V4's released configurations: what is led elsewhere, filled and refused."""

from __future__ import annotations

import ast
import json
import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_inplacekv.models.deepseek_v4 import ARCHITECTURE, MODEL_TYPE
from tests.inplacekv.startup import refusal, resolve
from tests.models.v4_checkpoints import FLASH, PRO

BUDGETS = {"SGLANG_INPLACEKV_GPU_MEMORY": "2GB", "SGLANG_INPLACEKV_HOST_MEMORY": "1GB"}


@pytest.fixture(autouse=True)
def budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BUDGETS.items():
        monkeypatch.setenv(name, value)


def write(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_released_configurations_resolve(tmp_path, caplog, config) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    with caplog.at_level(logging.WARNING, "sglang_inplacekv"):
        args = resolve(write(tmp_path, config), max_running_requests=2)
    assert not [r for r in caplog.records if r.name.startswith("sglang_inplacekv")], caplog.text
    settings, model = resolving_view(args), model_config_of(args)
    assert not settings.disable_radix_cache
    assert (settings.page_size, settings.quantization, settings.kv_cache_dtype) == (256, None, "auto")
    assert settings.cuda_graph_config.decode.backend == "disabled"
    assert model.hf_config.architectures == [ARCHITECTURE] and model.hf_config.model_type == MODEL_TYPE
    assert model.context_len == 1048576
    assert (model.head_dim, model.num_hidden_layers) == (512, config["num_hidden_layers"])
    assert not (model.is_hybrid_swa or model.has_attention_sinks or model.is_fp4_experts)
    assert not hasattr(model, "compress_ratios"), "SGLang's own V4 settings were derived"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"page_size": 192}, "--page-size: asked 192, possible with DeepSeek-V4 are multiples of 128"),
        (
            {"radix_cache_backend": "mine"},
            "--radix-cache-backend: asked mine, possible with DeepSeek-V4 and --attention-backend inplacekv is unset",
        ),
        (
            {"page_size": 128, "json_model_override_args": '{"sliding_window": 160}'},
            "--page-size: asked 128, possible with a prefix cache are multiples of 128 from the model's window of 160",
        ),
        ({"quantization": "fp8"}, "--quantization: asked fp8, possible with DeepSeek-V4 .* is unset"),
        ({"enable_eplb": True}, "--enable-eplb: asked True, possible with DeepSeek-V4 .* is False"),
        ({"cpu_offload_gb": 4}, "--cpu-offload-gb: asked 4, possible with DeepSeek-V4 .* is 0"),
        (
            {"json_model_override_args": "[1]"},
            r"its config has model override args '\[1\]', possible is a JSON",
        ),
        (
            {"json_model_override_args": '{"n_shared_experts": 2}'},
            "its config has n_shared_experts 2, possible is 1",
        ),
        (
            {"json_model_override_args": '{"head_dim": "x"}'},
            "its config has head_dim 'x', possible is a whole number from 1 to 1000000",
        ),
        (
            {"json_model_override_args": '{"compress_rates": 4}'},
            "its config has compress_rates 4, possible is an object",
        ),
        ({"tp_size": 2}, "--tp-size: asked 2, possible with --attention-backend inplacekv is 1"),
    ],
)
def test_conflicts_are_refused(tmp_path, fields, says) -> None:
    import re

    assert re.search(says, refusal(write(tmp_path, FLASH), **fields))


def test_a_budget_too_small_is_refused_with_the_arithmetic(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_INPLACEKV_GPU_MEMORY", "100MB")
    line = refusal(write(tmp_path, FLASH))
    assert line.startswith("--inplacekv-gpu-memory: asked 100000000 bytes, possible is at least "), line


def test_no_name_that_sglang_looks_for_is_ours() -> None:
    """Every string in SGLang that speaks of DeepSeek-V4, whole or as a part: `name in architecture` must not hold for ours."""
    (root,) = find_spec("sglang").submodule_search_locations
    found = set()
    for source in Path(root, "srt").rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        if "eepseek" not in text.lower():
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
                plain = node.value.lower().replace("_", "").replace("-", "")
                if "deepseek" in plain or "dsv4" in plain:
                    found.add(node.value)
    assert {"DeepseekV4ForCausalLM", "DeepseekV4", "deepseek_v4"} <= found, "the search finds what there is"
    for name in (ARCHITECTURE, MODEL_TYPE):
        inside = [literal for literal in found if literal.lower() in name.lower()]
        assert not inside, f"SGLang looks for {inside}, which {name} contains"
