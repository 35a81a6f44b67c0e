"""What the benchmarks of the share came to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .results import rows_of
from .stats import Spread
from .tables import markdown, ratio

GOOD = 1.03  # of the best time: a share as good as the best


Rounds = Mapping[float, Sequence[float]]  # by share: the median ms of its steps, round by round


def over_best(own_ms: Sequence[float], rounds: Rounds) -> Spread:
    """What `own_ms`, round by round, are of the best share's time in the same round.

    Which share is the best the other rounds tell: the least of many medians is less than any share takes.
    """
    turns = range(len(own_ms))
    found = []
    for turn in turns:
        others = [other for other in turns if other != turn] or [turn]
        best = min(rounds, key=lambda share: statistics.median([rounds[share][other] for other in others]))
        found.append(own_ms[turn] / rounds[best][turn])
    return Spread.of(found)


@dataclass(frozen=True)
class Verdict:
    """Of a share against a sweep."""

    best_share: float
    best_ms: float
    good_shares: tuple[float, float]  # least and greatest of those measured whose time is good
    share: float
    ms: float
    over_best: Spread

    @classmethod
    def of(cls, share: float, rounds: Rounds, own_ms: Sequence[float] | None = None) -> Verdict:
        """Where `share` has no time of its own, it has that of the nearest one measured."""
        medians = {at: statistics.median(ms) for at, ms in rounds.items()}
        best = min(medians, key=lambda at: medians[at])
        good = [at for at, ms in rounds.items() if over_best(ms, rounds).median <= GOOD]
        if own_ms is None:
            own_ms = rounds[min(rounds, key=lambda at: abs(at - share))]
        ends = (min(good, default=best), max(good, default=best))
        return cls(best, medians[best], ends, share, statistics.median(own_ms), over_best(own_ms, rounds))

    @property
    def is_good(self) -> bool:
        """Both in time and in place."""
        return self.over_best.median <= GOOD and self.good_shares[0] <= self.share <= self.good_shares[1]


def rounds_of(rows: list[dict], case: str) -> dict[float, list[float]]:
    own = [row for row in rows if row["what"] == "sweep" and row["case"] == case]
    return {row["share"]: row["rounds_ms"] for row in sorted(own, key=lambda row: row["share"])}


def share_sweep(parts: dict[str, list[dict]]) -> str:
    rows = rows_of(parts["share_sweep"])
    shares, plans = [], []
    for row in (row for row in rows if row["what"] == "controlled"):
        rounds = rounds_of(rows, row["case"])
        auto = Verdict.of(row["auto_share"], rounds, row["auto_rounds_ms"])
        plan = Verdict.of(row["predicted_share"], rounds)
        given = Verdict.of(row["auto_share"], rounds)
        low, high = auto.good_shares
        shares.append(
            (
                row["case"], auto.best_share, f"{low:.2f}-{high:.2f}", auto.best_ms, auto.share, given.over_best,
                _word(given.is_good), auto.over_best, f"{row.get('auto_moves', '-')} of {row.get('auto_steps', '-')}",
                plan.share, plan.over_best, _word(plan.is_good), row["placed_ms"],
            )
        )  # fmt: skip
        rates = [
            f"{row['rates_gbps'].get(side, 0):.1f} / {row['plan_gbps'][side]:.1f}" for side in ("cpu", "link")
        ]
        fixed = " / ".join(
            "-" if row[name] is None else f"{row[name]:.0f}" for name in ("auto_fixed_us", "plan_fixed_us")
        )
        plans.append(
            (
                row["case"], *rates, fixed, row["resident_ms"], row["predicted_ms"], plan.ms,
                row["predicted_ms"] / plan.ms,
            )
        )  # fmt: skip
    columns = (
        "model, batch x context", "best share", "within 3%", "ms", "r*", "given, of the best", "good",
        "controlled, of the best", "steps it moved in", "plan's", "of the best", "good", "placed at r*, ms",
    )  # fmt: skip
    plan_columns = (
        "model, batch x context", "CPU GB/s, in the step / plan", "link GB/s", "a0, us a layer", "shortest, all in D, ms",
        "plan, ms", "measured at its share, ms", "plan / measured",
    )  # fmt: skip
    return markdown(columns, shares) + "\n\n" + markdown(plan_columns, plans)


def _word(good: bool) -> str:
    return "yes" if good else "no"


def plan_step(parts: dict[str, list[dict]]) -> str:
    return _foretold(rows_of(parts["plan_step"]))


def plan_served(parts: dict[str, list[dict]]) -> str:
    return _foretold(rows_of(parts["plan_served"]))


def _foretold(rows: list[dict]) -> str:
    columns = (
        "model, batch x context", "layers", "plan's share", "share", "all in D, ms", "plan, ms", "measured, ms",
        "plan / measured",
    )  # fmt: skip
    table = [
        (
            row["case"], row["layers"], row["predicted_share"], row["controlled_share"], row["resident_ms"],
            row["predicted_ms"], row["step_ms"], row["predicted_ms"] / row["step_ms"].median,
        )
        for row in rows
    ]  # fmt: skip
    return markdown(columns, table)


def share_growing(parts: dict[str, list[dict]]) -> str:
    rows = rows_of(parts["share_growing"])
    auto = next(row for row in rows if row["share"] == "auto")
    fixed = [row for row in rows if row["share"] != "auto"]
    best = min(fixed, key=lambda row: row["total_s"].median)
    table = [
        (row["share"], *row["shares"].values(), row["total_s"], ratio(row["total_s"], best["total_s"]))
        for row in (auto, *fixed)
    ]
    lengths = (f"at {length}" for length in auto["shares"])
    text = markdown(("share", *lengths, "all steps, s", "of the best fixed one"), table)
    return (
        f"{text}\n\n{auto['what']}, {auto['steps']} steps of {auto['layers']} layers. In its first step auto has "
        "measured nothing."
    )


_HOG_COLUMNS = {
    "what": "what",
    "share_before": "share before",
    "share_after": "after",
    "floor": "floor",
    "target_after": "target",
    "follow_steps": "steps to follow",
    "before_ms": "ms before",
    "after_ms": "ms after",
    "share_grown": "share after growing",
    "floor_grown": "floor",
    "difference": "outputs differ by",
    "hog": "hog",
}


def share_hogs(parts: dict[str, list[dict]]) -> str:
    rows = [row | {"difference": f"{row['difference']:.1e}"} for row in rows_of(parts["share_hogs"])]
    return markdown(tuple(_HOG_COLUMNS.values()), [[row.get(name) for name in _HOG_COLUMNS] for row in rows])
