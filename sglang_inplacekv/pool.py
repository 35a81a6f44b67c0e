"""The KV pool that SGLang sees: plain token ids in, WriteScope's homes behind them."""

from __future__ import annotations

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, unwrap_write_loc

from sglang_inplacekv.executors.base import Executor
from sglang_inplacekv.metrics import StepMetrics
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import Planner, Span, StepPlan


class InplaceMHAPool(MHATokenToKVPool):
    """KV of a GQA or MHA model in four regions.

    A subclass only so that SGLang's isinstance checks hold; none of the parent's buffers exist. Whoever tries to read
    or write behind set_kv_buffer's back (a fused store, a copy to a host cache) gets an error, never wrong bytes.
    """

    def __init__(
        self,
        regions: Regions,
        executor: Executor,
        req_to_token_pool,
        *,
        start_layer: int,
        end_layer: int,
        device: str,
    ) -> None:
        shape, sizes = regions.shape, regions.sizes
        self.regions, self.executor = regions, executor
        self.planner = Planner(regions.homes, regions.windows, regions.config.wait_timeout_s)
        self.plan: StepPlan | None = None
        self.metrics = StepMetrics(regions)
        self._req_to_token_pool = req_to_token_pool
        self._row_pages: dict[
            int, tuple[int, np.ndarray]
        ] = {}  # row -> its generation and D pages when last run
        self.k_buffer = self.v_buffer = None
        self.head_num, self.head_dim, self.v_head_dim = shape.kv_heads, shape.head_dim, shape.head_dim
        KVCache.__init__(
            self,
            sizes.capacity_tokens,
            shape.page_size,
            shape.dtype,
            shape.layers,
            device,
            enable_memory_saver=False,
            start_layer=start_layer,
            end_layer=end_layer,
        )
        self._finalize_allocation_log(sizes.capacity_tokens)

    def begin_forward(self, spans: list[Span], is_decode: bool) -> StepPlan:
        """Plan the forward over `spans` and start its transfers."""
        self.executor.acknowledge()
        self._note_device_pages(spans)
        self.plan = self.planner.build(spans, is_decode)
        self.executor.begin_forward(self.plan)
        self.metrics.observe(self.plan)
        return self.plan

    def settle(self) -> None:
        """The server idles: take finished flushes back, check all accounts (RuntimeError), and show where things stand."""
        self.executor.acknowledge()
        self.regions.check_integrity()
        self.metrics.export()

    def set_kv_buffer(
        self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None, **_
    ) -> None:
        """Write this forward's K/V, [tokens, kv_heads, head_dim], to where its plan says."""
        loc, _, _ = unwrap_write_loc(loc_info)
        if self.plan is None or len(loc) != self.plan.tokens:
            raise RuntimeError(
                f"KV write of {len(loc)} tokens outside the planned forward ({self.plan and self.plan.tokens})"
            )
        if k_scale is not None or v_scale is not None:
            raise RuntimeError("scaled KV writes are not supported: use --kv-cache-dtype auto")
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        shape = (-1, self.head_num, self.head_dim)
        self.executor.write_layer(
            layer_id - self.start_layer,
            cache_k.to(self.dtype).view(shape),
            cache_v.to(self.dtype).view(shape),
        )

    def pages_freed(self, pages: list[int]) -> None:
        self.regions.pages_freed(pages)

    def forget_all_pages(self) -> None:
        """Every page is about to be free (start-up, flush_cache): let writes end and take all windows back."""
        self.executor.drain()
        self.regions.forget_all_pages()
        self._row_pages.clear()

    def _note_device_pages(self, spans: list[Span]) -> None:
        for span in spans:
            generation = int(self._req_to_token_pool.req_generation[span.row])
            self._row_pages[span.row] = (
                generation,
                span.pages[span.pages < self.regions.sizes.first_host_page],
            )

    def idle_device_pages(self) -> int:
        """D pages that no live request was seen to use: what only the prefix cache keeps."""
        rows = self._req_to_token_pool
        free_rows = set(rows.free_slots)
        live = np.zeros(self.regions.sizes.first_host_page, dtype=bool)
        for row, (generation, pages) in self._row_pages.items():
            # A row that was handed on since then says nothing about its new request.
            if row not in free_rows and generation == int(rows.req_generation[row]):
                live[pages] = True
        return self.regions.homes.device_used_pages - int(live.sum())

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of (K, V): device tensors and host arena together, halves of one."""
        total = self.regions.device_bytes + self.regions.arena.nbytes
        return total // 2, total // 2

    def _refuse(self, what: str):
        raise RuntimeError(
            f"{what} bypasses WriteScope and is not supported by --attention-backend inplacekv"
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("get_key_buffer")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("get_value_buffer")

    def get_kv_buffer(self, layer_id: int):
        self._refuse("get_kv_buffer")

    def get_raw_kv_buffer(self, *args, **kwargs):
        self._refuse("get_raw_kv_buffer")

    def set_kv_buffer_prefix_valid(self, *args, **kwargs):
        self._refuse("set_kv_buffer_prefix_valid")

    def get_cpu_copy(self, *args, **kwargs):
        self._refuse("get_cpu_copy")

    def load_cpu_copy(self, *args, **kwargs):
        self._refuse("load_cpu_copy")

    def move_kv_cache(self, *args, **kwargs):
        self._refuse("move_kv_cache")

    def get_contiguous_buf_infos(self):
        self._refuse("get_contiguous_buf_infos")

    def get_device_pool_infos(self):
        self._refuse("get_device_pool_infos")

    def register_layer_transfer_counter(self, layer_transfer_counter) -> None:
        self._refuse("register_layer_transfer_counter")
