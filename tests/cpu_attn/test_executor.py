"""The executor: hand-off, time-outs, errors, the GIL, copies, first touch, fork and exit."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from cpu_attn import DecodeArguments, Executor, PagedKV, PageTable, Signal, isa, paged_decode, read_probe_gbps
from cpu_attn.executor import Job
from cpu_attn.library import library, select_isa
from tests.cpu_attn.reference import Case, int32, make_case

WAIT_S = 60.0


@pytest.fixture
def slow_case() -> Iterator[Case]:
    """A decode that takes at least tens of milliseconds: scalar, one head, many passes of one page."""
    before = isa()
    select_isa("scalar")
    case = make_case([256], page_size=256, kv_heads=1, group=8, head_dim=256, dtype=torch.float16)
    repeats = 60
    entries = torch.zeros(repeats, dtype=torch.int32)
    case.kv = PagedKV([(case.k[0][None], case.v[0][None])])
    case.table = PageTable(entries, entries, int32([0, repeats]), int32([256 * repeats]))
    yield case
    select_isa(before)


def test_same_bits_as_direct_call(executor: Executor) -> None:
    case = make_case([0, 5, 700], group=4)
    job = executor.submit_paged_decode(case.q, case.kv, case.table, case.scale)
    direct = paged_decode(case.q, case.kv, case.table, case.scale, threads=2)
    assert all(torch.equal(a, b) for a, b in zip(job.wait(WAIT_S), direct))
    assert job.done()
    assert 0 < job.seconds < WAIT_S


def test_outputs_given_are_used(executor: Executor) -> None:
    case = make_case([33])
    out, lse = torch.empty(1, 4, 64), torch.empty(1, 4)
    job = executor.submit_paged_decode(case.q, case.kv, case.table, case.scale, out=out, lse=lse)
    result = job.wait(WAIT_S)
    assert result[0].data_ptr() == out.data_ptr()
    assert result[1].data_ptr() == lse.data_ptr()


def test_time_out_names_the_job(executor: Executor, slow_case: Case) -> None:
    job = executor.submit_paged_decode(slow_case.q, slow_case.kv, slow_case.table, 1.0)
    with pytest.raises(TimeoutError, match=r"paged_decode of 1 requests on cpu_attn executor \d+"):
        job.wait(0.0)
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = job.seconds
    assert job.wait(WAIT_S)[0].isfinite().all()


def test_error_comes_out_of_wait_and_the_next_job_runs(executor: Executor) -> None:
    case = make_case([20])
    bad = PageTable(int32([7, 0]), int32([0, 0]), int32([0, 2]), int32([20]))
    job = executor.submit_paged_decode(case.q, case.kv, bad, 1.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="region 7"):
            job.wait(WAIT_S)
    job = executor.submit_paged_decode(case.q, case.kv, case.table, 1.0)
    assert job.wait(WAIT_S)[0].isfinite().all()


@pytest.mark.parametrize("direct", [False, True])
def test_python_goes_on_meanwhile(executor: Executor, slow_case: Case, direct: bool) -> None:
    ticks, stop = 0, threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    before = ticks
    team = {"threads": 1} if direct else {"executor": executor}
    paged_decode(slow_case.q, slow_case.kv, slow_case.table, 1.0, **team)
    gained = ticks - before
    stop.set()
    counter.join()
    assert gained >= 3


def check_kept_until_it_ended(executor: Executor, last: Job, gone: weakref.ref) -> None:
    """What `gone` refers to, which nobody but the executor holds, lives until `last` has ended, and no longer."""
    gc.collect()
    assert last.done() or gone() is not None
    last.wait(WAIT_S)
    executor.submit_first_touch(torch.zeros(1, dtype=torch.uint8)).wait(WAIT_S)
    gc.collect()
    assert gone() is None


def test_tensors_live_until_the_job_has_ended(executor: Executor, slow_case: Case) -> None:
    executor.submit_paged_decode(slow_case.q, slow_case.kv, slow_case.table, 1.0)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    gone = weakref.ref(buffer)
    last = executor.submit_first_touch(buffer)
    del buffer
    check_kept_until_it_ended(executor, last, gone)


def test_an_interrupt_right_after_queueing_frees_nothing(executor: Executor, slow_case: Case) -> None:
    executor.submit_paged_decode(slow_case.q, slow_case.kv, slow_case.table, 1.0)
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    gone = weakref.ref(buffer)

    def interrupted(*arguments: object) -> None:
        library().submit_first_touch(*arguments)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor._submit(Job("interrupted", None, buffer), interrupted, buffer)
    last = executor.submit_first_touch(torch.zeros(1, dtype=torch.uint8))
    del buffer
    check_kept_until_it_ended(executor, last, gone)


def test_close_fails_what_is_queued(slow_case: Case) -> None:
    team = Executor(1)
    running = team.submit_paged_decode(slow_case.q, slow_case.kv, slow_case.table, 1.0)
    queued = team.submit_first_touch(torch.zeros(1, dtype=torch.uint8))
    team.close()
    team.close()
    assert running.done()
    assert queued.done()
    with pytest.raises(RuntimeError, match="closed before the job ran"):
        queued.wait(WAIT_S)
    with pytest.raises(RuntimeError, match="closed"):
        team.submit_first_touch(torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize("pause_s", [0.0, 0.003], ids=["in succession", "after it has gone to sleep"])
def test_spinning_executor(pause_s: float) -> None:
    case = make_case([70, 0, 500])
    wanted = paged_decode(case.q, case.kv, case.table, case.scale, threads=2)
    with Executor(2, spin_s=0.001) as team:
        for _ in range(30):
            job = team.submit_paged_decode(case.q, case.kv, case.table, case.scale)
            assert all(map(torch.equal, job.wait(WAIT_S), wanted))
            time.sleep(pause_s)


def test_spinning_ends_in_time(slow_case: Case) -> None:
    with Executor(1, spin_s=1.0) as team:
        job = team.submit_paged_decode(slow_case.q, slow_case.kv, slow_case.table, 1.0)
        with pytest.raises(TimeoutError):
            job.wait(0.001)
        job.wait(WAIT_S)
    # Closing has ended the thread's own spin.


def test_collected_executor_is_closed() -> None:
    team = Executor(1)
    finalizer = team._finalizer
    del team
    gc.collect()
    assert not finalizer.alive


def test_independent_of_torch_threads(executor: Executor) -> None:
    case = make_case([500])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        job = executor.submit_paged_decode(case.q, case.kv, case.table, case.scale)
        assert torch.equal(
            job.wait(WAIT_S)[0], paged_decode(case.q, case.kv, case.table, case.scale, threads=2)[0]
        )
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_pinned_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    with Executor(cores=cores) as team:
        assert team.threads == len(cores)
        pinned = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
        assert all({core} in pinned for core in cores)
    assert os.sched_getaffinity(0) >= set(cores)


def empty_kv() -> tuple[PagedKV, PageTable]:
    page = torch.zeros(1, 16, 2, 64)
    return PagedKV([(page, page)]), PageTable(int32([]), int32([]), int32([0]), int32([]))


def test_bad_teams() -> None:
    core = min(os.sched_getaffinity(0))
    for threads in (0, 1025, 2**31, 2**32, 2**32 + 1, 2**63):
        with pytest.raises(ValueError, match="threads must be 1 to 1024"):
            Executor(threads)
        with pytest.raises(ValueError, match="threads must be 1 to 1024"):
            paged_decode(torch.zeros(0, 2, 64), *empty_kv(), 1.0, threads=threads)
    with pytest.raises(ValueError, match="different cores"):
        Executor(2, cores=[core, core])
    with pytest.raises(ValueError, match="outside the affinity"):
        Executor(cores=[100_000])
    for spin_s in (-1.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match="spin_s must be 0 to 1 seconds"):
            Executor(1, spin_s=spin_s)


def test_first_touch(executor: Executor) -> None:
    buffer = torch.ones(5 * 4096 + 10, dtype=torch.uint8)
    executor.submit_first_touch(buffer).wait(WAIT_S)
    assert buffer[::4096].tolist() == [0] * 6
    assert buffer.sum() == len(buffer) - 6


def test_copy(executor: Executor) -> None:
    head_major = torch.randn(7, 3, 16, 64).bfloat16()
    token_major = torch.zeros(7, 16, 3, 64, dtype=torch.bfloat16)
    flat, flat_copy = torch.randn(1000), torch.zeros(1000)
    single, single_copy = torch.randn(5, 1), torch.zeros(5, 1)
    gapped = torch.zeros(4, 3, 100)
    pairs = [
        (token_major, head_major.permute(0, 2, 1, 3)),
        (flat_copy, flat),
        (single_copy, single),
        (gapped[..., 10:74], head_major[:4, :, 3].float()),
        (torch.empty(0, 4), torch.empty(0, 4)),
    ]
    executor.submit_copy(pairs).wait(WAIT_S)
    for dst, src in pairs:
        assert torch.equal(dst, src)
    assert not gapped[..., :10].any()
    assert not gapped[..., 74:].any()


def test_copy_that_does_not_fit(executor: Executor) -> None:
    a = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="do not match"):
        executor.submit_copy([(a, torch.zeros(4, 3))])
    with pytest.raises(ValueError, match="dtype"):
        executor.submit_copy([(a, a.double())])
    with pytest.raises(ValueError, match="dst 0 must be contiguous"):
        executor.submit_copy([(a.t(), a)])


def test_probe(executor: Executor) -> None:
    assert read_probe_gbps(8 << 20, executor=executor, repeats=3) > 0


FORK_AND_EXIT = """
import os, sys, torch, cpu_attn
from tests.cpu_attn.reference import make_case
case = make_case([300])
arguments = case.q, case.kv, case.table, case.scale
torch.ones(1 << 20).sum()
team = cpu_attn.Executor(2)
before = team.submit_paged_decode(*arguments).wait(30)[0]
assert torch.equal(before, cpu_attn.paged_decode(*arguments, threads=2)[0])
child = os.fork()
if child == 0:
    assert torch.equal(before, cpu_attn.paged_decode(*arguments, threads=2)[0])
    try:
        team.submit_paged_decode(*arguments)
    except RuntimeError as error:
        assert "forked child" in str(error)
    else:
        os._exit(1)
    with cpu_attn.Executor(2) as other:
        assert torch.equal(before, other.submit_paged_decode(*arguments).wait(30)[0])
    del team
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
for _ in range(50):
    team.submit_paged_decode(*arguments)
