"""Decode steps one after the other, with the share controlled, given, or held by placement alone, as a server runs them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import cpu_attn
from sglang_inplacekv.feedback import Costs, ShareController
from sglang_inplacekv.roofline import Line
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

    def __init__(self, scope: WriteScope, fixed_s: float) -> None:
        self.scope, self._fixed_s = scope, fixed_s
        self.control: ShareController | None = None

    def auto(self, start: float = AUTO_START_SHARE) -> None:
        """From now on as `--inplacekv-cpu-share auto`, knowing nothing yet."""
        self._take_costs()
        self.control = ShareController(start, self._fixed_s)
        self.scope.target_share, self.scope.steals = start, True

    def fixed(self, share: float, *, steals: bool) -> None:
        """From now on this share: of every step, or, unless it `steals`, of where new pages go."""
        self.control = None
        self.scope.target_share, self.scope.steals = share, steals

    def step(self) -> Step:
        begun_s = self._now_s()
        if self.control is not None:
            self.control.observe(self._take_costs())
            self.scope.target_share = self.control.share(self._host_tokens())
        computed, stolen, streamed = self._attend()
        seconds, tokens = self._now_s() - begun_s, computed + stolen + streamed
        return Step(seconds, self.scope.target_share, (computed + stolen) / tokens, computed / tokens, tokens)

    def steps(self, count: int) -> list[Step]:
        return [self.step() for _ in range(count)]

    @property
    def lines(self) -> tuple[Line | None, Line | None]:
        """What the controller has measured, of the CPU and of the link."""
        return (self.control.cpu, self.control.transfer) if self.control else (None, None)

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


class LayersDecoder(Decoder):
    """Over Layers, with the same inputs in every step."""

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers.regions.scope, cpu_attn.hand_over_seconds(layers.team))
        self.layers = layers
        self._spans: list[Span] = []
        self._inputs: Sequence[torch.Tensor] = ()

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
        self.layers.step(plan, tuple(self._inputs))
        read = plan.attended_tokens(PAGE_TOKENS)
        return read["C"], read["stolen"], read["T"]
