"""A torch.profiler trace of one decode step, reduced to intervals: copies, GPU attention, CPU attention."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

import cpu_attn

COPY, BACK, ATTENTION, OTHER, CPU = (
    "copy to GPU", "copy to host", "GPU attention", "other GPU work", "CPU attention",
)  # fmt: skip
LANES = (COPY, ATTENTION, CPU, OTHER, BACK)
# (part of a kernel's name, class), first match wins
_CLASSES = (
    ("memcpy htod", COPY),
    ("memcpy dtoh", BACK),
    ("pagedkvcache", ATTENTION),
    ("paged_kv", ATTENTION),
    ("raggedkv", ATTENTION),
    ("batchprefill", ATTENTION),
    ("batchdecode", ATTENTION),
    ("persistentvariablelengthmergestates", ATTENTION),
)
TRACE_FILE = "timeline_trace.json"  # in the results' folder
_ANCHOR = "inplacekv benchmark anchor"


@dataclass(frozen=True)
class Interval:
    lane: str
    name: str
    start_us: float
    end_us: float


def lane_of(event: dict) -> str:
    name = event["name"].lower()
    return next((lane for part, lane in _CLASSES if part in name), OTHER)


class StepTrace:
    """Profiles the step between the polls at which `first_step` and the next arrivals have been seen.

    Give `on_poll` to Server.serve. The GPU is idle at either end, so that all of the step's work is inside, and only it.
    """

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: torch.profiler.profile | None = None
        self._anchors_ns: list[int] = []
        self._jobs: list[tuple[int, cpu_attn.Job]] = []
        self.intervals: list[Interval] = []

    def on_poll(self, arrivals: list) -> None:
        done = len(arrivals)
        if done < self._first_step or self.intervals:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._profiler is None:
            self._profiler = torch.profiler.profile(activities=self._activities)
            self._profiler.start()
        self._anchor()
        # The first traced step pays for starting the profiler; the second is the one to show.
        if len(self._anchors_ns) == 3:
            self._profiler.stop()
            self.intervals = self._reduce(self._events())

    def _anchor(self) -> None:
        with torch.profiler.record_function(f"{_ANCHOR} {len(self._anchors_ns)}"):
            self._anchors_ns.append(time.perf_counter_ns())

    @contextmanager
    def watching_cpu_attention(self) -> Iterator[None]:
        """Note when each job of the CPU team is submitted: no profiler sees its threads."""
        submit = cpu_attn.Executor.submit_arguments

        def noted(executor, arguments, signal=None):
            started_ns = time.perf_counter_ns()
            job = submit(executor, arguments, signal)
            if len(self._anchors_ns) == 2:
                self._jobs.append((started_ns, job))
            return job

        with mock.patch.object(cpu_attn.Executor, "submit_arguments", noted):
            yield

    def _events(self) -> list[dict]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            return json.loads(path.read_text())["traceEvents"]

    def _reduce(self, events: list[dict]) -> list[Interval]:
        named = (e for e in events if str(e.get("name", "")).startswith(_ANCHOR))
        anchors = {e["name"]: float(e["ts"]) for e in named if e.get("cat") != "gpu_user_annotation"}
        start_us, end_us = anchors[f"{_ANCHOR} 1"], anchors[f"{_ANCHOR} 2"]
        found = [
            Interval(
                lane_of(e), e["name"][:80], float(e["ts"]) - start_us, float(e["ts"]) + e["dur"] - start_us
            )
            for e in events
            if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and start_us <= float(e["ts"]) < end_us
        ]
        for started_ns, job in self._jobs:
            begin_us = (started_ns - self._anchors_ns[1]) / 1e3
            found.append(Interval(CPU, "paged_decode", begin_us, begin_us + job.seconds * 1e6))
        return sorted(found, key=lambda interval: interval.start_us)

    def as_json(self) -> dict:
        step_us = (self._anchors_ns[2] - self._anchors_ns[1]) / 1e3
        return {
            "step_us": step_us,
            "busy_us": {lane: total(spans_of(self.intervals, lane)) for lane in LANES},
            "at_once_us": {
                f"{a} and {b}": total(common(spans_of(self.intervals, a), spans_of(self.intervals, b)))
                for a, b in ((COPY, CPU), (COPY, ATTENTION), (ATTENTION, CPU))
            },
            "intervals": [asdict(interval) for interval in self.intervals],
        }


Spans = list[tuple[float, float]]


def spans_of(intervals: list[Interval], lane: str) -> Spans:
    """A lane's intervals as disjoint spans in order."""
    merged: Spans = []
    for start, end in sorted((i.start_us, i.end_us) for i in intervals if i.lane == lane):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(a: Spans, b: Spans) -> Spans:
    """Where both are, each given as disjoint spans."""
    both = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return [span for span in both if span[0] < span[1]]


def total(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
