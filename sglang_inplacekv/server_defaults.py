"""SGLang flags under our backend: unset ones get values that fit, explicit conflicts are refused in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from cpu_attn import LATENT_WIDTHS, SUPPORTED_HEAD_DIMS, supports_latent
from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.config import ConfigError, InplaceConfig
from sglang_inplacekv.cores import team_cores
from sglang_inplacekv.trace import check_path
from sglang_inplacekv.v4 import settings as v4

DEFAULT_PAGE_SIZE = 256
DEFAULT_CHUNK_TOKENS = 8192
DEFAULT_CHUNK_TOKENS_CPU = 2048
DEFAULT_MAX_RUNNING = 32
_CPU_MEM_FRACTION = 0.5
# Latent widths that FlashInfer's kernels take.
_LORA_RANK_MULTIPLE_CUDA, _ROPE_DIM_MULTIPLE_CUDA = 128, 64

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
    "enable_pdmux": (False,),
    "dllm_algorithm": (None,),
    "kv_canary": ("none",),
    "enable_torch_compile": (False,),
    "enable_mis": (False,),
}
_MUST_BE_ONE = ("tp_size", "pp_size", "dp_size", "attn_cp_size", "dcp_size")
_FILLED: dict[str, Any] = {
    "page_size": DEFAULT_PAGE_SIZE,
    "max_running_requests": DEFAULT_MAX_RUNNING,
    "cuda_graph_backend_prefill": "disabled",
}


def _on_cpu(args: Any) -> bool:
    return args.device == "cpu" or not torch.cuda.is_available()


def _decode_graphs(args: Any) -> tuple[str, ...]:
    # Without a GPU there are none; with one, our graphs take the place of SGLang's "full".
    return ("disabled",) if _on_cpu(args) else ("full", "disabled")


def is_selected(args: Any) -> bool:
    return BACKEND_NAME in (
        args.attention_backend,
        args.prefill_attention_backend,
        args.decode_attention_backend,
    )


def prepare_server_args(args: Any) -> None:
    """Fill and check `args`, which select our backend, in place before SGLang resolves them."""
    config = InplaceConfig.from_env()
    team_cores(config.threads)
    if config.trace is not None:
        check_path(config.trace)
    _refuse_conflicts(args)
    v4.prepare(args)
    for field, value in _FILLED.items():
        if getattr(args, field) is None:
            setattr(args, field, value)
    if _on_cpu(args):
        _fill_for_cpu(args)
    # SGLang would reserve address space for its own pool and resize that after the capture; ours is what it is.
    os.environ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] = "0"
    _check_page_size(args)
    _fill_chunk(args)


def _fill_for_cpu(args: Any) -> None:
    if args.device is None:
        args.device = "cpu"  # SGLang would look for an accelerator and end
    args.disable_overlap_schedule = True  # nothing to overlap with
    if args.cuda_graph_backend_decode is None:
        args.cuda_graph_backend_decode = "disabled"
    if args.mem_fraction_static is None:
        # Our budgets size the pool; what SGLang derives from a GPU's figures can come out negative on a CPU.
        args.mem_fraction_static = _CPU_MEM_FRACTION


def check_resolved(args: Any) -> None:
    """Check what SGLang made of `args`, and budgets and model before the model is loaded."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolving_view

    from sglang_inplacekv.sizing import check_budgets

    settings = resolving_view(args)
    if settings.model_path.lower() in ("none", "dummy"):
        return  # SGLang resolves nothing more for these either
    backends = attention_backends_of(settings)
    if backends != (BACKEND_NAME, BACKEND_NAME):
        raise ConfigError(
            f"--attention-backend: asked {BACKEND_NAME}, possible with this model are {' and '.join(backends)}, "
            "which SGLang chooses for it"
        )
    check_settings(settings)
    model_config = model_config_of(args)
    _check_model(settings, model_config, on_cpu=_on_cpu(settings))
    check_budgets(settings, model_config)


def check_settings(settings: Any) -> None:
    """Check resolved settings, whoever resolved them: the scheduler process does so for those it was given."""
    _refuse_features(settings)
    if torch.device(settings.device).type not in ("cuda", "cpu"):
        _refuse("device", settings.device, "cuda or cpu")
    graphs = settings.cuda_graph_config
    if graphs.prefill.backend != "disabled":
        _refuse("cuda_graph_config", f"prefill {graphs.prefill.backend}", "prefill disabled")
    possible = _decode_graphs(settings)
    if graphs.decode.backend not in possible:
        _refuse("cuda_graph_config", f"decode {graphs.decode.backend}", f"decode {' or '.join(possible)}")
    _check_page_size(settings)
    _check_chunk(settings)


