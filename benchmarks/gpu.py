"""The measurements of a GPU host: `python -m benchmarks.gpu --out DIR`.

Each server configuration runs in a process of its own (up to 93 GB of weights each), one after the other; what one of them
fails at does not touch the others. Results: DIR/parts as they come, DIR/<benchmark>.json and the tables at the end, DIR/logs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .report import report
from .results import Budget, Part
from .servers import BENCHMARKS, SERVERS, ServerSetting

_LOG_CHARACTERS = 2000
_ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    arguments = parse()
    budget = Budget(arguments.budget_s)
    for setting in SERVERS:
        benchmarks = [name for name in setting.benchmarks if name in arguments.only]
        if not benchmarks or setting.name not in arguments.servers:
            continue
        began_s = time.monotonic()
        error = run_server(setting, benchmarks, arguments, budget)
        if error:
            note_end(setting, benchmarks, arguments.out / "parts", error, budget)
        print(f"{setting.name}: {time.monotonic() - began_s:.0f} s, {error or 'done'}", flush=True)
    text = report([arguments.out])
    (arguments.out / "tables.md").write_text(text, encoding="utf-8")
    print(text)


def run_server(
    setting: ServerSetting, benchmarks: Sequence[str], arguments: argparse.Namespace, budget: Budget
) -> str | None:
    """Run a worker to its end, or to the budget's, and return what went wrong."""
    for name in benchmarks:  # of an earlier run into the same folder
        for suffix in (".json", ".ended.json"):
            (arguments.out / "parts" / f"{name}.{setting.name}{suffix}").unlink(missing_ok=True)
    if budget.left_s < setting.needs_s:
        return f"skipped: {budget.left_s:.0f} s of the budget left, {setting.needs_s:.0f} s needed"
    command = [sys.executable, "-m", "benchmarks.worker", "--server", setting.name]
    command += ["--benchmarks", ",".join(benchmarks), "--out", str(arguments.out.absolute())]
    command += ["--budget-s", f"{budget.left_s:.0f}"]
    command += ["--layers", str(arguments.layers)] if arguments.layers else []
    command += ["--quick"] if arguments.quick else []
    log = arguments.out / "logs" / f"{setting.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(command, cwd=_ROOT, stderr=stderr, start_new_session=True)
        try:
            code = process.wait(max(1.0, budget.left_s))
        except subprocess.TimeoutExpired:
            return f"stopped at the end of the budget\n{_tail(log)}"
        finally:
            _end(process)
    if code == 0:
        return None
    tail = _tail(log)
    last_line = tail.rpartition("\n")[2]
    return f"ended with {code}: {last_line}\n{tail}"


def note_end(
    setting: ServerSetting, benchmarks: Sequence[str], parts: Path, error: str, budget: Budget
) -> None:
    """Record a worker's end beside the parts of the benchmarks that it did not finish."""
    for name in benchmarks:
        left = parts / f"{name}.{setting.name}.json"
        if left.is_file() and json.loads(left.read_text(encoding="utf-8"))["finished"]:
            continue
        part = Part(left.with_suffix(".ended.json"), name, setting.name, setting.side, budget)
        part.problems.append({"what": "server", "error": error, "traceback": ""})
        part.save()


def _end(process: subprocess.Popen) -> None:
    """End the worker and whatever it started; they share a session of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").strip()[-_LOG_CHARACTERS:]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [setting.name for setting in SERVERS]
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder (default %(default)s)")
    parser.add_argument(
        "--only", type=_names(BENCHMARKS), default=BENCHMARKS, help=f"of {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--servers", type=_names(names), default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--layers", type=int, help="layers of each model, fewer than it has")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shares and repetitions")
    parser.add_argument("--budget-s", type=float, default=1500.0, help="stop in time (default %(default)s)")
    return parser.parse_args()


def _names(possible: Sequence[str]):
    def names(text: str) -> list[str]:
        asked = text.split(",")
        unknown = [name for name in asked if name not in possible]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)} unknown, possible are {', '.join(possible)}"
            )
        return asked

    return names


if __name__ == "__main__":
    main()
