"""The served DeepSeek-V4 without a server: its layers and loader, and plain torch for the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor, nn

from sglang_inplacekv.models.deepseek_v4 import V4Geometry
from sglang_inplacekv.models.deepseek_v4.attention import RmsNorm
from sglang_inplacekv.models.deepseek_v4.hyper import HyperHead
from sglang_inplacekv.models.deepseek_v4.loading import load_tensors
from sglang_inplacekv.models.deepseek_v4.served import Layer


class Attention(Protocol):
    def attend(self, layer: int, *, h: Tensor, q_resid: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Rows of T new tokens -> the heads' outputs [T, heads, head_dim]."""


class Model(nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        geometry = V4Geometry.from_config(json.loads((path / "config.json").read_text(encoding="utf-8")))
        self.geometry = geometry
        self.embed_tokens = nn.Embedding(geometry.vocab_size, geometry.hidden_size)
        self.layers = nn.ModuleList(Layer(geometry, layer) for layer in range(geometry.layers))
        self.hc_head = HyperHead(geometry)
        self.norm = RmsNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.lm_head = nn.Linear(geometry.hidden_size, geometry.vocab_size, bias=False)
        load_tensors(self, load_file(path / "model.safetensors").items())

    @torch.no_grad()
    def forward(self, tokens: list[int], first: int, attention: Attention) -> Tensor:
        """Logits [vocab] of the last of `tokens`, which stand at positions first and on."""
        ids, positions = torch.tensor(tokens), torch.arange(first, first + len(tokens))
        streams = self.embed_tokens(ids).unsqueeze(1).repeat(1, self.geometry.hc_mult, 1)
        with forward_context(ForwardContext(attn_backend=attention)):  # where the layers look for it
            for layer in self.layers:
                streams = layer(streams, ids, positions)
        return self.lm_head(self.norm(self.hc_head(streams[-1:])))[0]
