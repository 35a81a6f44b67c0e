"""Small selectors of every kind with random weights, and random tokens for them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_attn import (
    CompressorWeights,
    DsaConfig,
    DsaIndexerWeights,
    DsaSelector,
    DsaWeights,
    GrowingStore,
    IndexerWeights,
    LayerInputs,
    MlpWeights,
    NsaConfig,
    NsaSelector,
    NsaWeights,
    Selector,
    V4Config,
    V4Selector,
    V4Weights,
)
from sparse_attn.rope import frequencies

KINDS = ("swa", "csa", "hca", "dsa", "nsa")
HEADS, HIDDEN, LATENT, INDEX_HEADS, INDEX_DIM, ROPE = 4, 24, 20, 16, 8, 4


def normal(*shape: int) -> Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def compressor(ratio: int, columns: int, dim: int) -> CompressorWeights:
    return CompressorWeights(
        normal(columns, HIDDEN),
        normal(columns, HIDDEN),
        torch.randn(ratio, columns),
        1 + 0.1 * torch.randn(dim),
    )


def mlp(block: int, d: int) -> MlpWeights:
    return MlpWeights(
        torch.randn(block, d), normal(12, block * d), torch.randn(12), normal(d, 12), torch.randn(d)
    )


def selector_of(kind: str, max_rollback: int = 6, seed: int = 0) -> Selector:
    torch.manual_seed(seed)
    turns = frequencies(ROPE, 10000.0)
    if kind == "dsa":
        indexer = DsaIndexerWeights(
            normal(INDEX_DIM, HIDDEN),
            1 + 0.1 * torch.randn(INDEX_DIM),
            torch.randn(INDEX_DIM),
            normal(INDEX_HEADS * INDEX_DIM, LATENT),
            normal(INDEX_HEADS, HIDDEN),
        )
        config = DsaConfig(
            heads=HEADS,
            kv_lora_rank=32,
            rope_dim=ROPE,
            index_heads=INDEX_HEADS,
            index_dim=INDEX_DIM,
            index_topk=7,
        )
        return DsaSelector(config, DsaWeights(turns, normal(HEADS, 6, 32), indexer))
    if kind == "nsa":
        geometry = NsaConfig(
            heads=HEADS,
            kv_heads=2,
            dk=12,
            dv=10,
            block=8,
            stride=4,
            selected_block=8,
            selected=4,
            window=11,
            max_rollback=max_rollback,
        )
        weights = NsaWeights(mlp(8, 12), mlp(8, 10), normal(3 * HEADS, HIDDEN), torch.randn(3 * HEADS))
        return NsaSelector(geometry, weights)
    main = compressor(4, 64, 32) if kind == "csa" else compressor(16, 32, 32)
    index = IndexerWeights(
        compressor(4, 2 * INDEX_DIM, INDEX_DIM),
        normal(INDEX_HEADS * INDEX_DIM, LATENT),
        normal(INDEX_HEADS, HIDDEN),
    )
    v4 = V4Config(
        kind,  # type: ignore[arg-type]
        heads=HEADS,
        head_dim=32,
        window=9,
        hca_ratio=16,
        index_heads=INDEX_HEADS,
        index_dim=INDEX_DIM,
        index_topk=5,
        max_rollback=max_rollback,
    )
    return V4Selector(v4, V4Weights(torch.randn(HEADS), turns, main, index))


def tokens_of(selector: Selector, count: int, seed: int, first: int = 0) -> LayerInputs:
    g = torch.Generator().manual_seed(seed)
    attended = [space for space in selector.spaces.values() if space.dv]
    dk = attended[0].dk
    raw = {"win", "lat", "slc"} | ({"cmp"} if "slc" in selector.spaces else set())
    return LayerInputs(
        first,
        torch.randn(count, HIDDEN, generator=g),
        torch.randn(count, LATENT, generator=g),
        torch.randn(count, HEADS, dk, generator=g),
        {
            space.name: torch.randn(count, space.kv_heads, space.width, generator=g)
            for space in attended
            if space.name in raw
        },
    )


class ForgetfulStore(GrowingStore):
    """Keeps of ring spaces what Space.ring promises and poisons all before."""

    def append(self, space: str, first: int, values: Tensor) -> None:
        super().append(space, first, values)
        ring, base = self._spaces[space].ring, self._first[space]
        if ring is not None:
            self._rows[space][: max(0, first - ring - base)] = torch.nan


def part(x: LayerInputs, first: int, last: int) -> LayerInputs:
    """Tokens first .. last of x, counted from its own first."""
    cut = slice(first, last)
    assert x.h is not None and x.q_resid is not None and x.q is not None
    return LayerInputs(
        x.first + first, x.h[cut], x.q_resid[cut], x.q[cut], {name: rows[cut] for name, rows in x.kv.items()}
    )
