"""What one forward writes and reads, region by region. Built once per step on the host, shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sglang_inplacekv.homes import HomeTable
from sglang_inplacekv.layout import ROLE_COMPUTE
from sglang_inplacekv.tickets import Ticket
from sglang_inplacekv.windows import WindowTable


@dataclass(frozen=True)
class Span:
    """One request's part of a forward: tokens [prefix, length) are new, its pages cover [0, length)."""

    label: str
    pages: np.ndarray  # [ceil(length / G)] int64
    prefix: int
    length: int

    @property
    def new_tokens(self) -> int:
        return self.length - self.prefix


@dataclass(frozen=True)
class HomeWrite:
    """A host page that is begun and completed in this forward: its tokens go straight home."""

    page: int
    first_token: int  # of the page, counted over the forward's tokens


@dataclass
class Reads:
    """Where one request's attended tokens are: disjoint, together all of them."""

    device_pages: np.ndarray  # [n] int64, of the device tensor (D homes and windows), all full but the last
    device_tokens: int  # of them
    compute_pages: np.ndarray  # [n] int64, full pages read in place by the CPU
    transfer_pages: np.ndarray  # [n] int64, full pages streamed through P
    # [n] int64, full T pages that the CPU reads in place in this step instead
    stolen_pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def cpu_pages(self) -> np.ndarray:
        return np.concatenate((self.compute_pages, self.stolen_pages))

    def steal(self, count: int) -> None:
        """Hand the last `count` T pages to the CPU: what is left stays adjacent."""
        if count:
            self.stolen_pages = self.transfer_pages[-count:]
            self.transfer_pages = self.transfer_pages[:-count]

    def device_slots(self, page_size: int) -> np.ndarray:
        """[device_tokens] int64: the tokens' slots in the device tensor."""
        slots = (self.device_pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
        return slots[: self.device_tokens]


@dataclass
class StepPlan:
    """One forward. Token indices count over the forward's new tokens, request after request."""

    spans: list[Span]
    is_decode: bool
    page_size: int = 0
    device_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    device_slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    home_writes: list[HomeWrite] = field(default_factory=list)
    flush_pages: list[int] = field(default_factory=list)  # window pages whose last slot this forward writes
    reads: list[Reads] = field(default_factory=list)
    pending: Mapping[int, Ticket] = field(default_factory=dict)  # unfinished writes of pages read from home

    @property
    def tokens(self) -> int:
        return sum(span.new_tokens for span in self.spans)

    def token_range(self, index: int) -> slice:
        """The new tokens of request `index`."""
        first = sum(span.new_tokens for span in self.spans[:index])
        return slice(first, first + self.spans[index].new_tokens)

    @cached_property
    def who(self) -> str:
        """The requests by name, for messages."""
        return "requests " + ", ".join(span.label for span in self.spans)

    @cached_property
    def cpu_tokens(self) -> int:
        """What the CPU attends in each layer of a decode, with multiplicity over requests."""
        return sum(len(reads.cpu_pages) for reads in self.reads) * self.page_size

    @cached_property
    def transfer_tokens(self) -> int:
        """What is attended in P in each layer of a decode, with multiplicity: a page that requests share crosses once."""
        return sum(len(reads.transfer_pages) for reads in self.reads) * self.page_size

    def attended_tokens(self, page_size: int) -> dict[str, int]:
        """Tokens read in this forward, with multiplicity over requests: of each region, and those of T that the CPU reads."""
        return {
            "D": sum(r.device_tokens for r in self.reads),
            "C": sum(len(r.compute_pages) for r in self.reads) * page_size,
            "T": sum(len(r.transfer_pages) for r in self.reads) * page_size,
            "stolen": sum(len(r.stolen_pages) for r in self.reads) * page_size,
        }


@dataclass(frozen=True)
class _Located:
    """Where a request's pages are. It follows from `ids`, `windows` and the chunks' roles, and holds while they are the same.

    Plans share the arrays, so nobody writes to them.
    """

    ids: np.ndarray  # of the pages that are read
    windows: dict[int, int]  # of those that have one
    device_pages: np.ndarray
    compute_pages: np.ndarray
    transfer_pages: np.ndarray
    ends_on_device: bool

    def __post_init__(self) -> None:
        for pages in (self.ids, self.device_pages, self.compute_pages, self.transfer_pages):
            pages.flags.writeable = False

    @cached_property
    def members(self) -> frozenset[int]:
        """Of ids, for look-ups. Not made for what does not last for a step."""
        return frozenset(self.ids.tolist())


class Planner:
    """Builds StepPlans from page ids. Opens windows, so it runs once per forward, before anything is queued."""

    def __init__(self, homes: HomeTable, windows: WindowTable, wait_timeout_s: float) -> None:
        self.homes, self.windows = homes, windows
        self.sizes = homes.sizes
        self._timeout_s = wait_timeout_s
        # Of the last decode's requests, by name: from step to step most have the same pages in the same places.
        self._located: dict[str, _Located] = {}
        self._roles: list[int] = []  # of the chunks, then

    def build(self, spans: Sequence[Span], is_decode: bool) -> StepPlan:
        plan = StepPlan(list(spans), is_decode, self.sizes.page_size)
        tokens: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        first = 0
        for span in plan.spans:
            self._plan_writes(plan, span, first, tokens, slots)
            first += span.new_tokens
        plan.device_tokens = np.concatenate(tokens) if tokens else plan.device_tokens
        plan.device_slots = np.concatenate(slots) if slots else plan.device_slots
        if self.homes.role != self._roles:
            self._located, self._roles = {}, list(self.homes.role)
        self._note_windows()
        ends = [span.length if is_decode else span.prefix for span in plan.spans]
        located = [
            self._locate(span.pages[: -(-end // self.sizes.page_size)], self._located.get(span.label))
            for span, end in zip(plan.spans, ends, strict=True)
        ]
        plan.reads = [self._plan_reads(*each) for each in zip(plan.spans, ends, located, strict=True)]
        if is_decode:
            self._located = {span.label: own for span, own in zip(plan.spans, located, strict=True)}
            self._steal(plan.reads)
        outstanding = self.homes.outstanding()
        if outstanding:
            home_pages = [np.concatenate((r.cpu_pages, r.transfer_pages)) for r in plan.reads]
            read = set(np.concatenate(home_pages).tolist()) if home_pages else set()
            plan.pending = {page: ticket for page, ticket in outstanding.items() if page in read}
        return plan

    def _note_windows(self) -> None:
        """Open pages, sorted, and their windows: what the lists of this forward are matched against."""
        pages = sorted(self.windows.open_pages().items())
        self._open_pages = np.array([page for page, _ in pages], dtype=np.int64)
        self._open_windows = np.array([window for _, window in pages], dtype=np.int64)

    def _plan_writes(self, plan: StepPlan, span: Span, first: int, tokens: list, slots: list) -> None:
        size = self.sizes.page_size
        for index in range(span.prefix // size, -(-span.length // size)):
            page = int(span.pages[index])
            start, end = max(span.prefix, index * size), min(span.length, (index + 1) * size)
            whole = end - start == size
            if not self.sizes.is_device(page) and whole and self.windows.window_of(page) is None:
                plan.home_writes.append(HomeWrite(page, first + start - span.prefix))
                continue
            place = page
            if not self.sizes.is_device(page):
                window = self.windows.window_of(page)
                if window is None:
                    window = self.windows.open(page, self._timeout_s, f"request {span.label},")
                place = self.sizes.first_host_page + window
                if end == (index + 1) * size:
                    plan.flush_pages.append(page)
            tokens.append(np.arange(first + start - span.prefix, first + end - span.prefix))
            slots.append(np.arange(place * size + start % size, place * size + start % size + end - start))

    def _steal(self, reads: Sequence[Reads]) -> None:
        """Let the CPU's share come to the target: each request gives T pages in proportion to what it has."""
        streamed = np.cumsum([0, *(len(own.transfer_pages) for own in reads)])
        wanted = self.homes.scope.wanted_stolen(
            sum(len(own.compute_pages) for own in reads), int(streamed[-1])
        )
        if not wanted:
            return
        given = np.diff(wanted * streamed // streamed[-1])
        for own, count in zip(reads, given.tolist(), strict=True):
            own.steal(count)
        self.homes.scope.stolen_pages += wanted

    def _locate(self, pages: np.ndarray, last: _Located | None) -> _Located:
        """Where `pages` are: `last` itself if nothing that it follows from has changed."""
        ids = np.asarray(pages, dtype=np.int64)
        if last is not None and np.array_equal(last.ids, ids):
            windows = self.windows.open_pages().items()
            if {page: window for page, window in windows if page in last.members} == last.windows:
                return last
        first_host = self.sizes.first_host_page
        place = np.where(ids < first_host, ids, -1)
        held = np.isin(ids, self._open_pages)
        own_windows = self._open_windows[np.searchsorted(self._open_pages, ids[held])]
        place[held] = first_host + own_windows
        on_device = place >= 0
        home = ids[~on_device]
        computed = np.asarray(self._roles)[self.sizes.locate(home)[0]] == ROLE_COMPUTE
        return _Located(
            ids.copy(),
            dict(zip(ids[held].tolist(), own_windows.tolist(), strict=True)),
            place[on_device],
            home[computed],
            home[~computed],
            bool(len(ids) and on_device[-1]),
        )

    def _plan_reads(self, span: Span, read_end: int, located: _Located) -> Reads:
        size = self.sizes.page_size
        spare = len(located.ids) * size - read_end
        if spare and not located.ends_on_device:
            raise RuntimeError(
                f"request {span.label}: open page {located.ids[-1]} of {size - spare} tokens is in no window"
            )
        device_tokens = len(located.device_pages) * size - spare
        reads = Reads(located.device_pages, device_tokens, located.compute_pages, located.transfer_pages)
        planned = device_tokens + (len(reads.compute_pages) + len(reads.transfer_pages)) * size
        if planned != read_end:
            raise RuntimeError(f"request {span.label}: {read_end} tokens to attend, {planned} planned")
        return reads
