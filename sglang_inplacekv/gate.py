"""Admission inside SGLang's prefill pass: counts what a request needs of D, and holds it back or lets SGLang add it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder

from sglang_inplacekv.admission import Demand, Verdict, decide

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_inplacekv.allocator import InplaceAllocator
    from sglang_inplacekv.pool import RegionPool

_NO_PAGES = np.empty(0, dtype=np.int64)


class AdmissionGate:
    """One per pool. Holds the head of the queue back as SGLang does when its pool is full: those behind it wait too.

    Counts as SGLang's own budget does: of an answer at most CLIP_MAX_NEW_TOKENS, and of those of running requests that may
    end early the fraction that SGLang expects. With `spill` no request is held back or counted.
    """

    def __init__(self, policy: str, pool: RegionPool) -> None:
        self._policy, self._pool = policy, pool
        self._waiting: weakref.WeakSet[Req] = weakref.WeakSet()
        # The prefix last read, after what it depends on.
        self._read: tuple[object, np.ndarray] = (None, _NO_PAGES)
        self.queued_requests = 0  # that had to wait for D, since start
        self.spilled_requests = 0  # that were started though D had no room for all of them, since start

    @property
    def waiting_requests(self) -> int:
        """Requests that were told to wait and have neither started nor been aborted; those behind them not counted."""
        return len(self._waiting)

    def add_one_req(self, add: Callable, adder: PrefillAdder, req: Req, *args, **kwargs) -> AddReqResult:
        """PrefillAdder.add_one_req, `add`, for a request that may start."""
        verdict = None if self._policy == "spill" else self._verdict(adder, req)
        if verdict is Verdict.WAITS:
            if req not in self._waiting:
                self._waiting.add(req)
                self.queued_requests += 1
            return AddReqResult.NO_TOKEN
        result = add(adder, req, *args, **kwargs)
        if adder.can_run_list and adder.can_run_list[-1] is req:
            self._waiting.discard(req)
            self.spilled_requests += verdict is Verdict.SPILLS
            if req.prefix_len:
                self._pool.page_lists.starts(self._prefix_ids(adder, req))
        return result

    def make_room_ahead(self, scheduler: Scheduler) -> None:
        """A pass of SGLang's is over, and its prefill about to be launched: evict what the next pass would evict, if it takes
        what goes on and the head of the queue.

        Evicted only when their room is wanted, pages would have to be waited for: their ids lie on the device, behind the
        prefill that runs, and the GPU would idle until the next one is ready.
        """
        going_on, tree = scheduler.chunked_req, scheduler.tree_cache
        allocator: InplaceAllocator = scheduler.token_to_kv_pool_allocator
        most_tokens = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        if not self._pool.freed.travel or not allocator.lacks_room_ahead(self._pages(most_tokens)):
            return
        # Tokens of the next pass, and its pages with those that answers begin in.
        left, pages = most_tokens, 0
        if going_on is not None:
            own = min(left, _tokens_so_far(going_on) - going_on.kv.kv_allocated_len)
            left, pages = left - own, self._pages(own + 1)
        with ExitStack() as kept:
            for req in scheduler.waiting_queue:
                if not left:
                    break
                req.init_next_round_input(tree)
                # The next pass keeps the prefixes of all its requests before it takes pages.
                kept.callback(tree.unlock, tree.lock(req.last_node))
                own = min(left, _tokens_so_far(req) - req.prefix_len)
                left, pages = left - own, pages + self._pages(own + 1)
            allocator.make_room_ahead(pages)

    def _verdict(self, adder: PrefillAdder, req: Req) -> Verdict:
        verdict = self._decide(adder, req)
        if verdict is Verdict.IN_DEVICE or not self._pool.freed.count:
            return verdict
        # What comes back may still count as a running request's, and SGLang asks a second time only when one has ended.
        self._pool.freed.wait()
        return self._decide(adder, req)

    def _decide(self, adder: PrefillAdder, req: Req) -> Verdict:
        model = self._pool.step_model if self._policy == "auto" else None
        return decide(self._policy, self._demand(adder, req, model is not None), model)

    def _demand(self, adder: PrefillAdder, req: Req, has_model: bool) -> Demand:
        pool, sizes = self._pool, self._pool.regions.sizes
        new_pages = self._new_pages(req)
        running = [r for r in adder.running_batch.reqs if not r.finished()]
        pool.freed.collect()
        room = pool.regions.homes.device_free_pages - sum(self._growth_pages(adder, r) for r in running)
        room -= sum(map(self._new_pages, adder.can_run_list))
        kept = host_pages = 0
        if new_pages > room:
            # Reading the prefix waits for the device, so it is left out where D has room without it.
            prefix = self._prefix_pages(adder, req)
            kept = int((prefix < sizes.first_host_page).sum())
            room += self._evictable_pages(adder, req, prefix)
            host_pages = pool.live_host_pages() if has_model and new_pages > room else 0
        beside = running + adder.can_run_list
        return Demand(
            new_pages=new_pages,
            kept_pages=kept,
            room_pages=room,
            device_pages=sizes.device_pages,
            host_pages=host_pages,
            new_tokens=_answer_tokens(req),
            running_tokens=max(map(_answer_tokens, beside)) if beside else None,
            # A prefill that goes on has its row already, and was not in the queue when this pass began.
            waiting=adder.waiting_queue_len - sum(not r.kv.holds_kv for r in adder.can_run_list),
        )

    def _pages(self, tokens: float) -> int:
        return int(-(-tokens // self._pool.page_size))

    def _new_pages(self, req: Req) -> int:
        """Of a request in this pass, chunks to come and answer included."""
        tokens = len(req.full_untruncated_fill_ids) + _answer_tokens(req)
        return self._pages(tokens) - self._pages(req.prefix_len)

    def _growth_pages(self, adder: PrefillAdder, req: Req) -> int:
        """Of a running request."""
        answer = adder._get_running_request_total_token_offset(req)
        tokens = _tokens_so_far(req) + answer
        return max(0, self._pages(tokens) - self._pages(req.kv.kv_allocated_len))

    def _prefix_ids(self, adder: PrefillAdder, req: Req) -> torch.Tensor:
        """Pages of the prefix-cache hit, [pages] int64 on the device."""
        return self._pool.pages_of(adder.tree_cache.prefix_device_indices(req))

    def _prefix_pages(self, adder: PrefillAdder, req: Req) -> np.ndarray:
        """The same on the host."""
        if not req.prefix_len:
            return _NO_PAGES
        # The head may ask at every step, and the cache gives a prefix other pages only after it has freed them.
        depends_on = (weakref.ref(req), req.prefix_len, self._pool.page_lists.frees)
        if self._read[0] != depends_on:
            self._read = depends_on, self._prefix_ids(adder, req).cpu().numpy()
        return self._read[1]

    def _evictable_pages(self, adder: PrefillAdder, req: Req, prefix: np.ndarray) -> int:
        """Of D, with the request's own prefix kept; and what has been freed and not come back yet."""
        with adder._lock_node(req.last_node):
            evictable = adder.tree_cache.evictable_size() // self._pool.page_size
        return min(evictable + self._pool.freed.count, self._pool.idle_device_pages(besides=prefix))


def _tokens_so_far(req: Req) -> int:
    """Of its prompt and its answer."""
    return len(req.origin_input_ids) + len(req.output_ids)


def _answer_tokens(req: Req) -> int:
    """The most that `req` may still decode, as far as SGLang looks ahead."""
    return min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
