"""Exactness by KL: is ours as close to stock FlashInfer as stock Triton is?

    python -m sglang_inplacekv.models qwen3_30b_a3b /dev/shm/qwen3
    python -m tests.gpu.kl --model /dev/shm/qwen3 --out /dev/shm/kl

The first of --configs is the reference, the second stock one the yardstick. Each runs in a process of its own, because a
process gives 57 GB of weights back for certain only when it ends. Recordings and kl.json stay in --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tests.gpu.configurations import FAULT_NAMES, OURS, SHARE_NAMES, Profile, recordings
from tests.gpu.divergence import Comparison, Divergence, kl
from tests.gpu.recording import HEAD_FILE, Recording
from tests.gpu.workload import WorkloadSize

FACTOR = 1.2  # of the yardstick's KL
FAULT_FACTOR = 10.0  # of that limit: what a fault must exceed to count as noticed
# Of decode positions alone only the median is judged, the rest is printed: where bf16 flips a router's choice once, the request
# stays apart for many steps, so that p99 and mean of 2,048 decode positions hang on two or three of 32 requests.
JUDGED = (("all", "median"), ("all", "p99"), ("decode", "median"))


@dataclass(frozen=True)
class Report:
    """KL(name || reference) of every recording; `yardstick` is the name of the second stock backend, or None."""

    reference: str
    yardstick: str | None
    comparisons: dict[str, Comparison]

    @classmethod
    def of(cls, recorded: Mapping[str, Recording], reference: str, yardstick: str | None) -> Report:
        others = {name: r for name, r in recorded.items() if name != reference}
        compared = {name: kl(recording, recorded[reference]) for name, recording in others.items()}
        return cls(reference, yardstick, compared)

    def limit(self, phase: str) -> Divergence:
        if self.yardstick is None:
            raise RuntimeError("no limit without a second stock backend")
        return self.comparisons[self.yardstick].phases()[phase]

    def excess(self, name: str) -> dict[str, float]:
        """What is judged of `name` over the yardstick's: 1 is as close as stock is to itself."""
        own = self.comparisons[name].phases()
        return {
            f"{phase} {what}": getattr(own[phase], what) / getattr(self.limit(phase), what)
            for phase, what in JUDGED
        }

    def passes(self, name: str) -> bool:
        """Within the limit; or for a planted fault, beyond it by far. A fault is one of decode steps."""
        if name in FAULT_NAMES:
            return self.excess(name)["decode median"] >= FAULT_FACTOR * FACTOR
        return max(self.excess(name).values()) <= FACTOR

    def judged(self) -> list[str]:
        """Recordings of ours, if there is a limit for them."""
        return [name for name in _names(OURS) if self.yardstick and name in self.comparisons]

    def table(self) -> str:
        lines = [
            f"{f'KL(... || {self.reference})':34} {'median':>10} {'p99':>10} {'mean':>10} {'positions':>10}"
        ]
        for name, comparison in self.comparisons.items():
            for phase, d in comparison.phases().items():
                line = f"{name:24} {phase:9} {d.median:10.3e} {d.p99:10.3e} {d.mean:10.3e} {d.positions:10}"
                lines.append(line)
            if name not in FAULT_NAMES and not comparison.same_batches:
                lines.append(f"{name}: its batches were not the reference's")
        for name in self.judged():
            over = ", ".join(f"{what} {value:.3g}" for what, value in self.excess(name).items())
            lines.append(f"{'pass' if self.passes(name) else 'FAIL'} {name}: times the yardstick: {over}")
        return "\n".join(lines)

    def as_dict(self) -> dict:
        return {
            "reference": self.reference,
            "yardstick": self.yardstick,
            "kl": {
                name: {phase: d.as_dict() for phase, d in c.phases().items()}
                for name, c in self.comparisons.items()
            },
            "same_batches": {name: c.same_batches for name, c in self.comparisons.items()},
            "passes": {name: self.passes(name) for name in self.judged()},
        }


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kl", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--out", type=Path, required=True, help="directory for recordings and kl.json")
    parser.add_argument("--configs", default=f"flashinfer,triton,{OURS}", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="fewer layers than the model's")
    parser.add_argument("--dtype", default=Profile.dtype)
    parser.add_argument("--checkpoint", action="store_true", help="load the weights instead of drawing them")
    for name in ("page_size", "chunk_tokens", "device_tokens", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Profile, name))
    for size in fields(WorkloadSize):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    reuse_help = "keep what --out holds of earlier runs with the same settings, which is not checked"
    parser.add_argument("--reuse", action="store_true", help=reuse_help)
    parser.add_argument("--record", metavar="CONFIG", help=argparse.SUPPRESS)  # the child processes
    return parser


def _profile(args: argparse.Namespace) -> Profile:
    return Profile(
        args.model,
        WorkloadSize(**{size.name: getattr(args, size.name) for size in fields(WorkloadSize)}),
        layers=args.layers,
        dtype=args.dtype,
        page_size=args.page_size,
        chunk_tokens=args.chunk_tokens,
        device_tokens=args.device_tokens,
        dummy_std=None if args.checkpoint else Profile.dummy_std,
        seed=args.seed,
    )


def _record(profile: Profile, config: str, folder: Path) -> None:
    """The child process. A line per recording, since the next may take long or fail."""
    started_s = time.monotonic()
    for name, recording in recordings(profile, config):
        seconds, started_s = time.monotonic() - started_s, time.monotonic()
        recording.save(folder, name)
        reads = f", decode read {recording.decode_reads}" if recording.decode_reads else ""
        print(
            f"[kl] {name}: {seconds:.1f} s, {len(recording.forwards)} forwards, {len(recording.places)} positions, "
            f"{recording.cached_tokens} tokens from the prefix cache{reads}",
            flush=True,
        )


def _names(config: str) -> list[str]:
    return [*SHARE_NAMES, *FAULT_NAMES] if config == OURS else [config]


def _load(folder: Path, configs: list[str]) -> dict[str, Recording]:
    """In the order of `configs`, all with one head in memory."""
    loaded: dict[str, Recording] = {}
    for config in configs:
        for name in _names(config):
            head = next(iter(loaded.values())).head if loaded else None
            loaded[name] = Recording.load(folder, name, head)
    return loaded


def main(argv: list[str] | None = None) -> int:
    """Record, compare, print, write kl.json; 1 if a criterion is missed."""
    argv = sys.argv[1:] if argv is None else argv
    args = _arguments().parse_args(argv)
    if args.record:
        _record(_profile(args), args.record, args.out)
        return 0
    configs = args.configs.split(",")
    stock = [config for config in configs if config != OURS]
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.reuse:
        (args.out / HEAD_FILE).unlink(missing_ok=True)  # of another model
    for config in configs:
        if args.reuse and all((args.out / f"{name}.pt").exists() for name in _names(config)):
            continue
        subprocess.run([sys.executable, "-m", "tests.gpu.kl", *argv, "--record", config], check=True)
    report = Report.of(_load(args.out, configs), stock[0], stock[1] if len(stock) > 1 else None)
    print(report.table())
    settings = {name: str(value) for name, value in vars(args).items()}
    written = report.as_dict() | {"settings": settings}
    (args.out / "kl.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0 if all(map(report.passes, report.judged())) else 1


if __name__ == "__main__":
    raise SystemExit(main())
