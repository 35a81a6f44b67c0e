"""Work on one stream made late on the GPU itself, and waits left out: what tests of the executor's ordering need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from sglang_inplacekv.step_plan import StepPlan
from tests.harness import Runner

COMPUTE = "compute"  # the current stream of the model's forwards
STREAMS = {"copy": "_copy_stream", "write": "_write_stream", "flush": "_flush_stream"}
DELAY_CYCLES = 2_000_000  # about 1 ms: fifty times what a kernel or copy of these tests takes
_COMPUTE_CALLS = (
    *("write_layer", "write_decoded", "decode_device", "decode_host", "decode_merge"),
    *("extend", "end_forward"),
)


@dataclass
class Delays:
    """How often work was delayed, and waits were left out."""

    count: int = 0
    skipped: int = 0


@contextmanager
def late(runner: Runner, name: str, *, blind: str | None = None) -> Iterator[Delays]:
    """Whatever stream `name` does after a wait, or begins in a block of its own, comes DELAY_CYCLES later.

    `blind` names a stream whose waits for events are left out: with it, results may be wrong, which is for the caller to
    notice. Nothing else changes: host threads are not delayed.
    """
    executor, delays, busy = runner.kv_pool.executor, Delays(), threading.local()
    own = {key: getattr(executor, attribute).cuda_stream for key, attribute in STREAMS.items()}
    wait, enter = torch.cuda.Event.wait, torch.cuda.StreamContext.__enter__

    def is_stream(which: str | None, stream: torch.cuda.Stream) -> bool:
        if which == COMPUTE:
            return stream.cuda_stream not in own.values()
        return which is not None and stream.cuda_stream == own[which]

    def sleep(stream: torch.cuda.Stream) -> None:
        # Entering the stream to sleep on it would sleep again.
        if getattr(busy, "asleep", False) or not is_stream(name, stream):
            return
        busy.asleep = True
        try:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(DELAY_CYCLES)
        finally:
            busy.asleep = False
        delays.count += 1

    def late_wait(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        if is_stream(blind, stream):
            delays.skipped += 1
        else:
            wait(event, stream)
        sleep(stream)

    def late_enter(context: torch.cuda.StreamContext) -> None:
        enter(context)
        if context.stream is not None:
            sleep(context.stream)

    def late_call(call):
        def delayed(*args, **kwargs):
            sleep(torch.cuda.current_stream())
            return call(*args, **kwargs)

        return delayed

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda.Event, "wait", late_wait))
        stack.enter_context(mock.patch.object(torch.cuda.StreamContext, "__enter__", late_enter))
        for call in _COMPUTE_CALLS if name == COMPUTE else ():
            stack.enter_context(mock.patch.object(executor, call, late_call(getattr(executor, call))))
        yield delays
        torch.cuda.synchronize()


@contextmanager
def noted_plans(runner: Runner) -> Iterator[list[bytes]]:
    """One entry a forward: which page of which request was attended where. Page ids leave no trace.

    A flush that ends later leaves its page in its window for another forward: equally right, summed in another order.
    """
    planner, seen = runner.kv_pool.planner, []
    build = planner.build

    def noting(*args, **kwargs) -> StepPlan:
        plan = build(*args, **kwargs)
        seen.append(b"|".join(map(_attended_where, plan.spans, plan.reads)))
        return plan

    with mock.patch.object(planner, "build", noting):
        yield seen


def _attended_where(span, reads) -> bytes:
    return (
        np.isin(span.pages, reads.compute_pages).tobytes()
        + np.isin(span.pages, reads.transfer_pages).tobytes()
    )