def _check_model(settings: Any, model_config: Any, *, on_cpu: bool) -> None:
    """Refuse what the configuration alone gives away; the layers themselves are checked when they exist."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    def refuse(asked: str, possible: str) -> None:
        raise ConfigError(f"--attention-backend {BACKEND_NAME}: asked {asked}, possible are {possible}")

    if v4.is_v4(model_config.hf_config):
        v4.check(settings, model_config)
        if not supports_latent(model_config.head_dim, 0):
            refuse(f"head_dim {model_config.head_dim}", LATENT_WIDTHS)
        return
    is_mla = model_config.attention_arch == AttentionArch.MLA
    if mambaish_config(model_config) is not None:
        refuse("a model with Mamba or linear-attention layers", "models with attention in every layer")
    if model_config.is_hybrid_swa:
        refuse("a model with sliding-window layers", "models with full attention in every layer")
    if is_deepseek_dsa(model_config.hf_config):
        refuse("a model with a DSA indexer", "models with full attention in every layer")
    if is_mla and not supports_latent(model_config.kv_lora_rank, model_config.qk_rope_head_dim):
        refuse(f"latent rows of {model_config.kv_lora_rank} + {model_config.qk_rope_head_dim}", LATENT_WIDTHS)
    if is_mla and not on_cpu:
        _check_mla_on_gpu(settings, model_config, refuse)
    if not is_mla and model_config.head_dim not in SUPPORTED_HEAD_DIMS:
        refuse(f"head_dim {model_config.head_dim}", ", ".join(map(str, SUPPORTED_HEAD_DIMS)))


def _check_mla_on_gpu(settings: Any, model_config: Any, refuse: Callable[[str, str], None]) -> None:
    rank, rope = model_config.kv_lora_rank, model_config.qk_rope_head_dim
    if rank % _LORA_RANK_MULTIPLE_CUDA or rope % _ROPE_DIM_MULTIPLE_CUDA:
        refuse(
            f"latent rows of {rank} + {rope} on a GPU",
            f"multiples of {_LORA_RANK_MULTIPLE_CUDA} + multiples of {_ROPE_DIM_MULTIPLE_CUDA} there",
        )
    for field in ("disable_chunked_prefix_cache", "flashinfer_mla_disable_ragged"):
        if getattr(settings, field):
            _refuse(field, True, "unset with an MLA model")


def _refuse(field: str, asked: Any, possible: Any) -> None:
    flag = "--" + field.replace("_", "-")
    raise ConfigError(
        f"{flag}: asked {asked}, possible with --attention-backend {BACKEND_NAME} is {possible}"
    )


def _refuse_conflicts(args: Any) -> None:
    for phase in ("prefill_attention_backend", "decode_attention_backend"):
        asked = getattr(args, phase)
        if asked not in (None, BACKEND_NAME) or (asked and args.attention_backend != BACKEND_NAME):
            _refuse(phase, asked, f"unset (select the backend with --attention-backend {BACKEND_NAME})")
    _refuse_features(args)
    for phase, possible in (
        ("decode", _decode_graphs(args)),
        ("prefill", ("disabled",)),
    ):
        field = f"cuda_graph_backend_{phase}"
        if getattr(args, field) not in (None, *possible):
            _refuse(field, getattr(args, field), " or ".join(possible))


def _refuse_features(settings: Any) -> None:
    for field, allowed in _MUST_BE_OFF.items():
        if getattr(settings, field) not in allowed:
            _refuse(field, getattr(settings, field), " or ".join(map(str, allowed)))
    for field in _MUST_BE_ONE:
        if getattr(settings, field) != 1:
            _refuse(field, getattr(settings, field), 1)


def _check_page_size(args: Any) -> None:
    if args.page_size < 2:
        _refuse("page_size", args.page_size, f"2 or more (default {DEFAULT_PAGE_SIZE})")
    # With one page SGLang's scheduler, stock's too, never starts a request.
    if args.max_total_tokens is not None and args.max_total_tokens < 2 * args.page_size:
        possible = f"at least two pages, twice --page-size {args.page_size}"
        _refuse("max_total_tokens", args.max_total_tokens, possible)


def _fill_chunk(args: Any) -> None:
    page = args.page_size
    if args.chunked_prefill_size is None:
        wanted = DEFAULT_CHUNK_TOKENS_CPU if _on_cpu(args) else DEFAULT_CHUNK_TOKENS
        args.chunked_prefill_size = max(1, wanted // page) * page
    _check_chunk(args)


def _check_chunk(settings: Any) -> None:
    page, chunk = settings.page_size, settings.chunked_prefill_size
    if chunk != -1 and (chunk < page or chunk % page):
        _refuse("chunked_prefill_size", chunk, f"-1 or a multiple of --page-size {page}")
