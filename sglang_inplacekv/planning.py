"""What a model's contexts would cost on a host: memory, the share the CPU would get, and decode time. No SGLang in here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cpu_attn
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.layout import KVShape
from sglang_inplacekv.models.config_fields import check_number, shown
from sglang_inplacekv.roofline import Line, balanced_share, layer_seconds

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_JSON_KINDS = {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
# Fields that ask for attention which a server refuses: model_check.py, and _check_model of server_defaults.py.
_NOT_SERVED = (
    "attn_logit_softcapping",
    "attention_chunk_size",
    "cross_attention_layers",
    "index_topk",
    # Of models some of whose layers are Mamba or linear attention.
    "full_attention_interval",
    "linear_attn_config",
    "hybrid_override_pattern",
)
# Before its first layer, a step that reads host memory plans pages, tiles and the CPU's part, which one with all KV in GPU
# memory does not: 0.5 to 1.7 ms on the host of docs/gpu.md.
STEP_START_S = 1e-3


@dataclass(frozen=True)
class ModelKV:
    """A model's KV as one GPU sees it, and the query heads that read it."""

    shape: KVShape
    q_heads: int

    @property
    def layer_token_bytes(self) -> int:
        """KV bytes of a token of one layer."""
        return self.shape.token_bytes // self.shape.layers


def read_model(folder: Path, page_size: int) -> ModelKV:
    """From the config.json of a Hugging Face checkpoint. ConfigError if there is none, it does not tell, or is not served."""
    config = load_config(folder / "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    _check_layers(inner)
    _check_kv_dtype(inner, config)
    heads, layers = _number(inner, "num_attention_heads"), _number(inner, "num_hidden_layers")
    width: dict[str, int]
    if inner.get("kv_lora_rank") is not None:
        rank, rope = _number(inner, "kv_lora_rank"), _number(inner, "qk_rope_head_dim")
        if not cpu_attn.supports_latent(rank, rope):
            raise refused(f"latent rows of {rank} + {rope}", cpu_attn.LATENT_WIDTHS)
        width = {"kv_heads": 1, "head_dim": rank + rope, "value_dim": rank}
    else:
        kv_heads = (
            heads if inner.get("num_key_value_heads") is None else _number(inner, "num_key_value_heads")
        )
        head_dim = (
            _number(inner, "hidden_size") // heads
            if inner.get("head_dim") is None
            else _number(inner, "head_dim")
        )
        if head_dim not in cpu_attn.SUPPORTED_HEAD_DIMS:
            raise refused(f"head_dim {head_dim}", ", ".join(map(str, cpu_attn.SUPPORTED_HEAD_DIMS)))
        if heads % kv_heads:
            raise refused(f"{heads} query heads on {kv_heads} KV heads", "a multiple of the KV heads")
        width = {"kv_heads": kv_heads, "head_dim": head_dim}
    shape = KVShape(layers=layers, dtype=dtype_of(inner, config), page_size=page_size, **width)
    return ModelKV(shape, heads)


def dtype_of(inner: Mapping[str, Any], config: Mapping[str, Any]) -> torch.dtype:
    """Of the text model, `inner`, of a config. SGLang serves what is neither bf16 nor fp16 in fp16."""
    named = next((of[key] for of in (inner, config) for key in ("dtype", "torch_dtype") if of.get(key)), None)
    return _DTYPES.get(str(named), torch.float16)


def load_config(path: Path) -> dict[str, Any]:
    """ConfigError if there is no JSON object."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--model: {path}: {error.strerror}; possible is a folder with a config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--model: {path} cannot be read as JSON: {type(error).__name__}") from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"--model: {path} holds {_JSON_KINDS.get(type(config), 'a number')}, possible is an object"
        )
    return config


def _number(config: Mapping[str, Any], name: str) -> int:
    try:
        check_number(config, name)
    except ValueError as error:
        raise ConfigError(f"--model: its config.json has {error}") from None
    found: int = config[name]
    return found


def refused(asked: str, possible: str) -> ConfigError:
    return ConfigError(f"--model: its config.json has {asked}, possible is {possible}")


def _check_layers(config: Mapping[str, Any]) -> None:
    kinds = config.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise refused(f"layer_types {shown(kinds)}", "a list")
    if others := [kind for kind in kinds or () if kind != "full_attention"]:
        raise refused(f"layers of {shown(others[0])}", "full attention in every layer")
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise refused("a sliding window", "full attention in every layer")
    for name in _NOT_SERVED:
        if config.get(name):
            raise refused(f"{name} {shown(config[name])}", "none")


def _check_kv_dtype(inner: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Of a checkpoint with FP8 KV SGLang makes --kv-cache-dtype auto FP8, which a server refuses."""
    places = (
        config.get("quantization_config"),
        inner.get("quantization_config"),
        config.get("compression_config"),
    )
    quantised = next((place for place in places if isinstance(place, dict)), {})
    nested = quantised.get("quantization")
    algorithm = (nested if isinstance(nested, dict) else quantised).get("kv_cache_quant_algo")
    if str(algorithm).upper() == "FP8" or _is_fp8(quantised.get("kv_cache_scheme"), quantised):
        raise refused("KV of FP8 in its quantization_config", "KV of the model's dtype")


def _is_fp8(scheme: object, quantised: Mapping[str, Any]) -> bool:
    if not isinstance(scheme, dict) or (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        return False
    # Of compressed-tensors' schemes SGLang ignores all but static ones with a scale a tensor; others but ModelOpt's, all.
    method = str(quantised.get("quant_method") or "modelopt")
    return method.startswith("modelopt") or (
        method == "compressed-tensors"
        and (
            scheme.get("strategy") == "tensor" and scheme.get("symmetric", True) and not scheme.get("dynamic")
        )
    )


@dataclass(frozen=True)
class Prediction:
    """One decode step of `batch` requests of `context` tokens."""

    batch: int
    context: int
    host_bytes: int  # of KV, in host memory
    share: float  # of the host tokens, for the CPU
    step_s: float
    transfer_s: float  # the step if everything crossed
    cpu_s: float  # the step if the CPU attended everything

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s if self.step_s else float("inf")


def with_rest(cpu: Line, rest_s: float, model: ModelKV) -> Line:
    """The CPU's line with what a layer takes beside attention, which nothing of it can hide: it goes on with the answer."""
    return Line(cpu.fixed_s + rest_s / model.shape.layers, cpu.token_s)


def predict(
    model: ModelKV, cpu: Line, transfer: Line, batch: int, context: int, device_bytes: int, rest_s: float
) -> Prediction:
    """cpu and transfer: seconds of a layer. rest_s: a step's time with all KV in GPU memory.

    The CPU's attention adds to rest_s, since each layer goes on with its answer. Copies hide behind both. STEP_START_S comes
    before, if anything is in host memory.
    """
    size = model.shape.page_size
    pages = batch * -(-context // size)
    host_pages = pages - min(pages, device_bytes // model.shape.page_bytes)
    tokens, layers = host_pages * size, model.shape.layers

    cpu = with_rest(cpu, rest_s, model)

    def step(share: float) -> float:
        start_s = STEP_START_S if tokens else 0.0
        return start_s + max(rest_s, layers * layer_seconds(share, cpu, transfer, tokens))

    share = balanced_share(cpu, transfer, tokens)
    return Prediction(
        batch, context, host_pages * model.shape.page_bytes, share, step(share), step(0.0), step(1.0)
    )
