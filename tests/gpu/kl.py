"""Exactness by KL: is ours as close to stock FlashInfer as stock Triton is?

    python -m sglang_inplacekv.models qwen3_30b_a3b /dev/shm/qwen3
    python -m tests.gpu.kl --model /dev/shm/qwen3 --out /dev/shm/kl

The first stock one of --configs is the reference, the second the yardstick. `ours` is compared over the workload that the
options describe; `faults`, the negative control, over short requests of its own, without the other one's. Each configuration
runs in a process of its own, because a process gives 57 GB of weights back for certain only when it ends. Recordings and
kl.json stay in --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tests.gpu.configurations import FAULT_NAMES, FAULTS, OURS, Profile
from tests.gpu.divergence import Comparison, Divergence, kl
from tests.gpu.recording import HEAD_FILE, Recording
from tests.gpu.workload import WorkloadSize

FACTOR = 1.2  # of the yardstick's KL
FAULT_FACTOR = 10.0  # of that limit: what a fault must exceed to count as noticed
# Of decode positions alone only the median is judged, the rest is printed: where bf16 flips a router's choice once, the request
# stays apart for many steps, so that p99 and mean of 2,048 decode positions hang on two or three of 32 requests.
JUDGED = (("all", "median"), ("all", "p99"), ("decode", "median"))
P99_POSITIONS = (
    2000  # at least, to judge p99: beyond it the control's 1,280 positions have 12, of one or two requests
)


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
            if what != "p99" or own[phase].positions >= P99_POSITIONS
        }

    def passes(self, name: str) -> bool:
        """Within the limit; or for a planted fault, beyond it by far. A fault is one of decode steps."""
        if name in FAULT_NAMES:
            return self.excess(name)["decode median"] >= FAULT_FACTOR * FACTOR
        return max(self.excess(name).values()) <= FACTOR

    def judged(self) -> list[str]:
        """Recordings of ours, if there is a limit for them."""
        return [name for name in self.comparisons if self.yardstick not in (None, name)]

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
    parser.add_argument(
        "--configs", default=f"flashinfer,triton,{OURS},{FAULTS}", help="default: %(default)s"
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the model's")
    parser.add_argument("--dtype", default=Profile.dtype)
    parser.add_argument("--shares", type=_shares, default=Profile.shares, help="of ours; default: 0,0.4,1")
    parser.add_argument("--checkpoint", action="store_true", help="load the weights instead of drawing them")
    for name in ("page_size", "chunk_tokens", "device_tokens", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Profile, name))
    for size in fields(WorkloadSize):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    reuse_help = "keep what --out holds of earlier runs with the same settings, which is not checked"
    parser.add_argument("--reuse", action="store_true", help=reuse_help)
    parser.add_argument("--record", metavar="CONFIG", help=argparse.SUPPRESS)  # the child processes
    return parser


def _shares(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _profile(args: argparse.Namespace) -> Profile:
    return Profile(
        args.model,
        WorkloadSize(**{size.name: getattr(args, size.name) for size in fields(WorkloadSize)}),
        layers=args.layers,
        dtype=args.dtype,
        shares=args.shares,
        page_size=args.page_size,
        chunk_tokens=args.chunk_tokens,
        device_tokens=args.device_tokens,
        dummy_std=None if args.checkpoint else Profile.dummy_std,
        seed=args.seed,
    )


def _record(parts: Mapping[str, Profile], config: str, out: Path) -> None:
    """A child process. A line per recording, since the next may take long or fail."""
    from tests.gpu.servers import recordings  # SGLang takes 10 s to import, which the parent can do without

    if not sys.stdin.readline():
        raise SystemExit(f"[kl] {config}: the process that compares has ended")
    started_s = time.monotonic()
    for part, name, recording in recordings(parts, config):
        seconds, started_s = time.monotonic() - started_s, time.monotonic()
        recording.save(out / part, name)
        reads = f", decode read {recording.decode_reads}" if recording.decode_reads else ""
        print(
            f"[kl] {part}, {name}: {seconds:.1f} s, {len(recording.forwards)} forwards, {len(recording.places)} positions, "
            f"{recording.cached_tokens} tokens from the prefix cache{reads}",
            flush=True,
        )


def _record_each(configs: Sequence[str], argv: Sequence[str]) -> None:
    """One after the other, since they share the GPU; but all import SGLang at once."""
    command = [sys.executable, "-m", "tests.gpu.kl", *argv, "--record"]
    children = [subprocess.Popen([*command, config], stdin=subprocess.PIPE) for config in configs]
    for config, child in zip(configs, children, strict=True):
        child.communicate(b"go\n")
        if child.returncode:
            raise RuntimeError(f"{config} ended with {child.returncode}")


def _load(folder: Path, names: Sequence[str]) -> dict[str, Recording]:
    """All with one head in memory."""
    loaded: dict[str, Recording] = {}
    for name in names:
        head = next(iter(loaded.values())).head if loaded else None
        loaded[name] = Recording.load(folder, name, head)
    return loaded


def _files(out: Path, parts: Mapping[str, Profile], config: str) -> list[Path]:
    """What `config` leaves in `out`."""
    if config in parts:
        return [out / config / f"{name}.pt" for name in parts[config].names()]
    return [out / part / f"{config}.pt" for part in parts]


def main(argv: list[str] | None = None) -> int:
    """Record, compare, print, write kl.json; 1 if a criterion is missed."""
    argv, parser = sys.argv[1:] if argv is None else argv, _arguments()
    args = parser.parse_args(argv)
    configs = args.configs.split(",")
    parts = _profile(args).parts(configs)
    stock = [config for config in configs if config not in parts]
    if not parts or not stock:
        parser.error(f"--configs needs a stock backend, and {OURS} or {FAULTS}; asked {args.configs}")
    if args.record:
        _record(parts, args.record, args.out)
        return 0
    for part in () if args.reuse else parts:
        (args.out / part / HEAD_FILE).unlink(missing_ok=True)  # of another model
    missing = [c for c in configs if not (args.reuse and all(f.exists() for f in _files(args.out, parts, c)))]
    _record_each(missing, argv)
    reports = {}
    for part, profile in parts.items():
        recorded = _load(args.out / part, [*stock, *profile.names()])
        reports[part] = Report.of(recorded, stock[0], stock[1] if len(stock) > 1 else None)
        print(f"{part}:\n{reports[part].table()}")
    written = {part: report.as_dict() for part, report in reports.items()}
    written["settings"] = {name: str(value) for name, value in vars(args).items()}
    (args.out / "kl.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0 if all(report.passes(name) for report in reports.values() for name in report.judged()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
