"""What takes the link or the CPU away from a decode. Processes of their own, as a neighbour's are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_COPY_BYTES = 2**26  # as large as a tile of the decode, so that the two take turns evenly
_READ_BYTES = 2**27  # of each process; together beyond any cache
_END_S = 30.0
_READER = """
import os, sys
import numpy as np
os.sched_setaffinity(0, {int(sys.argv[1])})
data = np.ones(int(sys.argv[2]) // 8)
print("works", flush=True)
while os.getppid() == int(sys.argv[3]):
    data.sum()
"""
# A few copies ahead, lest the link rest between two. Blocking events, so that waiting takes no core from the CPU team.
_COPIER = """
import os, select, sys, time
import torch
nbytes, parent, cuda = int(sys.argv[1]), int(sys.argv[2]), torch.cuda.is_available()
torch.set_num_threads(1)
source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=cuda)
target = source.to("cuda" if cuda else "cpu", copy=True)
print("works", flush=True)
begun_s, copies, queued = time.perf_counter(), 0, []
while os.getppid() == parent and not select.select([sys.stdin], [], [], 0)[0]:
    target.copy_(source, non_blocking=True)
    copies += 1
    if cuda:
        queued.append(torch.cuda.Event(blocking=True))
        queued[-1].record()
    if len(queued) == 4:
        queued.pop(0).synchronize()
if cuda:
    torch.cuda.synchronize()
print(copies * nbytes / (time.perf_counter() - begun_s) / 1e9)
"""


class LinkHog:
    """Copies pinned memory to the GPU without a pause; without a GPU, memory to memory.

    Not a thread: two threads of one process that issue large copies to the GPU, each on a stream of its own, were seen to stop
    both for good (driver 580.159, H200; with batched and with plain copies, and with nothing else running).
    """

    def __init__(self) -> None:
        self.gbps = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        with _working([[_COPIER, str(_COPY_BYTES)]]) as (copier,):
            yield
            told, _ = copier.communicate(timeout=_END_S)
        if copier.returncode:
            raise RuntimeError(f"the link hog ended with {copier.returncode}")
        self.gbps = float(told)


@contextmanager
def cpu_hog(cores: Sequence[int]) -> Iterator[None]:
    """A process on each of `cores` that reads memory without a pause. RuntimeError if one has ended when the context does."""
    with _working([[_READER, str(core), str(_READ_BYTES)] for core in cores]) as readers:
        yield
        ended = [reader.returncode for reader in readers if reader.poll() is not None]
    if ended:
        raise RuntimeError(f"{len(ended)} of {len(readers)} CPU hogs ended with {ended}")


@contextmanager
def _working(scripts: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen]]:
    """Processes that have begun to work. They end with the context, or with this process."""
    hogs = [
        subprocess.Popen(
            [sys.executable, "-c", *script, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for script in scripts
    ]
    try:
        for hog in hogs:
            if hog.stdout.readline().strip() != "works":
                raise RuntimeError(f"a hog ended with {hog.wait(_END_S)}")
        yield hogs
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait(_END_S)
            hog.stdin.close()
            hog.stdout.close()
