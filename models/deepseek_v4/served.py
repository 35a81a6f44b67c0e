"""DeepSeek-V4 as an SGLang model, under an architecture name that SGLang does not know.

Written for one rank and any device; attention is our backend's (`attend`). SGLang's name for the model would bring SGLang's own
KV pools and settings, which need its GPU kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import nn

from .attention import Attention, RmsNorm
from .experts import FeedForward
from .geometry import V4Geometry
from .hyper import HyperConnection, HyperHead
from .loading import load_tensors


class Layer(nn.Module):
    def __init__(self, geometry: V4Geometry, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(geometry, layer)
        self.mlp = FeedForward(geometry, layer)
        self.input_layernorm = RmsNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.attn_hc = HyperConnection(geometry)
        self.ffn_hc = HyperConnection(geometry)

    def forward(
        self, streams: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """streams [tokens, n, hidden] -> the same."""
        x, *mixing = self.attn_hc.collapse(streams)
        streams = self.attn_hc.expand(self.self_attn(self.input_layernorm(x), positions), streams, *mixing)
        x, *mixing = self.ffn_hc.collapse(streams)
        return self.ffn_hc.expand(self.mlp(self.post_attention_layernorm(x), input_ids), streams, *mixing)


class InplaceV4ForCausalLM(nn.Module):
    """`config` is SGLang's, with the field `v4_geometry` that override.py adds."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(f"{type(self).__name__} computes in plain dtypes: quantisation is not supported")
        self.config, self.quant_config = config, None
        geometry = self.geometry = V4Geometry.from_dict(config.v4_geometry)
        self.embed_tokens = VocabParallelEmbedding(geometry.vocab_size, geometry.hidden_size)
        self.layers = nn.ModuleList(Layer(geometry, layer) for layer in range(geometry.layers))
        self.hc_head = HyperHead(geometry)
        self.norm = RmsNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.lm_head = ParallelLMHead(geometry.vocab_size, geometry.hidden_size)
        self.logits_processor = LogitsProcessor(config)
        self._loaded = False

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch, input_embeds=None, **_
    ) -> LogitsProcessorOutput:
        """input_ids and positions int64 [tokens]. The hash-routed layers read the ids, so embeddings cannot stand for them."""
        if input_embeds is not None:
            raise ValueError("DeepSeek-V4 routes by token ids: input_embeds are not supported")
        x = self.embed_tokens(input_ids)
        streams = x.unsqueeze(1).repeat(1, self.geometry.hc_mult, 1)
        for layer in self.layers:
            streams = layer(streams, input_ids, positions)
        return self.logits_processor(input_ids, self.norm(self.hc_head(streams)), self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._loaded:
            raise RuntimeError(
                "DeepSeek-V4's weights cannot be replaced while it is served: its selectors hold copies"
            )
        load_tensors(self, weights)
        self._loaded = True


EntryClass = InplaceV4ForCausalLM
