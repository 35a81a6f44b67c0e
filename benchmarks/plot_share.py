"""docs/share_*.svg: sweeps with the share that the controller arrived at, a growing sequence, and hogs."""

from __future__ import annotations

from sglang_inplacekv.svg import COLOURS, Chart, ticks

from .share_tables import GOOD, Verdict, over_best, rounds_of

_SHARE_AXIS = [i / 10 for i in range(11)]
_MOST_OVER = 2.0  # what is slower says nothing about the best share
_LEAST_OVER = 0.85  # a ratio below 1 is chance
_OVER_AXIS = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]


def sweep_svgs(rows: list[dict]) -> dict[str, str]:
    """A picture for each model, by file name: step time over the best, one colour a shape."""
    models: dict[str, list[dict]] = {}
    for row in rows:
        if row["what"] == "controlled":
            models.setdefault(row["case"].split(" ", 1)[0], []).append(row)
    return {f"share_sweep_{model}.svg": _sweep_svg(model, own, rows) for model, own in models.items()}


def _sweep_svg(model: str, controlled: list[dict], rows: list[dict]) -> str:
    chart = Chart(f"{model}: step time over the CPU's share", (0.0, 1.0), (_LEAST_OVER, _MOST_OVER))
    chart.x_axis("share of the host's KV that the CPU attends", _SHARE_AXIS)
    chart.y_axis("of the best of the sweep", _OVER_AXIS)
    chart.curve([(0.0, GOOD), (1.0, GOOD)], "#999", dashed=True)
    entries = []
    for colour, row in zip(COLOURS, controlled):
        rounds = rounds_of(rows, row["case"])
        verdict = Verdict.of(row["auto_share"], rounds)
        over = [(share, over_best(own, rounds).median) for share, own in rounds.items()]
        chart.curve([(share, max(at, _LEAST_OVER)) for share, at in over if at <= _MOST_OVER], colour)
        at = min(max(verdict.over_best.median, _LEAST_OVER), _MOST_OVER)
        chart.dot(verdict.share, at, at, at, colour)
        entries.append((row["case"].split(" ", 1)[1], colour, False))
    chart.note("dots: where the controller arrived, its share given; dashed: 3% above the best")
    chart.legend(entries, (0.84, 1.95))
    return chart.svg()


def growing_svg(points: list[dict]) -> str:
    """`points` of benchmarks.cases.share_growing."""
    longest = ticks(max(point["tokens"] for point in points) / 1024)
    chart = Chart("A sequence grows: the share follows", (0.0, longest[-1]), (0.0, 1.0))
    chart.x_axis("context, K tokens", longest)
    chart.y_axis("CPU share", _SHARE_AXIS[::2])
    entries = [("target", COLOURS[0], True), ("share", COLOURS[1], False)]
    for name, colour, dashed in entries:
        chart.curve([(point["tokens"] / 1024, point[name]) for point in points], colour, dashed=dashed)
    chart.legend(entries, (0.84 * longest[-1], 0.95))
    return chart.svg()


def hogs_svgs(series: dict[str, dict]) -> dict[str, str]:
    """`series` of benchmarks.cases.share_hogs: share and floor, and step times, over the steps."""
    if not series:
        return {}
    runs = {name: [*own["before"], *own["after"], *own["grown"]] for name, own in series.items()}
    change = len(next(iter(series.values()))["before"])
    longest = ticks(max(len(steps) for steps in runs.values()))
    stealing = {name: steps for name, steps in runs.items() if name.endswith("stealing")}
    colours = dict(zip(runs, COLOURS))
    shares = Chart("A hog comes: the share", (0.0, longest[-1]), (0.0, 1.0))
    shares.y_axis("CPU share", _SHARE_AXIS[::2])
    for name, steps in stealing.items():
        shares.curve([(at, step["share"]) for at, step in enumerate(steps)], colours[name])
        shares.curve([(at, step["floor"]) for at, step in enumerate(steps)], colours[name], dashed=True)
    shares.note("dashed: the floor, what lies in C; at the end each step is a page longer")
    top = ticks(max(step["ms"] for steps in runs.values() for step in steps))
    times = Chart("A hog comes: the step time", (0.0, longest[-1]), (0.0, top[-1]))
    times.y_axis("ms a step", top)
    for name, steps in runs.items():
        times.curve([(at, step["ms"]) for at, step in enumerate(steps)], colours[name])
    for chart, names, highest, entries_at in ((shares, stealing, 1.0, 0.97), (times, runs, top[-1], 0.75)):
        chart.x_axis("step", longest)
        chart.curve([(change, 0.0), (change, highest)], "#999")
        chart.legend(
            [(name, colours[name], False) for name in names], (0.74 * longest[-1], entries_at * highest)
        )
    return {"share_hogs.svg": shares.svg(), "share_hogs_ms.svg": times.svg()}
