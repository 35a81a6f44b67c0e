"""Pool sizes for SGLang's configurator: capacity is what the host and D hold together.

The same arithmetic runs twice: in the main process, so that an impossible budget is refused before any weight is loaded, and in
the scheduler process, where what it yields is allocated.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator
from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule

from sglang_inplacekv.arena import check_host_budget, host_memory_available
from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.config import ConfigError, InplaceConfig, refuses_in_one_line
from sglang_inplacekv.layout import (
    DEFAULT_TILE_TOKENS,
    DEFAULT_TILE_TOKENS_CUDA,
    PLAN_BYTES_CUDA,
    PLAN_BYTES_CUDA_MLA,
    WORKSPACE_BYTES_CUDA,
    KVShape,
    RegionSizes,
    plan_regions,
)
from sglang_inplacekv.v4.layout import RECORD_SHARE, V4Layout, plan_v4_regions
from sglang_inplacekv.v4.settings import is_v4, layout_of

# What --kv-cache-dtype can name; "auto" is the model's own dtype.
_KV_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
_MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Without a GPU there is no device memory to size D from: a bounded stand-in, and the user's own figure beats it.
_CPU_DEVICE_BYTES = 2**30
_HOST_SHARE_AUTO = 0.5
_SMALL_GRAPHS = 12  # SGLang captures every fourth or eighth batch size, and more of the small ones


@dataclass(frozen=True)
class Demand:
    """What the model and SGLang's settings ask of the KV cache of one rank."""

    shape: KVShape
    on_cpu: bool
    max_running_requests: int
    context_tokens: int
    chunk_tokens: int  # longest prefill chunk
    v4: V4Layout | None = None  # `shape` is then that of its entries
    prefix_cache: bool = False  # of DeepSeek-V4, whose prefixes take memory of their own

    @property
    def page_tokens(self) -> int:
        return self.shape.page_size if self.v4 is None else self.v4.page_tokens

    @property
    def reachable_bytes(self) -> int:
        """What all running requests together can fill, in whole pages, and the tail records' part beside it."""
        pages = -(-self.context_tokens // self.page_tokens)
        page_bytes = self.max_running_requests * pages * self.shape.page_bytes
        return page_bytes * RECORD_SHARE // (RECORD_SHARE - 1) if self.prefix_cache else page_bytes


def v4_layout(kvc) -> V4Layout | None:
    """Of a DeepSeek-V4 model's state, from SGLang's KVCacheConfigurator."""
    if not is_v4(kvc.model_config.hf_config):
        return None
    _check_dtype(kvc)
    return layout_of(kvc.model_config.hf_config, kvc.kv_cache_dtype, kvc.page_size)


def _check_dtype(kvc) -> None:
    if kvc.kv_cache_dtype not in _MODEL_DTYPES:
        _refuse_dtype(kvc.kv_cache_dtype_str)


def kv_shape(kvc) -> KVShape:
    """Geometry of this rank's KV from SGLang's KVCacheConfigurator; of DeepSeek-V4's entries."""
    v4 = v4_layout(kvc)
    if v4 is not None:
        return v4.shape
    _check_dtype(kvc)
    parallel = get_parallel()
    return KVShape(
        layers=kvc.layer_info.num_effective_layers,
        dtype=kvc.kv_cache_dtype,
        page_size=kvc.page_size,
        **_heads(kvc.model_config, parallel.attn_tp_size, parallel.attn_dcp_size),
    )


def _heads(model_config, *parallel: int) -> dict[str, int]:
    if model_config.attention_arch == AttentionArch.MLA:
        rank, rope = model_config.kv_lora_rank, model_config.qk_rope_head_dim
        return {"kv_heads": 1, "head_dim": rank + rope, "value_dim": rank}
    return {"kv_heads": model_config.get_num_kv_heads(*parallel), "head_dim": model_config.head_dim}


def _refuse_dtype(asked: str) -> None:
    raise ConfigError(
        f"--kv-cache-dtype: asked {asked}, possible with {BACKEND_NAME} are auto, {', '.join(_KV_DTYPES)}"
    )


def check_budgets(settings, model_config) -> None:
    """Refuse, before the model is loaded, budgets that the scheduler process would refuse after."""
    if settings.kv_cache_dtype != "auto" and settings.kv_cache_dtype not in _KV_DTYPES:
        _refuse_dtype(settings.kv_cache_dtype)
    dtype = _KV_DTYPES.get(settings.kv_cache_dtype, model_config.dtype)
    v4 = None
    if is_v4(model_config.hf_config):
        v4 = layout_of(model_config.hf_config, dtype, settings.page_size)
        shape = v4.shape
    else:
        shape = KVShape(
            layers=model_config.num_hidden_layers,
            **_heads(model_config, 1, 1),
            dtype=dtype,
            page_size=settings.page_size,
        )
    # How much memory a GPU has left is not known before the weights are loaded.
    demand = _demand(shape, settings.device, settings, model_config, v4, settings.disable_radix_cache)
    plan_for(demand, sys.maxsize, None)


def _demand(
    shape: KVShape, device: str, settings, model_config, v4: V4Layout | None, disable_radix_cache: bool
) -> Demand:
    chunk = settings.chunked_prefill_size
    return Demand(
        shape,
        on_cpu=torch.device(device).type == "cpu",
        max_running_requests=settings.max_running_requests,
        context_tokens=model_config.context_len,
        chunk_tokens=chunk if chunk and chunk > 0 else model_config.context_len,
        v4=v4,
        prefix_cache=v4 is not None and not disable_radix_cache,
    )


# SGLang builds the pool later, from token counts alone; its configurator has slots, so the regions wait here.
_planned: dict[int, RegionSizes] = {}


def take_planned(kvc) -> RegionSizes:
    """The regions last planned for this KVCacheConfigurator."""
    return _planned.pop(id(kvc))


class InplacePoolConfigurator(MemoryPoolConfigurator):
    """Answers SGLang's sizing questions from our budgets and remembers the regions for the pool's construction."""

    def __init__(self, kvc) -> None:
        self._kvc = kvc
        self._available_bytes = 0

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        self._available_bytes = available_bytes
        return self._plan(None)

    def calculate_pool_sizes_from_max_tokens(
        self, max_total_num_tokens: int, page_size: int
    ) -> MemoryPoolConfig:
        return self._plan(max_total_num_tokens)

    @refuses_in_one_line
    def _plan(self, capacity_tokens: int | None) -> MemoryPoolConfig:
        kvc = self._kvc
        radix_off = get_memory().disable_radix_cache
        demand = _demand(
            kv_shape(kvc), kvc.device, get_schedule(), kvc.model_config, v4_layout(kvc), radix_off
        )
        sizes = plan_for(demand, self._available_bytes, capacity_tokens)
        _planned[id(kvc)] = sizes
        return MemoryPoolConfig(max_total_num_tokens=sizes.capacity_tokens)


def plan_for(demand: Demand, device_bytes: int, capacity_tokens: int | None) -> RegionSizes:
    """Regions for `demand` where the device has `device_bytes` left; ConfigError if a budget cannot be met."""
    config, shape = InplaceConfig.from_env(), demand.shape
    host_available = host_memory_available()
    host_bytes = min(int(host_available * _HOST_SHARE_AUTO), demand.reachable_bytes)
    common: dict[str, Any] = {
        "max_running_requests": demand.max_running_requests,
        "device_bytes_auto": min(device_bytes, _CPU_DEVICE_BYTES) if demand.on_cpu else device_bytes,
        "host_bytes_auto": host_bytes,
        "staging_tokens": demand.chunk_tokens,
        "capacity_tokens": capacity_tokens,
    }
    if demand.v4 is not None:
        kernels = 0 if demand.on_cpu else WORKSPACE_BYTES_CUDA + demand.v4.read_bytes(demand.context_tokens)
        common["prefix_cache"] = demand.prefix_cache
        sizes = plan_v4_regions(config, demand.v4, **common, workspace_bytes=kernels)
    else:
        running, context = demand.max_running_requests, demand.context_tokens
        kernels = 0 if demand.on_cpu else _workspace_bytes(config, shape, host_bytes, running, context)
        tile = DEFAULT_TILE_TOKENS if demand.on_cpu else DEFAULT_TILE_TOKENS_CUDA
        sizes = plan_regions(config, shape, **common, tile_tokens=tile, workspace_bytes=kernels)
    arena_bytes = sizes.host_pages * shape.page_bytes
    if demand.v4 is not None:
        arena_bytes += sizes.tail_records * demand.v4.record_bytes
    check_host_budget(arena_bytes, host_available)
    if demand.on_cpu:
        asked_bytes = sizes.device_tensor_pages * shape.page_bytes
        if demand.v4 is not None:
            asked_bytes += sizes.pages * demand.v4.kept_page_bytes
            asked_bytes += (demand.max_running_requests + 1) * demand.v4.request_bytes
        _check_stand_in(asked_bytes, host_available - arena_bytes)
    return sizes


def _workspace_bytes(
    config: InplaceConfig,
    shape: KVShape,
    host_bytes_auto: int,
    max_running_requests: int,
    context_tokens: int,
) -> int:
    """What the attention kernels hold on a GPU: shared split results, a plan for each tile of a layer, in both layouts where
    they differ, and the latent rows of a context, which SGLang expands.
    """
    host_tokens = (config.host_memory_bytes or host_bytes_auto) // shape.token_bytes
    tiles = -(-host_tokens // (config.tile_tokens or DEFAULT_TILE_TOKENS_CUDA))
    captured = max_running_requests // 4 + _SMALL_GRAPHS
    if shape.value_dim is None:
        return WORKSPACE_BYTES_CUDA + (2 * tiles + captured) * PLAN_BYTES_CUDA
    prefix_bytes = context_tokens * shape.token_bytes // shape.layers
    return WORKSPACE_BYTES_CUDA + (tiles + captured) * PLAN_BYTES_CUDA_MLA + prefix_bytes


def _check_stand_in(asked_bytes: int, available_bytes: int) -> None:
    """On a CPU host the device tensors are system RAM as well."""
    if asked_bytes > available_bytes:
        raise ConfigError(
            f"--inplacekv-gpu-memory: asked {asked_bytes} bytes for D and windows, which without a GPU are system RAM, "
            f"possible are at most {available_bytes} bytes that this host and its cgroup allow beside --inplacekv-host-memory"
        )
