"""Decode attention against what this host reads, multiplies and SDPA does: python -m cpu_attn.bench.

Data is random; KV sets are rotated so that none is found in the caches; what is compared takes turns, so
that drift of a shared host hits all. Each section is a bench_*.py of its own.
"""

import argparse
import os

import torch

from cpu_attn import bench_gqa, bench_layouts, bench_mla, bench_sparse, bench_threads
from cpu_attn.executor import Executor
from cpu_attn.library import check_threads, default_threads, isa
from cpu_attn.probe import hand_over_seconds, huge_buffer

SPIN_S = 2e-3  # as a server's team beside a GPU
MOST_PAGE_TOKENS = 2048  # the shortest length

# Torch's threads, which gqa starts for SDPA, come last: they would be in the way of the others.
SECTIONS = {
    "mla": bench_mla.run,
    "threads": bench_threads.run,
    "layouts": bench_layouts.run,
    "sparse": bench_sparse.run,
    "gqa": bench_gqa.run,
}


def team_size() -> int:
    """As a server's team: whoever submits jobs has a core of his own, where there are more than two."""
    usable = default_threads()
    return usable - 1 if usable > 2 else usable


def core_list(text: str) -> list[int]:
    """Different cores of this process's affinity, as "0,2,4"."""
    try:
        cores = [int(core) for core in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 0,2,4") from None
    if foreign := sorted(set(cores) - os.sched_getaffinity(0)):
        raise argparse.ArgumentTypeError(f"{foreign} are outside the affinity of this process")
    if len(set(cores)) < len(cores):
        raise argparse.ArgumentTypeError(f"{text} has a core twice")
    return cores


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def page_tokens(text: str) -> int:
    """All lengths are whole pages of these."""
    value = positive(text)
    if value > MOST_PAGE_TOKENS or value & (value - 1):
        raise argparse.ArgumentTypeError(f"{value} is no power of two up to {MOST_PAGE_TOKENS}")
    return value


def parse(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    threads = f"of the team (default: as many as --cores, or {team_size()})"
    parser.add_argument("--threads", type=int, help=threads)
    parser.add_argument("--cores", type=core_list, help="of the team, a thread each, such as 0,2,4")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds a case, at least 5")
    parser.add_argument("--page-size", type=page_tokens, default=256, help="tokens a page")
    parser.add_argument("--probe-mib", type=positive, default=1024, help="well above the caches")
    parser.add_argument("--max-tokens", type=int, default=65536, help="gqa: batch x length at most")
    parser.add_argument("--no-sdpa", action="store_true", help="gqa: not beside torch")
    parser.add_argument(
        "--ggml", action="store_true", help="gqa: beside ggml's too (pip install ggml-python)"
    )
    parser.add_argument("--max-mla-tokens", type=int, default=262144, help="mla: batch x length at most")
    parser.add_argument("--mla-heads", type=positive, default=16, help="mla: query heads, 16 V2-Lite, 128 V3")
    parser.add_argument("--layout-mib", type=int, default=1024, help="layouts: KV in each kind of memory")
    parser.add_argument("--pool-mib", type=positive, default=2048, help="sparse: KV that lists select from")
    arguments = parser.parse_args(command_line)
    if arguments.rounds < 5:
        parser.error("--rounds must be at least 5")
    if arguments.threads is None:
        arguments.threads = len(arguments.cores) if arguments.cores else team_size()
    try:
        check_threads(arguments.threads)
    except ValueError as error:
        parser.error(f"--{error}")
    if arguments.cores and len(arguments.cores) != arguments.threads:
        parser.error(f"--threads {arguments.threads} need as many --cores, got {len(arguments.cores)}")
    return arguments


def report_hand_over(threads: int, cores: list[int] | None) -> None:
    """What a job costs that has nothing to do, by whether those who wait for it sleep or spin. Torch's own threads would
    spin on the team's cores.
    """
    torch.set_num_threads(1)
    for name, spin_s in (("sleeping", 0.0), ("spinning", SPIN_S)):
        with Executor(threads, cores, spin_s=spin_s) as executor:
            hand_over_seconds(executor)
            print(
                f"an empty job, {name} between jobs: {hand_over_seconds(executor) * 1e6:.1f} us", flush=True
            )


def main(command_line: list[str] | None = None) -> None:
    arguments = parse(command_line)
    report_hand_over(arguments.threads, arguments.cores)
    torch.manual_seed(0)
    spin_s = SPIN_S if arguments.threads < default_threads() else 0.0
    with Executor(arguments.threads, arguments.cores, spin_s=spin_s) as executor:
        print(f"{isa()}, {arguments.threads} threads, pages of {arguments.page_size} tokens")
        probe = huge_buffer(arguments.probe_mib << 20, executor)
        probe.fill_(1)
        for section in SECTIONS if arguments.only is None else (arguments.only,):
            SECTIONS[section](executor, probe, arguments)


if __name__ == "__main__":
    main()
