"""SGLang's own resolution of arguments over a model that is a configuration and nothing else: milliseconds, no weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig

from sglang_inplacekv.config import ConfigError

GEOMETRY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


def write_config(folder: Path, kind: str = "llama", architecture: str = "LlamaForCausalLM", **fields) -> Path:
    config = AutoConfig.for_model(kind, **(GEOMETRY | fields))
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


@contextmanager
def restored_environment() -> Iterator[None]:
    """Resolving ServerArgs sets variables of its own."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def server_args(model: Path, **fields) -> ServerArgs:
    load_plugins()
    given = {"attention_backend": "inplacekv", "device": "cpu", "dtype": "float32", "load_format": "dummy"}
    return ServerArgs(model_path=str(model), skip_tokenizer_init=True, **(given | fields))


def resolve(model: Path, **fields) -> ServerArgs:
    args = server_args(model, **fields)
    args.resolve_once()
    return args


def refusal(model: Path, **fields) -> str:
    """The one line with which these arguments are refused."""
    with pytest.raises(ConfigError) as refused:
        resolve(model, **fields)
    line = str(refused.value)
    assert "\n" not in line
    return line
