"""Put parts together, of one run or of several, and print the tables: `python -m benchmarks.report DIR [DIR ...]`.

Each benchmark's parts become DIR/<benchmark>.json in the first folder. What was measured again counts from the
last folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .bounds import Bounds
from .csa_tables import csa_layer
from .results import read_parts, rows_of, write_json
from .servers import BENCHMARKS, OURS, STOCK
from .share_tables import plan_served, plan_step, share_growing, share_hogs, share_sweep
from .tables import markdown, ratio
from .trace import COPY, CPU

_PROBLEM_CHARACTERS = 200


def transfer(parts: dict[str, list[dict]]) -> str:
    rows = rows_of(parts["transfer"])
    copy = next((row["gbps"] for row in rows if row["what"] == "H2D copy alone"), None)
    table = [(r["what"], r["gbps"], r["gbps"].median / copy.median if copy else None) for r in rows]
    return (
        markdown(("what", "GB/s", "of the long copy"), table) + f"\n\nBound: {Bounds.of(parts['transfer'])}."
    )


def fits(parts: dict[str, list[dict]]) -> str:
    stock = {row["case"]: row for row in rows_of(parts["fits"], side=STOCK)}
    ours = {row["case"]: row for row in rows_of(parts["fits"], side=OURS)}
    table = []
    for case in dict.fromkeys((*stock, *ours)):
        theirs, own = (side[case]["step_ms"] if case in side else None for side in (stock, ours))
        table.append((case, theirs, own, ratio(own, theirs) if own and theirs else None))
    return markdown(("batch x context", "stock, ms a step", "ours, ms a step", "ours / stock"), table)


def prefill(parts: dict[str, list[dict]]) -> str:
    rows = rows_of(parts["prefill"])
    stock = {row["tokens"]: row["tokens_per_s"] for row in rows if row["side"] == STOCK}
    table = []
    for row in sorted(rows, key=lambda row: row["tokens"]):
        theirs = stock.get(row["tokens"])
        against = ratio(row["tokens_per_s"], theirs) if theirs and row["side"] == OURS else None
        hidden, exposed = (row.get(name) for name in ("hidden_s", "exposed_s"))
        table.append(
            (row["tokens"], row["side"], row["homes"], row["tokens_per_s"], against, hidden, exposed)
        )
    columns = ("tokens", "side", "homes", "tokens/s", "ours / stock", "hidden transfer, s", "exposed, s")
    return markdown(columns, table)


def _against_bound(name: str) -> Callable[[dict[str, list[dict]]], str]:
    def table(parts: dict[str, list[dict]]) -> str:
        bounds, by_case = Bounds.of(parts.get("transfer", [])), _by_case(rows_of(parts[name]))
        lines = []
        for row in (row for own in by_case.values() for row in own):
            own_ms = bounds.step_ms(row["host_bytes"], row["effective_share"])
            best_ms = bounds.best_ms(row["host_bytes"])
            gigabytes = row["host_bytes"] / 1e9
            shares = (own_ms / row["step_ms"].median, best_ms / row["step_ms"].median)
            lines.append(
                (
                    row["case"],
                    row["share"],
                    row["effective_share"],
                    gigabytes,
                    row["step_ms"],
                    own_ms,
                    *shares,
                )
            )
        columns = (
            "batch x context", "share", "effective", "host GB a step", "ms a step", "bound at this share, ms",
            "of it", "of the joint bound",
        )  # fmt: skip
        best = [_best(case, own, bounds) for case, own in by_case.items()]
        layers = next(iter(by_case.values()))[0]["layers"]
        text = (
            markdown(columns, lines),
            markdown(_BEST_COLUMNS, best),
            f"{layers} layers. Bound: {bounds}.",
        )
        return "\n\n".join(text)

    return table


def _by_case(rows: list[dict]) -> dict[str, list[dict]]:
    """Cases in the order in which they were measured, each one's rows by share."""
    cases = dict.fromkeys(row["case"] for row in rows)
    return {
        case: sorted((row for row in rows if row["case"] == case), key=lambda row: row["share"])
        for case in cases
    }


_BEST_COLUMNS = (
    "batch x context", "best share", "ms a step", "gain over share 0", "gain over share 1", "joint bound, ms",
    "of it",
)  # fmt: skip


