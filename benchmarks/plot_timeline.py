"""docs/timeline.svg: some layers of a traced decode step, a lane for each thing that goes on at once."""

from __future__ import annotations

from sglang_inplacekv.svg import COLOURS, Chart, ticks

from .trace import CPU, LANES, Interval, spans_of

_SHOWN_LAYERS = 4  # of the step: more would be too fine to see


def timeline_svg(result: dict) -> str:
    """The middle layers of the step in `result`, what benchmarks.cases.timeline wrote."""
    intervals = [Interval(**fields) for fields in result["intervals"]]
    start_us, end_us = middle(intervals)
    span_ms = (end_us - start_us) / 1e3
    chart = Chart(
        "Copy, GPU attention and CPU attention at once",
        (0.0, span_ms),
        (-0.6, len(LANES) - 0.4),
        height=290,
        left=120,
    )
    chart.x_axis("ms", [tick for tick in ticks(span_ms) if tick <= span_ms])
    for row, name in enumerate(LANES):
        lane = len(LANES) - 1 - row
        chart.lane(lane, name)
        for begin, stop in spans_of(intervals, name):
            begin, stop = max(begin, start_us), min(stop, end_us)
            if begin < stop:
                chart.bar((begin - start_us) / 1e3, (stop - start_us) / 1e3, lane, 0.55, COLOURS[row])
    shown = f"{_SHOWN_LAYERS} of {result['layers']} layers"
    chart.note(f"{shown}, {result['case']} tokens, CPU share {result['share']:g}")
    return chart.svg()


def middle(intervals: list[Interval]) -> tuple[float, float]:
    """From where the first layer shown begins to where the first one after them does: the CPU has one job a layer."""
    begins = sorted(interval.start_us for interval in intervals if interval.lane == CPU)
    first = (len(begins) - _SHOWN_LAYERS) // 2
    return begins[first], begins[first + _SHOWN_LAYERS]
