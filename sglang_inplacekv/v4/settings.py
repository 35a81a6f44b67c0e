"""DeepSeek-V4 in SGLang's settings: our architecture instead of the released one, and what the model asks of the others."""

from __future__ import annotations

from typing import Any

import torch

from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.models.deepseek_v4 import ARCHITECTURE, V4Geometry, override_args, read_config
from sglang_inplacekv.models.deepseek_v4.geometry import CSA_RATIO, HCA_RATIO
from sglang_inplacekv.v4.layout import V4Layout, check_page_tokens

# field -> what it must be: each of these would go round the model or its state.
_ONLY: dict[str, tuple[Any, ...]] = {
    "radix_cache_backend": (None,),
    "quantization": (None,),
    "cpu_offload_gb": (0,),
    "offload_group_size": (-1,),
    "enable_lora": (None, False),
    "lora_paths": (None,),
    "enable_eplb": (False,),
    "expert_distribution_recorder_mode": (None,),
    "enable_return_routed_experts": (False,),
    "enable_return_indexer_topk": (False,),
    "enable_return_aux_hidden_states": (False,),
    "model_impl": ("auto", "sglang"),
    "cuda_graph_backend_decode": (None, "disabled"),
}


def is_v4(hf_config: Any) -> bool:
    """Whether SGLang's config is one that `prepare` has led to our model."""
    return ARCHITECTURE in (getattr(hf_config, "architectures", None) or ())


def layout_of(hf_config: Any, dtype: torch.dtype, page_tokens: int) -> V4Layout:
    return V4Layout(V4Geometry.from_dict(hf_config.v4_geometry), dtype, page_tokens)


def prepare(args: Any) -> None:
    """Where `args` (ServerArgs, not resolved) name a DeepSeek-V4 checkpoint: lead SGLang to our model, fill and refuse.

    ConfigError for what cannot be served.
    """
    fields = read_config(args.model_path, args.revision)
    if fields is None:
        return
    try:
        args.json_model_override_args = override_args(fields, args.json_model_override_args)
    except ValueError as error:
        raise ConfigError(f"--model-path {args.model_path}: its config has {error}") from None
    for name, possible in _ONLY.items():
        if getattr(args, name) not in possible:
            shown = " or ".join("unset" if value is None else str(value) for value in possible)
            raise ConfigError(
                f"--{name.replace('_', '-')}: asked {getattr(args, name)}, possible with DeepSeek-V4 and "
                f"--attention-backend {BACKEND_NAME} is {shown}"
            )
    args.cuda_graph_backend_decode = "disabled"


def check(settings: Any, model_config: Any) -> None:
    """Check resolved settings of a model that is_v4."""
    check_page_tokens(settings.page_size)
    geometry = V4Geometry.from_dict(model_config.hf_config.v4_geometry)
    if not settings.disable_radix_cache and geometry.sliding_window > settings.page_size:
        raise ConfigError(
            f"--page-size: asked {settings.page_size}, possible with a prefix cache are multiples of {HCA_RATIO} from the "
            f"model's window of {geometry.sliding_window} tokens on; any with --disable-radix-cache"
        )
    if not geometry.layers_of(CSA_RATIO):
        raise ConfigError(
            "--model-path: a DeepSeek-V4 without layers of ratio 4, possible are those with some"
        )
