"""DeepSeek-V4 attention: a window of raw tokens beside compressed entries, in one softmax with a sink.

swa  the window alone
csa  and the top-k of entries that sum up 4 new tokens each and the 4 before them, found by the lightning indexer
hca  and every entry of 128 tokens each

Spaces: "win", raw rows of every token; "cmp", compressed entries; "idx", the indexer's keys, of the same blocks as "cmp". A row
is key and value at once. The window overlaps the entries' source tokens on purpose. An entry is visible from the token on that
closes its block, so query t sees floor((t + 1) / ratio) of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparse_attn.base import (
    Closed,
    LayerInputs,
    Segment,
    Selection,
    Selector,
    SelectorState,
    Space,
    Taken,
    hidden_of,
    rows_of,
)
from sparse_attn.compressor import Compressor, CompressorWeights
from sparse_attn.indexer import index_queries, top_entries
from sparse_attn.rope import rotate_tail

Kind = Literal["swa", "csa", "hca"]


@dataclass(frozen=True)
class V4Config:
    """Geometry of one layer; the defaults are V4-Flash's."""

    kind: Kind
    layer: int = 0
    heads: int = 64
    head_dim: int = 512
    window: int = 128  # tokens, the query's own included
    csa_ratio: int = 4
    hca_ratio: int = 128
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 512
    eps: float = 1e-6
    max_rollback: int = 16
    entry_dtype: torch.dtype = torch.float32  # of what observe hands to the store
    entry_bytes: int | None = None  # as kept; None: head_dim of entry_dtype. 584 in the released fp8 format
    index_bytes: int | None = None  # likewise of an index key, 132 and 68 in the released fp8 and fp4 formats

    def __post_init__(self) -> None:
        if self.kind not in ("swa", "csa", "hca"):
            raise ValueError(f"kind must be swa, csa or hca, is {self.kind!r}")
        for name in ("heads", "head_dim", "window", "csa_ratio", "hca_ratio", "index_topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, is {getattr(self, name)}")

    @property
    def ratio(self) -> int:
        return {"swa": 0, "csa": self.csa_ratio, "hca": self.hca_ratio}[self.kind]

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def spaces(self) -> dict[str, Space]:
        size, dim = self.entry_dtype.itemsize, self.head_dim
        row_bytes = self.entry_bytes or dim * size
        ring = self.window + self.max_rollback
        spaces = [Space("win", 1, 1, 1, dim, dim, True, row_bytes, ring=ring, kv_owner=self.layer)]
        if self.kind != "swa":
            cover = self.ratio * (2 if self.kind == "csa" else 1)
            block, spill = (self.ratio, cover, self.ratio), self.kind == "csa"
            spaces.append(Space("cmp", *block, dim, dim, True, row_bytes, kv_owner=self.layer, spill=spill))
        if self.kind == "csa":
            key_bytes = self.index_bytes or self.index_dim * size
            spaces.append(Space("idx", *block, self.index_dim, 0, True, key_bytes, kv_owner=self.layer))
        return {space.name: space for space in spaces}


@dataclass(frozen=True)
class IndexerWeights:
    compressor: CompressorWeights  # d = index_dim
    query: Tensor  # [index_heads * index_dim, q_lora_rank]
    head_weights: Tensor  # [index_heads, hidden]


@dataclass(frozen=True)
class V4Weights:
    sink: Tensor  # [heads]
    inv_freq: Tensor  # fp32 [rope_dim / 2] of this layer, see rope.py: YaRN's where there are entries, plain ones else
    compressor: CompressorWeights | None = None  # csa, hca
    indexer: IndexerWeights | None = None  # csa


