"""Budgets against the model and the host, refused in the main process, before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_inplacekv import arena, sizing
from sglang_inplacekv.config import InplaceConfig
from sglang_inplacekv.layout import PLAN_BYTES_CUDA, WORKSPACE_BYTES_CUDA, KVShape
from tests.inplacekv.startup import refusal, resolve, restored_environment, write_config

# Of Llama as GEOMETRY has it: K and V x 2 heads x 64 x 4 bytes x 2 layers
TOKEN_BYTES = 2 * 2 * 64 * 4 * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    with restored_environment():
        yield


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_kv_cache_dtype(model: Path, dtype: str) -> None:
    line = refusal(model, kv_cache_dtype=dtype)
    assert line.startswith(f"--kv-cache-dtype: asked {dtype}, possible")
    assert "auto, bfloat16" in line


def budget(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"SGLANG_INPLACEKV_{name.upper()}", value)


def test_bad_setting_in_the_environment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, cpu_share="nan")
    assert refusal(model).startswith("--inplacekv-cpu-share: asked nan, ")
    budget(monkeypatch, cpu_share="0.5", no_such_thing="1")
    assert refusal(model).startswith("SGLANG_INPLACEKV_NO_SUCH_THING is not a setting; possible are ")


def test_gpu_budget_below_windows_and_tiles(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, gpu_memory="1MB")
    line = refusal(model, page_size=64, max_running_requests=4)
    assert line.startswith("--inplacekv-gpu-memory: asked 1000000 bytes, possible is at least ")
    assert f"8 windows {8 * 64 * TOKEN_BYTES} + two P tiles" in line


def test_host_budget_below_one_chunk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, host_memory=str(64 * TOKEN_BYTES - 1))
    line = refusal(model, page_size=64)
    assert line.startswith(
        f"--inplacekv-host-memory: asked {64 * TOKEN_BYTES - 1} bytes, possible is at least one"
    )
    assert f"{64 * TOKEN_BYTES} bytes" in line


def test_host_budget_above_the_cgroup(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    monkeypatch.setattr(sizing, "host_memory_available", lambda: arena.host_memory_available(tmp_path))
    budget(monkeypatch, host_memory="2.5GB", gpu_memory="512tok")
    line = refusal(model)
    assert line.startswith("--inplacekv-host-memory: asked 249") and "system RAM (not VRAM)" in line
    assert "possible are at most 2000000000 bytes that this host and its cgroup still allow" in line
    budget(monkeypatch, host_memory="1.9GB", gpu_memory="1.5GB")
    line = refusal(model)
    assert line.startswith("--inplacekv-gpu-memory: asked ") and "without a GPU are system RAM" in line
    budget(monkeypatch, host_memory="500MB", gpu_memory="1.2GB")
    resolve(model)


def test_auto_host_budget_holds_one_short_request(model: Path) -> None:
    """Reachable tokens are rounded up to pages: auto never asks for less than one."""
    resolve(model, context_length=100, max_running_requests=1, page_size=256)


def test_workspaces_grow_with_what_a_layer_streams() -> None:
    """A plan for each P tile that all of host memory fills, in both layouts, and for each captured batch size."""
    shape = KVShape(layers=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16, page_size=16)

    def plans(host_tokens: int, requests: int) -> float:
        config = InplaceConfig(tile_tokens=256, host_memory_bytes=host_tokens * shape.token_bytes)
        nbytes = sizing._workspace_bytes(config, shape, 0, requests, context_tokens=4096)
        return (nbytes - WORKSPACE_BYTES_CUDA) / PLAN_BYTES_CUDA

    assert plans(1025, 32) - plans(1024, 32) == 2
    assert plans(2048, 32) - plans(1024, 32) == 2 * 4
    for requests, sizes in ((32, 8), (128, 20), (256, 36)):  # that SGLang captures
        assert plans(256, requests) - 2 >= sizes + 2  # and D of eager forwards, and T read in place


def test_workspaces_of_latent_rows_hold_a_context() -> None:
    shape = KVShape(2, 1, 576, torch.bfloat16, 16, value_dim=512)
    config = InplaceConfig(tile_tokens=256, host_memory_bytes=1024 * shape.token_bytes)
    short, long = (sizing._workspace_bytes(config, shape, 0, 32, tokens) for tokens in (1000, 3000))
    assert long - short == 2000 * 576 * 2
