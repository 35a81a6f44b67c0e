"""DeepSeek Sparse Attention (V3.2): absorbed MLA over the top-k tokens of a lightning indexer; one softmax, no sink, no window.

Spaces: "lat", a latent row of every token, the normalised latent c and behind it the shared rotary key, the value being c;
"idx", the indexer's keys. A layer may own no indexer and take another layer's lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
from sparse_attn.indexer import index_queries, top_entries
from sparse_attn.rope import rotate_head_halves


@dataclass(frozen=True)
class DsaConfig:
    """Geometry of one layer; the defaults are V3.2's."""

    layer: int = 0
    list_owner: int | None = None  # layer whose lists this one attends; None: its own
    heads: int = 128
    kv_lora_rank: int = 512
    rope_dim: int = 64
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 2048
    index_norm_eps: float = 1e-6
    entry_dtype: torch.dtype = torch.float32
    entry_bytes: int | None = None  # as kept; None: a row of entry_dtype. 656 in the released fp8 format
    index_bytes: int | None = None  # likewise of an index key, 132

    @property
    def owner(self) -> int:
        return self.layer if self.list_owner is None else self.list_owner

    def spaces(self) -> dict[str, Space]:
        size, width = self.entry_dtype.itemsize, self.kv_lora_rank + self.rope_dim
        row_bytes = self.entry_bytes or width * size
        token = (1, 1, 1)
        spaces = [
            Space("lat", *token, width, self.kv_lora_rank, True, row_bytes, kv_owner=self.layer, spill=True)
        ]
        if self.owner == self.layer:
            key_bytes = self.index_bytes or self.index_dim * size
            spaces.append(Space("idx", *token, self.index_dim, 0, True, key_bytes, kv_owner=self.layer))
        return {space.name: space for space in spaces}


@dataclass(frozen=True)
class DsaIndexerWeights:
    key: Tensor  # [index_dim, hidden]
    key_norm: Tensor  # [index_dim], of a LayerNorm
    key_norm_bias: Tensor  # [index_dim]
    query: Tensor  # [index_heads * index_dim, q_lora_rank]
    head_weights: Tensor  # [index_heads, hidden]


@dataclass(frozen=True)
class DsaWeights:
    inv_freq: Tensor  # fp32 [rope_dim / 2]
    value_up: Tensor  # [heads, v_head_dim, kv_lora_rank], W_uv: a head's value from the latent
    indexer: DsaIndexerWeights | None = None  # of a layer that owns its lists


class DsaSelector(Selector):
    """One layer of DeepSeek-V3.2.

    observe reads kv["lat"] [T, 1, kv_lora_rank + rope_dim], and h where the layer owns its lists; select then reads h and
    q_resid, and otherwise lists. finish is W_uv. Index queries and keys are rotated in halves of their first channels, which
    the latent rows are not. Nothing sums up several tokens, so rollback reaches as far as there are tokens.
    """

    def __init__(self, config: DsaConfig, weights: DsaWeights) -> None:
        owns = config.owner == config.layer
        if owns != (weights.indexer is not None):
            fault = "missing" if owns else "given"
            raise ValueError(
                f"layer {config.layer} attends lists of layer {config.owner}: indexer weights {fault}"
            )
        self.config = config
        self.spaces = config.spaces()
        self.tail_rows = {}
        self.max_rollback = 2**62
        self._weights = weights

    def _take_in(self, state: SelectorState, x: LayerInputs) -> Taken:
        config, indexer = self.config, self._weights.indexer
        latents = rows_of(x, "lat", (1, config.kv_lora_rank + config.rope_dim))
        taken = Taken([], {})
        if not x.tokens:
            return taken
        taken.closed.append(Closed("lat", x.first, latents.to(config.entry_dtype)))
        if indexer is not None:
            h = hidden_of(x, "a layer with an indexer needs")
            keys = F.linear(h.to(indexer.key.dtype), indexer.key).float()
            norm, bias = indexer.key_norm.float(), indexer.key_norm_bias.float()
            keys = F.layer_norm(keys, norm.shape, norm, bias, config.index_norm_eps)
            keys = rotate_head_halves(keys, x.positions(keys.device), self._weights.inv_freq)
            taken.closed.append(Closed("idx", x.first, keys[:, None].to(config.entry_dtype)))
        return taken

    def _journal_from(self, space: str, tokens: int) -> int:
        raise KeyError(f"{space} has no journal")

    def select(self, state: SelectorState, x: LayerInputs) -> Selection:
        self._check_observed(state, x)
        ids = self._given(x) if self._weights.indexer is None else self._top(state, x, self._weights.indexer)
        # Lists of another layer may name tokens behind the query: the limit drops them.
        limit = x.positions(ids.device) + 1
        return Selection([Segment("lat", 0, limit, ids=ids)], list_owner=self.config.owner)

    def _given(self, x: LayerInputs) -> Tensor:
        if x.lists is None or x.lists.dim() != 3 or x.lists.shape[:2] != (x.tokens, 1):
            found = "missing" if x.lists is None else str(tuple(x.lists.shape))
            raise ValueError(f"lists of layer {self.config.owner} must be {(x.tokens, 1, 'K')}, are {found}")
        return x.lists

    def _top(self, state: SelectorState, x: LayerInputs, indexer: DsaIndexerWeights) -> Tensor:
        """int32 [T, 1, K]."""
        config = self.config
        keys = state.store.rows("idx", 0, x.first + x.tokens)[:, 0]
        queries, weights = index_queries(x, indexer.query, indexer.head_weights)
        queries = rotate_head_halves(queries, x.positions(queries.device), self._weights.inv_freq)
        return top_entries(queries, weights, keys, x.first, 1, config.index_topk)[:, None]

    def finish(self, outs: Sequence[Tensor], x: LayerInputs, selection: Selection) -> Tensor:
        (out,) = outs
        value_up = self._weights.value_up
        return torch.einsum("thc,hdc->thd", out.to(value_up.dtype), value_up).float()
