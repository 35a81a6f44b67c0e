"""Which pages each running request has, as the host knows it.

SGLang keeps page ids on the device only. Reading them waits for the forward before, and the GPU idles until the next one is
launched. So they are read when they may be others than the host believes: where a request begins with a prefix from the cache,
and where pages were freed since a request's prefill, until the prefix cache has seen that (it rewrites a row then, and only to
free what it replaces). Else a row consists of the pages that the allocator has handed out, in the order of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

# The overlap schedule processes a prefill's result after it has launched the decode that follows. From the second decode on the
# cache has the prompt, and leaves the row alone.
_SETTLED_DECODES = 2


@dataclass
class _Known:
    row: int  # of SGLang's table
    generation: int  # of that row, which is handed on from request to request
    length: int  # tokens that `pages` cover
    pages: np.ndarray  # [ceil(length / G)] int64
    current: bool  # whether the device's table still says the same
    decodes: int = 0  # since its prefill, or since the row was read


class PageLists:
    """Rows of SGLang's req_to_token as pages, by request id. Used by the scheduler's thread only."""

    def __init__(self, req_to_token_pool, page_size: int, *, verify: bool = False) -> None:
        self._pool, self._page_size, self._verify = req_to_token_pool, page_size, verify
        self._known: dict[str, _Known] = {}
        self._owner: dict[int, str] = {}  # row -> the request last seen in it
        self._shared: set[str] = set()  # ids that two requests had at once
        self._handed_out: list[int] = []
        self._starting: list[torch.Tensor] = []  # prefixes of requests that have not been in a forward
        self.frees = 0  # times that pages were freed

    def handed_out(self, pages: Sequence[int]) -> None:
        """The allocator gave `pages` to the forward that comes next."""
        self._handed_out = list(pages)

    def starts(self, pages: torch.Tensor) -> None:
        """The next extend begins a request whose prefix the cache has, in `pages` [pages] on the device."""
        self._starting.append(pages)

    def page_freed(self, *, evicted: bool = False) -> None:
        """Pages were freed; `evicted`: by the cache, of prefixes that no request has."""
        self.frees += 1
        if evicted:
            return
        for known in self._known.values():
            known.current &= known.decodes >= _SETTLED_DECODES

    def clear(self) -> None:
        self._known.clear()
        self._owner.clear()
        self._shared.clear()
        self._handed_out, self._starting = [], []
        self.frees += 1

    def of_extend(
        self,
        rids: list[str],
        index: torch.Tensor,
        rows: list[int],
        prefixes: list[int],
        lengths: list[int],
    ) -> list[np.ndarray]:
        """Pages of the requests `rids` in the rows `index` [requests] (on the device), ceil(length / G) each.

        The forward extends them from `prefixes` tokens to `lengths`. `rows` is `index` on the host.
        """
        distinct = len(set(rids)) == len(rids)
        lists = self._told(rids, rows, prefixes, lengths) if distinct else None
        self._handed_out, self._starting = [], []
        if lists is None:
            lists = self._read(index, lengths)
        elif self._verify:
            self._check(rids, lists, self._read(index, lengths))
        self._keep(rids, rows, lengths, lists, current=distinct)
        return lists

    def of_decode(self, rids: list[str], index: torch.Tensor, lengths: list[int]) -> list[np.ndarray]:
        """The same for a decode step, in which each request has grown by one token. May be asked twice in a step."""
        # Two requests may have been given one id: neither's pages can then be told from the id.
        distinct = len(set(rids)) == len(rids)
        prefixes = [length - 1 for length in lengths]
        lists = self._told(rids, [None] * len(rids), prefixes, lengths) if distinct else None
        self._handed_out = []
        if lists is None:
            lists = self._read(index, lengths)
            self._keep(rids, index.tolist(), lengths, lists, current=distinct)
            return lists
        if self._verify:
            self._check(rids, lists, self._read(index, lengths))
        for rid, length, pages in zip(rids, lengths, lists, strict=True):
            known = self._known[rid]
            known.decodes += known.length != length  # else this step has asked before
            known.length, known.pages = length, pages
        return lists

    def _told(
        self, rids: list[str], rows: Sequence[int | None], prefixes: list[int], lengths: list[int]
    ) -> list[np.ndarray] | None:
        """What requests that grow from `prefixes` tokens to `lengths` must have by now, None if that cannot be told.

        rows: None in a decode, which nobody joins.
        """
        lists, taken = [], 0
        for rid, row, prefix, length in zip(rids, rows, prefixes, lengths, strict=True):
            before = self._before(rid, row, prefix)
            if before is None:
                return None
            count = -(-length // self._page_size) - len(before)
            own = self._handed_out[taken : taken + count]
            taken += count
            lists.append(np.concatenate((before, np.array(own, dtype=np.int64))) if count else before)
        return lists if taken == len(self._handed_out) else None

    def _before(self, rid: str, row: int | None, prefix: int) -> np.ndarray | None:
        """Pages of the `prefix` tokens that a request had, None if that cannot be told."""
        if row is not None and prefix == 0:
            return np.empty(0, dtype=np.int64)
        known = self._known.get(rid)
        if known is None or not known.current:
            return None
        if row is None:
            # One token more if this step has asked before.
            return known.pages if known.length in (prefix, prefix + 1) else None
        same = (known.row, known.generation, known.length) == (row, self.generation(row), prefix)
        return known.pages if same else None

    def _read(self, index: torch.Tensor, lengths: list[int]) -> list[np.ndarray]:
        size = self._page_size
        longest = max(lengths, default=0)
        # The one place where page ids reach the host: a page-strided slice of SGLang's own table.
        table = (self._pool.req_to_token[index, 0:longest:size] // size).long().cpu().numpy()
        return [table[i, : -(-length // size)] for i, length in enumerate(lengths)]

    def _check(self, rids: list[str], lists: list[np.ndarray], table: list[np.ndarray]) -> None:
        for rid, known, read in zip(rids, lists, table, strict=True):
            if not np.array_equal(known, read):
                raise RuntimeError(
                    f"request {rid} has pages {read.tolist()}, the host believed {known.tolist()}"
                )

    def _keep(
        self,
        rids: list[str],
        rows: list[int],
        lengths: list[int],
        lists: list[np.ndarray],
        *,
        current: bool,
    ) -> None:
        free = set(self._pool.free_slots)
        for rid, row, length, pages in zip(rids, rows, lengths, lists, strict=True):
            before = self._known.get(self._owner.get(row, ""))
            if before is not None and before.row == row:
                del self._known[self._owner[row]]
            namesake = self._known.get(rid)
            if namesake is not None and namesake.row != row and self._is_live(namesake, free):
                self._shared.add(rid)
            self._owner[row] = rid
            own = current and rid not in self._shared
            self._known[rid] = _Known(row, self.generation(row), length, pages, own)

    def _is_live(self, known: _Known, free: Collection[int]) -> bool:
        """Whether the request that `known` was seen of still has its row. free: of SGLang's rows."""
        return known.row not in free and known.generation == self.generation(known.row)

    def generation(self, row: int) -> int:
        """Rises whenever SGLang gives the row to a request."""
        return int(self._pool.req_generation[row])

    def live_pages(self) -> list[np.ndarray]:
        """Pages, as last seen, of the requests that still have their row, and prefixes of those that start."""
        self._starting = [pages.cpu() for pages in self._starting]  # read once, and only if somebody asks
        return self.known_live_pages() + [pages.numpy() for pages in self._starting]

    def known_live_pages(self) -> list[np.ndarray]:
        """The same without those that start: nothing is read."""
        free = set(self._pool.free_slots)
        return [known.pages for known in self._known.values() if self._is_live(known, free)]

    @property
    def starting_pages(self) -> int:
        """Pages at most that requests have of which no forward has told yet."""
        return len(self._handed_out) + sum(map(len, self._starting))
