"""Draw every picture that the results allow: `python -m benchmarks.plots RESULTS [docs]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .bounds import Bounds
from .plot_sweep import sweep_svg
from .plot_timeline import timeline_svg
from .results import read_parts, rows_of


def draw(results: Path, docs: Path) -> list[Path]:
    """Write timeline.svg and decode_sweep.svg into `docs` and return those that were drawn."""
    drawn = []
    if (results / "timeline.json").is_file():
        drawn.append(docs / "timeline.svg")
        drawn[-1].write_text(
            timeline_svg(json.loads((results / "timeline.json").read_text())), encoding="utf-8"
        )
    parts = read_parts([results])
    if rows := rows_of(parts.get("decode_sweep", [])):
        drawn.append(docs / "decode_sweep.svg")
        drawn[-1].write_text(sweep_svg(rows, Bounds.of(parts.get("transfer", []))), encoding="utf-8")
    return drawn


def main() -> None:
    results, *docs = map(Path, sys.argv[1:])
    print(*draw(results, docs[0] if docs else Path("docs")), sep="\n")


if __name__ == "__main__":
    main()
