"""Draw every picture that the results allow: `python -m benchmarks.plots RESULTS [RESULTS ...] [--docs DIR]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from .bounds import Bounds
from .plot_sweep import sweep_svg
from .plot_timeline import timeline_svg
from .results import read_parts, rows_of
from .trace import TRACE_FILE


def draw(results: Sequence[Path], docs: Path) -> list[Path]:
    """Write timeline.svg and decode_sweep.svg into `docs` and return those that were drawn."""
    pictures = {}
    traces = [folder / TRACE_FILE for folder in results if (folder / TRACE_FILE).is_file()]
    if traces:
        pictures["timeline.svg"] = timeline_svg(json.loads(traces[-1].read_text(encoding="utf-8")))
    parts = read_parts(results)
    if rows := rows_of(parts.get("decode_sweep", [])):
        pictures["decode_sweep.svg"] = sweep_svg(rows, Bounds.of(parts.get("transfer", [])))
    for name, svg in pictures.items():
        (docs / name).write_text(svg, encoding="utf-8")
    return [docs / name for name in pictures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="folders of one run or of several")
    parser.add_argument("--docs", default="docs", type=Path, help="where to (default %(default)s)")
    arguments = parser.parse_args()
    print(*draw(arguments.results, arguments.docs), sep="\n")


if __name__ == "__main__":
    main()
