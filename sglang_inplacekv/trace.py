"""One line of JSON a decode step: written by the server (`--inplacekv-trace FILE`), read by `inplacekv trace FILE`."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO

from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.feedback import Costs

logger = logging.getLogger(__name__)
FLAG = "--inplacekv-trace"
_BUFFERED_STEPS = 64  # about 16 KB: a write now and then, to the page cache
_MICROSECONDS = 6  # decimals


@dataclass
class TracedStep:
    """A decode step. Tokens of a step are counted with multiplicity over its requests, in one layer."""

    step: int  # since the server's start, from 1
    requests: int
    tokens: int  # attended, in all regions
    host_tokens: int  # of them, those of C and T: the L that r is chosen for
    target: float  # share of host_tokens
    effective: float
    stolen: int  # tokens of T that the CPU attended
    # Tokens of allocated pages; window counts those of C and T that are still on the device.
    D: int
    C: int
    T: int
    window: int
    at_s: float = 0.0  # when it began, since the trace did
    wall_s: float = 0.0  # until the next forward began or the server idled
    # Known by the end of the step. On a GPU some of the transfers' may be of the forwards before.
    cpu_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0


_TYPES = {field.name: int if field.type == "int" else float for field in fields(TracedStep)}
_SHARES = ("target", "effective")
_LINE_BYTES = 4096  # more than a line has


class TraceWriter:
    """Writes steps as they end. No error gets out: the first one is logged, and the trace ends there.

    What is buffered is written when the server idles and each _BUFFERED_STEPS steps; a server that is killed loses that much.
    """

    def __init__(self, path: Path) -> None:
        """Replaces an earlier trace. Raises ConfigError where `path` is something else, in use, or cannot be written."""
        check_path(path)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._closing = weakref.finalize(self, os.close, self._file)
            _lock(self._file, fcntl.LOCK_EX)  # until the file is closed
            os.truncate(self._file, 0)
        except OSError as error:
            raise _refusal(path, error.strerror or str(error)) from error
        self._path, self._began_s = path, time.perf_counter()
        self._step: TracedStep | None = None
        self._costs = Costs()
        self._lines: list[str] = []

    @property
    def closed(self) -> bool:
        """Whether a write has failed: nothing more will come."""
        return not self._closing.alive

    def begin(self, step: TracedStep, now_s: float) -> None:
        """`step` begins at now_s, by time.perf_counter: its times are set here."""
        step.at_s = now_s - self._began_s
        self._step = step

    def end(self, costs: Costs, now_s: float) -> None:
        """The step that began last, if any, ends at now_s. Costs that come between two steps are those of the next."""
        if self.closed:
            return
        self._costs.cpu_s += costs.cpu_s
        self._costs.transfer_s += costs.transfer_s
        self._costs.exposed_s += costs.exposed_s
        step = self._step
        if step is None:
            return
        step.wall_s = now_s - self._began_s - step.at_s
        known, self._costs, self._step = self._costs, Costs(), None
        step.cpu_s, step.transfer_s, step.exposed_s = known.cpu_s, known.transfer_s, known.exposed_s
        values = {
            name: round(value, _MICROSECONDS) if isinstance(value, float) else value
            for name, value in vars(step).items()
        }
        self._lines.append(json.dumps(values, separators=(",", ":")) + "\n")
        if len(self._lines) >= _BUFFERED_STEPS:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if self.closed or not self._lines:
            return
        data = "".join(self._lines).encode()
        self._lines.clear()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            logger.warning(f"{FLAG}: the trace ends here: {self._path}: {error.strerror}")
            self._close()

    def _close(self) -> None:
        try:
            self._closing()
        except OSError as error:  # some file systems report a failed write only here
            logger.warning(f"{FLAG}: {self._path}: {error.strerror}")


def check_path(path: Path) -> None:
    """Raise ConfigError unless a trace may go to `path`: what is there and is no trace stays as it is."""
    try:
        if path.is_file():
            with path.open("rb") as existing:
                _lock(existing.fileno(), fcntl.LOCK_SH)
                # A training log may well begin with {"step": too.
                if path.stat().st_size and not _begins_as_trace(existing):
                    raise _refusal(path, "it exists and is no trace")
        elif path.exists():
            raise _refusal(path, "it is no regular file")
        elif not path.parent.is_dir():
            raise _refusal(path, "its folder does not exist")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _refusal(path, "it cannot be written")
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from error


def _lock(file: int, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, "another server writes it") from None


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{FLAG}: asked {str(path)!r}, possible are off, a new file and an earlier trace: {why}"
    )


def is_trace(path: Path) -> bool:
    """Whether the file begins as a trace does. Raises OSError."""
    with path.open("rb") as file:
        return _begins_as_trace(file)


def _begins_as_trace(file: BinaryIO) -> bool:
    return not isinstance(_parse(file.readline(_LINE_BYTES)), str)


def read_trace(path: Path) -> tuple[list[TracedStep], str | None]:
    """The steps of a trace, at least one, and a note where it ends in the middle of a line.

    Raises ConfigError with file and line where it is no trace.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    steps: list[TracedStep] = []
    last, note = lines.pop(), None
    for number, line in enumerate(lines, start=1):
        step = _parse(line)
        if isinstance(step, str):
            raise ConfigError(f"{path}, line {number}: {step}")
        if steps and step.step <= steps[-1].step:
            raise ConfigError(f"{path}, line {number}: step {step.step} after step {steps[-1].step}")
        if steps and step.at_s < steps[-1].at_s:
            raise ConfigError(f"{path}, line {number}: it begins before step {steps[-1].step}")
        steps.append(step)
    if last:
        note = f"{path} ends in the middle of line {len(lines) + 1}, which is left out"
    if not steps:
        raise ConfigError(f"{path} holds no decode step" if not last else f"{path}, line 1: no whole line")
    return steps, note


def _parse(line: bytes) -> TracedStep | str:
    """A step, or what is wrong with it."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(values, dict):
        return f"a {type(values).__name__}, possible is an object"
    for name, kind in _TYPES.items():
        if name not in values:
            return f"no {name}"
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int | kind):
            return f"{name} is {str(value)[:40]!r}, possible is a {'whole ' if kind is int else ''}number"
        if not 0 <= value < 2**63:  # NaN neither
            return f"{name} is {str(value)[:40]}, possible is a number from 0 to 2**63"
        if name in _SHARES and value > 1:
            return f"{name} is {value:g}, possible is a share from 0 to 1"
    return TracedStep(**{name: values[name] for name in _TYPES})
