"""Whether a request that does not fit D now starts, in host memory, or waits. Pure functions of pages and times: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from sglang_inplacekv.feedback import MovingAverage
from sglang_inplacekv.roofline import Line, balanced_share, layer_seconds


class Verdict(Enum):
    IN_DEVICE = auto()  # D has room for all of it
    SPILLS = auto()  # starts, part of it in host memory
    WAITS = auto()


@dataclass(frozen=True)
class Demand:
    """A request that asks to start, and what runs beside it. Pages of D or the host; tokens of answers are upper bounds."""

    new_pages: int  # that it has to be given until it ends; a cached prefix is already there
    kept_pages: int  # of its cached prefix, in D
    # Of D, free or evictable, less what running requests will still take; below 0 if they will spill.
    room_pages: int
    device_pages: int  # all of D
    host_pages: int  # that a decode step of the running requests reads; looked at only with a StepModel
    new_tokens: int  # it may decode
    running_tokens: int | None  # the most that a running request may still decode; None if nothing runs
    waiting: int  # requests in the queue, itself included

    @property
    def spilled_pages(self) -> int:
        return max(0, self.new_pages - max(0, self.room_pages))

    @property
    def fits_alone(self) -> bool:
        return self.new_pages + self.kept_pages <= self.device_pages

    @property
    def companions(self) -> int:
        """With how many of the queue, itself included, it would share D if it waited."""
        return max(1, min(self.waiting, self.device_pages // max(1, self.new_pages + self.kept_pages)))


@dataclass(frozen=True)
class StepModel:
    """Seconds of a decode step: over D alone, and with host pages in every layer."""

    device_s: float
    cpu: Line
    transfer: Line
    layers: int
    page_size: int

    def step_s(self, host_pages: int) -> float:
        """A step that reads so many host pages, shared at best between CPU and link.

        Be they few: it is no whole graph over D any more, and some of its pages lie in C, so each layer waits for the CPU.
        """
        if host_pages == 0:
            return self.device_s
        tokens = host_pages * self.page_size
        share = balanced_share(self.cpu, self.transfer, tokens)
        layer_s = layer_seconds(share, self.cpu, self.transfer, tokens)
        return max(self.device_s, self.layers * self.cpu.fixed_s, self.layers * layer_s)


def decide(policy: str, demand: Demand, model: StepModel | None) -> Verdict:
    """policy: auto, queue or spill. model: None as long as it is not measured; `auto` then queues.

    Whatever the policy, a request that D could never hold starts, and so does any once nothing else runs: what runs ends, so
    nobody waits for ever.
    """
    if demand.spilled_pages == 0:
        return Verdict.IN_DEVICE
    if policy == "spill" or not demand.fits_alone or demand.running_tokens is None:
        return Verdict.SPILLS
    if policy == "auto" and model is not None and spilling_pays(demand, model):
        return Verdict.SPILLS
    return Verdict.WAITS


def spilling_pays(demand: Demand, model: StepModel) -> bool:
    """Whether a token of the request costs the server less time now than it will once the request has D.

    Now: what its host pages add to a step that is made anyway, for those that run. Later: a step over D alone, shared with
    its companions. Its pages stay where they are when those that run have ended, so only their part of its answer counts.
    """
    added_s = model.step_s(demand.host_pages + demand.spilled_pages) - model.step_s(demand.host_pages)
    shared = min(1.0, (demand.running_tokens or 0) / max(1, demand.new_tokens))
    return added_s < shared * model.device_s / demand.companions


class DeviceSteps:
    """Moving average of a decode step over D alone, from its beginning to that of the next one."""

    def __init__(self) -> None:
        self._average = MovingAverage()
        self._begun_s: float | None = None

    @property
    def seconds(self) -> float | None:
        return self._average.value

    def begin(self, now_s: float) -> None:
        if self._begun_s is not None:
            self._average.add(now_s - self._begun_s)
        self._begun_s = now_s

    def interrupt(self) -> None:
        """Something other than the next such step begins."""
        self._begun_s = None
