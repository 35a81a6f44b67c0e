"""Which attention layers this version computes rightly: all others are refused, by name."""

from __future__ import annotations

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.pool import RegionPool


def check_model(runner) -> None:
    """Refuse, by name, any attention layer that this version would compute wrongly."""
    pool = runner.token_to_kv_pool
    layers = [(name, m) for name, m in runner.model.named_modules() if isinstance(m, RadixAttention)]
    if runner.use_mla_backend:
        # Each MLA layer has a second form, over keys and values that are made from the latent rows; it writes none.
        layers = [(name, layer) for name, layer in layers if layer.tp_k_head_num == 1]
        _check_mla(runner.model, layers)
    for name, layer in layers:
        _check_layer(name, layer, pool)
    for name, module in runner.model.named_modules():
        if getattr(module, "learnable_sink_param", None) is not None:
            raise ConfigError(
                f"--attention-backend {BACKEND_NAME}: layer {name} asks an attention sink, possible is plain softmax"
            )
    # Layers write and stream in this order, once each per forward.
    expected = list(range(pool.start_layer, pool.start_layer + pool.layer_num))
    found = sorted(layer.layer_id for _, layer in layers)
    if found != expected:
        raise ConfigError(
            f"--attention-backend {BACKEND_NAME}: asked a model whose attention layers are {found}, possible is one "
            f"in each of the layers {expected[0]} to {expected[-1]}"
        )


def _check_mla(model: torch.nn.Module, layers: list[tuple[str, RadixAttention]]) -> None:
    """mla.py tells SGLang's DeepSeek attention which form to take; other MLA code does not ask it."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    asked = {id(m.attn_mqa) for m in model.modules() if isinstance(m, DeepseekV2AttentionMLA)}
    for name, layer in layers:
        if id(layer) not in asked:
            raise ConfigError(
                f"--attention-backend {BACKEND_NAME}: layer {name} asks MLA of its own kind, possible is that of SGLang's "
                "DeepSeek models"
            )


def _check_layer(name: str, layer: RadixAttention, pool: RegionPool) -> None:
    def refuse(asked: str, possible: str) -> None:
        raise ConfigError(
            f"--attention-backend {BACKEND_NAME}: layer {name} asks {asked}, possible is {possible}"
        )

    shape = pool.regions.shape
    if layer.tp_k_head_num != layer.tp_v_head_num:
        refuse(f"{layer.tp_k_head_num} K and {layer.tp_v_head_num} V heads", "as many of each")
    if shape.value_dim is None and layer.qk_head_dim != layer.v_head_dim:
        refuse(f"K of {layer.qk_head_dim} and V of {layer.v_head_dim}", "equal widths")
    asked = (layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
    possible = (shape.kv_heads, shape.head_dim, shape.out_dim)
    if asked != possible:
        refuse(
            "{} KV heads of K {} and V {}".format(*asked),
            "the {} of K {} and V {} of the model's other layers".format(*possible),
        )
    if layer.use_irope or layer.pos_encoding_mode != "NONE" or layer.xai_temperature_len > 0:
        refuse("position-dependent attention scores", "plain scaled dot products")
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        refuse(f"a sliding window of {layer.sliding_window_size}", "full attention")
    if layer.logit_cap:
        refuse(f"logit soft-capping at {layer.logit_cap}", "plain softmax")
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        refuse("cross- or encoder attention", "causal decoder attention")
