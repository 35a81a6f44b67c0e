"""Pool sizes for SGLang's configurator: capacity is what the host and D hold together."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator
from sglang.srt.runtime_context import get_parallel, get_schedule

from sglang_inplacekv.arena import check_host_budget, host_memory_available
from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.config import ConfigError, InplaceConfig
from sglang_inplacekv.layout import KVShape, RegionSizes, plan_regions

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Without a GPU there is no device memory to size D from: a bounded stand-in, and the user's own figure beats it.
_CPU_DEVICE_BYTES = 2**30
_HOST_SHARE_AUTO = 0.5


def kv_shape(kvc) -> KVShape:
    """Geometry of this rank's KV from SGLang's KVCacheConfigurator."""
    if kvc.kv_cache_dtype not in SUPPORTED_DTYPES:
        possible = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES)
        raise ConfigError(
            f"--kv-cache-dtype: asked {kvc.kv_cache_dtype_str}, possible with {BACKEND_NAME} are {possible}"
        )
    return KVShape(
        layers=kvc.layer_info.num_effective_layers,
        kv_heads=kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size, get_parallel().attn_dcp_size),
        head_dim=kvc.model_config.head_dim,
        dtype=kvc.kv_cache_dtype,
        page_size=kvc.page_size,
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

    def _plan(self, capacity_tokens: int | None) -> MemoryPoolConfig:
        sizes = plan_for(self._kvc, self._available_bytes, capacity_tokens)
        _planned[id(self._kvc)] = sizes
        return MemoryPoolConfig(max_total_num_tokens=sizes.capacity_tokens)


def plan_for(kvc, available_bytes: int, capacity_tokens: int | None) -> RegionSizes:
    config, shape, schedule = InplaceConfig.from_env(), kv_shape(kvc), get_schedule()
    on_cpu = torch.device(kvc.device).type == "cpu"
    host_available = host_memory_available()
    reachable_tokens = schedule.max_running_requests * kvc.model_config.context_len
    host_auto = min(int(host_available * _HOST_SHARE_AUTO), reachable_tokens * shape.token_bytes)
    chunk = schedule.chunked_prefill_size
    sizes = plan_regions(
        config,
        shape,
        max_running_requests=schedule.max_running_requests,
        device_bytes_auto=min(available_bytes, _CPU_DEVICE_BYTES) if on_cpu else available_bytes,
        host_bytes_auto=host_auto,
        staging_tokens=chunk if chunk and chunk > 0 else kvc.model_config.context_len,
        capacity_tokens=capacity_tokens,
    )
    check_host_budget(sizes.host_pages * shape.page_bytes, host_available)
    return sizes
