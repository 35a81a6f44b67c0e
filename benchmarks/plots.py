"""Draw every picture that the results allow: `python -m benchmarks.plots RESULTS [RESULTS ...] [--docs DIR]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bounds import Bounds
from .cases import share_growing, share_hogs
from .plot_share import growing_svg, hogs_svgs, sweep_svgs
from .plot_sweep import sweep_svg
from .plot_timeline import timeline_svg
from .results import read_parts, rows_of
from .trace import TRACE_FILE


def draw(results: Sequence[Path], docs: Path) -> list[Path]:
    """Write the pictures into `docs` and return those that were drawn."""
    pictures = {}
    if trace := _last(results, TRACE_FILE):
        pictures["timeline.svg"] = timeline_svg(trace)
    parts = read_parts(results)
    if rows := rows_of(parts.get("decode_sweep", [])):
        pictures["decode_sweep.svg"] = sweep_svg(rows, Bounds.of(parts.get("transfer", [])))
    pictures |= sweep_svgs(rows_of(parts.get("share_sweep", [])))
    if points := _last(results, share_growing.SERIES_FILE):
        pictures["share_growing.svg"] = growing_svg(points)
    pictures |= hogs_svgs(_last(results, share_hogs.SERIES_FILE) or {})
    for name, svg in pictures.items():
        (docs / name).write_text(svg, encoding="utf-8")
    return [docs / name for name in pictures]


def _last(results: Sequence[Path], name: str) -> Any:
    """The file of that name in the last folder that has one."""
    files = [folder / name for folder in results if (folder / name).is_file()]
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="folders of one run or of several")
    parser.add_argument("--docs", default="docs", type=Path, help="where to (default %(default)s)")
    arguments = parser.parse_args()
    print(*draw(arguments.results, arguments.docs), sep="\n")


if __name__ == "__main__":
    main()
