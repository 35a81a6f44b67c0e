"""What a query attends, said in one form for every sparse attention: spaces of entries, segments of them, a selection.

A layer keeps one or more arrays of KV entries, its spaces. An entry covers one token or a block of them and exists from the
token on that completes its block. For each query a selector names the entries to attend: dense spans or lists of ids, each in
one space, each in one softmax group. It does not attend: that is compose.py, which may split any list between two sides.

Order of calls for each layer and sequence: `observe` the new tokens, then `select` for those queries, so that the query that
completes a block sees that block's entry. Tokens may be cut into calls anywhere; nothing depends on the cuts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sparse_attn import journals
from sparse_attn.stores import GrowingStore


@dataclass(frozen=True)
class Space:
    """One array of entries in one layer; entry i is row i.

    Rows are [kv_heads, width]: the key, and behind it the value unless the value is the key's beginning (v_in_k). A space with
    dv == 0 is not attended; its selector reads it.
    """

    name: str
    stride: int  # tokens from one entry to the next
    cover: int  # source tokens that an entry sums up, the first ones excepted where blocks overlap
    opens: int  # tokens after which the first entry exists
    dk: int
    dv: int
    v_in_k: bool
    entry_bytes: int  # of one entry as it is kept, all kv_heads together
    kv_heads: int = 1
    ring: int | None = None  # entries that must stay readable behind those of the latest observe; None: all
    kv_owner: int = 0  # layer that stores it, the layer itself unless layers share
    spill: bool = False  # may leave the device: large, and read in small part

    @property
    def width(self) -> int:
        return self.dk if self.v_in_k else self.dk + self.dv

    def count(self, tokens: int) -> int:
        """Entries that exist once `tokens` tokens were observed."""
        return max(0, (tokens - self.opens) // self.stride + 1)


@dataclass(frozen=True)
class Segment:
    """The entries of one space that each of T queries attends: a dense span, or ids.

    ids are int32 [T, G, K], G one or the space's kv_heads, in no order, unique but for padding with -1. Each id stands for
    `unit` adjacent entries: id * unit and on. Entries at or past `limit` are invisible however they are named.
    """

    space: str
    group: int  # segments of one number share one softmax
    limit: Tensor  # int64 [T]: first invisible entry
    ids: Tensor | None = None
    span: tuple[Tensor, Tensor] | None = None  # int64 [T] each: first entry, and the one behind the last
    unit: int = 1

    def __post_init__(self) -> None:
        if (self.ids is None) == (self.span is None):
            raise ValueError(f"a segment of {self.space} has either ids or a span")


@dataclass(frozen=True)
class Selection:
    """What T queries attend. Groups are numbered from 0; each is a softmax of its own."""

    segments: Sequence[Segment]
    sink: Tensor | None = None  # fp32 [H]: natural logits that join group 0's softmax once, with no value
    gates: Tensor | None = (
        None  # fp32 [T, H, groups]: factors of the groups' outputs; None: there is one group
    )
    list_owner: int = 0  # layer that computed the ids

    @property
    def groups(self) -> int:
        return 1 + max(segment.group for segment in self.segments)


@dataclass(frozen=True)
class LayerInputs:
    """T adjacent tokens of one sequence at the input of one layer's attention; each selector says which fields it reads."""

    first: int  # position of row 0; row i is token first + i
    h: Tensor | None = None  # [T, hidden], after the input norm
    q_resid: Tensor | None = None  # [T, q_lora_rank], the normalised query latent
    q: Tensor | None = None  # [T, H, dk], as attended: rotated, absorbed
    kv: Mapping[str, Tensor] = field(default_factory=dict)  # space -> raw rows [T, kv_heads, width], rotated
    lists: Tensor | None = None  # int32 [T, G, K], of the layer that owns this layer's lists

    @property
    def tokens(self) -> int:
        for rows in (self.h, self.q_resid, self.q, self.lists, *self.kv.values()):
            if rows is not None:
                return rows.shape[0]
        return 0

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """int64 [T]."""
        return torch.arange(self.first, self.first + self.tokens, device=device)


@dataclass(frozen=True)
class Closed:
    """Entries first .. first + len(values) that came to be; values [entries, kv_heads, width] of the selector's entry dtype."""

    space: str
    first: int
    values: Tensor


