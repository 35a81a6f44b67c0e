"""The KV pool that SGLang sees: plain token ids in, WriteScope's homes behind them."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, MLATokenToKVPool, unwrap_write_loc

from sglang_inplacekv.admission import DeviceSteps, StepModel
from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.executors.base import Executor
from sglang_inplacekv.feedback import ShareController
from sglang_inplacekv.freed_pages import FreedPages
from sglang_inplacekv.gate import AdmissionGate
from sglang_inplacekv.metrics import StepMetrics
from sglang_inplacekv.page_lists import PageLists
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import Planner, Span, StepPlan
from sglang_inplacekv.trace import TraceWriter


class RegionPool(KVCache):
    """What the pools of all KV layouts have in common; a mixin before SGLang's pool class.

    In a forward that holds a host page, whoever tries to read or write behind the write methods' back (a fused store, a copy to
    a host cache) gets an error, never wrong bytes. `device_only` is set for a forward whose pages are all homed in D: then the
    device tensors are a stock pool, whose rows D's token ids are.
    """

    def __init__(
        self,
        regions: Regions,
        executor: Executor,
        control: ShareController | None,
        req_to_token_pool,
        *,
        start_layer: int,
        end_layer: int,
        device: str,
        trace: TraceWriter | None = None,
    ) -> None:
        shape = regions.shape
        self.regions, self.executor = regions, executor
        self.planner = Planner(regions.homes, regions.windows, regions.config.wait_timeout_s)
        self.plan: StepPlan | None = None
        self.device_only = False
        self._control = control  # None where the share is given
        self._device_steps = DeviceSteps()
        self._decode_began_s: float | None = None  # of a decode that was the last forward
        self.freed = FreedPages(self._take_back, device)
        self.gate = self._make_gate(regions.config.admission)
        self.metrics = StepMetrics(regions, control, self.gate, trace)
        page_tokens = regions.sizes.page_tokens
        self.page_lists = PageLists(req_to_token_pool, page_tokens, verify=regions.config.verify)
        super().__init__(
            size=regions.sizes.capacity_tokens,
            page_size=page_tokens,
            dtype=shape.dtype,
            layer_num=shape.layers,
            device=device,
            enable_memory_saver=False,
            start_layer=start_layer,
            end_layer=end_layer,
            **self._row_arguments(),
        )

    def _make_gate(self, policy: str) -> AdmissionGate:
        return AdmissionGate(policy, self)

    @abstractmethod
    def _row_arguments(self) -> dict[str, Any]:
        """What SGLang's pool class wants to know of a token's row."""

    @property
    def on_gpu(self) -> bool:
        return self.regions.device_kv.is_cuda

    def all_in_device(self, spans: list[Span]) -> bool:
        """Whether every page of `spans` is homed in D."""
        first_host = self.regions.sizes.first_host_page
        return all(len(span.pages) == 0 or span.pages.max() < first_host for span in spans)

    def begin_forward(self, spans: list[Span], is_decode: bool, graph_rows: int | None = None) -> StepPlan:
        """Plan the forward over `spans` and start its transfers; graph_rows as in Executor.begin_forward."""
        self.device_only = False
        self._device_steps.interrupt()
        began_s = self._end_step()
        if is_decode and self._control is not None:
            self._note_step(self._control, began_s)
            self.regions.scope.target_share = self._control.share(self._host_tokens(spans))
            self.regions.scope.step_share = self._control.step_share
        if self.regions.windows.free_count < self._windows_to_open(spans):
            self.freed.wait()  # some may own windows
        self.plan = self.planner.build(spans, is_decode)
        self._decode_began_s = began_s if is_decode else None
        self._start(self.plan, graph_rows)
        self.metrics.observe(self.plan, began_s)
        return self.plan

    def _windows_to_open(self, spans: list[Span]) -> int:
        """At most: a forward leaves the last page of each request open, if any."""
        first_host, windows = self.regions.sizes.first_host_page, self.regions.windows
        last = [int(span.pages[-1]) for span in spans if len(span.pages)]
        return sum(page >= first_host and windows.window_of(page) is None for page in last)

    def _note_step(self, control: ShareController, now_s: float) -> None:
        """A decode begins. If the forward before was one too, this is how long it took."""
        if self._decode_began_s is None or self.plan is None:
            # The decode before, if it was one of a trial, was not timed.
            control.ends.break_off()
            return
        computed, tokens = self.plan.cpu_tokens, self.plan.cpu_tokens + self.plan.transfer_tokens
        if tokens:
            control.note_step(computed / tokens, tokens, (now_s - self._decode_began_s) / self.layer_num)

    def _start(self, plan: StepPlan, graph_rows: int | None) -> None:
        self.executor.begin_forward(plan, graph_rows)

    def _end_step(self) -> float:
        """Between forwards: take back what the one before has released, and account for what it has cost.

        Returns when: what comes next begins then, its planning included.
        """
        now_s = time.perf_counter()
        self.freed.collect()
        self.executor.acknowledge()
        costs = self.executor.take_costs()
        if self._control is not None:
            self._control.observe(costs)
        self.metrics.end_step(costs, now_s)
        return now_s

    def _host_tokens(self, spans: list[Span]) -> int:
        first_host = self.regions.sizes.first_host_page
        return sum(int((span.pages >= first_host).sum()) for span in spans) * self.page_size

    def begin_device_forward(self, spans: list[Span], is_decode: bool) -> None:
        """A forward over `spans`, all homed in D, that SGLang's own backend runs."""
        self.device_only, self.plan, self._decode_began_s = True, None, None
        began_s = self._end_step()
        if is_decode:
            self._device_steps.begin(began_s)
            self.metrics.observe_device_decode(spans, began_s)
        else:
            self._device_steps.interrupt()

    @property
    def step_model(self) -> StepModel | None:
        """What decode steps take; None until D, CPU and link have all been measured, and where the share is given."""
        device_s, control = self._device_steps.seconds, self._control
        if device_s is None or control is None or control.cpu is None or control.transfer is None:
            return None
        return StepModel(device_s, control.cpu, control.transfer, self.layer_num, self.page_size)

    def settle(self) -> None:
        """The server idles: take finished flushes back, check all accounts (RuntimeError), and show where things stand."""
        self._end_step()
        self.freed.wait()
        self.regions.check_integrity()
        self.metrics.idle()

    def free_pages(self, ids: torch.Tensor, *, evicted: bool) -> None:
        """SGLang frees the pages `ids` [pages] int64, on their device; `evicted` as in PageLists.page_freed."""
        self.page_lists.page_freed(evicted=evicted)
        self.freed.add(ids)

    def _take_back(self, pages: list[int]) -> None:
        self.regions.homes.free(pages)
        self.regions.pages_freed(pages)

    def forget_all_pages(self) -> None:
        """Every page is about to be free (start-up, flush_cache): let writes end and take all windows back."""
        self.executor.drain()
        self.freed.forget()
        self.regions.forget_all_pages()
        self.page_lists.clear()

    def resumable_tokens(self, tokens: int, ids: Callable[[], torch.Tensor]) -> int:
        """After how many of a cached prefix's `tokens` a request can go on. `ids` finds its token ids, on the device."""
        return tokens

    def prefix_is_cached(self, own: torch.Tensor, cached: Callable[[], torch.Tensor]) -> None:
        """A request's token ids `own`, on the device, are about to join the prefix cache. Of their beginning it has others
        already, which `cached` finds: those stay, and the request's own are freed."""

    def pages_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Pages of token ids [pages * page_size], [pages] int64 on their device."""
        return (ids[:: self.page_size] // self.page_size).long()

    def live_host_pages(self) -> int:
        """Host pages that live requests were last seen to have, shared ones once for each."""
        first_host = self.regions.sizes.first_host_page
        return sum(int((pages >= first_host).sum()) for pages in self.page_lists.live_pages())

    def idle_device_pages(self, besides: np.ndarray | None = None) -> int:
        """D pages that no live request was seen to use: what only the prefix cache keeps, and what comes back to the free list.

        `besides` count as in use.
        """
        return self._device_pages_used_besides(
            self.page_lists.live_pages() + ([] if besides is None else [besides])
        )

    def surely_idle_device_pages(self) -> int:
        """Of those, how many at least, without waiting for the device. Pages whose free is under way are not among them."""
        used = self._device_pages_used_besides(self.page_lists.known_live_pages())
        return used - self.freed.count - self.page_lists.starting_pages

    def _device_pages_used_besides(self, lists: list[np.ndarray]) -> int:
        listed = np.zeros(self.regions.sizes.pages, dtype=bool)
        for pages in lists:
            listed[pages] = True
        return self.regions.homes.device_used_pages - int(
            listed[1 : self.regions.sizes.first_host_page].sum()
        )

    def _check_write(self, loc_info) -> None:
        loc, _, _ = unwrap_write_loc(loc_info)
        if self.plan is None or len(loc) != self.plan.tokens:
            raise RuntimeError(
                f"KV write of {len(loc)} tokens outside the planned forward ({self.plan and self.plan.tokens})"
            )

    @property
    def nbytes(self) -> int:
        """Device tensors and host arena together."""
        return self.regions.device_bytes + self.regions.arena.nbytes

    def _refuse(self, what: str):
        raise RuntimeError(
            f"{what} bypasses WriteScope and is not supported by --attention-backend inplacekv"
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        if not self.device_only:
            self._refuse("get_key_buffer")
        return super().get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        if not self.device_only:
            self._refuse("get_value_buffer")
        return super().get_value_buffer(layer_id)

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


class InplaceMHAPool(RegionPool, MHATokenToKVPool):
    """KV of a GQA or MHA model in four regions."""

    def _row_arguments(self) -> dict[str, Any]:
        return {
            "head_num": self.regions.shape.kv_heads,
            "head_dim": self.regions.shape.head_dim,
            "kv_cache_layout": "nhd",
        }

    def _create_buffers(self) -> None:
        self.k_buffer, self.v_buffer = self.regions.device_k, self.regions.device_v

    def set_kv_buffer(
        self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None, **_
    ) -> None:
        """Write this forward's K/V, [tokens, kv_heads, head_dim], to where its plan says."""
        if self.device_only:
            super().set_kv_buffer(layer, loc_info, cache_k, cache_v, k_scale, v_scale, layer_id_override)
            return
        self._check_write(loc_info)
        if k_scale is not None or v_scale is not None:
            raise RuntimeError("scaled KV writes are not supported: use --kv-cache-dtype auto")
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        shape = (-1, self.head_num, self.head_dim)
        self.executor.write_layer(
            layer_id - self.start_layer,
            cache_k.to(self.dtype).view(shape),
            cache_v.to(self.dtype).view(shape),
        )

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of (K, V), halves of one."""
        return self.nbytes // 2, self.nbytes // 2


class InplaceMLAPool(RegionPool, MLATokenToKVPool):
    """The latent KV of an MLA model in four regions: one row a token, whose first kv_lora_rank elements are V."""

    _extend_batch: Any = None  # SGLang's ForwardBatch, of an expanded prefill that has prefixes
    _prefix_rows: torch.Tensor | None = None  # of the layer whose prefixes are attended chunk by chunk

    def _row_arguments(self) -> dict[str, Any]:
        shape = self.regions.shape
        return {"kv_lora_rank": shape.out_dim, "qk_rope_head_dim": shape.head_dim - shape.out_dim}

    def _create_buffers(self) -> None:
        self.kv_buffer = self.regions.device_k

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, layer_id_override=None) -> None:
        """Write this forward's latent rows, cache_k [tokens, 1, kv_lora_rank + rope], to where its plan says.

        cache_v, their beginning, is not looked at.
        """
        if self.device_only:
            super().set_kv_buffer(layer, loc_info, cache_k, cache_v, layer_id_override)
            return
        self._check_write(loc_info)
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        latent = cache_k.to(self.dtype).view(-1, 1, self.kv_cache_dim)
        self.executor.write_layer(layer_id - self.start_layer, latent)

    def set_mla_kv_buffer(self, layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override=None) -> None:
        """set_kv_buffer of rows in two parts, [tokens, 1, kv_lora_rank] and [tokens, 1, rope]."""
        if self.device_only:
            super().set_mla_kv_buffer(layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override)
            return
        latent = torch.cat((cache_k_nope, cache_k_rope), dim=-1)
        self.set_kv_buffer(layer, loc_info, latent, None, layer_id_override)

    def begin_prefix(self, forward_batch) -> None:
        """An extend attends its prefixes in the chunks that `forward_batch` now names."""
        self._extend_batch = forward_batch

    def get_mla_kv_buffer(self, layer, loc, dst_dtype=None) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the prefix chunk that is attended next, as ([tokens, 1, kv_lora_rank], [tokens, 1, rope]).

        Of SGLang's `loc` only the length counts: the forward's plan says where the rows are.
        """
        if self.device_only:
            return super().get_mla_kv_buffer(layer, loc, dst_dtype)
        chunk = self._extend_batch.prefix_chunk_idx
        if chunk == 0:
            self._prefix_rows = self.executor.read_prefix(layer.layer_id - self.start_layer)
        rows = self._chunk_of(self._prefix_rows, chunk)
        if len(rows) != len(loc):
            raise RuntimeError(
                f"layer {layer.layer_id}: a prefix chunk of {len(loc)} tokens, {len(rows)} planned"
            )
        if chunk == self._extend_batch.num_prefix_chunks - 1:
            self._prefix_rows = None
            if layer.layer_id == self.end_layer - 1:
                self._extend_batch = None
        rows = rows.to(dst_dtype or self.dtype).unsqueeze(1)
        return rows[..., : self.kv_lora_rank].contiguous(), rows[..., self.kv_lora_rank :].contiguous()

    def _chunk_of(self, rows: torch.Tensor, chunk: int) -> torch.Tensor:
        """Of all prefixes' rows, request after request, those of one chunk."""
        batch = self._extend_batch
        if batch.num_prefix_chunks == 1:
            return rows
        starts, sizes = (
            each[chunk].tolist() for each in (batch.prefix_chunk_starts_cpu, batch.prefix_chunk_seq_lens_cpu)
        )
        assert self.plan is not None
        prefixes = rows.split([span.prefix for span in self.plan.spans])
        return torch.cat(
            [own[start : start + size] for own, start, size in zip(prefixes, starts, sizes, strict=True)]
        )

    def get_kv_size_bytes(self) -> int:
        return self.nbytes


def pool_of(runner, kind: type) -> Any:
    """The pool that SGLang gave this model runner. RuntimeError unless it is one of ours, of this kind."""
    pool = runner.token_to_kv_pool
    if not isinstance(pool, kind):
        raise RuntimeError(
            f"--attention-backend {BACKEND_NAME} got the KV pool {type(pool).__name__}: a hook did not take"
        )
    return pool
