"""transformers' DeepSeek-V4 attention as the yardstick, and its weights and projections in the form that selectors take."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from sparse_attn import CompressorWeights, IndexerWeights, LayerInputs, V4Config, V4Selector, V4Weights
from sparse_attn.compressor import rms_norm
from sparse_attn.rope import frequencies, rotate_tail, yarn_frequencies

KINDS = ("swa", "csa", "hca")
RATIOS = {"swa": 0, "csa": 4, "hca": 128}


def tiny_config(kind: str, **changed: Any) -> DeepseekV4Config:
    """One layer. With few index heads relu makes many scores exactly 0, and how the oracle breaks such ties is not defined."""
    fields: dict[str, Any] = {
        "hidden_size": 128,
        "num_attention_heads": 8,
        "head_dim": 64,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "sliding_window": 32,
        "o_groups": 4,
        "o_lora_rank": 24,
        "index_n_heads": 32,
        "index_head_dim": 32,
        "index_topk": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": yarn(256),
    }
    return flash_config(kind, **(fields | changed))


def yarn(original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


def flash_config(kind: str, **changed: Any) -> DeepseekV4Config:
    """One layer of V4-Flash's geometry."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_hash_layers": 0,
        "compress_ratios": [RATIOS[kind]],
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_parameters": yarn(65536),
        "attn_implementation": "eager",
    }
    return DeepseekV4Config(**(fields | changed))


class Oracle:
    """One attention layer with random weights, fed in chunks through its cache; keeps what it selected and attended."""

    def __init__(self, config: DeepseekV4Config, seed: int = 0) -> None:
        self.config = config
        torch.manual_seed(seed)
        self.layer = hf.DeepseekV4Attention(config, 0).eval()
        self._randomise()
        self._rope = hf.DeepseekV4RotaryEmbedding(config)
        self.cache = DynamicCache(config=config)
        self.selected: list[Tensor] = []  # int64 [T, k] a chunk, -1 padded
        self.heads: list[Tensor] = []  # [T, H, head_dim] a chunk, rotated back
        self.layer.o_a_proj.register_forward_pre_hook(
            lambda _, inputs: self.heads.append(
                inputs[0][0].reshape(-1, config.num_attention_heads, config.head_dim)
            )
        )
        indexer = getattr(self.layer.compressor, "indexer", None)
        if indexer is not None:
            indexer.register_forward_hook(lambda _, inputs, ids: self.selected.append(ids[0]))

    @torch.no_grad()
    def _randomise(self) -> None:
        # Sinks and position biases are zero and norms one otherwise, which would hide a wrong sign or order.
        for name, parameter in self.layer.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                parameter.normal_()
            elif parameter.dim() == 1:
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))

    @torch.no_grad()
    def forward(self, h: Tensor, first: int) -> Tensor:
        """Attend the tokens first .. first + T of h [tokens, hidden] after all before; returns [T, hidden]."""
        part = h[None, first:]
        positions = torch.arange(first, len(h))[None]
        rope = {
            kind: self._rope(part, position_ids=positions, layer_type=kind) for kind in ("main", "compress")
        }
        window = self.config.sliding_window
        keys, queries = torch.arange(max(0, first - window + 1), len(h)), positions[0][:, None]
        seen = (keys <= queries) & (keys > queries - window)
        mask = torch.where(seen, 0.0, -torch.inf)[None, None]
        return self.layer(
            part,
            position_embeddings=rope,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
        )[0][0]


def inv_freq(config: DeepseekV4Config, kind: str) -> Tensor:
    if kind == "swa":
        return frequencies(config.qk_rope_head_dim, 10000.0)
    original = config.rope_parameters["compress"]["original_max_position_embeddings"]
    return yarn_frequencies(config.qk_rope_head_dim, 160000.0, 16.0, original)


def compressor_weights(module: nn.Module) -> CompressorWeights:
    return CompressorWeights(
        module.kv_proj.weight.detach(),
        module.gate_proj.weight.detach(),
        module.position_bias.detach(),
        module.kv_norm.weight.detach(),
    )


def selector_of(oracle: Oracle, kind: Any, **changed: Any) -> V4Selector:
    config, layer = oracle.config, oracle.layer
    compressor = indexer = None
    if kind != "swa":
        compressor = compressor_weights(layer.compressor)
    if kind == "csa":
        module = layer.compressor.indexer
        indexer = IndexerWeights(
            compressor_weights(module),
            module.q_b_proj.weight.detach(),
            module.scorer.weights_proj.weight.detach(),
        )
    geometry = V4Config(
        kind,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        window=config.sliding_window,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        index_topk=config.index_topk,
        eps=config.rms_norm_eps,
        **changed,
    )
    weights = V4Weights(layer.sinks.detach(), inv_freq(config, kind), compressor, indexer)
    return V4Selector(geometry, weights)


@torch.no_grad()
def inputs_of(oracle: Oracle, kind: str, h: Tensor, first: int, last: int) -> LayerInputs:
    """Project tokens first .. last of h [tokens, hidden] as a model does."""
    layer, config, turns = oracle.layer, oracle.config, inv_freq(oracle.config, kind)
    part, positions = h[first:last], torch.arange(first, last)
    q_resid = rms_norm(F.linear(part, layer.q_a_proj.weight), layer.q_a_norm.weight, config.rms_norm_eps)
    q = F.linear(q_resid, layer.q_b_proj.weight).view(-1, config.num_attention_heads, config.head_dim)
    q = rotate_tail(rms_norm(q, None, config.rms_norm_eps), positions, turns)
    kv = rms_norm(F.linear(part, layer.kv_proj.weight), layer.kv_norm.weight, config.rms_norm_eps)
    return LayerInputs(first, part, q_resid, q, {"win": rotate_tail(kv, positions, turns)[:, None]})


@torch.no_grad()
def project_out(oracle: Oracle, heads: Tensor) -> Tensor:
    """Grouped output projection of heads [T, H, head_dim]."""
    grouped = heads.reshape(1, len(heads), oracle.config.o_groups, -1)
    return oracle.layer.o_b_proj(oracle.layer.o_a_proj(grouped).flatten(2))[0]
