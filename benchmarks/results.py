"""Results on disk: one part per server and benchmark, rewritten with every row, so that nothing measured is lost."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .stats import Spread, number

_TRACEBACK_CHARACTERS = 1500
_IDENTITY = ("what", "case", "share", "tokens", "homes")  # fields of a row that say what was measured


class Budget:
    """Seconds this process may still use."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()


@dataclass
class Part:
    """Rows of one benchmark on one server."""

    path: Path
    benchmark: str
    server: str
    side: str
    budget: Budget
    rows: list[dict] = field(default_factory=list)
    problems: list[dict] = field(default_factory=list)
    attempted: list[str] = field(default_factory=list)
    finished: bool = False
    began_s: float = field(default_factory=time.monotonic)

    def row(self, **fields: Any) -> None:
        """Add a row; spreads may be among the fields."""
        _json(fields)  # what cannot be saved raises here, before it is among what every later save holds
        self.rows.append(fields)
        shown = "  ".join(f"{name} {_shown(value)}" for name, value in fields.items())
        print(f"{self.server}/{self.benchmark}: {shown}", flush=True)
        self.save()

    def attempt(self, what: str, measure: Callable[[], None], *, needs_s: float = 5.0) -> bool:
        """Run `measure` if the budget leaves `needs_s`; whatever it raises is recorded and ends only itself."""
        self.attempted.append(what)
        if self.budget.left_s < needs_s:
            self._problem(
                what, f"skipped: {self.budget.left_s:.0f} s of the budget left, {needs_s:.0f} s needed"
            )
            return False
        try:
            measure()
        except Exception as error:
            text = traceback.format_exc()[-_TRACEBACK_CHARACTERS:]
            self._problem(what, f"{type(error).__name__}: {error}", text)
            return False
        return True

    def _problem(self, what: str, error: str, trace: str = "") -> None:
        print(f"{self.server}/{self.benchmark}: {what}: {error}\n{trace}", flush=True)
        self.problems.append({"what": what, "error": error, "traceback": trace})
        self.save()

    def save(self) -> None:
        names = ("benchmark", "server", "side", "finished", "attempted", "rows", "problems")
        fields = {name: getattr(self, name) for name in names}
        fields["wall_s"] = round(time.monotonic() - self.began_s, 1)
        write_json(self.path, fields)


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def write_json(path: Path, value: Any) -> None:
    """Write in one step; spreads become objects with their fields, and other objects are refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(_json(value) + "\n", encoding="utf-8")
    scratch.replace(path)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return value.as_json()
    raise TypeError(f"{value!r} of {type(value).__name__} is no field of a result")


def read_parts(folders: Iterable[Path]) -> dict[str, list[dict]]:
    """All parts under `folders`, by benchmark. What a later folder has measured again counts from there."""
    found: dict[str, list[dict]] = {}
    for folder in folders:
        paths = sorted((folder / "parts").glob("*.json"))
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        for part in parts:
            for earlier in found.get(part["benchmark"], []):
                if earlier["server"] == part["server"]:
                    _supersede(earlier, part)
        for part in parts:
            found.setdefault(part["benchmark"], []).append(part)
    return found


def _supersede(earlier: dict, part: dict) -> None:
    """Drop the rows that `part` has too, and the problems of what it attempted again: it lists what is left of those."""
    again = {_measured(row) for row in part["rows"]}
    earlier["rows"] = [row for row in earlier["rows"] if _measured(row) not in again]
    retried = set(part.get("attempted", ()))
    earlier["problems"] = [problem for problem in earlier["problems"] if problem["what"] not in retried]


def _measured(row: dict) -> tuple:
    return tuple(row.get(name) for name in _IDENTITY)


def rows_of(parts: Iterable[dict], **wanted: Any) -> list[dict]:
    """Rows whose part or own fields equal `wanted`, spreads restored, with their part's `side` and `server`."""
    rows = []
    for part in parts:
        for row in part["rows"]:
            whole = {"side": part["side"], "server": part["server"]} | {
                k: _restored(v) for k, v in row.items()
            }
            if all(whole.get(name) == value for name, value in wanted.items()):
                rows.append(whole)
    return rows


def _restored(value: Any) -> Any:
    is_spread = isinstance(value, dict) and value.keys() == {"median", "least", "most", "count"}
    return Spread.from_json(value) if is_spread else value
