"""Just enough SVG for a chart: a frame with axes, and marks in data coordinates. No plotting library is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

FONT = 'font-family="Helvetica, Arial, sans-serif"'
INK, GRID = "#333", "#e4e4e4"
COLOURS = ("#2f5fa8", "#c4622d", "#3f8f4f", "#7d4a9e", "#8a7a2a")


class Chart:
    """`width` x `height` pixels; x and y give the data range that the frame shows."""

    def __init__(
        self,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        width: int = 760,
        height: int = 400,
        left: int = 70,
        right: int = 20,
    ) -> None:
        self._x, self._y, self.width, self.height = x, y, width, height
        self._left, self._right, self._top, self._bottom = left, width - right, 58, height - 52
        self._parts = [f'<rect width="{width}" height="{height}" fill="#fff"/>']
        self._text(self._left, 24, title, size=15, bold=True, anchor="start")

    def px(self, x: float) -> float:
        low, high = self._x
        return self._left + (x - low) / (high - low) * (self._right - self._left)

    def py(self, y: float) -> float:
        low, high = self._y
        return self._bottom - (y - low) / (high - low) * (self._bottom - self._top)

    def x_axis(self, label: str, ticks: Sequence[float]) -> None:
        for tick in ticks:
            at = self.px(tick)
            self._line(at, self._top, at, self._bottom, GRID)
            self._text(at, self._bottom + 18, _label(tick))
        self._line(self._left, self._bottom, self._right, self._bottom, INK)
        self._text((self._left + self._right) / 2, self.height - 12, label)

    def y_axis(self, label: str, ticks: Sequence[float]) -> None:
        for tick in ticks:
            at = self.py(tick)
            self._line(self._left, at, self._right, at, GRID)
            self._text(self._left - 8, at + 4, _label(tick), anchor="end")
        self._line(self._left, self._top, self._left, self._bottom, INK)
        middle = (self._top + self._bottom) / 2
        self._text(18, middle, label, extra=f' transform="rotate(-90 18 {middle:.1f})"')

    def curve(self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> None:
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
        )

    def area(
        self, low: Sequence[tuple[float, float]], high: Sequence[tuple[float, float]], colour: str
    ) -> None:
        """Fill between two curves over the same x."""
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in [*high, *reversed(low)])
        self._parts.append(f'<polygon points="{path}" fill="{colour}" fill-opacity="0.75"/>')

    def dot(self, x: float, y: float, least: float, most: float, colour: str) -> None:
        """A measured point with its range."""
        at = self.px(x)
        self._line(at, self.py(least), at, self.py(most), colour)
        self._parts.append(f'<circle cx="{at:.1f}" cy="{self.py(y):.1f}" r="3.2" fill="{colour}"/>')

    def bar(self, x0: float, x1: float, lane: float, height: float, colour: str) -> None:
        """A bar from x0 to x1, centred on y = lane."""
        left, width = self.px(x0), max(0.3, self.px(x1) - self.px(x0))
        top = self.py(lane + height / 2)
        tall = self.py(lane - height / 2) - top
        self._parts.append(
            f'<rect x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{tall:.1f}" fill="{colour}"/>'
        )

    def strokes(self, runs: Sequence[tuple[float, float, float]], colour: str, width: float) -> None:
        """Horizontal lines (x0, x1, y), `width` pixels thick; thousands of them are one element."""
        path = "".join(f"M{self.px(x0):.1f} {self.py(y):.1f}H{self.px(x1):.1f}" for x0, x1, y in runs)
        self._parts.append(f'<path d="{path}" stroke="{colour}" stroke-width="{width:g}"/>')

    def value(self, x: float, y: float, text: str) -> None:
        """Text that begins just right of a point."""
        self._text(self.px(x) + 6, self.py(y) + 4, text, anchor="start")

    def lane(self, y: float, label: str) -> None:
        self._text(self._left - 8, self.py(y) + 4, label, anchor="end")

    def legend(self, entries: Sequence[tuple[str, str, bool]], at: tuple[float, float] | None = None) -> None:
        """(label, colour, dashed), from data coordinates `at` downwards; else above the frame, up to its right end."""
        if at is not None:
            places = [(self.px(at[0]), self.py(at[1]) + 18 * row) for row in range(len(entries))]
        else:
            widths = [42.0 + 7.0 * len(label) for label, _, _ in entries]
            places = [(self._right - sum(widths[i:]) + 14, self._top - 10.0) for i in range(len(widths))]
        for (label, colour, dashed), (x, y) in zip(entries, places):
            extra = ' stroke-width="2" stroke-dasharray="6 4"' if dashed else ' stroke-width="3"'
            self._line(x, y, x + 22, y, colour, extra)
            self._text(x + 28, y + 4, label, anchor="start")

    def note(self, text: str) -> None:
        """A line below the title."""
        self._text(self._left, 43, text, anchor="start", colour="#666")

    def svg(self) -> str:
        return stacked([self])

    def elements(self, y: int = 0) -> list[str]:
        """What is drawn, moved down by y pixels."""
        return [f'<g transform="translate(0 {y})">', *self._parts, "</g>"] if y else self._parts

    def _line(self, x1: float, y1: float, x2: float, y2: float, colour: str, extra: str = "") -> None:
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{extra}/>'
        )

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        anchor: str = "middle",
        bold: bool = False,
        colour: str = INK,
        extra: str = "",
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}{extra}>'
            f"{escape(text)}</text>"
        )


def stacked(charts: Sequence[Chart]) -> str:
    """One picture of charts below each other."""
    width, height, parts = max(chart.width for chart in charts), 0, []
    for chart in charts:
        parts += chart.elements(height)
        height += chart.height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT} font-size="12">'
    return "\n".join((head, *parts, "</svg>")) + "\n"


def _label(tick: float) -> str:
    return f"{tick:.10g}"  # a million in digits, and 0.1 + 0.2 as 0.3


def ticks(top: float, count: int = 5) -> list[float]:
    """From 0 in round steps up to the first that is no less than `top`; about `count` of them."""
    step = _round_step(top, count)
    return [step * index for index in range(math.ceil(top / step) + 1)]


def ticks_between(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, which is more; about `count` of them."""
    step = _round_step(high - low, count)
    return [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_step(span: float, count: int) -> float:
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor * count >= span)
