"""What DeepSeek-V4 keeps of a running request beside its pages, by SGLang's request row: windows and compressor journals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from sglang_inplacekv.models.deepseek_v4.geometry import CSA_RATIO, HCA_RATIO
from sglang_inplacekv.step_plan import Span
from sglang_inplacekv.v4.layout import ENTRIES, KEYS, WINDOW, V4Layout
from sglang_inplacekv.v4.paged import PagedEntries
from sglang_inplacekv.v4.records import TailRecords
from sparse_attn import Selector, SelectorState


@dataclass
class Request:
    """One request's part of a forward; `span` counts tokens."""

    row: int
    span: Span
    rows: slice  # of the forward's tokens
    pages: torch.Tensor  # span.pages on the device, int64
    generation: int  # of the row, which is handed on from request to request
    fresh: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # layer -> CSA entries of this forward [n, d]
    # tokens after which this forward completes a page -> slot of its tail record
    marks: dict[int, int] = field(default_factory=dict)

    def completed(self, page_tokens: int) -> dict[int, int]:
        """Pages that this forward completes: tokens after which -> page."""
        first, last = self.span.prefix // page_tokens, self.span.length // page_tokens
        return {(i + 1) * page_tokens: int(self.span.pages[i]) for i in range(first, last)}

    @property
    def first_entry(self) -> int:
        """Of CSA, the first that this forward makes."""
        return self.span.prefix // CSA_RATIO


class LayerStore:
    """sparse_attn's EntryStore of one row and layer, over this server's memory.

    `window` is what the layer's queries see of raw tokens, valid until the layer's next append: the row's ring as it was, in
    order, and the new tokens behind it.
    """

    def __init__(self, states: RequestStates, row: int, layer: int) -> None:
        self._states, self._row, self._layer = states, row, layer
        self.window: torch.Tensor | None = None  # [n, d]
        self.window_first = 0  # position of its first row

    def append(self, space: str, first: int, values: torch.Tensor) -> None:
        values, request = values[:, 0], self._states.current(self._row)
        if space == WINDOW:
            self._append_window(first, values)
        elif space == ENTRIES and self._layer in self._states.spilled:
            request.fresh[self._layer] = values
        else:
            self._states.paged(space).write(self._layer, request.pages, first, values)

    def _append_window(self, first: int, values: torch.Tensor) -> None:
        ring = self._states.windows[self._layer, self._row]
        size, last = len(ring), first + len(values)
        self.window_first = max(0, first - size + 1)
        before = torch.arange(self.window_first, first, device=ring.device) % size
        self.window = torch.cat((ring[before], values))
        kept = torch.arange(max(first, last - size), last, device=ring.device)
        ring[kept % size] = values[kept - first]

    def rows(self, space: str, first: int, last: int) -> torch.Tensor:
        if space != KEYS or first:
            raise RuntimeError(f"entries {first} .. {last} of {space} are not read through the store")
        request = self._states.current(self._row)
        return self._states.keys.read(self._layer, request.pages, last).unsqueeze(1)

    def window_at(self, tokens: int) -> torch.Tensor:
        """The window after `tokens` tokens of this append, [window, d]: what a ring of that moment holds, in order."""
        assert self.window is not None
        last = tokens - self.window_first
        return self.window[last - self._states.layout.geometry.sliding_window : last]

    def truncate(self, space: str, count: int) -> None:
        raise RuntimeError(f"{space} cannot be cut to {count} entries: nothing is rolled back")


