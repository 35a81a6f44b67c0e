"""DeepSeek-V4's shapes from its config.json, released (Flash, Pro) or saved by transformers, in one form.

Ratios, one a layer: 0 is a sliding window alone, 4 compressed sparse attention (CSA), 128 heavily compressed attention (HCA).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..config_fields import MOST_REAL, check_list, check_number, check_number_if_there, object_of

STOCK_ARCHITECTURE = "DeepseekV4ForCausalLM"
CSA_RATIO, HCA_RATIO = 4, 128
_RATIO_OF_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}
# What a config may also say, and the only value that is computed here.
_FIXED = {
    "scoring_func": "sqrtsoftplus",
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "swiglu_limit",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "rms_norm_eps",
)


@dataclass(frozen=True)
class Yarn:
    """Rotary scaling of the layers that compress. Neither cosines nor the softmax scale get an attention factor."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_tokens: int


@dataclass(frozen=True)
class V4Geometry:
    """Names are those of config.json, where it has one."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int  # of the one KV vector, key and value alike; its last rope_dim channels are rotated
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int  # tokens, the query's own included
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    ratios: tuple[int, ...]  # one a layer
    rope_theta: float  # of layers of ratio 0, which have no yarn
    compress_rope_theta: float
    yarn: Yarn | None
    hash_layers: tuple[bool, ...]  # whether a table, not scores, chooses the experts
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float

    @property
    def layers(self) -> int:
        return len(self.ratios)

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Ids of the layers of one kind."""
        return tuple(layer for layer, own in enumerate(self.ratios) if own == ratio)

    def to_dict(self) -> dict[str, Any]:
        """JSON values alone; from_dict of it is equal."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> V4Geometry:
        yarn = fields["yarn"]
        lists = {name: tuple(fields[name]) for name in ("ratios", "hash_layers")}
        return cls(**{**fields, **lists, "yarn": None if yarn is None else Yarn(**yarn)})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> V4Geometry:
        """From the fields of a config.json. ValueError, naming the field, if one is missing, malformed or not computed here."""
        _check_fields(config)
        for name, possible in _FIXED.items():
            if config.get(name, possible) != possible:
                raise ValueError(f"{name} {config[name]!r}, possible is {possible!r}")
        layers = _field(config, "num_hidden_layers")
        ratios = _ratios(config, layers)
        main, compress = _rope(config)
        return cls(
            **{name: _field(config, name) for name in _SAME_NAME},
            rope_dim=_rope_dim(config),
            ratios=ratios,
            rope_theta=float(main["rope_theta"]),
            compress_rope_theta=float(compress["rope_theta"]),
            yarn=_yarn(compress),
            hash_layers=_hash_layers(config, layers),
        )


def _check_fields(config: Mapping[str, Any]) -> None:
    """That what is computed with is of the kind that is counted on. What is missing is told where it is asked for."""
    own = (*_SAME_NAME, "rope_theta", "compress_rope_theta")
    for field in (field for field in fields(V4Geometry) if field.name in own):
        if field.type == "int":
            check_number_if_there(config, field.name)
        else:
            check_number_if_there(config, field.name, 0, MOST_REAL, whole=False)
    check_number_if_there(config, "num_hidden_layers")
    check_number_if_there(config, "qk_rope_head_dim")
    check_number_if_there(config, "num_hash_layers", 0)
    check_number_if_there(config, "partial_rotary_factor", 0, 1, whole=False)
    for name in ("layer_types", "compress_ratios", "mlp_layer_types"):
        check_list(config, name)
    object_of(config, "compress_rates")
    _check_rope(config)


def _check_rope(config: Mapping[str, Any]) -> None:
    nested = object_of(config, "rope_parameters")
    parts = [nested, object_of(config, "rope_scaling")]
    for name in ("main", "compress"):
        if name in nested:
            parts.append(object_of(nested, name))
            check_number(parts[-1], "rope_theta", 0, MOST_REAL, whole=False)
    for part in parts:
        for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
            check_number_if_there(part, name, 0, MOST_REAL, whole=False)


def _field(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"no {name}")
    return config[name]


def _ratios(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """One entry a main layer; released configs list those of draft blocks behind them."""
    if config.get("layer_types") is not None:
        types = config["layer_types"][:layers]
        ratios = [_RATIO_OF_TYPE.get(kind, kind) for kind in types]
        rates = config.get("compress_rates") or {}
        for kind, ratio in _RATIO_OF_TYPE.items():
            if rates.get(kind, ratio) != ratio:
                raise ValueError(f"compress_rates {kind} {rates[kind]!r}, possible is {ratio}")
    else:
        ratios = list(_field(config, "compress_ratios")[:layers])
    if len(ratios) != layers:
        raise ValueError(f"{len(ratios)} compress ratios for num_hidden_layers {layers}")
    if strange := sorted({str(ratio) for ratio in ratios} - {"0", str(CSA_RATIO), str(HCA_RATIO)}):
        raise ValueError(f"layers of {', '.join(strange)}, possible are ratios 0, {CSA_RATIO}, {HCA_RATIO}")
    if not all(type(ratio) is int for ratio in ratios):
        raise ValueError("a layer ratio in quotes, possible is a number")
    return tuple(ratios)


def _rope_dim(config: Mapping[str, Any]) -> int:
    if config.get("qk_rope_head_dim") is not None:
        return config["qk_rope_head_dim"]
    return int(_field(config, "head_dim") * _field(config, "partial_rotary_factor"))


def _rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Parameters of layers of ratio 0, and of the others."""
    nested = config.get("rope_parameters") or {}
    if "main" in nested and "compress" in nested:
        return nested["main"], nested["compress"]
    flat = dict(nested or config.get("rope_scaling") or {})
    compress = {**flat, "rope_theta": _field(config, "compress_rope_theta")}
    return {"rope_theta": _field(config, "rope_theta")}, compress


def _yarn(parameters: Mapping[str, Any]) -> Yarn | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"rope type {kind!r}, possible are yarn and default")
    return Yarn(
        factor=float(_field(parameters, "factor")),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        original_tokens=int(_field(parameters, "original_max_position_embeddings")),
    )


def _hash_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if config.get("mlp_layer_types") is not None:
        return tuple(kind == "hash_moe" for kind in config["mlp_layer_types"][:layers])
    return tuple(layer < _field(config, "num_hash_layers") for layer in range(layers))