class V4Selector(Selector):
    """One layer of DeepSeek-V4.

    observe reads kv["win"] [T, 1, head_dim], normalised and rotated, and h (csa, hca). select reads h and q_resid (csa). finish
    rotates the outputs' last channels back by the query's position, which the value rows carry. Compressors, their journals and
    index scores are fp32; the indexer's two linears run in their weights' dtype. Construct it after the weights are loaded.
    """

    def __init__(self, config: V4Config, weights: V4Weights) -> None:
        missing = [
            name
            for name, needed in (("compressor", config.kind != "swa"), ("indexer", config.kind == "csa"))
            if needed and getattr(weights, name) is None
        ]
        if missing:
            raise ValueError(f"a {config.kind} layer needs weights of its {' and '.join(missing)}")
        if weights.sink.shape != (config.heads,):
            raise ValueError(f"sink must be {(config.heads,)}, is {tuple(weights.sink.shape)}")
        self.config = config
        self.spaces = config.spaces()
        self.max_rollback = config.max_rollback
        self._sink = weights.sink.float()
        self._inv_freq = weights.inv_freq
        self._compressors: dict[str, Compressor] = {}
        overlap = config.kind == "csa"
        if weights.compressor is not None and config.kind != "swa":
            self._add_compressor("cmp", weights.compressor, overlap)
        if weights.indexer is not None and overlap:
            self._add_compressor("idx", weights.indexer.compressor, overlap)
            self._query, self._head_weights = weights.indexer.query, weights.indexer.head_weights
        self.tail_rows = {
            name: compressor.tail_rows(config.max_rollback) for name, compressor in self._compressors.items()
        }

    def _add_compressor(self, space: str, weights: CompressorWeights, overlap: bool) -> None:
        compressor = Compressor(weights, self.config.ratio, overlap, self._inv_freq, self.config.eps)
        if compressor.dim != self.spaces[space].width:
            raise ValueError(
                f"entries of {space} have {self.spaces[space].width} channels, not {compressor.dim}"
            )
        self._compressors[space] = compressor

    def _take_in(self, state: SelectorState, x: LayerInputs) -> Taken:
        window = rows_of(x, "win", (1, self.config.head_dim))
        taken = Taken([], {})
        if not x.tokens:
            return taken
        taken.closed.append(Closed("win", x.first, window.to(self.config.entry_dtype)))
        for space, compressor in self._compressors.items():
            rows = compressor.project(hidden_of(x, f"a {self.config.kind} layer needs"))
            first, entries = compressor.close(state.tails.get(space), x.first, rows)
            taken.journal[space] = rows
            if len(entries):
                taken.closed.append(Closed(space, first, entries[:, None].to(self.config.entry_dtype)))
        return taken

    def _journal_from(self, space: str, tokens: int) -> int:
        return self._compressors[space].journal_from(tokens)

    def select(self, state: SelectorState, x: LayerInputs) -> Selection:
        self._check_observed(state, x)
        config, positions = self.config, x.positions(self._sink.device)
        behind = positions + 1
        opening = (behind - config.window).clamp(min=0)
        segments = [Segment("win", 0, behind, span=(opening, behind))]
        if config.kind != "swa":
            closed = behind // config.ratio
            if config.kind == "hca":
                segments.append(Segment("cmp", 0, closed, span=(torch.zeros_like(closed), closed)))
            else:
                segments.append(Segment("cmp", 0, closed, ids=self._top(state, x)))
        return Selection(segments, sink=self._sink, list_owner=config.layer)

    def _top(self, state: SelectorState, x: LayerInputs) -> Tensor:
        """int32 [T, 1, K]."""
        config = self.config
        keys = state.store.rows("idx", 0, (x.first + x.tokens) // config.ratio)[:, 0]
        queries, weights = index_queries(x, self._query, self._head_weights)
        queries = rotate_tail(queries, x.positions(queries.device), self._inv_freq)
        return top_entries(queries, weights, keys, x.first, config.ratio, config.index_topk)[:, None]

    def finish(self, outs: Sequence[Tensor], x: LayerInputs, selection: Selection) -> Tensor:
        (out,) = outs
        return rotate_tail(out, x.positions(out.device), self._inv_freq, back=True)
