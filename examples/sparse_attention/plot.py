"""The picture: what was selected in each layer whose entries may leave the device, by who attended it, and bytes by policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_inplacekv.svg import COLOURS, GRID, Chart, stacked, ticks
from sparse_attn import Space
from sparse_attn.traffic import Traffic

from .sides import SIDES, LayerSequence, Record

KIB = 1024
SIDE_COLOURS = dict(zip(SIDES, COLOURS))
SIDE_LABELS = {"hot": "hot: a copy on the device", "fetched": "fetched to the device", "cpu": "CPU, in place"}
WINDOW_LABEL, WINDOW_COLOUR = "window, on the device", "#999"
PARTS = {  # of the bytes over the link: label, colour
    "query_bytes": ("queries to the CPU", COLOURS[3]),
    "answer_bytes": ("its answers", COLOURS[2]),
    "fetched_bytes": ("fetched entries", COLOURS[1]),
    "homed_bytes": ("new entries to the host", COLOURS[4]),
}


@dataclass(frozen=True)
class Decode:
    """What the picture shows: `layers` by number, those that spill; the policy that the panels show."""

    layers: Mapping[int, LayerSequence]
    shown: str
    prompt_tokens: int
    steps: int

    def traffic(self, policy: str) -> list[Traffic]:
        return [layer.composers[policy].traffic for layer in self.layers.values()]


def runs(record: Record, space: Space, side: int) -> list[tuple[float, float, float]]:
    """Where one side attended: (first step, behind the last, position in the text), adjacent steps in one."""
    open_runs: dict[int, int] = {}
    found = []
    for step in range(len(record.events) + 1):
        now: set[int] = set()
        if step < len(record.events):
            entries, sides = record.events[step]
            now = set(entries[sides == side].tolist())
        for entry in [entry for entry in open_runs if entry not in now]:
            found.append((open_runs.pop(entry), step, space.opens + entry * space.stride - 1))
        open_runs |= dict.fromkeys(now - open_runs.keys(), step)
    return [(first + 0.5, last + 0.5, position) for first, last, position in found]


def panel(decode: Decode, number: int) -> Chart:
    layer = decode.layers[number]
    space, record, steps = layer.spilled, layer.records[decode.shown], decode.steps
    assert space is not None
    top = decode.prompt_tokens + steps
    chart = Chart(
        f"Layer {number}, policy {decode.shown}: who attended the entries selected of {layer.store.count(space.name):,}",
        (0.5, steps + 0.5),
        (0, top * 1.02),
        height=300,
    )
    chart.x_axis("decode step", step_ticks(steps))
    chart.y_axis("position in the text (tokens)", [tick for tick in ticks(top) if tick <= top])
    for side, name in enumerate(SIDES):
        if marks := runs(record, space, side):
            chart.strokes(marks, SIDE_COLOURS[name], 2.2)
    chart.curve([(step, decode.prompt_tokens + step) for step in (0.5, steps + 0.5)], WINDOW_COLOUR)
    labels = [(SIDE_LABELS[name], SIDE_COLOURS[name], False) for name in SIDES]
    chart.legend([*labels, (WINDOW_LABEL, WINDOW_COLOUR, False)])
    return chart


def step_ticks(steps: int) -> list[float]:
    return [tick or 1 for tick in ticks(steps) if tick <= steps]


def bytes_chart(decode: Decode) -> Chart:
    """Means of a step, all layers that spill together."""
    per_step = KIB * decode.steps
    names = list(next(iter(decode.layers.values())).composers)
    rows = {
        name: {part: sum(getattr(t, part) for t in decode.traffic(name)) / per_step for part in PARTS}
        for name in names
    }
    fetched_all = sum(t.selected_bytes for t in decode.traffic(names[0])) / per_step
    whole = sum(layer.full_bytes for layer in decode.layers.values()) / per_step
    most = max(fetched_all, *(sum(row.values()) for row in rows.values()))
    lanes, right = len(rows) + 2, most * 1.15
    chart = Chart(
        "Bytes over the link by policy",
        (0, right),
        (0.4, lanes + 0.6),
        height=110 + 30 * lanes,
        left=190,
    )
    chart.x_axis(
        f"KiB a step, layers {' and '.join(map(str, decode.layers))} together",
        [tick for tick in ticks(most) if tick <= right],
    )
    chart.lane(lanes, "all entries")
    chart.bar(0, min(whole, right), lanes, 0.6, GRID)
    chart.value(
        0, lanes, f"{whole:,.1f}" + (f", {whole / right:.0f} times this width" if whole > right else "")
    )
    chart.lane(lanes - 1, "selected, no hot set")
    chart.bar(0, fetched_all, lanes - 1, 0.6, PARTS["fetched_bytes"][1])
    chart.value(fetched_all, lanes - 1, f"{fetched_all:.1f}")
    for lane, (name, row) in zip(range(lanes - 2, 0, -1), rows.items(), strict=True):
        chart.lane(lane, name)
        begin = 0.0
        for part, size in row.items():
            if size:
                chart.bar(begin, begin + size, lane, 0.6, PARTS[part][1])
            begin += size
        chart.value(begin, lane, f"{begin:.1f}")
    chart.legend([(label, colour, False) for label, colour in PARTS.values()])
    return chart


def picture(decode: Decode) -> str:
    panels: Sequence[Chart] = [panel(decode, number) for number in decode.layers]
    return stacked([*panels, bytes_chart(decode)])
