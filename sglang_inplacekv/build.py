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
from sglang_inplacekv.feedback import ShareController
from sglang_inplacekv.planning import ModelKV
from sglang_inplacekv.pool import InplaceMHAPool, InplaceMLAPool, RegionPool
from sglang_inplacekv.probes import HostRates, host_rates
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.server_defaults import check_settings
from sglang_inplacekv.sizing import kv_shape, take_planned, v4_layout
from sglang_inplacekv.trace import TraceWriter
from sglang_inplacekv.v4.pool import InplaceV4Pool
from sglang_inplacekv.v4.settings import is_v4
from sglang_inplacekv.write_scope import AUTO_START_SHARE

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
    device = torch.device(kvc.device).type
    v4 = v4_layout(kvc)
    model = ModelKV(kv_shape(kvc), kvc.model_config.get_num_attention_heads(1))
    # Rates are those of streamed pages, which DeepSeek-V4 has none of.
    rates = None if v4 is not None else _probe(config, model, device)
    team = make_team(config.threads if rates is None else rates.team.threads, device)
    regions = Regions(config, model.shape, planned, team, device)
    executor, layers = make_executor(regions, device), kvc.layer_info
    common = {
        "start_layer": layers.start_layer,
        "end_layer": layers.end_layer,
        "device": kvc.device,
        # Last, since an earlier trace ends with it.
        "trace": TraceWriter(config.trace) if config.trace else None,
    }
    pool: RegionPool
    if v4 is not None:
        pool = InplaceV4Pool(v4, regions, executor, req_to_token_pool, **common)
    else:
        control = make_control(regions, model, rates)
        kind = InplaceMLAPool if kvc.use_mla_backend else InplaceMHAPool
        pool = kind(regions, executor, control, req_to_token_pool, **common)
    logger.info(
        f"InplaceKV regions: D {planned.device_pages * planned.page_tokens} tokens, "
        f"C+T {planned.host_pages * planned.page_tokens} tokens in {planned.chunks} chunks of {planned.chunk_pages} pages, "
        f"{planned.window_pages} windows, two P tiles of {planned.tile_pages} pages, page size {planned.page_tokens}, "
        f"share target {regions.scope.target_share:g}, CPU attention {cpu_attn.isa()} on cores {sorted(team.cores)}"
    )
    if v4 is not None:
        logger.info(
            f"InplaceKV prefix cache: {planned.tail_records} tail records of {v4.record_bytes} bytes in host memory, beside "
            f"{planned.host_pages} pages of {v4.shape.page_bytes} bytes; a prefix is reused up to its last page that has one"
        )
    return pool


def _probe(config: InplaceConfig, model: ModelKV, device: str) -> HostRates | None:
    if config.probe == "off":
        return None
    rates = host_rates(model, device, config.threads, redo=config.probe == "redo")
    logger.info(f"InplaceKV host: {rates}; {rates.attention_text(model)}")
    return rates


def make_control(regions: Regions, model: ModelKV, rates: HostRates | None) -> ShareController | None:
    """What moves the CPU's share, and where pages are placed until it does; None where the share is given.

    It starts from the rates. Where they are not known, or there is no link, it starts from a constant.
    """
    if not regions.scope.steals:
        return None
    # A call's own fixed part is in the attention that steps time; only what is foretold has it apart.
    hand_over_s = cpu_attn.hand_over_seconds(regions.team) if rates is None else rates.team.hand_over_s
    control = ShareController(AUTO_START_SHARE, hand_over_s, None if rates is None else rates.lines(model))
    # Pages are placed before the first decode tells how many there will be: as if they filled the host.
    regions.scope.target_share = control.share(regions.sizes.host_pages * regions.sizes.page_size)
    return control


def build_allocator(pool: RegionPool) -> InplaceAllocator:
    return InplaceAllocator(pool.size, pool.page_size, pool.dtype, pool.device, pool, pool.regions.homes)


@refuses_in_one_line
def build_backend(runner):
    """Factory behind `--attention-backend inplacekv`; runs in the scheduler process, and refuses rather than serve wrongly."""
    from sglang_inplacekv.backend import InplaceAttnBackend
    from sglang_inplacekv.model_check import check_model

    hooks.verify()
    if is_v4(runner.model_config.hf_config):
        from sglang_inplacekv.v4.backend import InplaceV4Backend

        check_settings(resolving_view(get_server_args()))
        return InplaceV4Backend(runner)
    if runner.use_mla_backend:
        from sglang_inplacekv import mla

        mla.register()
    check_settings(resolving_view(get_server_args()))
    check_model(runner)
    return InplaceAttnBackend(runner)
