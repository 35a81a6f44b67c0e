"""docs/decode_sweep.svg: step time over the CPU share, measured and bound."""

from __future__ import annotations

from sglang_inplacekv.svg import COLOURS, Chart, ticks

from .bounds import Bounds

_BOUND_POINTS = 101


def sweep_svg(rows: list[dict], bounds: Bounds) -> str:
    """`rows` of benchmarks.cases.decode_sweep, spreads restored; one colour a shape, its bound dashed."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    top = ticks(max(row["step_ms"].most for row in rows))
    chart = Chart("Spilled decode: step time over the CPU's share", (0.0, 1.0), (0.0, top[-1]))
    chart.x_axis("share of the host's KV that the CPU attends", [i / 10 for i in range(11)])
    chart.y_axis("ms a step", top)
    entries = []
    for colour, case in zip(COLOURS, cases):
        own = sorted((row for row in rows if row["case"] == case), key=lambda row: row["effective_share"])
        host_bytes = max(row["host_bytes"] for row in own)
        shares = [i / (_BOUND_POINTS - 1) for i in range(_BOUND_POINTS)]
        chart.curve([(s, bounds.step_ms(host_bytes, s)) for s in shares], colour, dashed=True)
        chart.curve([(row["effective_share"], row["step_ms"].median) for row in own], colour)
        for row in own:
            step = row["step_ms"]
            chart.dot(row["effective_share"], step.median, step.least, step.most, colour)
        entries.append((case, colour, False))
    chart.note(
        f"dashed: KV bytes over bandwidth, link {bounds.link_joint:.0f} + CPU {bounds.cpu_joint:.0f} GB/s at once"
    )
    chart.legend(entries, (0.8, top[-1] * 0.96))
    return chart.svg()