def _best(case: str, rows: list[dict], bounds: Bounds) -> tuple:
    best = min(rows, key=lambda row: row["step_ms"].median)
    gains = {row["share"]: row["step_ms"].median / best["step_ms"].median for row in rows}
    bound_ms = bounds.best_ms(best["host_bytes"])
    fraction = bound_ms / best["step_ms"].median
    return case, best["share"], best["step_ms"], gains.get(0.0), gains.get(1.0), bound_ms, fraction


def long(parts: dict[str, list[dict]]) -> str:
    table = [
        (
            r["side"],
            r["tokens"],
            r["gpu_kv_bytes"] / 1e9,
            r["outcome"],
            r.get("first_token_s"),
            r.get("step_ms"),
        )
        for r in rows_of(parts["long"])
    ]
    return markdown(("side", "tokens", "GPU KV, GB", "outcome", "first token, s", "ms a step"), table)


_END_TO_END = {  # measure -> whether more is better; None: neither
    "case": None,
    "asked": None,
    "new_tokens": None,
    "gpu_kv_bytes": None,
    "end_to_end_s": False,
    "output_tokens_per_s": True,
    "all_tokens_per_s": True,
    "first_token_mean_s": False,
    "first_token_p50_s": False,
    "first_token_max_s": False,
    "step_ms": None,
    "retractions": None,
    "queued": None,
    "spilled": None,
}


def _end_to_end(benchmark: str) -> Callable[[dict[str, list[dict]]], str]:
    return lambda parts: _by_side(rows_of(parts[benchmark]))


def _by_side(rows: list[dict]) -> str:
    by_side = {row["side"]: row for row in rows}
    table = []
    for measure, more_is_better in _END_TO_END.items():
        ours, stock = (by_side.get(side, {}).get(measure) for side in (OURS, STOCK))
        wins = None
        if more_is_better is not None and ours is not None and stock is not None:
            wins = "ours" if (ours > stock) == more_is_better else "stock"
        table.append((measure, ours, stock, wins))
    return markdown(("measure", "ours", "stock, queueing", "wins"), table)


def timeline(parts: dict[str, list[dict]]) -> str:
    row = rows_of(parts["timeline"])[-1]
    shorter_us = min(row[f"{COPY}, us"], row[f"{CPU}, us"])
    at_once = row[f"{COPY} and {CPU} at once, us"] / max(1.0, shorter_us)
    return markdown(("what", "value"), [*row.items(), (f"{COPY} and {CPU} at once, of the shorter", at_once)])


TABLES: dict[str, Callable[[dict[str, list[dict]]], str]] = {
    "transfer": transfer,
    "attention": _against_bound("attention"),
    "share_sweep": share_sweep,
    "plan_step": plan_step,
    "plan_served": plan_served,
    "share_growing": share_growing,
    "share_hogs": share_hogs,
    "csa_layer": csa_layer,
    "timeline": timeline,
    "fits": fits,
    "prefill": prefill,
    "decode_sweep": _against_bound("decode_sweep"),
    "long": long,
    "million": _end_to_end("million"),
    "queueing": _end_to_end("queueing"),
}


def report(folders: Sequence[Path]) -> str:
    """Write <benchmark>.json of all parts into the first folder and return the tables."""
    parts = read_parts(folders)
    text = []
    for name in BENCHMARKS:
        if name not in parts:
            continue
        environments = {part["server"]: _environment(folders, part["server"]) for part in parts[name]}
        write_json(folders[0] / f"{name}.json", {"environment": environments, "parts": parts[name]})
        text.append(f"## {name}\n")
        try:
            measured = any(part["rows"] for part in parts[name])
            text.append(TABLES[name](parts) if measured else "nothing measured")
        except (KeyError, IndexError, StopIteration, TypeError) as error:
            text.append(f"no table: {type(error).__name__} {error}")
        text += _problems(parts[name])
        text.append("")
    return "\n".join(text)


def _problems(parts: list[dict]) -> list[str]:
    """What went wrong, by its first line: the rest is in the part."""
    told = ((p["server"], x["what"], x["error"].partition("\n")[0]) for p in parts for x in p["problems"])
    return [f"- {server}: {what}: {error[:_PROBLEM_CHARACTERS]}" for server, what, error in told]


def _environment(folders: Sequence[Path], server: str) -> dict | None:
    paths = (folder / f"environment-{server}.json" for folder in reversed(folders))
    return next((json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()), None)


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:]]
    if not folders:
        sys.exit(__doc__)
    print(report(folders))


if __name__ == "__main__":
    main()
