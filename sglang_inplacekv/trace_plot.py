"""A trace as a picture and as a table: the share, the regions and the time of decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sglang_inplacekv.svg import COLOURS, INK, Chart, stacked, ticks, ticks_between
from sglang_inplacekv.trace import TracedStep

_MOST_POINTS = 600  # of a curve: about one for each pixel that it is wide
_BLUE, _ORANGE, _GREEN, _VIOLET, _ = COLOURS
_REGIONS = (("D", _GREEN), ("C", _BLUE), ("T", _ORANGE))  # from below
_TIMES = (
    ("step", "wall_s", INK),
    ("CPU", "cpu_s", _BLUE),
    ("transfer", "transfer_s", _ORANGE),
    ("exposed", "exposed_s", _VIOLET),
)

Points = list[tuple[float, float]]


class _Columns:
    """Steps as arrays, and as curves of at most _MOST_POINTS points, each of as many steps."""

    def __init__(self, steps: Sequence[TracedStep]) -> None:
        self._steps = steps
        count = min(len(steps), _MOST_POINTS)
        self._bounds = np.linspace(0, len(steps), count + 1).astype(int)
        self.first, self.last = steps[0].step, max(steps[-1].step, steps[0].step + 1)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array([getattr(step, name) for step in self._steps], dtype=np.float64)

    def curve(self, values: np.ndarray, fold: Callable[..., float] = np.mean) -> Points:
        """fold: what stands for the steps of a point."""
        numbers = self["step"]
        points = [
            (float(fold(numbers[start:stop])), float(fold(values[start:stop])))
            for start, stop in zip(self._bounds, self._bounds[1:])
        ]
        return points if len(points) > 1 else [*points, (self.last, points[0][1])]


def trace_svg(steps: Sequence[TracedStep]) -> str:
    """Three charts over the steps, of which there is at least one."""
    columns = _Columns(steps)
    return stacked([_share_chart(columns), _region_chart(columns), _time_chart(columns)])


def _chart(columns: _Columns, title: str, label: str, top: list[float]) -> Chart:
    chart = Chart(title, (columns.first, columns.last), (0.0, top[-1]), height=300, right=30)
    chart.x_axis("decode step", ticks_between(columns.first, columns.last))
    chart.y_axis(label, top)
    return chart


def _share_chart(columns: _Columns) -> Chart:
    chart = _chart(columns, "The CPU's share r", "of host tokens", [0.0, 0.25, 0.5, 0.75, 1.0])
    chart.curve(columns.curve(columns["effective"]), _BLUE)
    chart.curve(columns.curve(columns["target"]), _ORANGE, dashed=True)
    chart.legend([("target", _ORANGE, True), ("effective", _BLUE, False)])
    return chart


def _region_chart(columns: _Columns) -> Chart:
    sizes = [columns[name] for name, _ in _REGIONS]
    most = float(np.sum(sizes, axis=0).max())
    unit, scale = ("thousand tokens", 1e3) if most >= 1e4 else ("tokens", 1.0)
    chart = _chart(columns, "Tokens held, by region", unit, ticks(max(1.0, most) / scale))
    low = np.zeros_like(sizes[0])
    for (_, colour), size in zip(_REGIONS, sizes):
        high = low + size
        chart.area(columns.curve(low / scale), columns.curve(high / scale), colour)
        low = high
    chart.curve(columns.curve(columns["window"] / scale), INK, dashed=True)
    # The topmost first, as in the picture.
    chart.legend(
        [
            *((name, colour, False) for name, colour in reversed(_REGIONS)),
            ("of C and T in windows", INK, True),
        ]
    )
    return chart


def _time_chart(columns: _Columns) -> Chart:
    curves = [columns.curve(columns[name] * 1e3, np.median) for _, name, _ in _TIMES]
    top = max(y for curve in curves for _, y in curve)
    chart = _chart(columns, "Time of a step", "ms", ticks(max(top, 1e-3)))
    for (_, _, colour), curve in zip(_TIMES, curves):
        chart.curve(curve, colour)
    chart.legend([(label, colour, False) for label, _, colour in _TIMES])
    return chart


def summary(steps: Sequence[TracedStep]) -> str:
    """A few lines: totals, and median, least and most of what varies. Shares are those of steps with host tokens."""
    spilled = [step for step in steps if step.host_tokens]
    transfer_s, exposed_s = (
        sum(getattr(step, name) for step in steps) for name in ("transfer_s", "exposed_s")
    )
    hidden = f"{max(0.0, 1 - exposed_s / transfer_s):.2f}" if transfer_s else "-"
    seconds = steps[-1].at_s + steps[-1].wall_s - steps[0].at_s
    lines = [
        f"{len(steps)} decode steps in {seconds:.1f} s, {len(spilled)} of them with host tokens; "
        f"of transfers hidden: {hidden}; stolen tokens: {sum(step.stolen for step in steps)}",
        f"{'':>18} {'median':>10} {'least':>10} {'most':>10}",
    ]
    rows: list[tuple[str, Sequence[TracedStep], str, float, int]] = [
        ("share target", spilled, "target", 1, 2),
        ("share effective", spilled, "effective", 1, 2),
        *((f"{label} ms", steps, name, 1e3, 2) for label, name, _ in _TIMES),
        ("host tokens read", steps, "host_tokens", 1, 0),
        *((f"{name} tokens", steps, name, 1, 0) for name, _ in _REGIONS),
    ]
    for label, own, name, scale, decimals in rows:
        values = np.array([getattr(step, name) for step in own]) * scale
        cells = [f"{fold(values):.{decimals}f}" if own else "-" for fold in (np.median, np.min, np.max)]
        lines.append(f"{label:>18} " + " ".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)
