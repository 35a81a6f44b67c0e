"""DeepSeek-V4 attention: a window of raw tokens beside compressed entries, in one softmax with a sink.

swa  the window alone
csa  and the top-k of entries that sum up 4 new tokens each and the 4 before them, found by the lightning indexer
hca  and every entry of 128 tokens each
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["swa", "csa", "hca"]


@dataclass(frozen=True)
class V4Config:
    """Geometry of one layer; the defaults are V4-Flash's."""

    kind: Kind
    layer: int = 0
    heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64  # the trailing channels of every row
    window: int = 128  # tokens, the query's own included
    csa_ratio: int = 4
    hca_ratio: int = 128
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 512
    eps: float = 1e-6
    max_rollback: int = 16
    entry_dtype: torch.dtype = torch.float32  # of what observe hands to the store
    entry_bytes: int | None = None  # as kept; None: head_dim of entry_dtype, 584 in the released fp8 format
    index_bytes: int | None = None  # likewise of an index key


@dataclass(frozen=True)
class CompressorWeights:
    """coff is 2 where blocks overlap (csa, indexer), else 1; d is the width of an entry. Any float dtype; computed in fp32."""

    kv: Tensor  # [coff * d, hidden]
    gate: Tensor  # [coff * d, hidden]
    position_bias: Tensor  # [ratio, coff * d]
    norm: Tensor  # [d]


@dataclass(frozen=True)
class IndexerWeights:
    compressor: CompressorWeights  # d = index_dim
    query: Tensor  # [index_heads * index_dim, q_lora_rank]
    head_weights: Tensor  # [index_heads, hidden]


@dataclass(frozen=True)
class V4Weights:
    sink: Tensor  # [heads]
    inv_freq: Tensor  # fp32 [rope_dim / 2] of this layer, see rope.py
    compressor: CompressorWeights | None = None  # csa, hca
    indexer: IndexerWeights | None = None  # csa
