"""SGLang flags under our backend: unset ones get values that fit, explicit conflicts are refused in one line."""

from __future__ import annotations

from typing import Any

import torch

from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.config import ConfigError, InplaceConfig

DEFAULT_PAGE_SIZE = 256
DEFAULT_CHUNK_TOKENS = 8192
DEFAULT_CHUNK_TOKENS_CPU = 2048
DEFAULT_MAX_RUNNING = 32

# field -> values that keep the feature off. Each of these either bypasses the pool or needs what is not built yet.
_MUST_BE_OFF: dict[str, tuple[Any, ...]] = {
    "speculative_algorithm": (None,),
    "enable_hierarchical_cache": (False,),
    "enable_hisparse": (False,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "enable_unified_memory": (False,),
    "enable_unified_cache_external_linker": (False,),
    "enable_page_major_kv_layout": (False,),
    "enable_kv_cache_sharding": (False,),
    "enable_mixed_chunk": (False,),
    "enable_two_batch_overlap": (False,),
    "enable_memory_saver": (False,),
    "enable_deterministic_inference": (False,),
    "enable_streaming_session": (False,),
    "prefill_only_disable_kv_cache": (False,),
    "disaggregation_mode": ("null",),
}
_MUST_BE_ONE = ("tp_size", "pp_size", "dp_size", "attn_cp_size", "dcp_size")
_FILLED: dict[str, Any] = {
    "page_size": DEFAULT_PAGE_SIZE,
    "max_running_requests": DEFAULT_MAX_RUNNING,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
}


def prepare_server_args(args: Any) -> None:
    """Fill and check `args` in place, before SGLang resolves it. No-op unless our backend is selected."""
    if BACKEND_NAME not in (
        args.attention_backend,
        args.prefill_attention_backend,
        args.decode_attention_backend,
    ):
        return
    InplaceConfig.from_env()
    _refuse_conflicts(args)
    for field, value in _FILLED.items():
        if getattr(args, field) is None:
            setattr(args, field, value)
    args.disable_overlap_schedule = True
    _check_page_size(args)
    _fill_chunk(args)


def _refuse(field: str, asked: Any, possible: Any) -> None:
    flag = "--" + field.replace("_", "-")
    raise ConfigError(
        f"{flag}: asked {asked}, possible with --attention-backend {BACKEND_NAME} is {possible}"
    )


def _refuse_conflicts(args: Any) -> None:
    for phase in ("prefill_attention_backend", "decode_attention_backend"):
        if getattr(args, phase) not in (None, BACKEND_NAME) or args.attention_backend != BACKEND_NAME:
            _refuse(
                phase,
                getattr(args, phase),
                f"unset (select the backend with --attention-backend {BACKEND_NAME})",
            )
    for field, allowed in _MUST_BE_OFF.items():
        if getattr(args, field) not in allowed:
            _refuse(field, getattr(args, field), " or ".join(map(str, allowed)))
    for field in _MUST_BE_ONE:
        if getattr(args, field) != 1:
            _refuse(field, getattr(args, field), 1)
    for phase in ("decode", "prefill"):
        field = f"cuda_graph_backend_{phase}"
        if getattr(args, field) not in (None, "disabled"):
            _refuse(field, getattr(args, field), "disabled")


def _check_page_size(args: Any) -> None:
    if args.page_size < 2:
        _refuse("page_size", args.page_size, f"2 or more (default {DEFAULT_PAGE_SIZE})")


def _fill_chunk(args: Any) -> None:
    page, chunk = args.page_size, args.chunked_prefill_size
    if chunk is None:
        on_cpu = args.device == "cpu" or not torch.cuda.is_available()
        wanted = DEFAULT_CHUNK_TOKENS_CPU if on_cpu else DEFAULT_CHUNK_TOKENS
        args.chunked_prefill_size = max(1, wanted // page) * page
    elif chunk != -1 and chunk % page:
        _refuse("chunked_prefill_size", chunk, f"-1 or a multiple of --page-size {page}")
