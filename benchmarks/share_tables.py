"""What the benchmarks of the share came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .results import rows_of
from .tables import markdown, ratio

GOOD = 1.03  # of the best time: a share as good as the best


@dataclass(frozen=True)
class Verdict:
    """Of a share against a sweep."""

    best_share: float
    best_ms: float
    good_shares: tuple[float, float]  # least and greatest of those measured whose time is good
    share: float
    ms: float

    @classmethod
    def of(cls, share: float, points: Sequence[tuple[float, float]], own_ms: float | None = None) -> Verdict:
        """points: (share, ms). Where `share` has no time of its own, it has that of the nearest one measured."""
        best_share, best_ms = min(points, key=lambda point: point[1])
        good = [at for at, ms in points if ms <= GOOD * best_ms]
        _, ms = min(points, key=lambda point: abs(point[0] - share))
        return cls(best_share, best_ms, (min(good), max(good)), share, ms if own_ms is None else own_ms)

    @property
    def over_best(self) -> float:
        return self.ms / self.best_ms

    @property
    def is_good(self) -> bool:
        """Both in time and in place."""
        return self.over_best <= GOOD and self.good_shares[0] <= self.share <= self.good_shares[1]


def points_of(rows: list[dict], case: str) -> list[tuple[float, float]]:
    own = [row for row in rows if row["what"] == "sweep" and row["case"] == case]
    return sorted((row["share"], row["step_ms"].median) for row in own)


def share_sweep(parts: dict[str, list[dict]]) -> str:
    rows = rows_of(parts["share_sweep"])
    shares, plans = [], []
    for row in (row for row in rows if row["what"] == "controlled"):
        points = points_of(rows, row["case"])
        auto = Verdict.of(row["auto_share"], points, row["auto_ms"].median)
        plan = Verdict.of(row["predicted_share"], points)
        low, high = auto.good_shares
        shares.append(
            (
                row["case"], auto.best_share, f"{low:.2f}-{high:.2f}", auto.best_ms, auto.share, auto.over_best,
                _word(auto.is_good), plan.share, plan.over_best, _word(plan.is_good), row["placed_ms"],
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
        "model, batch x context", "best share", "within 3%", "ms", "auto", "of the best", "good", "plan", "of the best",
        "good", "placed at auto, ms",
    )  # fmt: skip
    plan_columns = (
        "model, batch x context", "CPU GB/s, in the step / plan", "link GB/s", "a0, us a layer", "shortest, all in D, ms",
        "plan, ms", "measured at its share, ms", "plan / measured",
    )  # fmt: skip
    return markdown(columns, shares) + "\n\n" + markdown(plan_columns, plans)


def _word(good: bool) -> str:
    return "yes" if good else "no"


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
