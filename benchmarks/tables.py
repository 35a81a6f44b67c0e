"""Tables from rows, in Markdown, so that they can be pasted into documents as they are printed."""

from __future__ import annotations

from collections.abc import Sequence

from .stats import Spread, number


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Spread):
        return str(value)
    return number(value) if isinstance(value, float) else str(value)


def ratio(ours: Spread, theirs: Spread) -> Spread:
    """ours over theirs: the median of each, and the widest range that their ranges allow."""
    return Spread(
        ours.median / theirs.median,
        ours.least / theirs.most,
        ours.most / theirs.least,
        min(ours.count, theirs.count),
    )
