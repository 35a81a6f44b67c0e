"""The CPU's share, kept where measured times want it. It decides speed and nothing else: any share gives the same output."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_inplacekv.roofline import Line, balanced_share

HALF_LIFE_STEPS = 8
# The first steps of a server load kernels and touch caches.
_WARM_UP_STEPS = 3
# A step that took so many times the average says nothing about the next one, unless more of them follow.
_OUTLIER, _OUTLIERS_IN_A_ROW = 3.0, 4
# A share as good as this does not move: plans and tiles stay as they were.
_HYSTERESIS = 0.02
# A side that had nothing to do for so long is measured anew: what made it slow may be over.
_RETRY_STEPS = 500


@dataclass
class Costs:
    """What decodes have cost since this was last taken. Tokens are counted once a layer."""

    cpu_s: float = 0.0
    cpu_tokens: int = 0
    transfer_s: float = 0.0
    transfer_tokens: int = 0


class MovingAverage:
    """Exponential, without the first steps and lone outliers; None until there is a value."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._seen = 0
        self._outliers = 0
        self._weight = 1.0 - 0.5 ** (1.0 / HALF_LIFE_STEPS)

    def add(self, value: float) -> None:
        self._seen += 1
        if self._seen <= _WARM_UP_STEPS:
            return
        if self.value is None:
            self.value = value
            return
        if value > _OUTLIER * self.value:
            self._outliers += 1
            if self._outliers < _OUTLIERS_IN_A_ROW:
                return
        self._outliers = 0
        self.value += self._weight * (value - self.value)


class ShareController:
    """Target share from moving averages of what a token costs on either side."""

    def __init__(self, start: float, cpu_fixed_s: float) -> None:
        """start: the share until both sides have been measured. cpu_fixed_s: of handing a layer to the team and back."""
        self.target = self._start = start
        self._cpu_fixed_s = cpu_fixed_s
        self._cpu, self._transfer = MovingAverage(), MovingAverage()
        self._idle_steps = 0  # in a row, of one side alone

    def observe(self, costs: Costs) -> None:
        if costs.cpu_tokens:
            self._cpu.add(costs.cpu_s / costs.cpu_tokens)
        if costs.transfer_tokens:
            self._transfer.add(costs.transfer_s / costs.transfer_tokens)
        self._retry(costs)

    def _retry(self, costs: Costs) -> None:
        """Forget a side that has long had nothing to do, and start again."""
        one_side = bool(costs.cpu_tokens) != bool(costs.transfer_tokens)
        self._idle_steps = self._idle_steps + 1 if one_side else 0
        if self._idle_steps < _RETRY_STEPS:
            return
        self._idle_steps, self.target = 0, self._start
        if costs.cpu_tokens:
            self._transfer = MovingAverage()
        else:
            self._cpu = MovingAverage()

    @property
    def cpu(self) -> Line | None:
        """The CPU's time for a layer, once measured."""
        return None if self._cpu.value is None else Line(self._cpu_fixed_s, self._cpu.value)

    @property
    def transfer(self) -> Line | None:
        return None if self._transfer.value is None else Line(0.0, self._transfer.value)

    def share(self, host_tokens: int) -> float:
        """The target for a step that reads so many host tokens a layer."""
        if self.cpu is not None and self.transfer is not None and host_tokens:
            best = balanced_share(self.cpu, self.transfer, host_tokens)
            if abs(best - self.target) > _HYSTERESIS or best in (0.0, 1.0):
                self.target = best
        return self.target
