"""A server in miniature over Regions and an Executor, without SGLang: requests arrive, extend in chunks, decode, share
prefixes, finish and are aborted, while every attention output is checked against dense attention over what was written.

SGLang's part (row tables, page-aligned allocation, a prefix cache that keeps full pages) is played here in its simplest form.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.config import InplaceConfig
from sglang_inplacekv.executors import make_executor
from sglang_inplacekv.layout import KVShape, RegionSizes, window_count
from sglang_inplacekv.regions import Regions
from sglang_inplacekv.step_plan import Planner, Span, StepPlan
from tests.inplacekv.reference import dense_attention


@dataclass
class SimRequest:
    name: str
    row: int
    pages: list[int] = field(default_factory=list)
    shared: int = 0  # leading pages owned by the cache
    length: int = 0
    k: torch.Tensor | None = None  # [layers, length, kv_heads, d]: what was written, in order
    v: torch.Tensor | None = None


@dataclass
class CachedPrefix:
    pages: list[int]
    k: torch.Tensor
    v: torch.Tensor
    readers: int = 0


class Simulation:
    """Runs in fp32 on the CPU, in bf16 on a GPU.

    Tolerances: 2e-5 for fp32 arithmetic of unit-variance values over up to some thousand tokens; 2e-2 for bf16, whose
    outputs of up to 4 are rounded to 2**-8 of their size in each of up to a few partial states.
    """

    def __init__(
        self,
        *,
        share: float,
        device_pages: int,
        host_pages: int,
        seed: int,
        page_size: int = 4,
        chunk_pages: int = 3,
        tile_pages: int = 2,
        max_running: int = 4,
        layers: int = 2,
        jitter: bool = True,
        device: str = "cpu",
        transfer: str = "dma",
        latent: bool = False,
        steals: bool = False,
    ) -> None:
        self.device = device
        self.tolerance = 2e-5 if device == "cpu" else 2e-2
        dtype, head_dim = (torch.float32, 64) if device == "cpu" else (torch.bfloat16, 128)
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.shape, self.q_heads = KVShape(layers, 2, head_dim, dtype, page_size), 6
        if latent:
            # On a GPU the widths of DeepSeek's models, which the kernels are made for.
            rank, rope, self.q_heads = (64, 32, 6) if device == "cpu" else (512, 64, 16)
            self.shape = KVShape(layers, 1, rank + rope, dtype, page_size, value_dim=rank)
        sizes = RegionSizes(
            device_pages, window_count(max_running), host_pages, chunk_pages, tile_pages, page_size
        )
        config = InplaceConfig(
            cpu_share=share,
            transfer=transfer,
            poison=True,
            jitter_seed=seed if jitter else None,
            wait_timeout_s=30,
        )
        self.team = cpu_attn.Executor(threads=2)
        self.regions = Regions(config, self.shape, sizes, self.team, device)
        self.regions.scope.steals = steals
        self.executor = make_executor(self.regions, device)
        self.planner = Planner(self.regions.homes, self.regions.windows, config.wait_timeout_s)
        self.running: list[SimRequest] = []
        self.cache: list[CachedPrefix] = []
        self.max_running, self.scale = max_running, self.shape.head_dim**-0.5
        self.free_rows = list(range(1, max_running + 1))
        self.arrivals = 0
        self.worst = 0.0

    def close(self) -> None:
        self.executor.close()
        self.team.close()

    @property
    def page_size(self) -> int:
        return self.shape.page_size

    def random_kv(self, tokens: int) -> torch.Tensor:
        shape = (self.shape.layers, tokens, self.shape.kv_heads, self.shape.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.shape.dtype)

    def admit(self, prefix: CachedPrefix | None = None) -> SimRequest:
        self.arrivals += 1
        request = SimRequest(f"r{self.arrivals}", self.free_rows.pop())
        request.k = self.random_kv(0)
        request.v = request.k[..., : self.shape.out_dim]
        if prefix is not None:
            prefix.readers += 1
            request.pages, request.shared = list(prefix.pages), len(prefix.pages)
            request.length = request.shared * self.page_size
            request.k, request.v = prefix.k, prefix.v
            request.prefix = prefix
        self.running.append(request)
        return request

    def grow(self, request: SimRequest, tokens: int) -> bool:
        """Allocate room for `tokens` more, as SGLang does: the open page is continued."""
        wanted = -(-(request.length + tokens) // self.page_size) - len(request.pages)
        pages = self.regions.homes.allocate(wanted)
        if pages is None:
            return False
        request.pages += pages
        return True

    def forward(self, work: list[tuple[SimRequest, int]], is_decode: bool) -> None:
        """Run one forward that adds `tokens` to each request, and check every layer's output."""
        spans = [
            Span(
                r.name,
                np.array(r.pages[: -(-(r.length + n) // self.page_size)]),
                r.length,
                r.length + n,
            )
            for r, n in work
        ]
        self.executor.acknowledge()
        plan = self.planner.build(spans, is_decode)
        self.executor.begin_forward(plan)
        for request, tokens in work:
            parts = [self.random_kv(tokens) for _ in range(self.shape.parts)]
            request.k = torch.cat((request.k, parts[0]), 1)
            request.v = torch.cat((request.v, parts[-1][..., : self.shape.out_dim]), 1)
        for layer in range(self.shape.layers):
            self._layer(layer, work, is_decode)
        self.executor.end_forward()
        if is_decode:
            self._check_costs(plan)
        for request, tokens in work:
            request.length += tokens

    def _layer(self, layer: int, work: list[tuple[SimRequest, int]], is_decode: bool) -> None:
        k = torch.cat([r.k[layer, r.length :] for r, _ in work])
        v = torch.cat([r.v[layer, r.length :] for r, _ in work])
        q = torch.randn(len(k), self.q_heads, self.shape.head_dim, generator=self.generator).to(
            self.shape.dtype
        )
        on_device = [t.to(self.device) for t in (q, k, v)]
        self.executor.write_layer(layer, *on_device[1 : 1 + self.shape.parts])
        out = torch.empty(*q.shape[:2], self.shape.out_dim, dtype=q.dtype, device=self.device)
        if is_decode:
            self.executor.decode(layer, on_device[0], self.scale, out)
        elif self.shape.value_dim is not None and self.device != "cpu":
            self._check_prefixes(layer, [request for request, _ in work])
            return
        else:
            self.executor.extend(layer, *on_device, self.scale, out)
        out = out.cpu()
        first = 0
        for request, tokens in work:
            wanted = dense_attention(
                q[first : first + tokens], request.k[layer], request.v[layer], self.scale, request.length
            )
            error = (out[first : first + tokens] - wanted).abs().max().item()
            self.worst = max(self.worst, error)
            assert error < self.tolerance, (
                f"{request.name} layer {layer} tokens {request.length}+{tokens}: error {error}"
            )
            first += tokens

    def _check_costs(self, plan: StepPlan) -> None:
        """The tokens of each side, once a layer, and time for them. A GPU knows of its transfers a step later."""
        costs, layers = self.executor.take_costs(), self.shape.layers
        assert costs.cpu_tokens == plan.cpu_tokens * layers and (costs.cpu_s > 0) == (plan.cpu_tokens > 0)
        if self.device == "cpu":
            assert costs.transfer_tokens == plan.transfer_tokens * layers
            assert (costs.transfer_s > 0) == (plan.transfer_tokens > 0) == (costs.transfer_bytes > 0)
            assert (costs.exposed_s > 0) == (plan.transfer_tokens > 0)

    def _check_prefixes(self, layer: int, requests: list[SimRequest]) -> None:
        """On a GPU SGLang expands latent rows and attends them itself: what it gets must be every row, in some order."""
        lengths = [request.length for request in requests]
        if not any(lengths):
            return
        for request, found in zip(
            requests, self.executor.read_prefix(layer).cpu().split(lengths), strict=True
        ):
            wanted = request.k[layer, : request.length, 0]
            found, wanted = (rows[rows.double().sum(-1).argsort()] for rows in (found, wanted))
            assert torch.equal(found, wanted), (
                f"{request.name} layer {layer}: prefix of {request.length} tokens"
            )

    def finish(self, request: SimRequest, keep: bool) -> None:
        """Leave; with `keep` the full pages stay cached for later arrivals."""
        self.running.remove(request)
        self.free_rows.append(request.row)
        full = request.length // self.page_size
        own = request.pages[request.shared :]
        if keep and full > request.shared:
            tokens = full * self.page_size
            kept = CachedPrefix(request.pages[:full], request.k[:, :tokens], request.v[:, :tokens])
            kept.base = getattr(request, "prefix", None)
            kept.own = request.pages[request.shared : full]
            if kept.base is not None:
                kept.base.readers += 1
            self.cache.append(kept)
            own = request.pages[full:]
        self._free(own)
        if hasattr(request, "prefix"):
            request.prefix.readers -= 1

    def evict(self) -> bool:
        idle = [entry for entry in self.cache if entry.readers == 0]
        if not idle:
            return False
        entry = self.rng.choice(idle)
        self.cache.remove(entry)
        if entry.base is not None:
            entry.base.readers -= 1
        self._free(entry.own)
        return True

    def _free(self, pages: list[int]) -> None:
        self.regions.homes.free(pages)
        self.regions.pages_freed(pages)

    def room_for(self, request: SimRequest, tokens: int) -> bool:
        while not self.grow(request, tokens):
            if not self.evict():
                return False
        return True

    def step(self) -> None:
        """One scheduler step: arrivals first, else decode, now and then an abort."""
        if self.free_rows and self.rng.random() < 0.4:
            self._arrive()
        elif self.running:
            self._decode()
        for request in list(self.running):
            if self.rng.random() < 0.06:
                self.finish(request, keep=self.rng.random() < 0.6)
        self.regions.check_integrity()

    def _arrive(self) -> None:
        prefix = self.rng.choice(self.cache) if self.cache and self.rng.random() < 0.6 else None
        request = self.admit(prefix)
        batch = []
        for extender in [request, *self.rng.sample(self.running[:-1], k=min(1, len(self.running) - 1))]:
            tokens = self.rng.choice(
                (1, self.page_size - 1, self.page_size, self.page_size + 1, 3 * self.page_size + 2)
            )
            if self.room_for(extender, tokens):
                batch.append((extender, tokens))
        if not batch or batch[0][0] is not request:
            self.finish(request, keep=False)
        if batch:
            batch = [(r, n) for r, n in batch if r in self.running]
        if batch:
            self.forward(batch, is_decode=False)

    def _decode(self) -> None:
        batch = []
        for request in list(self.running):
            if request.length == 0 or self.room_for(request, 1):
                batch.append((request, 1))
            else:
                self.finish(request, keep=False)  # retraction
        batch = [(r, n) for r, n in batch if r in self.running and r.length > 0]
        if batch:
            self.forward(batch, is_decode=True)