class RequestStates:
    """States of every row and layer, made once, and the paged entries that never leave the device.

    Memory is there from the start; `adopt` the selectors before the first forward.
    """

    def __init__(
        self, layout: V4Layout, rows: int, pages: int, device: str, records: TailRecords, *, poison: bool
    ) -> None:
        geometry, dtype = layout.geometry, layout.dtype
        self.layout, self._row_count, self._poison = layout, rows, poison
        self.records = records
        self._generations = [-1] * rows  # of the request that a row's state is of
        self.spilled = frozenset(layout.csa_layers)
        shape = (geometry.layers, rows, geometry.sliding_window, geometry.head_dim)
        self.windows = torch.zeros(shape, dtype=dtype, device=device)
        key_width = geometry.index_head_dim
        self.keys = PagedEntries(layout.csa_layers, pages, layout.page_rows, key_width, dtype, device)
        blocks = layout.page_tokens // HCA_RATIO
        self.heavy = PagedEntries(layout.hca_layers, pages, blocks, geometry.head_dim, dtype, device)
        self._tails = [
            {
                space: torch.zeros(rows, *shape, device=device)
                for space, shape in layout.journals(ratio).items()
            }
            for ratio in geometry.ratios
        ]
        self._states: list[list[SelectorState]] = []
        self._current: dict[int, Request] = {}

    def adopt(self, selectors: Sequence[Selector]) -> None:
        """One selector a layer."""
        for layer, selector in enumerate(selectors):
            kept = {space: tails.shape[1] for space, tails in self._tails[layer].items()}
            if kept != dict(selector.tail_rows):
                raise RuntimeError(
                    f"layer {layer}: journals of {kept} rows, its selector keeps {selector.tail_rows}"
                )
        self._selectors = list(selectors)
        self._states = [
            [self._new_state(selector, row, layer) for layer, selector in enumerate(selectors)]
            for row in range(self._row_count)
        ]

    def _new_state(self, selector: Selector, row: int, layer: int) -> SelectorState:
        state = selector.new_state(LayerStore(self, row, layer))
        state.tails.update({space: tails[row] for space, tails in self._tails[layer].items()})
        return state

    @property
    def nbytes(self) -> int:
        tails = sum(tails.nbytes for own in self._tails for tails in own.values())
        return self.windows.nbytes + tails + self.keys.nbytes + self.heavy.nbytes

    def paged(self, space: str) -> PagedEntries:
        return self.keys if space == KEYS else self.heavy

    def current(self, row: int) -> Request:
        return self._current[row]

    def state(self, row: int, layer: int) -> SelectorState:
        return self._states[row][layer]

    def begin_forward(self, requests: list[Request]) -> None:
        """Rows whose request begins are emptied and, behind a cached prefix, filled from the record of its last page.

        RuntimeError if a request goes on from anywhere but where its row has stopped, or its prefix has no record.
        """
        self._current = {request.row: request for request in requests}
        for request in requests:
            if request.span.prefix == 0 or self._generations[request.row] != request.generation:
                self._begin(request)
            for layer, state in enumerate(self._states[request.row]):
                if state.tokens != request.span.prefix:
                    raise RuntimeError(
                        f"request {request.span.label} goes on at token {request.span.prefix}, layer {layer} of row "
                        f"{request.row} has seen {state.tokens}"
                    )
        self._mark_completed(requests)

    def _begin(self, request: Request) -> None:
        row, span = request.row, request.span
        self._generations[row] = request.generation
        self._forget(row)
        if not span.prefix:
            return
        pages, inside = divmod(span.prefix, self.layout.page_tokens)
        if inside:
            raise RuntimeError(f"request {span.label} begins at token {span.prefix}, inside a page")
        kept = self.records.read(int(span.pages[pages - 1]), f"request {span.label}")
        ring = self.windows[:, row]
        record = {space: rows.to(ring.device) for space, rows in kept.items()}
        size = ring.shape[1]
        places = torch.arange(span.prefix - size, span.prefix, device=ring.device) % size
        ring[:, places] = record[WINDOW]
        for layer, (selector, state) in enumerate(zip(self._selectors, self._states[row], strict=True)):
            selector.restore(state, span.prefix, self.records.journals(layer, record))

    def _mark_completed(self, requests: list[Request]) -> None:
        """Give slots to the tail records that this forward makes."""
        ends = [(request, request.completed(self.layout.page_tokens)) for request in requests]
        slots = self.records.table.take([page for _, own in ends for page in own.values()])
        for request, own in ends:
            request.marks = {tokens: slots[page] for tokens, page in own.items() if page in slots}

    def write_records(self, layer: int, snapshots: Sequence[Sequence[Mapping[str, torch.Tensor]]]) -> None:
        """Of one layer, with each request's snapshots at its marks; called before the layer's stores append again."""
        slots: list[int] = []
        windows: list[torch.Tensor] = []
        for request in self._current.values():
            store = self._states[request.row][layer].store
            assert isinstance(store, LayerStore)
            slots += request.marks.values()
            windows += [store.window_at(tokens) for tokens in request.marks]
        if slots:
            self.records.write(layer, slots, windows, list(chain.from_iterable(snapshots)))

    def _forget(self, row: int) -> None:
        if self._poison:
            self.windows[:, row] = torch.nan
        for state in self._states[row]:
            state.tokens = state.floor = 0
            if self._poison:
                for tail in state.tails.values():
                    tail.fill_(torch.nan)

    def pages_freed(self, pages: list[int]) -> None:
        self.records.pages_freed(pages)
        if self._poison and pages:
            self.keys.poison(pages)
            self.heavy.poison(pages)
