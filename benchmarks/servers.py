"""The server configurations, one process each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .model import KIND, PAGE_TOKENS

STOCK, OURS, NONE = "stock", "ours", "none"

# A GPU budget of 4.2 GB for stock: the least that serves one 32K request.
SMALL_POOL_TOKENS = 43_000
HOST_MEMORY_BYTES = 104 * 10**9  # 32 requests of 32,000 tokens, and what they generate
# For one request of the longest context, of any of the models.
ONE_REQUEST_BYTES = 24 * 10**9
# D of the servers whose steps are foretold: room for the request that tells what a step takes with all KV there.
PLANNED_DEVICE_TOKENS = 4096
HOST_RESERVE_BYTES = 8 * 10**9  # left to pinned buffers, the process and the system

# Both sides alike. FlashInfer's sampling kernels would only be compiled for nothing: requests are greedy.
_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "dummy_std": 0.02,
    "max_running_requests": 32,
    "chunked_prefill_size": 8192,
    "context_length": 131072,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": None,
    # Unset, as a user leaves them: stock then overlaps and captures full decode graphs, ours what it supports.
    "disable_overlap_schedule": False,
    "cuda_graph_backend_decode": None,
    "cuda_graph_backend_prefill": "disabled",
}
# The harness checks accounts in every iteration; a server does not.
_COMMON_ENV = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0",
    "SGLANG_INPLACEKV_WAIT_TIMEOUT_S": "60",
}


@dataclass(frozen=True)
class ServerSetting:
    """`needs_s` is the least time that starting it and measuring something takes."""

    name: str
    side: str
    benchmarks: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    needs_s: float = 100.0
    kind: str = KIND  # of released model


def _stock(name: str, benchmarks: tuple[str, ...], **arguments: Any) -> ServerSetting:
    own = {"backend": "flashinfer", "page_size": 1} | arguments
    return ServerSetting(name, STOCK, benchmarks, _COMMON | own, _COMMON_ENV)


def _ours(
    name: str, benchmarks: tuple[str, ...], gpu: str, host_bytes: int, share: str = "0.5", kind: str = KIND
) -> ServerSetting:
    env = _COMMON_ENV | {
        "SGLANG_INPLACEKV_GPU_MEMORY": gpu,
        "SGLANG_INPLACEKV_HOST_MEMORY": f"{host_bytes}B",
        "SGLANG_INPLACEKV_CPU_SHARE": share,
    }
    arguments = _COMMON | {"backend": "inplacekv", "page_size": PAGE_TOKENS}
    return ServerSetting(name, OURS, benchmarks, arguments, env, kind=kind)


def _planned(name: str, kind: str) -> ServerSetting:
    gpu = f"{PLANNED_DEVICE_TOKENS}tok"
    return _ours(name, ("plan_served",), gpu, ONE_REQUEST_BYTES, share="auto", kind=kind)


SERVERS = (
    ServerSetting(
        "no_model",
        NONE,
        ("transfer", "attention", "share_sweep", "plan_step", "share_growing", "share_hogs", "csa_layer"),
        needs_s=30.0,
    ),
    _stock("stock", ("fits", "prefill")),
    _ours("resident", ("fits", "prefill"), "auto", 8 * 10**9),
    # No D homes: every page but the open ones is in host memory. Windows and tiles are 1.2 GB.
    _ours("spilled", ("prefill", "timeline", "decode_sweep", "long", "million"), "0tok", HOST_MEMORY_BYTES),
    _stock("stock_small", ("long", "million", "queueing"), max_total_tokens=SMALL_POOL_TOKENS),
    # D as large as that pool, less what is no whole page, and every other choice its own.
    _ours(
        "resident_small",
        ("queueing",),
        f"{SMALL_POOL_TOKENS // PAGE_TOKENS * PAGE_TOKENS}tok",
        HOST_MEMORY_BYTES // 2,
        share="auto",
    ),
    _planned("planned_qwen3", KIND),
    _planned("planned_mixtral", "mixtral_8x7b"),
    _planned("planned_v2_lite", "deepseek_v2_lite"),
)
BENCHMARKS = (
    "transfer",
    "attention",
    "share_sweep",
    "plan_step",
    "plan_served",
    "share_growing",
    "share_hogs",
    "csa_layer",
    "timeline",
    "fits",
    "prefill",
    "decode_sweep",
    "long",
    "million",
    "queueing",
)


def by_name(name: str) -> ServerSetting:
    return next(setting for setting in SERVERS if setting.name == name)
