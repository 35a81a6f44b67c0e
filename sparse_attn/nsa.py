"""Native Sparse Attention (arXiv 2502.11089): three branches with keys and values of their own, each its own softmax, gated.

cmp  (group 0) entries that an MLP makes of `block` tokens every `stride`
slc  (group 1) the raw tokens of the `selected` best blocks of `selected_block` tokens, one list for each KV head
win  (group 2) the last `window` tokens

A block's importance is read off the softmax of the cmp branch: p_cmp summed over the query heads of a KV head, then over the
entries that lie in the block, each as often as strides of it fall into the block (equation 9 of the paper, there 1-based):

    p_slc[j] = sum over m < selected_block / stride, n < block / stride of p_cmp[selected_block / stride (j + 1) - 1 - m - n]

The paper leaves open the MLP's activation and the gates' depth: here GELU with one hidden layer, and one linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from sparse_attn import journals
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
from sparse_attn.indexer import top_ids

_SCORES = 2**24  # fp32 scores of single heads held at once


@dataclass(frozen=True)
class NsaConfig:
    """Geometry of one layer; the defaults are those of the paper's 27B model."""

    layer: int = 0
    heads: int = 64
    kv_heads: int = 4
    dk: int = 192
    dv: int = 128
    block: int = 32
    stride: int = 16
    selected_block: int = 64
    selected: int = 16  # blocks, forced ones included
    initial: int = 1  # first blocks, always taken
    local: int = 2  # last blocks, always taken, the query's own included
    window: int = 512
    max_rollback: int = 16
    entry_dtype: torch.dtype = torch.float32
    entry_bytes: int | None = None  # as kept, all KV heads; None: kv_heads (dk + dv) of entry_dtype

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        for name in ("block", "selected_block"):
            if getattr(self, name) % self.stride:
                raise ValueError(f"{name} {getattr(self, name)} must be a multiple of stride {self.stride}")
        if self.initial + self.local > self.selected:
            raise ValueError(
                f"initial {self.initial} + local {self.local} exceed the {self.selected} selected"
            )

    @property
    def scale(self) -> float:
        return self.dk**-0.5

    def spaces(self) -> dict[str, Space]:
        row_bytes = self.entry_bytes or self.kv_heads * (self.dk + self.dv) * self.entry_dtype.itemsize

        def space(name: str, stride: int, cover: int, ring: int | None = None, spill: bool = False) -> Space:
            return Space(
                name,
                stride,
                cover,
                cover,
                self.dk,
                self.dv,
                False,
                row_bytes,
                self.kv_heads,
                ring,
                self.layer,
                spill,
            )

        return {
            "cmp": space("cmp", self.stride, self.block),
            "slc": space("slc", 1, 1, spill=True),
            "win": space("win", 1, 1, ring=self.window + self.max_rollback),
        }


@dataclass(frozen=True)
class MlpWeights:
    """Of `block` rows of d channels, one: flatten(rows + position), up, GELU, down. Shared by the KV heads."""

    position: Tensor  # [block, d]
    up: Tensor  # [inner, block * d]
    up_bias: Tensor  # [inner]
    down: Tensor  # [d, inner]
    down_bias: Tensor  # [d]

    def apply(self, rows: Tensor) -> Tensor:
        """[entries, kv_heads, block, d] to [entries, kv_heads, d], fp32."""
        flat = (rows.float() + self.position.float()).flatten(-2)
        inner = F.gelu(F.linear(flat, self.up.float(), self.up_bias.float()))
        return F.linear(inner, self.down.float(), self.down_bias.float())


@dataclass(frozen=True)
class NsaWeights:
    key: MlpWeights  # d = dk
    value: MlpWeights  # d = dv
    gate: Tensor  # [heads * 3, hidden], branches of a head adjacent
    gate_bias: Tensor  # [heads * 3]


