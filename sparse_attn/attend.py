"""Attention over listed entries in torch, and merging of partial results. LSE is base 2, as everywhere in this project.

A partial state is (out, lse): out [T, H, dv] fp32, normalised over the entries of its own list; lse [T, H] fp32, log2 of the
sum of exp2(scale log2(e) q . k). An empty list gives zeros and -inf, the neutral element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from sparse_attn.base import Segment, Selection, Space

State = tuple[Tensor, Tensor]

LOG2E = 1.4426950408889634
_GATHERED = 2**24  # elements of listed rows held at once


class EntrySource(Protocol):
    """Entries that can be attended where they lie; stores.GrowingStore is one."""

    def slots(self, space: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, kv_heads, width] and, of ids' shape, which of them each id is; -1 stays -1."""


def empty_state(tokens: int, heads: int, dv: int, device: torch.device | str = "cpu") -> State:
    return (
        torch.zeros(tokens, heads, dv, device=device),
        torch.full((tokens, heads), -torch.inf, device=device),
    )


def weigh(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax of scores fp32 [..., n], base 2, -inf for what is hidden: weights, what their sums are divided by, and the lse.

    Weights [..., n] are relative to the largest score, the divisor is [..., 1] and the lse [...]. Where all is hidden they are
    0, 1 and -inf.
    """
    top = scores.amax(-1, keepdim=True)
    # -inf minus -inf is NaN: where all is hidden any finite anchor gives weights 0.
    anchor = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp2(scores - anchor)
    total = weights.sum(-1, keepdim=True)
    return weights, torch.where(total > 0, total, 1.0), (torch.log2(total) + anchor).squeeze(-1)


def expand(segment: Segment) -> Tensor:
    """Entry ids that a segment names, int64 [T, G, K]: visible ones only, -1 in the place of others."""
    limit = segment.limit[:, None, None]
    if segment.span is not None:
        first, last = (bound[:, None, None] for bound in segment.span)
        longest = int((last - first).amax()) if len(first) else 0
        ids = first + torch.arange(max(longest, 0), device=first.device)
        return torch.where((ids < last) & (ids < limit), ids, -1)
    assert segment.ids is not None
    ids = segment.ids.long()
    if segment.unit > 1:
        entries = ids[..., None] * segment.unit + torch.arange(segment.unit, device=ids.device)
        ids = torch.where(ids[..., None] < 0, -1, entries).flatten(-2)
    return torch.where((ids >= 0) & (ids < limit), ids, -1)


def pack(ids: Tensor) -> Tensor:
    """Move what is listed in ids [T, G, K] to the front, in its order, and cut off the columns that are -1 for all."""
    listed = ids >= 0
    place = listed.cumsum(-1)
    columns = int(place[..., -1].amax()) if ids.numel() else 0
    packed = ids.new_full((*ids.shape[:2], columns), -1)
    token, head, column = listed.nonzero(as_tuple=True)
    packed[token, head, place[token, head, column] - 1] = ids[token, head, column]
    return packed


def attend_rows(q: Tensor, space: Space, rows: Tensor, slots: Tensor, scale: float) -> State:
    """Attend each query to the rows it lists.

    q [T, H, dk] any float dtype; rows [n, kv_heads, width]; slots [T, G, K] rows of a query, G 1 or kv_heads, -1 for none;
    query head h reads KV head h // (H / kv_heads). Computed in fp32.
    """
    tokens, heads, _ = q.shape
    slots = pack(slots)
    if not slots.numel():
        return empty_state(tokens, heads, space.dv, q.device)
    # Padding must not read what nobody wrote: a weight of 0 does not cure NaN.
    readable = slots.amax()
    out, lse = [], []
    step = max(1, _GATHERED // (space.kv_heads * slots.shape[2] * space.width))
    for start in range(0, tokens, step):
        part = slots[start : start + step].expand(-1, space.kv_heads, -1)
        heads_of = torch.arange(space.kv_heads, device=part.device)[None, :, None]
        picked = rows[torch.where(part >= 0, part, readable), heads_of].float()  # [t, kv_heads, K, width]
        keys = picked[..., : space.dk]
        values = picked[..., : space.dv] if space.v_in_k else picked[..., space.dk :]
        queries = rearrange(q[start : start + step].float(), "t (g h) d -> t g h d", g=space.kv_heads)
        scores = (queries * (scale * LOG2E)) @ keys.mT
        scores.masked_fill_((part < 0)[:, :, None], -torch.inf)
        weights, divisor, part_lse = weigh(scores)
        out.append(((weights @ values) / divisor).flatten(1, 2))
        lse.append(part_lse.flatten(1))
    return torch.cat(out), torch.cat(lse)


def merge(states: Sequence[State], sink: Tensor | None = None) -> State:
    """Merge states over disjoint lists of one softmax group, and the sink [H], natural logits, which enters here and once.

    Independent of order and grouping up to rounding; empty states are neutral. The lse that is returned includes the sink.
    """
    lse = torch.stack([state[1] for state in states])
    top = lse.amax(0)
    if sink is not None:
        level = sink.float() * LOG2E
        top = torch.maximum(top, level)
    anchor = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp2(lse - anchor)
    total = weights.sum(0)
    if sink is not None:
        total = total + torch.exp2(level - anchor)
    shares = weights / torch.where(total > 0, total, 1.0)
    out = sum(state[0] * share[..., None] for state, share in zip(states, shares))
    assert isinstance(out, Tensor)
    return out, torch.log2(total) + anchor


def attend_selection(
    q: Tensor, selection: Selection, spaces: Mapping[str, Space], source: EntrySource, scale: float
) -> list[Tensor]:
    """Attend a whole selection on one side: outs [T, H, dv] fp32 by group, for Selector.finish. q [T, H, dk]."""
    states: list[list[State]] = [[] for _ in range(selection.groups)]
    for segment in selection.segments:
        space = spaces[segment.space]
        rows, slots = source.slots(segment.space, expand(segment))
        states[segment.group].append(attend_rows(q, space, rows, slots, scale))
    return [merge(part, selection.sink if group == 0 else None)[0] for group, part in enumerate(states)]