class EntryStore(Protocol):
    """One sequence's entries in one layer, by space. A server gives its own over memory that it owns; stores.GrowingStore else.

    A selector appends to every space and reads only those with dv == 0 (and NSA's "cmp"), so a store may keep the others
    wherever and in whatever format it likes.
    """

    def append(self, space: str, first: int, values: Tensor) -> None:
        """Keep values [n, kv_heads, width] as entries first .. first + n. `first` is the number of entries kept so far."""

    def rows(self, space: str, first: int, last: int) -> Tensor:
        """Return entries first .. last, [last - first, kv_heads, width]; the caller only reads them."""

    def truncate(self, space: str, count: int) -> None:
        """Forget entries count and on."""


@dataclass
class SelectorState:
    """One sequence in one layer: what observe and rollback change. Made by Selector.new_state.

    tails hold, by space, the last compressor inputs as rings: the row of token t in slot t % len. They are the journal that
    rollback needs: going back moves `tokens` and overwrites nothing.
    """

    store: EntryStore
    tokens: int = 0  # observed so far
    floor: int = 0  # rollback reaches no further down
    tails: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """What tokens amount to before anything changed: entries to store, and rows [T, width] fp32 for the journals, by space."""

    closed: list[Closed]
    journal: dict[str, Tensor]


