"""One selector a layer, over the served model's weights."""

from __future__ import annotations

from typing import Any

import torch

from sglang_inplacekv.models.deepseek_v4.geometry import CSA_RATIO, HCA_RATIO
from sparse_attn import CompressorWeights, IndexerWeights, V4Config, V4Selector, V4Weights
from sparse_attn.v4 import Kind

_KINDS: dict[int, Kind] = {0: "swa", CSA_RATIO: "csa", HCA_RATIO: "hca"}


def make_selectors(model: Any, dtype: torch.dtype) -> list[V4Selector]:
    """Of models.deepseek_v4's InplaceV4ForCausalLM, weights loaded. dtype: of entries as they are kept."""
    return [_selector(layer.self_attn, dtype) for layer in model.layers]


def _selector(attention: Any, dtype: torch.dtype) -> V4Selector:
    geometry, layer = attention.geometry, attention.layer_id
    ratio = geometry.ratios[layer]
    config = V4Config(
        _KINDS[ratio],
        layer,
        heads=geometry.num_attention_heads,
        head_dim=geometry.head_dim,
        window=geometry.sliding_window,
        index_heads=geometry.index_n_heads,
        index_dim=geometry.index_head_dim,
        index_topk=geometry.index_topk,
        eps=geometry.rms_norm_eps,
        max_rollback=0,  # nothing is taken back: no speculation
        entry_dtype=dtype,
    )
    return V4Selector(
        config,
        V4Weights(
            attention.sinks.detach(),
            attention.inv_freq,
            _compressor(attention.compressor) if ratio else None,
            _indexer(attention.compressor.indexer) if ratio == CSA_RATIO else None,
        ),
    )


def _compressor(module: Any) -> CompressorWeights:
    return CompressorWeights(
        module.kv_proj.weight.detach(),
        module.gate_proj.weight.detach(),
        module.position_bias.detach(),
        module.kv_norm.weight.detach(),
    )


def _indexer(module: Any) -> IndexerWeights:
    return IndexerWeights(
        _compressor(module), module.q_b_proj.weight.detach(), module.weights_proj.weight.detach()
    )
