"""What a model's contexts would cost on a host: memory, the share the CPU would get, and decode time. No SGLang in here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.layout import KVShape
from sglang_inplacekv.roofline import Line, balanced_share, layer_seconds

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
    """From the config.json of a Hugging Face checkpoint. ConfigError if there is none, or it does not tell."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"--model: asked {folder}, possible is a folder with a config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    heads = _field(config, path, "num_attention_heads")
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in _DTYPES:
        raise ConfigError(f"--model: {path} has dtype {name}, possible are {', '.join(_DTYPES)}")
    width: dict[str, int]
    if rank := config.get("kv_lora_rank"):
        width = {"kv_heads": 1, "head_dim": rank + config["qk_rope_head_dim"], "value_dim": rank}
    else:
        width = {
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or _field(config, path, "hidden_size") // heads,
        }
    layers = _field(config, path, "num_hidden_layers")
    return ModelKV(KVShape(layers=layers, dtype=_DTYPES[name], page_size=page_size, **width), heads)


def _field(config: Mapping[str, Any], path: Path, name: str) -> int:
    if name not in config:
        raise ConfigError(f"--model: {path} has no {name}")
    return config[name]


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


def predict(
    model: ModelKV, cpu: Line, transfer: Line, batch: int, context: int, device_bytes: int, rest_s: float
) -> Prediction:
    """cpu and transfer: seconds of a layer. rest_s: a step's time with all KV in GPU memory, which hides nothing here."""
    size = model.shape.page_size
    pages = batch * -(-context // size)
    host_pages = pages - min(pages, device_bytes // model.shape.page_bytes)
    tokens, layers = host_pages * size, model.shape.layers

    def step(share: float) -> float:
        return rest_s + layers * layer_seconds(share, cpu, transfer, tokens)

    share = balanced_share(cpu, transfer, tokens)
    return Prediction(
        batch, context, host_pages * model.shape.page_bytes, share, step(share), step(0.0), step(1.0)
    )
