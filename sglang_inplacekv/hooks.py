"""Every hook into SGLang, each with its reason. Registered by the plugin, verified before the server serves.

SGLang logs and swallows whatever goes wrong while hooks are applied. So `verify` is called in the main process, when our
backend is seen to be selected, and again in the scheduler process, by the backend's factory: the server starts only if each
of them is live in both.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_inplacekv import cpu_host
from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.config import FLAGS, ConfigError

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


@dataclass(frozen=True)
class Hook:
    target: str
    kind: HookType
    function: Callable
    why: str


def _selected() -> bool:
    from sglang.srt.runtime_context import attention_backends

    return BACKEND_NAME in attention_backends()


def _pool_configurator(original, kvc):
    from sglang_inplacekv.sizing import InplacePoolConfigurator

    return InplacePoolConfigurator(kvc) if _selected() else original(kvc)


def _build_pool(original, kvc, *, sizes, is_dsa_model, is_dsv4_model, req_to_token_pool):
    if not _selected():
        return original(
            kvc,
            sizes=sizes,
            is_dsa_model=is_dsa_model,
            is_dsv4_model=is_dsv4_model,
            req_to_token_pool=req_to_token_pool,
        )
    from sglang_inplacekv.build import build_pool

    return build_pool(kvc, sizes, req_to_token_pool)


def _build_allocator(original, kvc, *, token_to_kv_pool, **kwargs):
    if not _selected():
        return original(kvc, token_to_kv_pool=token_to_kv_pool, **kwargs)
    from sglang_inplacekv.build import build_allocator

    return build_allocator(token_to_kv_pool)


def _match_kv_cache(original, req, tree_cache, *args, max_prefix_len=None, **kwargs):
    result = original(req, tree_cache, *args, max_prefix_len=max_prefix_len, **kwargs)
    if not _selected() or not req.prefix_len:
        return result
    pool = tree_cache.token_to_kv_pool_allocator.get_kvcache()
    tokens = pool.resumable_tokens(req.prefix_len, lambda: tree_cache.prefix_device_indices(req))
    if tokens == req.prefix_len:
        return result
    return original(req, tree_cache, *args, max_prefix_len=tokens, **kwargs)


def _insert(original, cache, params):
    if _selected() and not cache.disable:

        def cached_ids():
            from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

            match = cache.match_prefix(MatchPrefixParams(key=params.key))
            return cache.path_device_indices(match.last_device_node)

        cache.token_to_kv_pool_allocator.get_kvcache().prefix_is_cached(params.value, cached_ids)
    return original(cache, params)


def _add_one_req(original, adder, req, *args, **kwargs):
    if not _selected():
        return original(adder, req, *args, **kwargs)
    gate = adder.token_to_kv_pool_allocator.get_kvcache().gate
    return gate.add_one_req(original, adder, req, *args, **kwargs)


def _prefill_pass(result, scheduler, *_, **__):
    if _selected() and result.batch_to_run is not None:
        scheduler.token_to_kv_pool_allocator.get_kvcache().gate.make_room_ahead(scheduler)
    return result


def _fused_kv_store(original, forward_batch):
    if _selected():
        from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

        if not get_token_to_kv_pool().device_only:
            return False
    return original(forward_batch)


def _graph_variants(original, hf_config):
    if not _selected():
        return original(hf_config)
    from sglang_inplacekv.graphs import DecodeForms

    return DecodeForms()


def _decode_graphs(original, runner):
    if not _selected():
        return original(runner)
    from sglang_inplacekv.graphs import DecodeGraphs

    return DecodeGraphs(runner)


def _model_architecture(original, model_config):
    from sglang_inplacekv.models.deepseek_v4 import ARCHITECTURE

    if ARCHITECTURE in (getattr(model_config.hf_config, "architectures", None) or ()):
        from sglang.srt.models.registry import ModelRegistry

        from sglang_inplacekv.models.deepseek_v4.served import EntryClass

        ModelRegistry.models[ARCHITECTURE] = EntryClass
    return original(model_config)


def _support_triton(original, backend: str):
    return False if backend == BACKEND_NAME and cpu_host.is_cpu_host() else original(backend)


def _add_cli_args(result, parser, *_):
    group = parser.add_argument_group("InplaceKV")
    for flag in FLAGS:
        group.add_argument(
            flag.option, type=str, default=None, metavar=flag.values, help=f"{flag.help} [{flag.env}]"
        )
    return result


_came_from_cli = False


def _from_cli_args(original, cls, args):
    global _came_from_cli
    _came_from_cli = True
    for flag in FLAGS:
        value = getattr(args, flag.option.removeprefix("--").replace("-", "_"), None)
        if value is not None:
            os.environ[flag.env] = value
    return original(cls, args)


def _resolve_once(original, args):
    from sglang_inplacekv import server_defaults

    if getattr(args, "_resolution_finished", False) or not server_defaults.is_selected(args):
        return original(args)
    try:
        verify()
        server_defaults.prepare_server_args(args)
        result = original(args)
        server_defaults.check_resolved(args)
        return result
    except ConfigError as error:
        if not _came_from_cli:
            raise
        # At a command line the one line is the answer; a traceback would bury it.
        sys.exit(f"error: {error}")


HOOKS = (
    Hook(
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
        HookType.AROUND,
        _pool_configurator,
        "capacity comes from the host and GPU budgets, not from free GPU memory",
    ),
    Hook(
        f"{_CONFIGURATOR}._build_token_to_kv_pool",
        HookType.AROUND,
        _build_pool,
        "SGLang has no seam for a pool class",
    ),
    Hook(
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        HookType.AROUND,
        _build_allocator,
        "SGLang has no seam for an allocator class",
    ),
    Hook(
        "sglang.srt.mem_cache.common.match_kv_cache",
        HookType.AROUND,
        _match_kv_cache,
        "a cached prefix of DeepSeek-V4 is reused up to the last page that has a tail record, which the tree knows nothing of",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert",
        HookType.AROUND,
        _insert,
        "pages that the tree has already are freed here, with tail records that the tree's own may have lost",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        HookType.AROUND,
        _add_one_req,
        "SGLang starts a request as soon as the whole pool has room; only here are it and those that run both known",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        HookType.AFTER,
        _prefill_pass,
        "room for the next prompt is made while this one's prefill runs; only here are a made pass and the queue both at hand",
    ),
    Hook(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        HookType.AROUND,
        _fused_kv_store,
        "the fused RoPE and KV store writes to the pool's buffer by token id: right for pages in D, wrong for all others",
    ),
    Hook(
        "sglang.srt.layers.attention.graph_variants.create_attention_graph_variants",
        HookType.AROUND,
        _graph_variants,
        "each decode graph is captured in two forms, and the batch decides which is replayed",
    ),
    Hook(
        "sglang.srt.model_executor.runner_backend.utils.resolve_decode_backend",
        HookType.AROUND,
        _decode_graphs,
        "one form is a whole graph, the other breaks at attention; SGLang's settings choose one kind for all",
    ),
    Hook(
        "sglang.srt.model_loader.utils.get_model_architecture",
        HookType.AROUND,
        _model_architecture,
        "our DeepSeek-V4 joins SGLang's registry when it is first asked for: importing that registry loads every model",
    ),
    Hook(
        "sglang.srt.utils.common.support_triton",
        HookType.AROUND,
        _support_triton,
        "true for unknown backend names, so that Triton kernels would be launched with no driver",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        HookType.AFTER,
        _add_cli_args,
        "our flags on the command line",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        HookType.AROUND,
        _from_cli_args,
        "unknown attributes are dropped there; the environment reaches the scheduler",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        HookType.AROUND,
        _resolve_once,
        "defaults, conflicts and budgets; the last moment the CLI and Engine both pass while fields may be set "
        "(msgspec calls the __post_init__ it saw at class creation, so a hook there never runs)",
    ),
)


def register() -> None:
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)


def verify() -> None:
    """Raise ConfigError unless every hook that this file declares wraps its target right now."""
    for name, target in _EXPECTED.items():
        if not _is_live(globals()[name], target):
            raise ConfigError(
                f"--attention-backend {BACKEND_NAME}: the hook on {target} did not take, so SGLang would run without it; "
                "see the plugin errors above in the log"
            )
    if cpu_host.is_cpu_host() and not cpu_host.is_applied():
        raise ConfigError(
            f"--attention-backend {BACKEND_NAME}: the changes for hosts without a GPU did not take"
        )


def _is_live(function: Callable, target: str) -> bool:
    """Whether `function` is among the closures of the wrappers that now stand at `target`."""
    wrapper = pkgutil.resolve_name(target)
    wrapper = getattr(wrapper, "__func__", wrapper)
    while wrapper is not None:
        if any(cell.cell_contents is function for cell in wrapper.__closure__ or ()):
            return True
        wrapper = getattr(wrapper, "__wrapped__", None)
    return False


# Apart from HOOKS on purpose: an entry that is lost there must be missed here.
_EXPECTED = {
    "_pool_configurator": "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
    "_build_pool": f"{_CONFIGURATOR}._build_token_to_kv_pool",
    "_build_allocator": f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
    "_match_kv_cache": "sglang.srt.mem_cache.common.match_kv_cache",
    "_insert": "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert",
    "_add_one_req": "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
    "_prefill_pass": "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
    "_fused_kv_store": "sglang.srt.models.utils.enable_fused_set_kv_buffer",
    "_graph_variants": "sglang.srt.layers.attention.graph_variants.create_attention_graph_variants",
    "_decode_graphs": "sglang.srt.model_executor.runner_backend.utils.resolve_decode_backend",
    "_model_architecture": "sglang.srt.model_loader.utils.get_model_architecture",
    "_support_triton": "sglang.srt.utils.common.support_triton",
    "_add_cli_args": "sglang.srt.server_args.ServerArgs.add_cli_args",
    "_from_cli_args": "sglang.srt.server_args.ServerArgs.from_cli_args",
    "_resolve_once": "sglang.srt.server_args.ServerArgs.resolve_once",
}
