"""Checkpoint names of DeepSeek-V4: the released ones, transformers' ones and those that it saves, to the names here.

The model here uses transformers' names, less the beginning "model.", with each expert apart: `mlp.experts.7.gate_proj.weight`.
"""

from __future__ import annotations

import re

SCALE = "scale"
_DRAFT = re.compile(r"^mtp\.|^layers\.\d+\.(eh_proj|enorm|hnorm)\b")
_TOP = {
    "embed.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "hc_head.fn",
    "hc_head_base": "hc_head.base",
    "hc_head_scale": "hc_head.scale",
    "hc_head.hc_fn": "hc_head.fn",
    "hc_head.hc_base": "hc_head.base",
    "hc_head.hc_scale": "hc_head.scale",
}
# Tried in order, each on what the one before has made of a layer's part.
_LAYER = [
    (re.compile(pattern), target)
    for pattern, target in (
        (r"^attn\.", "self_attn."),
        (r"^ffn\.", "mlp."),
        (r"^attn_norm\.", "input_layernorm."),
        (r"^ffn_norm\.", "post_attention_layernorm."),
        (r"^hc_(attn|ffn)_(fn|base|scale)$", r"\1_hc.\2"),
        (r"\.indexer\.compressor\.", ".compressor.indexer."),
        (r"^self_attn\.indexer\.", "self_attn.compressor.indexer."),
        (r"\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.ape$", ".position_bias"),
        (r"\.wq_a\.", ".q_a_proj."),
        (r"\.wq_b\.", ".q_b_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.wo_a\.", ".o_a_proj."),
        (r"\.wo_b\.", ".o_b_proj."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.norm\.", ".kv_norm."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"\.(scale|weight_scale_inv|weight_scale)$", rf".{SCALE}"),
    )
]


def canonical(name: str) -> str | None:
    """The name here, None for a draft block's tensor. A quantised weight's scales end in `.scale`, the weight in `.weight`."""
    name = name.removeprefix("model.")
    if _DRAFT.match(name):
        return None
    if not name.startswith("layers."):
        return _TOP.get(name, name)
    _, layer, rest = name.split(".", 2)
    for pattern, target in _LAYER:
        rest = pattern.sub(target, rest)
    return f"layers.{layer}.{rest}"
