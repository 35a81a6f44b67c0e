"""A repeated measurement as median and range, and step times out of arrival stamps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

# The last of a batch. With no other step to launch, an overlapped scheduler hands out their tokens in quick succession.
_SLACK_STEPS = 2


@dataclass(frozen=True)
class Spread:
    """Median, least and most of `count` repetitions."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        if not values:
            raise ValueError("no repetition was measured")
        return cls(statistics.median(values), min(values), max(values), len(values))

    @classmethod
    def from_json(cls, fields: dict) -> Spread:
        return cls(**fields)

    def as_json(self) -> dict:
        return asdict(self)

    def map(self, function) -> Spread:
        """Apply a monotonic function, such as seconds to tokens per second."""
        ends = sorted((function(self.least), function(self.most)))
        return Spread(function(self.median), *ends, self.count)

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(self.least)}-{number(self.most)}]"


def number(value: float) -> str:
    """Three significant digits, never in exponent form."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    digits = 2 if abs(value) < 10 else 1
    while abs(value) < 10.0 ** (2 - digits) and digits < 6:
        digits += 1
    return f"{value:.{digits}f}"


def step_windows(stamps_s: Sequence[float], *, warmup_steps: int, window_steps: int) -> list[float]:
    """Mean seconds of a step in each whole window of `window_steps` between the first steps and the last.

    Windows, because an overlapped scheduler hands out the tokens of neighbouring steps at uneven times.
    """
    marks = list(stamps_s[warmup_steps:-_SLACK_STEPS:window_steps])
    return [(end - start) / window_steps for start, end in pairwise(marks)]


def tokens_for(steps: int) -> int:
    """New tokens of each request for `steps` steps in `step_windows`, warm-up among them.

    Two more than that and the slack: the first token, which need not come for all at once, and the first step's
    beginning.
    """
    return 2 + steps + _SLACK_STEPS


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of `values` lie, the nearest one that occurred."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