class NsaSelector(Selector):
    """One layer of NSA.

    observe reads kv of "cmp", "slc" and "win", raw rows [T, kv_heads, dk + dv] of each branch. select reads q and h. finish is
    the sum of the branches' outputs times their gates. The compressing MLPs and the importance are fp32.
    """

    def __init__(self, config: NsaConfig, weights: NsaWeights) -> None:
        self.config = config
        self.spaces = config.spaces()
        self.max_rollback = config.max_rollback
        self.tail_rows = {"cmp": config.max_rollback + config.block}
        self._weights = weights
        # How often an entry counts for a block, by its distance from the block's last one.
        parts, strides = config.selected_block // config.stride, config.block // config.stride
        counts = [
            sum(1 for m in range(parts) for n in range(strides) if m + n == distance)
            for distance in range(parts + strides - 1)
        ]
        self._counts = torch.tensor(counts[::-1], dtype=torch.float32, device=weights.gate.device)

    def _take_in(self, state: SelectorState, x: LayerInputs) -> Taken:
        config = self.config
        rows = {name: rows_of(x, name, (config.kv_heads, config.dk + config.dv)) for name in self.spaces}
        taken = Taken([], {})
        if not x.tokens:
            return taken
        for name in ("slc", "win"):
            taken.closed.append(Closed(name, x.first, rows[name].to(config.entry_dtype)))
        taken.journal["cmp"] = rows["cmp"].float().flatten(1)
        first, entries = self._compress(state.tails.get("cmp"), x.first, taken.journal["cmp"])
        if len(entries):
            taken.closed.append(Closed("cmp", first, entries.to(config.entry_dtype)))
        return taken

    def _compress(self, tail: Tensor | None, first: int, rows: Tensor) -> tuple[int, Tensor]:
        """Entries that rows [T, kv_heads * (dk + dv)] complete: the first one's id, and fp32 [entries, kv_heads, dk + dv]."""
        config, space = self.config, self.spaces["cmp"]
        known, count = space.count(first), space.count(first + len(rows))
        if known == count:
            return known, rows.new_empty(0, config.kv_heads, space.width)
        start = known * config.stride
        if start < first:
            if tail is None:
                raise RuntimeError(f"token {first} has no journal of the tokens before it")
            rows = torch.cat((journals.read(tail, start, first), rows))
        blocks = rows[max(0, start - first) :].unfold(0, config.block, config.stride)
        blocks = rearrange(blocks, "n (g d) l -> n g l d", g=config.kv_heads)
        keys, values = blocks[..., : config.dk], blocks[..., config.dk :]
        return known, torch.cat((self._weights.key.apply(keys), self._weights.value.apply(values)), -1)

    def _journal_from(self, space: str, tokens: int) -> int:
        return min(tokens, self.spaces[space].count(tokens) * self.config.stride)

    def select(self, state: SelectorState, x: LayerInputs) -> Selection:
        self._check_observed(state, x)
        config, weights = self.config, self._weights
        q = rows_of(x, "q", (config.heads, config.dk))
        h = hidden_of(x, "the gates need")
        behind = x.positions(q.device) + 1
        closed = ((behind - config.block).div(config.stride, rounding_mode="floor") + 1).clamp(min=0)
        segments = [
            Segment("cmp", 0, closed, span=(torch.zeros_like(closed), closed)),
            Segment("slc", 1, behind, ids=self._blocks(state, x, q, closed), unit=config.selected_block),
            Segment("win", 2, behind, span=((behind - config.window).clamp(min=0), behind)),
        ]
        gates = torch.sigmoid(F.linear(h.float(), weights.gate.float(), weights.gate_bias.float()))
        gates = rearrange(gates, "t (h branches) -> t h branches", branches=3)
        return Selection(segments, gates=gates, list_owner=config.layer)

    def _blocks(self, state: SelectorState, x: LayerInputs, q: Tensor, closed: Tensor) -> Tensor:
        """int32 [T, kv_heads, K] blocks to select; closed [T]: entries of cmp that each query sees."""
        config = self.config
        count = self.spaces["cmp"].count(x.first + x.tokens)
        keys = rearrange(state.store.rows("cmp", 0, count)[..., : config.dk].float(), "n g d -> g d n")
        own = x.positions(q.device) // config.selected_block
        blocks = (x.first + x.tokens - 1) // config.selected_block + 1
        ids = []
        step = max(1, _SCORES // (config.heads * max(count, 1)))
        for start in range(0, x.tokens, step):
            part = slice(start, start + step)
            queries = rearrange(q[part].float(), "t (g h) d -> g t h d", g=config.kv_heads)
            importance = self._importance(queries, keys, closed[part], blocks)
            ids.append(self._best(importance, own[part]))
        return torch.cat(ids) if ids else torch.empty(0, config.kv_heads, 0, dtype=torch.int32)

    def _importance(self, queries: Tensor, keys: Tensor, closed: Tensor, blocks: int) -> Tensor:
        """p_slc [t, kv_heads, blocks] of queries [kv_heads, t, heads of one, dk] and keys [kv_heads, dk, entries]."""
        config = self.config
        tokens, count = queries.shape[1], keys.shape[2]
        if not count:
            return queries.new_zeros(tokens, config.kv_heads, blocks)
        scores = rearrange(queries, "g t h d -> g (t h) d") @ keys * config.scale
        scores = rearrange(scores, "g (t h) n -> t g h n", t=tokens)
        hidden = torch.arange(count, device=scores.device) >= closed[:, None]
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        shares = torch.softmax(scores, -1).masked_fill((closed == 0)[:, None, None, None], 0.0)
        shares = reduce(shares, "t g h n -> t g n", "sum")
        parts = config.selected_block // config.stride
        before = len(self._counts) - parts  # entries that begin before the block but reach into it
        after = max(0, blocks * parts - count)
        padded = F.pad(shares, (before, after))[..., : before + blocks * parts]
        sums = F.conv1d(padded.flatten(0, 1)[:, None], self._counts[None, None], stride=parts)
        return sums.view(tokens, config.kv_heads, blocks)

    def _best(self, importance: Tensor, own: Tensor) -> Tensor:
        """int32 [t, kv_heads, K] of importance [t, kv_heads, blocks] and each query's own block [t]."""
        config = self.config
        tokens, kv_heads, blocks = importance.shape
        block, own = torch.arange(blocks, device=own.device), own[:, None]
        forced = (block < config.initial) | (block > own - config.local)
        scores = importance.masked_fill(forced[:, None], torch.inf).flatten(0, 1)
        limits = (own + 1).repeat_interleave(kv_heads, 0)
        return top_ids(scores, limits, config.selected).view(tokens, kv_heads, -1)

    def finish(self, outs: Sequence[Tensor], x: LayerInputs, selection: Selection) -> Tensor:
        assert selection.gates is not None
        out = sum(part * selection.gates[..., group, None] for group, part in enumerate(outs))
        assert isinstance(out, Tensor)
        return out
