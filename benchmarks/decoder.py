"""Decode steps one after the other, with the share controlled, given, or held by placement alone, as a server runs them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

import cpu_attn
from sglang_inplacekv.feedback import Costs, ShareController
from sglang_inplacekv.step_plan import Span
from sglang_inplacekv.write_scope import AUTO_START_SHARE, WriteScope

from .layers import PAGE_TOKENS, Layers
from .scale import Shape


@dataclass(frozen=True)
class Step:
    seconds: float
    target: float
    share: float  # of the host tokens read, what the CPU attended
    floor: float  # of them, what lies in C: no share below it without new pages
    tokens: int  # read from host memory in each layer


class Decoder(ABC):
    """What is decoded, and who decides the share. `fixed_s` is what handing a layer to the CPU costs."""

    def __init__(self, scope: WriteScope, fixed_s: float, layers: int) -> None:
        self.scope, self._fixed_s, self._layers = scope, fixed_s, layers
        self.control: ShareController | None = None

    def auto(self, start: float = AUTO_START_SHARE) -> None:
        """From now on as `--inplacekv-cpu-share auto`, knowing nothing yet."""
        self.scope.target_share, self.scope.step_share = start, None
        self.follow(ShareController(start, self._fixed_s))

    def follow(self, control: ShareController) -> None:
        """From now on as `control` wants, with what it has measured."""
        self._take_costs()
        self.control, self.scope.steals = control, True

    def fixed(self, share: float, *, steals: bool) -> None:
        """From now on this share: of every step, or, unless it `steals`, of where new pages go."""
        self.control, self.scope.step_share = None, None
        self.scope.target_share, self.scope.steals = share, steals

    def step(self) -> Step:
        begun_s = self._now_s()
        if self.control is not None:
            self.control.observe(self._take_costs())
            self.scope.target_share = self.control.share(self._host_tokens())
            self.scope.step_share = self.control.step_share
        computed, stolen, streamed = self._attend()
        seconds, tokens = self._now_s() - begun_s, computed + stolen + streamed
        share = (computed + stolen) / tokens
        if self.control is not None:
            self.control.note_step(share, tokens, seconds / self._layers)
        return Step(seconds, self.scope.target_share, share, computed / tokens, tokens)

    def steps(self, count: int) -> list[Step]:
        return [self.step() for _ in range(count)]

    @property
    def out(self) -> torch.Tensor | None:
        """What the last layer of the last step came to, if anything."""
        return None

    @abstractmethod
    def place(self, shape: Shape) -> None:
        """Give back what was decoded, and decode `shape`, with homes as the scope wants them."""

    @abstractmethod
    def grow(self) -> None:
        """Every request is a page longer, with a home as the scope wants it."""

    def _now_s(self) -> float:
        return time.perf_counter()

    @abstractmethod
    def _take_costs(self) -> Costs:
        """As Executor.take_costs."""

    @abstractmethod
    def _host_tokens(self) -> int:
        """What the share is chosen for."""

    @abstractmethod
    def _attend(self) -> tuple[int, int, int]:
        """Plan and run a step. Returns the tokens of C, of T by the CPU, and of T by the link, that it read in each layer."""


class ScopeDecoder(Decoder):
    """Over the scope's counts of pages alone, which it sees as one request, by a clock of its own."""

    def __init__(self, layers: int, fixed_s: float) -> None:
        super().__init__(WriteScope(0.0), fixed_s, layers)
        self._costs, self._clock_s = Costs(), 0.0

    def place(self, shape: Shape) -> None:
        self.scope.compute_pages = self.scope.transfer_pages = 0
        self._add(shape.batch * shape.context // PAGE_TOKENS)

    def grow(self) -> None:
        self._add(1)

    def _add(self, pages: int) -> None:
        computed = self.scope.wanted_compute(pages)
        self.scope.compute_pages += computed
        self.scope.transfer_pages += pages - computed

    def _now_s(self) -> float:
        return self._clock_s

    def _take_costs(self) -> Costs:
        taken, self._costs = self._costs, Costs()
        return taken

    def _host_tokens(self) -> int:
        return self.scope.host_pages * PAGE_TOKENS

    @abstractmethod
    def _sides_s(self, computed: int, streamed: int) -> tuple[float, float, float]:
        """Of a layer of so many tokens on either side: the CPU's attention, what the layer takes besides, the copies."""

    def _attend(self) -> tuple[int, int, int]:
        scope, layers, costs = self.scope, self._layers, self._costs
        stolen = scope.wanted_stolen(scope.compute_pages, scope.transfer_pages)
        computed = (scope.compute_pages + stolen) * PAGE_TOKENS
        streamed = (scope.transfer_pages - stolen) * PAGE_TOKENS
        cpu_s, besides_s, link_s = self._sides_s(computed, streamed)
        layer_s = max(cpu_s + besides_s, link_s)
        self._clock_s += layers * layer_s
        costs.cpu_s += layers * cpu_s
        costs.cpu_tokens += layers * computed
        costs.transfer_s += layers * link_s
        costs.transfer_tokens += layers * streamed
        if link_s > cpu_s + besides_s:
            # Attention over P begins to wait where the hand-over begins.
            costs.exposed_s += layers * (link_s - besides_s + self._fixed_s)
        if computed:
            costs.between_s += layers * (layer_s - cpu_s)
            costs.betweens += layers
            costs.answers += layers
        return scope.compute_pages * PAGE_TOKENS, stolen * PAGE_TOKENS, streamed


class LayersDecoder(Decoder):
    """Over Layers, with the same inputs in every step."""

    def __init__(self, layers: Layers) -> None:
        scope, fixed_s = layers.regions.scope, cpu_attn.hand_over_seconds(layers.team)
        super().__init__(scope, fixed_s, layers.shape.layers)
        self.layers = layers
        self._spans: list[Span] = []
        self._inputs: tuple[torch.Tensor, ...] = ()

    def place(self, shape: Shape) -> None:
        self._spans = self.layers.allocate(shape)
        self._inputs = self.layers.inputs(shape.batch)

    def grow(self) -> None:
        self._spans = self.layers.grown(self._spans)

    @property
    def out(self) -> torch.Tensor:
        return self._inputs[-1].to("cpu", torch.float32, copy=True)

    def _take_costs(self) -> Costs:
        return self.layers.executor.take_costs()

    def _host_tokens(self) -> int:
        # With the open page, as the pool counts.
        return sum(len(span.pages) for span in self._spans) * PAGE_TOKENS

    def _attend(self) -> tuple[int, int, int]:
        plan = self.layers.plan(self._spans)
        self.layers.step(plan, self._inputs)
        read = plan.attended_tokens(PAGE_TOKENS)
        return read["C"], read["stolen"], read["T"]
