"""The CPU's share, kept where measured times want it. It decides speed and nothing else: any share gives the same output."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from sglang_inplacekv.end_trials import EndTrials
from sglang_inplacekv.roofline import Line, balanced_share, layer_seconds

HALF_LIFE_STEPS = 8
# The first steps of a server load kernels and touch caches.
_WARM_UP_STEPS = 3
_FIRST_STEPS = 3  # their median is what an average starts from
# What enters an average is the median of so many steps. A host that others use too has steps that take several times as long,
# and they say little about the next one.
_MEDIAN_STEPS = 5
# A median that is more than so many times the average counts as that.
_CLIP = 2.0
_LEAST_S = 1e-15
# A share whose layer takes no longer than so many times the best one's does not move: a step that moves plans its tiles anew,
# which takes the host as long as a layer or two. Times are compared, not shares: at 0.6 a hundredth of the share too little
# leaves the link a fortieth more to do.
_AS_GOOD = 1.015
# A side that had nothing to do for so long is measured anew: what made it slow may be over.
_RETRY_STEPS = 500
# Of a layer's time, by the lines. In a short layer launching is in them too, of both sides' work where only one's would be.
_WORTH_A_TRIAL = 1.6
_EXPLAINED = 1.2  # a layer that takes no longer than so many times what the lines say


@dataclass
class Costs:
    """What decodes have cost since this was last taken. Tokens are counted once a layer."""

    cpu_s: float = 0.0
    cpu_tokens: int = 0
    answers: int = 0  # of the CPU, one a layer
    between_s: float = 0.0  # from one layer's answer of the CPU to the next layer's, less the CPU's attention
    betweens: int = 0
    transfer_s: float = 0.0
    transfer_tokens: int = 0
    transfer_bytes: int = 0  # a page that requests share crosses once
    exposed_s: float = 0.0  # what attention over P stood still for transfers, beside the CPU's attention too

    def add(self, other: Costs) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def hidden_s(self) -> float:
        """Of transfer_s, what went on behind other work. Never negative: a wait may begin before its copy does."""
        return max(0.0, self.transfer_s - self.exposed_s)


class MovingAverage:
    """Exponential, without the first steps, of running medians; None until there is a value."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._skipped = 0
        self._recent: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self._weight = 1.0 - 0.5 ** (1.0 / HALF_LIFE_STEPS)

    def add(self, value: float) -> None:
        if self._skipped < _WARM_UP_STEPS:
            self._skipped += 1
            return
        self._recent.append(max(value, _LEAST_S))
        median = statistics.median(self._recent)
        if self.value is not None:
            self.value += self._weight * (min(median, _CLIP * self.value) - self.value)
        elif len(self._recent) == _FIRST_STEPS:
            self.value = median


class ShareController:
    """Target share from moving averages of what a token costs on either side."""

    def __init__(self, start: float, cpu_fixed_s: float, predicted: tuple[Line, Line] | None = None) -> None:
        """start: the share until both sides have been measured.

        cpu_fixed_s: the hand-over to the CPU team and back. Of what a layer takes besides the CPU's attention this is known
        before the rest has been measured.
        predicted: lines of CPU and transfer that were measured before; until the steps' own are known they take their place.
        """
        self.target = self._start = start
        self._known_fixed_s = cpu_fixed_s
        self._predicted: tuple[Line | None, Line | None] = predicted or (None, None)
        self._cpu, self._fixed, self._transfer = MovingAverage(), MovingAverage(), MovingAverage()
        self._idle_steps = [0, 0]  # of CPU and transfer, while the other side worked
        self.ends = EndTrials()

    def observe(self, costs: Costs) -> None:
        """Costs of neither side tell nothing: they come with every prefill, and before the GPU's are known."""
        if costs.cpu_tokens:
            self._cpu.add(costs.cpu_s / costs.cpu_tokens)
        if costs.betweens:
            # Attention over P begins to wait when the CPU gets its part. What it still waits after the CPU's answer is the
            # link's time, not the layer's.
            waited_s = (costs.exposed_s - costs.cpu_s) / costs.answers - self._known_fixed_s
            self._fixed.add(costs.between_s / costs.betweens - max(0.0, waited_s))
        if costs.transfer_tokens:
            self._transfer.add(costs.transfer_s / costs.transfer_tokens)
        worked = (costs.cpu_tokens > 0, costs.transfer_tokens > 0)
        for side in (0, 1):
            if worked[side]:
                self._idle_steps[side] = 0
            elif worked[1 - side]:
                self._idle_steps[side] += 1
        if self._idle_steps[0] >= _RETRY_STEPS:
            self._cpu, self._fixed = self._start_again(), MovingAverage()
        if self._idle_steps[1] >= _RETRY_STEPS:
            self._transfer = self._start_again()

    def _start_again(self) -> MovingAverage:
        # What was predicted may be why a side idles: from here only steps tell.
        self._idle_steps, self.target, self._predicted = [0, 0], self._start, (None, None)
        return MovingAverage()

    @property
    def fixed_s(self) -> float:
        """What a layer takes beside the CPU's attention: the hand-over, and the rest of the layer, which waits for the CPU."""
        return self._known_fixed_s if self._fixed.value is None else self._fixed.value

    @property
    def cpu(self) -> Line | None:
        """The CPU's time for a layer, once measured."""
        return None if self._cpu.value is None else Line(self.fixed_s, self._cpu.value)

    @property
    def transfer(self) -> Line | None:
        return None if self._transfer.value is None else Line(0.0, self._transfer.value)

    @property
    def _lines(self) -> tuple[Line, Line] | None:
        cpu, transfer = self.cpu or self._predicted[0], self.transfer or self._predicted[1]
        return None if cpu is None or transfer is None else (cpu, transfer)

    def note_step(self, share: float, host_tokens: int, layer_s: float) -> None:
        """A decode took layer_s a layer, in which it read so many host tokens, of which the CPU attended `share`."""
        lines = self._lines
        if lines is not None and host_tokens:
            known, *ends = (layer_seconds(at, *lines, host_tokens) for at in (share, 1.0, 0.0))
            worth = [
                end for end, end_s in zip((1.0, 0.0), ends, strict=True) if end_s <= _WORTH_A_TRIAL * layer_s
            ]
            self.ends.note(share, host_tokens, layer_s, worth if layer_s > _EXPLAINED * known else ())
        else:
            self.ends.break_off()

    @property
    def step_share(self) -> float | None:
        """What the next step should attend instead of `share`; None: nothing else. An end that is held leaves a side idle: it
        steps back while that side is measured anew."""
        return None if self._lines is None else self.ends.share

    def share(self, host_tokens: int) -> float:
        """The target for a step that reads so many host tokens a layer."""
        lines = self._lines
        if lines is not None and host_tokens:
            best = balanced_share(*lines, host_tokens)
            now_s, best_s = (layer_seconds(at, *lines, host_tokens) for at in (self.target, best))
            if now_s > _AS_GOOD * best_s or best in (0.0, 1.0):
                self.target = best
        return self.target