# Neither closed nor waited for.
"""


def test_fork_and_exit_do_not_hang() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK_AND_EXIT], timeout=120, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_signal_is_raised_when_the_results_are_there_and_when_there_will_be_none(executor: Executor) -> None:
    case, flag = make_case([300]), torch.zeros(1, dtype=torch.int32)
    good = DecodeArguments.check(case.q, case.kv, case.table, 1.0)
    bad = PageTable(int32([7]), int32([0]), int32([0, 1]), int32([5]))
    for value, arguments in enumerate((good, DecodeArguments.check(case.q, case.kv, bad, 1.0), good), 1):
        job = executor.submit_arguments(arguments, Signal(flag, value))
        deadline = time.monotonic() + WAIT_S
        while flag.item() != value:
            assert time.monotonic() < deadline
        with pytest.raises(ValueError, match="region 7") if value == 2 else nullcontext():
            job.wait(WAIT_S)


def test_signal_of_a_dropped_job(slow_case: Case) -> None:
    executor, flag = Executor(1), torch.zeros(1, dtype=torch.int32)
    arguments = DecodeArguments.check(slow_case.q, slow_case.kv, slow_case.table, 1.0)
    executor.submit_arguments(arguments)
    dropped = executor.submit_arguments(arguments, Signal(flag, 1))
    executor.close()
    assert flag.item() == 1
    with pytest.raises(RuntimeError, match="closed"):
        dropped.wait(WAIT_S)


@pytest.mark.parametrize(
    ("there", "value", "after"),
    [(5, 3, 5), (3, 5, 5), (2**31 - 1, -(2**31), -(2**31)), (-(2**31), 2**31 - 1, -(2**31))],
)
def test_signal_never_goes_back(executor: Executor, there: int, value: int, after: int) -> None:
    case, flag = make_case([3]), int32([there])
    arguments = DecodeArguments.check(case.q, case.kv, case.table, 1.0)
    executor.submit_arguments(arguments, Signal(flag, value)).wait(WAIT_S)
    assert flag.item() == after


@pytest.mark.parametrize(("flag", "value"), [(int32([0, 0]), 1), (int32([0]), 2**31), (torch.zeros(1), 1)])
def test_bad_signals(flag: torch.Tensor, value: int) -> None:
    with pytest.raises(ValueError, match="signal|flag"):
        Signal(flag, value)
