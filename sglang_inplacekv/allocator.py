"""SGLang's paged allocator over plain ids whose homes are D, C or T."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.mem_cache.allocator.paged import (
    PagedTokenToKVPoolAllocator,
    alloc_decode_naive,
    alloc_extend_naive,
)
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams
from sglang.srt.utils import get_num_new_pages

from sglang_inplacekv.homes import HomeTable

# Least recently used prefixes need not hold D pages; this bounds what is given up on the way to those that do.
_EVICT_PAGES_PER_PAGE = 16


class InplaceAllocator(PagedTokenToKVPoolAllocator):
    """Hands out page-aligned token ids; `size` is the exact capacity in tokens, padding excluded.

    Keeps SGLang's contracts (radix, retraction, idle leak check work on plain ids) and replaces only where a page comes
    from and goes to.
    """

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache, homes: HomeTable
    ) -> None:
        self.homes = homes
        self._tree_cache: BasePrefixCache | None = None  # learned from the first eviction request
        self._evicts = False  # what is freed now, the cache has given up
        super().__init__(size, page_size, dtype, device, kvcache, need_sort=False)

    def clear(self) -> None:
        self._kvcache.forget_all_pages()
        self.homes.clear()
        self.free_group = None
        self.free_page_ids_group: list[torch.Tensor] = []

    def available_size(self) -> int:
        return (self.homes.free_pages + self._kvcache.freed.count) * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        self._kvcache.freed.wait()
        return torch.tensor(list(self.homes.all_free()), dtype=torch.int64, device=self.device)

    def merge_and_sort_free(self) -> None:
        """Nothing to do: every freed page is on its list at once."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        pages = self._take(need_size // self.page_size)
        if pages is None:
            return None
        return (pages[:, None] * self.page_size + torch.arange(self.page_size, device=self.device)).reshape(
            -1
        )

    def alloc_extend(
        self,
        prefix_lens,
        prefix_lens_cpu,
        seq_lens,
        seq_lens_cpu,
        last_loc,
        extend_num_tokens,
        num_new_pages=None,
    ) -> torch.Tensor | None:
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        pages = self._take(num_new_pages)
        if pages is None:
            return None
        out = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, pages, out, self.page_size, self.device)
        return out

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc) -> torch.Tensor | None:
        num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        pages = self._take(num_new_pages)
        if pages is None:
            return None
        out = torch.empty(len(seq_lens), dtype=torch.int64, device=self.device)
        alloc_decode_naive(seq_lens, last_loc, pages, out, self.page_size, num_new_pages)
        return out

    def _take(self, count: int) -> torch.Tensor | None:
        self._kvcache.freed.collect()
        if count > self.homes.device_free_pages:
            self._kvcache.freed.wait()  # they may be of D; and where the others go depends on what the host holds
        self._make_room_in_device(count)
        pages = self.homes.allocate(count)
        if pages is None:
            return None
        self._kvcache.page_lists.handed_out(pages)
        # Nobody waits for the copy: it is queued behind the forward that runs.
        ids = torch.tensor(pages, dtype=torch.int64, pin_memory=self._kvcache.on_gpu)
        return ids.to(self.device, non_blocking=True)

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        self._kvcache.free_pages(torch.cat(page_ids), evicted=self._evicts)

    def evict_to_free_tokens(self, tree_cache, num_tokens: int) -> bool | None:
        """As SGLang: evict until `num_tokens` fit anywhere. Its figure is an over-estimate, so D is looked after when the
        pages are taken."""
        if tree_cache is not None and tree_cache.supports_prefix_sharing():
            self._tree_cache = tree_cache
        with self._giving_up():
            return super().evict_to_free_tokens(tree_cache, num_tokens)

    def _make_room_in_device(self, wanted_pages: int) -> None:
        """Evict idle prefixes so that `wanted_pages` new ones fit D.

        SGLang evicts only when everything is short. Here D can be short while the host has room: idle prefixes would
        then keep D for good and every new request would spill. So while D holds pages that no running request uses, LRU
        steps go on until D holds the new pages, nothing is evictable, or the cap is lost: sixteen pages for each page
        wanted, and at most as much as D holds. The cap may be lost in the host alone: what AdmissionGate took for room
        is not reached then, and the new pages spill.
        """
        if self._tree_cache is None:
            return
        pages = min(wanted_pages, self.homes.sizes.device_pages)
        cap_tokens = min(self.homes.sizes.device_pages, _EVICT_PAGES_PER_PAGE * pages) * self.page_size
        lost_tokens = 0
        while (
            (short := pages - self.homes.device_free_pages) > 0
            and lost_tokens < cap_tokens
            and self._kvcache.idle_device_pages() > 0
        ):
            evicted = self._evict(short)
            if evicted == 0:
                break
            self._kvcache.freed.wait()
            lost_tokens += evicted

    def _evict(self, pages: int) -> int:
        """Let the cache give up its least recently used `pages`, whole prefixes of them. Tokens that it has given up."""
        assert self._tree_cache is not None
        with self._giving_up():
            tokens = self._tree_cache.evict(EvictParams(num_tokens=pages * self.page_size)).num_tokens_evicted
        self.homes.device_evicted_tokens += tokens
        return tokens

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        self._evicts = True
        try:
            yield
        finally:
            self._evicts = False

    def lacks_room_ahead(self, pages: int) -> bool:
        """Whether D will not hold `pages` new ones unless idle prefixes are evicted, and there are any."""
        return (
            self._short_of(pages) > 0
            and self._tree_cache is not None
            and self._tree_cache.evictable_size() > 0
        )

    def make_room_ahead(self, pages: int) -> None:
        """Evict idle prefixes so that D holds `pages` soon, as far as can be told without waiting. `_take` does the rest."""
        short = self._short_of(pages)
        if 0 < short <= self._kvcache.surely_idle_device_pages():
            self._evict(short)

    def _short_of(self, pages: int) -> int:
        # What comes back counts as D's. It may be the host's, as may what is evicted.
        return pages - self.homes.device_free_pages - self._kvcache.freed.count

    def verify_byte_accounting(self) -> list[str]:
        """SGLang's idle check asks here: whatever is wrong with homes and windows, as text."""
        try:
            self._kvcache.settle()
        except RuntimeError as error:
            return [str(error)]
        return []
