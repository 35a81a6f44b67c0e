"""A CPU thread team that runs jobs while Python goes on."""

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpu_attn.decode import DecodeArguments, check_kind
from cpu_attn.library import check_threads, default_threads, library
from cpu_attn.paged import BlockTable, PagedKV, PagedLatent, PageTable, check_cpu, check_last_dim

# How long a wait stays in C++ before Python may handle a signal.
SIGNAL_SLICE_S = 0.1
MAX_SPIN_S = 1.0


@dataclass(frozen=True)
class Signal:
    """A job's end, for whoever cannot wait for it, such as a GPU.

    When the job has written its results, or has failed, `flag` ([1] int32, CPU) becomes `value`. Values
    count up from job to job, and past 2**31 - 1 go on at -2**31; a flag never goes back to an earlier one.
    """

    flag: Tensor
    value: int

    def __post_init__(self) -> None:
        check_cpu("flag", self.flag, (torch.int32,), 1)
        if len(self.flag) != 1 or not -(2**31) <= self.value < 2**31:
            raise ValueError(f"a signal is one int32, got {len(self.flag)} and value {self.value}")


_NO_FLAG = torch.empty(0, dtype=torch.int32)


class Job:
    """Something submitted to an Executor."""

    def __init__(self, what: str, result: Any, kept: Any) -> None:
        self._handle: Any = None  # until it is queued
        self._what = what
        self._result = result
        self._kept = kept  # tensors the job reads or writes

    @property
    def queued(self) -> bool:
        """Whether submitting it went through: an interrupt may come in between."""
        return self._handle is not None

    def done(self) -> bool:
        """Return whether the job has ended, well or with an error."""
        return bool(library().job_done(self._handle))

    def wait(self, timeout_s: float) -> Any:
        """Block until the job has ended and return its result.

        The GIL is released meanwhile. May be called again, by any thread.

        Returns:
            (out, lse) of a decode, None of other jobs.

        Raises:
            TimeoutError: when it has not ended after `timeout_s` seconds; it goes on running.
            ValueError, RuntimeError: what the job raised.
        """
        deadline = time.monotonic() + timeout_s
        while not library().job_wait(
            self._handle, max(0.0, min(SIGNAL_SLICE_S, deadline - time.monotonic()))
        ):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self._what} has not ended after {timeout_s:g} s")
        self._kept = None
        library().job_result(self._handle)
        return self._result

    @property
    def seconds(self) -> float:
        """Run time in seconds as the worker measured it, without the time queued.

        Raises RuntimeError while the job has not ended.
        """
        if not self.done():
            raise RuntimeError(f"{self._what} has not ended")
        return float(library().job_seconds(self._handle))