class Selector(ABC):
    """Which entries of one layer a query attends. Holds weights and geometry and no sequence; safe to share among sequences."""

    spaces: Mapping[str, Space]
    tail_rows: Mapping[str, int]  # compressor inputs to keep, by space
    max_rollback: int  # tokens that rollback can take back in any state

    def new_state(self, store: EntryStore | None = None) -> SelectorState:
        """State of a sequence of no tokens, over `store` or a GrowingStore of its own."""
        return SelectorState(GrowingStore(self.spaces) if store is None else store)

    def observe(self, state: SelectorState, x: LayerInputs) -> list[Closed]:
        """Take in the next tokens, put what they completed into the store, and return it, at least one entry to an item.

        Raises ValueError, before anything changed, unless x starts at state.tokens and fits the geometry.
        """
        return self._observe(state, x, ())[0]

    def observe_marked(
        self, state: SelectorState, x: LayerInputs, marks: Sequence[int]
    ) -> list[dict[str, Tensor]]:
        """As `observe`, and return what `snapshot` would have returned after each of `marks` tokens, which end in x.

        ValueError, before anything changed, for a mark elsewhere.
        """
        if any(not x.first < mark <= x.first + x.tokens for mark in marks):
            raise ValueError(f"marks {list(marks)} do not end in tokens {x.first} .. {x.first + x.tokens}")
        return self._observe(state, x, marks)[1]

    def _observe(
        self, state: SelectorState, x: LayerInputs, marks: Sequence[int]
    ) -> tuple[list[Closed], list[dict[str, Tensor]]]:
        if x.first != state.tokens:
            raise ValueError(f"the next token is {state.tokens}, tokens from {x.first} were given")
        taken = self._take_in(state, x)
        snapshots = [self._marked(state, x.first, taken.journal, mark) for mark in marks]
        for closed in taken.closed:
            state.store.append(closed.space, closed.first, closed.values)
        for space, rows in taken.journal.items():
            if space not in state.tails:
                state.tails[space] = rows.new_empty(self.tail_rows[space], rows.shape[1])
            journals.write(state.tails[space], x.first, rows)
        state.tokens += x.tokens
        state.floor = max(state.floor, state.tokens - self.max_rollback)
        return taken.closed, snapshots

    def _marked(
        self, state: SelectorState, first: int, journal: Mapping[str, Tensor], mark: int
    ) -> dict[str, Tensor]:
        """The snapshot after `mark` tokens: rows of the journals as they are, and of `journal`, which begins at `first`."""
        snapshot = {}
        for space, rows in journal.items():
            start = self._journal_from(space, mark)
            own = rows[max(0, start - first) : mark - first]
            if start < first:
                own = torch.cat((journals.read(state.tails[space], start, first), own))
            snapshot[space] = own.clone()
        return snapshot

    @abstractmethod
    def _take_in(self, state: SelectorState, x: LayerInputs) -> Taken:
        """Check x and compute what observe stores; change nothing."""

    @abstractmethod
    def select(self, state: SelectorState, x: LayerInputs) -> Selection:
        """Name what the queries of x attend; changes nothing.

        Of equal scores the lowest id is taken first, so equal inputs give equal sets. Raises ValueError where x has tokens that
        were not observed.
        """

    def rollback(self, state: SelectorState, tokens: int) -> dict[str, int]:
        """Take back the last `tokens` tokens. What follows is as if they had never been observed.

        Returns, by space, how many entries remain: every copy of a later entry elsewhere is stale and must be dropped, since
        its id will come again with another value. Raises ValueError beyond max_rollback tokens below the most ever observed.
        """
        left = state.tokens - tokens
        if tokens < 0 or left < state.floor:
            raise ValueError(
                f"{tokens} of {state.tokens} tokens cannot be taken back: journals reach down to token {state.floor}"
            )
        counts = {name: space.count(left) for name, space in self.spaces.items()}
        for name, count in counts.items():
            state.store.truncate(name, count)
        state.tokens = left
        return counts

    @abstractmethod
    def finish(self, outs: Sequence[Tensor], x: LayerInputs, selection: Selection) -> Tensor:
        """What follows the merge: outs, fp32 [T, H, dv] by group, become the heads' outputs [T, H, head_dim] fp32."""

    def snapshot(self, state: SelectorState) -> dict[str, Tensor]:
        """What it takes, beside the entries of all spaces, to go on from state.tokens: fp32 [rows, width] by space, copies.

        Small where blocks end together: after a multiple of 128 tokens V4 needs 4 rows of csa's two compressors, none of hca.
        """
        return {
            space: journals.read(tail, self._journal_from(space, state.tokens), state.tokens)
            for space, tail in state.tails.items()
        }

    def resume(self, tokens: int, rows: Mapping[str, Tensor], store: EntryStore) -> SelectorState:
        """State of a sequence of `tokens` tokens from its snapshot, over a store that holds their entries.

        It cannot be rolled back below `tokens`. Raises ValueError where rows are missing.
        """
        state = SelectorState(store)
        self.restore(state, tokens, rows)
        return state

    def restore(self, state: SelectorState, tokens: int, rows: Mapping[str, Tensor]) -> None:
        """As `resume`, of a state that exists, in its own journals; a space whose snapshot is empty need not be given.

        Raises ValueError, before anything changed, where rows are missing.
        """
        starts = {space: self._journal_from(space, tokens) for space in self.tail_rows}
        for space, first in starts.items():
            if (found := len(rows.get(space, ()))) != tokens - first:
                raise ValueError(
                    f"{tokens} tokens leave {tokens - first} rows of {space}, {found} were given"
                )
        for space, first in starts.items():
            if space in rows:
                if space not in state.tails:
                    length = self.tail_rows[space]
                    state.tails[space] = rows[space].new_empty(length, rows[space].shape[1])
                journals.write(state.tails[space], first, rows[space])
        state.tokens = state.floor = tokens

    @abstractmethod
    def _journal_from(self, space: str, tokens: int) -> int:
        """First token whose compressor input a later entry of `space` still reads, once `tokens` tokens were observed."""

    def _check_observed(self, state: SelectorState, x: LayerInputs) -> None:
        if x.first < 0 or x.first + x.tokens > state.tokens:
            raise ValueError(
                f"tokens {x.first} .. {x.first + x.tokens} to select for, but {state.tokens} observed"
            )


def hidden_of(x: LayerInputs, who: str) -> Tensor:
    """x.h; ValueError, saying who needs it (such as "the gates need"), unless it has x's tokens."""
    if x.h is None or len(x.h) != x.tokens:
        raise ValueError(f"{who} h of {x.tokens} tokens")
    return x.h


def rows_of(x: LayerInputs, name: str, shape: tuple[int, ...]) -> Tensor:
    """x.kv[name] or the field of that name; ValueError unless it is there and [T, *shape]."""
    rows = x.kv.get(name, getattr(x, name, None))
    if rows is None or tuple(rows.shape) != (x.tokens, *shape):
        found = "missing" if rows is None else str(tuple(rows.shape))
        raise ValueError(f"{name} must be {(x.tokens, *shape)}, is {found}")
    return rows
