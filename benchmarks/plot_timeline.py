"""docs/timeline.svg: one traced decode step, a lane for each thing that goes on at once."""

from __future__ import annotations

from .svg import COLOURS, Chart, ticks
from .trace import LANES, Interval, spans_of

_SHOWN_LAYERS = 3  # of the step: more would be too fine to see


def timeline_svg(result: dict) -> str:
    """The middle layers of the step in `result`, what benchmarks.cases.timeline wrote."""
    intervals = [Interval(**fields) for fields in result["intervals"]]
    layers = max(1, result["layers"])
    layer_us = result["step_us"] / layers
    start_us = layer_us * max(0, layers - _SHOWN_LAYERS) / 2
    end_us = min(result["step_us"], start_us + layer_us * _SHOWN_LAYERS)
    chart = Chart(
        "Copy, GPU attention and CPU attention at once",
        (0.0, (end_us - start_us) / 1e3),
        (-0.6, len(LANES) - 0.4),
        height=290,
        left=120,
    )
    chart.x_axis("ms", [t for t in ticks((end_us - start_us) / 1e3) if t <= (end_us - start_us) / 1e3])
    for row, name in enumerate(LANES):
        lane = len(LANES) - 1 - row
        chart.lane(lane, name)
        for begin, stop in spans_of(intervals, name):
            begin, stop = max(begin, start_us), min(stop, end_us)
            if begin < stop:
                chart.bar((begin - start_us) / 1e3, (stop - start_us) / 1e3, lane, 0.55, COLOURS[row])
    chart.note(f"{_SHOWN_LAYERS} of {layers} layers, {result['case']} tokens, CPU share {result['share']:g}")
    return chart.svg()
