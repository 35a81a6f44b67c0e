"""Bandwidth probes: what host memory and the link give, alone and together."""

from __future__ import annotations

import torch

import cpu_attn
from cpu_attn.probe import huge_buffer

from .scale import Scale
from .stats import Spread

_WAIT_S = 60.0
_JOINT_COPIES = 40


def _random_bytes(target: torch.Tensor) -> torch.Tensor:
    piece = torch.randint(0, 256, (min(len(target), 1 << 25),), dtype=torch.uint8)
    for part in target.split(len(piece)):
        part.copy_(piece[: len(part)])
    return target


class Copies:
    """Queued copies of one pinned buffer to the GPU, with an event after each."""

    def __init__(self, size_bytes: int) -> None:
        self._source = _random_bytes(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))
        self._target = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()
        self._events: list[torch.cuda.Event] = []

    def queue(self, count: int) -> None:
        with torch.cuda.stream(self._stream):
            for turn in range(count + 1):
                if turn:
                    self._target.copy_(self._source, non_blocking=True)
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._events.append(event)

    @property
    def under_way(self) -> bool:
        return not self._events[-1].query()

    def gbps(self) -> list[float]:
        """Rate of each copy, when all are done."""
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:])
        return [len(self._source) / (a.elapsed_time(b) * 1e-3) / 1e9 for a, b in pairs]


def pinned_copy(scale: Scale) -> Spread:
    copies = Copies(scale.copy_bytes)
    copies.queue(1 + scale.repeats)
    return Spread.of(copies.gbps()[1:])


def dram_read(team: cpu_attn.Executor, scale: Scale) -> Spread:
    buffer = _random_bytes(huge_buffer(scale.read_bytes, team))
    return Spread.of([_read_gbps(team, buffer) for _ in range(1 + scale.repeats)][1:])


def _read_gbps(team: cpu_attn.Executor, buffer: torch.Tensor) -> float:
    job = team.submit_read(buffer)
    job.wait(_WAIT_S)
    return len(buffer) / job.seconds / 1e9


def joint(team: cpu_attn.Executor, scale: Scale) -> tuple[Spread, Spread]:
    """(DRAM read by the team, H2D copies), GB/s, while both are under way."""
    buffer = _random_bytes(huge_buffer(scale.read_bytes, team))
    copies, reads = Copies(scale.copy_bytes), []
    copies.queue(_JOINT_COPIES)
    while copies.under_way:
        reads.append(_read_gbps(team, buffer))
    # The first of each started alone, the last read may have ended alone.
    return Spread.of(reads[1:-1]), Spread.of(copies.gbps()[1:])
