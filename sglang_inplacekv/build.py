"""Construction of the pool, the allocator and the backend inside SGLang's model runner."""

from __future__ import annotations

import logging

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.runtime_context import get_server_args

import cpu_attn
from sglang_inplacekv import hooks
from sglang_inplacekv.allocator import InplaceAllocator
from sglang_inplacekv.config import InplaceConfig, refuses_in_one_line
from sglang_inplacekv.cores import make_team
from sglang_inplacekv.executors import make_executor
from sglang_inplacekv.pool import InplaceMHAPool, InplaceMLAPool, RegionPool
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.server_defaults import check_settings
from sglang_inplacekv.sizing import kv_shape, take_planned
from sglang_inplacekv.trace import TraceWriter

logger = logging.getLogger(__name__)


@refuses_in_one_line
def build_pool(kvc, sizes, req_to_token_pool) -> RegionPool:
    """The pool of a KVCacheConfigurator, with its arena mapped and touched: nothing is allocated after this."""
    planned = take_planned(kvc)
    if planned.capacity_tokens != sizes.max_total_num_tokens:
        raise RuntimeError(
            f"SGLang asks a pool of {sizes.max_total_num_tokens} tokens, regions hold {planned.capacity_tokens}"
        )
    config = InplaceConfig.from_env()
    trace = TraceWriter(config.trace) if config.trace else None
    device = torch.device(kvc.device).type
    team = make_team(config.threads, device)
    regions = Regions(config, kv_shape(kvc), planned, team, device)
    pool = (InplaceMLAPool if kvc.use_mla_backend else InplaceMHAPool)(
        regions,
        make_executor(regions, device),
        req_to_token_pool,
        start_layer=kvc.layer_info.start_layer,
        end_layer=kvc.layer_info.end_layer,
        device=kvc.device,
        trace=trace,
    )
    logger.info(
        f"InplaceKV regions: D {planned.device_pages * planned.page_size} tokens, C+T {planned.host_pages * planned.page_size} "
        f"tokens in {planned.chunks} chunks of {planned.chunk_pages} pages, {planned.window_pages} windows, two P tiles of "
        f"{planned.tile_pages} pages, page size {planned.page_size}, share target {regions.scope.target_share:g}, "
        f"CPU attention {cpu_attn.isa()}"
    )
    return pool


def build_allocator(pool: RegionPool) -> InplaceAllocator:
    return InplaceAllocator(pool.size, pool.page_size, pool.dtype, pool.device, pool, pool.regions.homes)


@refuses_in_one_line
def build_backend(runner):
    """Factory behind `--attention-backend inplacekv`; runs in the scheduler process, and refuses rather than serve wrongly."""
    from sglang_inplacekv.backend import InplaceAttnBackend
    from sglang_inplacekv.model_check import check_model

    hooks.verify()
    if runner.use_mla_backend:
        from sglang_inplacekv import mla

        mla.register()
    check_settings(resolving_view(get_server_args()))
    check_model(runner)
    return InplaceAttnBackend(runner)