class Executor:
    """A team of threads of its own, running jobs in the order submitted.

    Args:
        threads: size of the team; default: len(cores), or default_threads().
        cores: one core per thread to pin to. None leaves the threads where the system puts them
            within the affinity of the creating thread.
        spin_s: seconds for which whoever waits, the thread for a job or a caller for its end, spins
            before it sleeps. Worth it for jobs in quick succession, on a host with a core to spare
            beside the team's.

    Independent of torch's thread settings. Close it, or use it as a context manager; otherwise it is
    closed when collected or when the interpreter exits. It does not survive a fork: in the child,
    submitting raises RuntimeError.

    Raises:
        ValueError: on fewer than one thread, cores that repeat, do not match `threads` or lie
            outside this process's affinity, or a spin_s out of range.
    """

    _numbers = itertools.count()

    def __init__(
        self, threads: int | None = None, cores: Sequence[int] | None = None, spin_s: float = 0.0
    ) -> None:
        cores = [] if cores is None else list(cores)
        if threads is None:
            threads = len(cores) or default_threads()
        check_threads(threads)
        if cores and (len(cores) != threads or len(set(cores)) != threads):
            raise ValueError(f"{threads} threads need as many different cores, got {cores}")
        if not 0.0 <= spin_s <= MAX_SPIN_S:
            raise ValueError(f"spin_s must be 0 to {MAX_SPIN_S:g} seconds, is {spin_s}")
        foreign = sorted(set(cores) - os.sched_getaffinity(0))
        if foreign:
            raise ValueError(f"cores {foreign} are outside the affinity of this process")
        self.threads = threads
        self.cores = tuple(cores)
        self.name = f"cpu_attn executor {next(self._numbers)}"
        self._handle = library().executor_new(threads, tuple(cores), float(spin_s))
        self._owner = os.getpid()
        self._lock = threading.Lock()  # submitters may be several threads
        self._pending: deque[Job] = deque()
        # _pending goes along: its tensors must outlive the job that is running.
        self._finalizer = weakref.finalize(self, _close, self._handle, self._pending)

    def submit_paged_decode(
        self,
        q: Tensor,
        kv: PagedKV,
        table: PageTable | BlockTable,
        scale: float,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Job:
        """Queue paged_decode and return at once; the job's result is (out, lse).

        Arguments as for paged_decode. Tensors that do not fit raise ValueError here, a bad page
        table raises it from the job's wait(). The tensors are kept alive and must not be written
        until the job has ended.
        """
        check_kind(kv, PagedKV)
        return self.submit_arguments(DecodeArguments.check(q, kv, table, scale, out, lse))

    def submit_paged_mla_decode(
        self,
        q: Tensor,
        kv: PagedLatent,
        table: PageTable | BlockTable,
        scale: float,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Job:
        """Queue paged_mla_decode and return at once; everything else as submit_paged_decode."""
        check_kind(kv, PagedLatent)
        return self.submit_arguments(DecodeArguments.check(q, kv, table, scale, out, lse))

    def submit_arguments(self, arguments: DecodeArguments, signal: Signal | None = None) -> Job:
        """Queue the decode that `arguments` are of. `signal` is raised at its end, and not if this raises."""
        kept = (arguments, signal)
        job = Job(f"{arguments.what} on {self.name}", (arguments.out, arguments.lse), kept)
        flag, value = (_NO_FLAG, 0) if signal is None else (signal.flag, signal.value)
        return self._submit(job, library().submit_decode, *arguments.handles(), flag, value)

    def submit_first_touch(self, buffer: Tensor) -> Job:
        """Queue writing one zero byte to each 4 KiB of `buffer` ([bytes] uint8, contiguous).

        Worker w of n writes the w-th of n contiguous shares, so that on a NUMA host a request
        laid out over the whole buffer is read by the thread whose node holds it.
        """
        check_cpu("buffer", buffer, (torch.uint8,), 1)
        check_last_dim("buffer", buffer)
        job = Job(f"first touch of {len(buffer)} bytes on {self.name}", None, buffer)
        return self._submit(job, library().submit_first_touch, buffer)

    def submit_copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Job:
        """Queue dst.copy_(src) for each (dst, src), shared out over the team by bytes.

        Each pair has one shape and dtype, CPU, both last dimensions contiguous, other strides free;
        no two destinations may overlap each other or a source.
        """
        lib = library()
        copies = lib.copy_new()
        for index, (dst, src) in enumerate(pairs):
            check_cpu(f"dst {index}", dst, (src.dtype,), src.dim())
            check_cpu(f"src {index}", src, (dst.dtype,), dst.dim())
            if dst.shape != src.shape or dst.dim() == 0:
                raise ValueError(
                    f"pair {index}: shapes {tuple(dst.shape)} and {tuple(src.shape)} do not match"
                )
            check_last_dim(f"dst {index}", dst)
            check_last_dim(f"src {index}", src)
            if dst.numel():
                lib.copy_add(copies, dst.detach(), src.detach())
        job = Job(f"copy of {len(pairs)} tensors on {self.name}", None, tuple(pairs))
        return self._submit(job, lib.submit_copy, copies)

    def submit_read(self, buffer: Tensor) -> Job:
        """Queue reading `buffer` ([bytes] uint8, contiguous) once, for the bandwidth probe."""
        check_cpu("buffer", buffer, (torch.uint8,), 1)
        check_last_dim("buffer", buffer)
        job = Job(f"read of {len(buffer)} bytes on {self.name}", None, buffer)
        return self._submit(job, library().submit_read, buffer)

    def submit_read_pieces(self, buffer: Tensor, starts: Tensor, piece_bytes: int) -> Job:
        """Queue reading `piece_bytes` of `buffer` from each of `starts` ([pieces] int64) on: the probe of scattered memory.

        Raises ValueError where a piece is not inside `buffer`.
        """
        check_cpu("buffer", buffer, (torch.uint8,), 1)
        check_last_dim("buffer", buffer)
        check_cpu("starts", starts, (torch.int64,), 1)
        check_last_dim("starts", starts)
        if piece_bytes < 1 or (
            len(starts) and (int(starts.min()) < 0 or int(starts.max()) > len(buffer) - piece_bytes)
        ):
            raise ValueError(f"pieces of {piece_bytes} bytes do not all lie in {len(buffer)} bytes")
        job = Job(f"read of {len(starts)} pieces on {self.name}", None, (buffer, starts))
        return self._submit(job, library().submit_read_pieces, buffer, starts, piece_bytes)

    def submit_multiply(self, rounds: int) -> Job:
        """Queue `rounds` rounds of products in registers on every thread, for the FLOP/s probe."""
        job = Job(f"{rounds} rounds of products on {self.name}", None, None)
        return self._submit(job, library().submit_multiply, rounds)

    def _submit(self, job: Job, queue: Callable[..., Any], *arguments: Any) -> Job:
        """Kept before it is queued: an interrupt in between must not free what the team writes."""
        # Another thread may have held the lock when a child was forked.
        if os.getpid() != self._owner:
            raise RuntimeError(f"{self.name} belongs to process {self._owner}, not to its forked child")
        with self._lock:
            self._drop_done()
            self._pending.append(job)
            try:
                job._handle = queue(self._handle, *arguments)
            except Exception:  # refused, and surely not queued
                self._pending.remove(job)
                raise
        return job

    def _drop_done(self) -> None:
        """Jobs run in order, so what came before one that is done is done too, queued for all we know or not."""
        done = 0
        for count, job in enumerate(self._pending, 1):
            if job.queued:
                if not job.done():
                    break
                done = count
        for _ in range(done):
            self._pending.popleft()

    def close(self) -> None:
        """End the running job, fail the queued ones with RuntimeError, stop the threads."""
        self._finalizer()

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close(handle: Any, pending: "deque[Job]") -> None:
    library().executor_close(handle)
    pending.clear()
