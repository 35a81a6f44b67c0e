"""DeepSeek-V4's KV pool: SGLang sees pages of tokens; behind them are the regions, of CSA entries, and what stays in D."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import KVCache

from sglang_inplacekv.executors.base import Executor
from sglang_inplacekv.gate import AdmissionGate
from sglang_inplacekv.models.deepseek_v4.geometry import CSA_RATIO
from sglang_inplacekv.pool import RegionPool
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import Reads, Span, StepPlan
from sglang_inplacekv.tickets import wait_all
from sglang_inplacekv.v4.entries import EntryReader, Places
from sglang_inplacekv.v4.gate import TokenIdGate
from sglang_inplacekv.v4.layout import V4Layout
from sglang_inplacekv.v4.records import TailRecords
from sglang_inplacekv.v4.requests import Request, RequestStates

_NO_PAGES = np.empty(0, dtype=np.int64)


class InplaceV4Pool(RegionPool, KVCache):
    """A forward's plan counts entries. Only `write_entries` and the requests' stores write."""

    requests: list[Request]
    places: list[Places]

    def __init__(
        self, layout: V4Layout, regions: Regions, executor: Executor, req_to_token_pool, **kwargs
    ) -> None:
        self.layout = layout
        super().__init__(regions, executor, None, req_to_token_pool, **kwargs)
        rows = len(req_to_token_pool.req_to_token)
        poison = regions.config.poison
        self.records = TailRecords(
            layout,
            regions.sizes.tail_records,
            executor,
            poison=poison,
            wait_timeout_s=regions.config.wait_timeout_s,
        )
        self.states = RequestStates(
            layout, rows, regions.sizes.pages, self.device, self.records, poison=poison
        )
        self.reader = EntryReader(regions, regions.shape.layers)
        self.requests, self.places = [], []
        # CSA entries that decodes attended since start, summed over layers and requests: in D or a window, by the CPU (C, and
        # what it takes of T), and crossing from T.
        self.attended: Counter[str] = Counter()
        self._finalize_allocation_log(self.size)

    def _make_gate(self, policy: str) -> AdmissionGate:
        return TokenIdGate(policy, self)

    def _row_arguments(self) -> dict[str, Any]:
        return {}

    def begin_requests(self, requests: list[Request], is_decode: bool) -> None:
        """Plan a forward and start it; called between forwards."""
        completed = sum(len(request.completed(self.layout.page_tokens)) for request in requests)
        if min(completed, self.records.table.count) > self.records.table.free_count:
            self.freed.wait()  # records of freed pages would push out those of cached ones
        self.states.begin_forward(requests)
        self.requests = requests
        self.begin_forward([_in_entries(request.span) for request in requests], is_decode)

    def _start(self, plan: StepPlan, graph_rows: int | None) -> None:
        """The executor writes and flushes. What is read is known when a layer has selected, so it streams nothing."""
        wait_all(plan.pending.values(), self.regions.config.wait_timeout_s, f"{plan.who}, region C or T,")
        self.places = self.reader.places(plan)
        unread = replace(plan, reads=[Reads(_NO_PAGES, 0, _NO_PAGES, _NO_PAGES) for _ in plan.spans])
        self.executor.begin_forward(unread, graph_rows)

    @property
    def is_decode(self) -> bool:
        """Of the forward that is under way."""
        if self.plan is None:
            raise RuntimeError("no forward has begun")
        return self.plan.is_decode

    def write_entries(self, layer: int) -> None:
        """Put the CSA entries that this forward's requests have made, of one of the model's layers, where the plan says."""
        made = [own for request in self.requests if (own := request.fresh.get(layer)) is not None]
        if made:
            index = self.layout.csa_layers.index(layer)
            self.executor.write_layer(index, torch.cat(made).unsqueeze(1))

    def resumable_tokens(self, tokens: int, ids: Callable[[], torch.Tensor]) -> int:
        if not self.records.table.lost_records:
            return tokens  # every full page has its record
        return self.records.table.resumable(self.pages_of(ids()).tolist()) * self.page_size

    def prefix_is_cached(self, own: torch.Tensor, cached: Callable[[], torch.Tensor]) -> None:
        if self.records.table.lost_records:
            # A cached page whose record has given way would never get one again.
            for page, stays in zip(*(self.pages_of(ids).tolist() for ids in (own, cached())), strict=False):
                self.records.table.hand_over(page, stays)

    def settle(self) -> None:
        super().settle()
        self.records.table.check_integrity(self.regions.homes.all_used())

    def forget_all_pages(self) -> None:
        super().forget_all_pages()
        self.records.pages_freed(range(self.regions.sizes.pages))

    def _take_back(self, pages: list[int]) -> None:
        super()._take_back(pages)
        self.states.pages_freed(pages)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("get_key_buffer")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("get_value_buffer")

    def get_kv_buffer(self, layer_id: int):
        self._refuse("get_kv_buffer")

    def set_kv_buffer(self, *args, **kwargs) -> None:
        self._refuse("set_kv_buffer")

    def get_kv_size_bytes(self) -> int:
        return self.nbytes + self.states.nbytes + self.records.nbytes


def _in_entries(span: Span) -> Span:
    return Span(span.label, span.pages, span.prefix // CSA_RATIO, span.length // CSA_RATIO)
