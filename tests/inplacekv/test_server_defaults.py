"""SGLang's flags under our backend: what is filled in, and what is refused before the model is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.server_args import ServerArgs

from cpu_attn import LATENT_WIDTHS
from sglang_inplacekv import server_defaults
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.server_defaults import _FILLED, _MUST_BE_OFF, _MUST_BE_ONE
from tests.inplacekv.startup import refusal, resolve, restored_environment, server_args, write_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    with restored_environment():
        yield


def test_tables_name_real_fields_and_their_defaults_are_allowed() -> None:
    fields = {field.name for field in record_fields(ServerArgs)}
    assert {*_MUST_BE_OFF, *_MUST_BE_ONE, *_FILLED} <= fields
    untouched = ServerArgs(model_path="none")
    for field, allowed in _MUST_BE_OFF.items():
        assert getattr(untouched, field) in allowed, field
    assert all(getattr(untouched, field) == 1 for field in _MUST_BE_ONE)
    assert all(getattr(untouched, field) is None for field in _FILLED)


def test_unset_flags_are_filled(model: Path) -> None:
    settings = resolving_view(resolve(model))
    assert (settings.page_size, settings.max_running_requests) == (256, 32)
    assert settings.chunked_prefill_size == 2048
    assert settings.disable_overlap_schedule is True
    graphs = settings.cuda_graph_config
    assert (graphs.decode.backend, graphs.prefill.backend) == ("disabled", "disabled")


@pytest.mark.skipif(torch.cuda.is_available(), reason="chooses the GPU")
def test_without_a_gpu_the_device_is_the_cpu(model: Path) -> None:
    """SGLang looks for an accelerator, and ends."""
    assert resolving_view(resolve(model, device=None)).device == "cpu"


def test_flags_that_were_set_are_kept(model: Path) -> None:
    fields = {"page_size": 16, "max_running_requests": 3, "chunked_prefill_size": 160}
    settings = resolving_view(resolve(model, **fields))
    assert {name: getattr(settings, name) for name in fields} == fields


@pytest.mark.parametrize(("page_size", "chunk"), [(16, 2048), (48, 2016), (4096, 4096)])
def test_filled_chunk_is_a_multiple_of_the_page(model: Path, page_size: int, chunk: int) -> None:
    assert resolving_view(resolve(model, page_size=page_size)).chunked_prefill_size == chunk


def test_another_backend_is_left_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INPLACEKV_NO_SUCH_THING", "1")
    args = resolve(model, attention_backend="torch_native", page_size=1, enable_mixed_chunk=True)
    assert resolving_view(args).page_size == 1
    assert not server_defaults.is_selected(args)


ON = {
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "dllm_algorithm": "LowConfidence",
    "kv_canary": "log",
}


@pytest.mark.parametrize("field", sorted(_MUST_BE_OFF))
def test_unsupported_feature(model: Path, field: str) -> None:
    asked = ON.get(field, True)
    flag = "--" + field.replace("_", "-")
    possible = " or ".join(map(str, _MUST_BE_OFF[field]))
    expected = f"{flag}: asked {asked}, possible with --attention-backend inplacekv is {possible}"
    assert refusal(model, **{field: asked}) == expected


@pytest.mark.parametrize("field", _MUST_BE_ONE)
def test_more_than_one_rank(model: Path, field: str) -> None:
    flag = "--" + field.replace("_", "-")
    expected = f"{flag}: asked 2, possible with --attention-backend inplacekv is 1"
    assert refusal(model, **{field: 2}) == expected


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_cuda_graphs(model: Path, phase: str) -> None:
    field = f"cuda_graph_backend_{phase}"
    asked = refusal(model, **{field: "breakable"})
    assert asked.startswith(f"--cuda-graph-backend-{phase}: asked breakable, ") and asked.endswith("disabled")
    as_json = refusal(model, cuda_graph_config={phase: {"backend": "full"}})
    assert as_json.startswith(f"--cuda-graph-config: asked {phase} full, ")
    resolve(model, **{field: "disabled"})


def test_one_backend_for_both_phases(model: Path) -> None:
    for fields in (
        {"attention_backend": None, "decode_attention_backend": "inplacekv"},
        {"attention_backend": "torch_native", "prefill_attention_backend": "inplacekv"},
        {"decode_attention_backend": "torch_native"},
    ):
        line = refusal(model, **fields)
        assert re.match(r"--(prefill|decode)-attention-backend: asked ", line), line
        assert "select the backend with --attention-backend inplacekv" in line
    resolve(model, decode_attention_backend="inplacekv", prefill_attention_backend="inplacekv")


@pytest.mark.parametrize("page_size", [1, 0, -16])
def test_page_size(model: Path, page_size: int) -> None:
    line = refusal(model, page_size=page_size)
    assert line.startswith(f"--page-size: asked {page_size}, possible") and "2 or more" in line


@pytest.mark.parametrize("chunk", [100, 8, 0, -16])
def test_chunk_is_a_multiple_of_the_page(model: Path, chunk: int) -> None:
    line = refusal(model, page_size=16, chunked_prefill_size=chunk)
    assert line.startswith(f"--chunked-prefill-size: asked {chunk}, possible")
    assert line.endswith("-1 or a multiple of --page-size 16")


def test_chunk_may_be_off(model: Path) -> None:
    resolve(model, page_size=16, chunked_prefill_size=-1)


def test_capacity_below_two_pages(model: Path) -> None:
    line = refusal(model, page_size=64, max_total_tokens=127)
    assert line.startswith("--max-total-tokens: asked 127, ") and "--page-size 64" in line
    resolve(model, page_size=64, max_total_tokens=128)


@pytest.mark.parametrize("head_dim", [32, 48, 72, 512])
def test_head_dim(tmp_path: Path, head_dim: int) -> None:
    expected = f"--attention-backend inplacekv: asked head_dim {head_dim}, possible are 64, 80, 96, 112, 128, 192, 256"
    assert refusal(write_config(tmp_path, head_dim=head_dim)) == expected


def deepseek(tmp_path: Path, **fields: int) -> Path:
    fields = {"kv_lora_rank": 32, "qk_rope_head_dim": 16} | fields
    return write_config(
        tmp_path,
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        q_lora_rank=None,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        **fields,
    )


@pytest.mark.parametrize(
    ("fields", "asked"), [({"kv_lora_rank": 48}, "48 + 16"), ({"qk_rope_head_dim": 24}, "32 + 24")]
)
def test_latent_width(tmp_path: Path, fields: dict[str, int], asked: str) -> None:
    expected = f"--attention-backend inplacekv: asked latent rows of {asked}, possible are {LATENT_WIDTHS}"
    assert refusal(deepseek(tmp_path, **fields)) == expected


def check_on_gpu(model: Path, **settings) -> None:
    args = resolve(model, **settings)
    server_defaults._check_model(resolving_view(args), model_config_of(args), on_cpu=False)


def test_latent_width_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"latent rows of 32 \+ 16 on a GPU, possible are multiples of 128 \+"
    ):
        check_on_gpu(deepseek(tmp_path))


def test_mla_on_a_gpu_needs_the_chunked_prefix(tmp_path: Path) -> None:
    model = deepseek(tmp_path, kv_lora_rank=128, qk_rope_head_dim=64)
    check_on_gpu(model)
    for field in ("disable_chunked_prefix_cache", "flashinfer_mla_disable_ragged"):
        flag = "--" + field.replace("_", "-")
        with pytest.raises(ConfigError, match=f"{flag}: asked True, possible .* is unset"):
            check_on_gpu(model, **{field: True})


def test_hybrid_sliding_window(tmp_path: Path) -> None:
    mellum = write_config(tmp_path, is_hybrid_swa=True, layer_types=["sliding_attention", "full_attention"])
    line = refusal(mellum)
    assert line.startswith(
        "--attention-backend inplacekv: asked a model with sliding-window layers, possible"
    )


def test_backend_that_sglang_replaces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sglang.srt.arg_groups.overrides.attention_backends_of", lambda cfg: ("triton", "fa3")
    )
    line = refusal(model)
    assert line.startswith(
        "--attention-backend: asked inplacekv, possible with this model are triton and fa3"
    )


def test_settings_that_never_passed_our_hook(model: Path) -> None:
    """What the scheduler process finds when the main process lost the hook."""
    args = server_args(
        model, page_size=16, cuda_graph_backend_decode="full", cuda_graph_backend_prefill="disabled"
    )
    ServerArgs.resolve_once.__wrapped__(args)
    with pytest.raises(
        ConfigError, match="^--cuda-graph-config: asked decode full, possible .* is decode disabled$"
    ):
        server_defaults.check_settings(resolving_view(args))
    server_defaults.check_settings(resolving_view(resolve(model)))


def test_resolving_twice_is_resolving_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = resolve(model)
    monkeypatch.setenv("SGLANG_INPLACEKV_CPU_SHARE", "nan")
    args.resolve_once()  # as in the scheduler process, which gets resolved arguments
    assert server_args(model).attention_backend == "inplacekv"
