"""The share's benchmarks on a host without a GPU: `python -m benchmarks.share_simulation --out DIR`.

Two SIMULATED clocks, and a step takes the longer of them. The CPU's is the processor time that one thread of cpu_attn takes to
attend KV in place, really, but without what other processes take from it. The link's is bytes over a declared rate: nothing
is copied, nothing is merged. What is tried is the controller and the share, never the GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import cpu_attn
from cpu_attn.bench_inputs import fill_random, page_table, paged_kv_of
from cpu_attn.probe import huge_buffer
from sglang_inplacekv.roofline import Line

from .cases import share_growing, share_hogs, share_sweep
from .decoder import ScopeDecoder
from .environment import environment
from .layers import PAGE_TOKENS, qwen
from .planned import Planned
from .report import report
from .results import Budget, Part, write_json
from .scale import FULL, Shape, ShareScale

FIXED_S = 20e-6  # declared, of handing a layer to the CPU and back
_TASKS = Path("/proc/self/task")
_LEAVES_S = 100e-6
_PLAN_STEPS = 9
_LINK_SLOWER, _CPU_SLOWER = 2.0, 4.0  # the latter so that the floor is met
_WAIT_S = 60.0
_SERVER = "simulated"
_BUDGET_S = 600.0
SCALE = replace(
    FULL.share,
    layers=4,
    settle_s=0.0,
    round_s=0.0,
    shapes=(Shape(1, 2048), Shape(1, 8192), Shape(1, 32768)),
    growing_tokens=(2048, 32768),
    growing_pages=1,
    growing_shares=(0.5, 0.6, 0.7, 0.75, 0.8, 0.9),
    hog=Shape(1, 16384),
    hog_grow_steps=60,
)


class SimulatedDecoder(ScopeDecoder):
    """Requests of up to `tokens` together, seen as one, in Qwen3-30B-A3B's shape. Either side may become slower."""

    def __init__(self, layers: int, tokens: int, link_gbps: float) -> None:
        super().__init__(layers, FIXED_S)
        before = set(os.listdir(_TASKS))
        self.team = cpu_attn.Executor(threads=1)
        (thread,) = set(os.listdir(_TASKS)) - before
        self._schedstat = _TASKS / thread / "schedstat"
        self.model, self._link_gbps, self._cpu_factor = qwen(layers), link_gbps, 1.0
        shape = self.model.shape
        self._q = torch.randn(1, self.model.q_heads, shape.head_dim).to(shape.dtype)
        self._kv = []
        for _ in range(layers):
            buffer = huge_buffer(tokens * self.model.layer_token_bytes, self.team)
            fill_random(buffer, self.team)
            self._kv.append(paged_kv_of(buffer, shape.dtype, shape.kv_heads, PAGE_TOKENS, shape.head_dim))

    def _sides_s(self, computed: int, streamed: int) -> tuple[float, float, float]:
        link_s = streamed * self.model.layer_token_bytes / (self._link_gbps * 1e9)
        if not computed:
            return 0.0, 0.0, link_s
        return self._attention_s(computed) / len(self._kv), FIXED_S, link_s

    def _attention_s(self, tokens: int) -> float:
        """Processor time of attending so many in every layer."""
        table = page_table(1, tokens, PAGE_TOKENS)
        begun_s = self._processor_s()
        for kv in self._kv:
            self.team.submit_paged_decode(self._q, kv, table, self.model.shape.head_dim**-0.5).wait(_WAIT_S)
        return self._cpu_factor * (self._processor_s() - begun_s)

    def _processor_s(self) -> float:
        # The system counts a thread's time when it leaves the processor, which it does shortly after its job's end.
        time.sleep(_LEAVES_S)
        return int(self._schedstat.read_text().split()[0]) / 1e9

    @contextmanager
    def slower(self, *, link: float = 1.0, cpu: float = 1.0) -> Iterator[None]:
        """Times as slow."""
        before = self._link_gbps, self._cpu_factor
        self._link_gbps, self._cpu_factor = self._link_gbps / link, self._cpu_factor * cpu
        try:
            yield
        finally:
            self._link_gbps, self._cpu_factor = before


def measure(out: Path, scale: ShareScale, link_gbps: float) -> None:
    """Write what the cases of the same names write on a GPU host, of server 'simulated'."""
    longest = max(shape.batch * shape.context for shape in (*scale.shapes, scale.hog))
    tokens = max(scale.growing_tokens[1], longest) + scale.hog_grow_steps * PAGE_TOKENS
    decoder, series = SimulatedDecoder(scale.layers, tokens, link_gbps), {}
    planned = _planned(decoder, tokens, link_gbps)
    hogs = {share_hogs.LINK: {"link": _LINK_SLOWER}, share_hogs.CPU: {"cpu": _CPU_SLOWER}}
    parts = {
        name: Part(out / "parts" / f"{name}.{_SERVER}.json", name, _SERVER, "none", Budget(_BUDGET_S))
        for name in ("share_sweep", "share_growing", "share_hogs")
    }
    for shape in scale.shapes:
        share_sweep.compare(parts["share_sweep"], scale, decoder, planned, shape)
    steps = share_growing.compare(parts["share_growing"], scale, decoder)
    write_json(out / share_growing.SERIES_FILE, share_growing.points(steps))
    for name, hog in hogs.items():
        told = partial("{:g} times slower".format, *hog.values())
        follow = partial(decoder.slower, **hog)
        share_hogs.compare(parts["share_hogs"], scale, decoder, name, follow, told, series)
    write_json(out / share_hogs.SERIES_FILE, series)
    decoder.team.close()


def _planned(decoder: SimulatedDecoder, tokens: int, link_gbps: float) -> Planned:
    """What `plan` would measure, by the simulated clocks: the longest sequence alone on either side."""
    decoder.place(Shape(1, tokens))
    decoder.fixed(1.0, steals=True)
    steps, width = decoder.steps(_PLAN_STEPS), decoder.model.layer_token_bytes
    seconds = statistics.median(step.seconds for step in steps) / decoder.model.shape.layers - FIXED_S
    lines = Line(FIXED_S, seconds / tokens), Line(0.0, width / (link_gbps * 1e9))
    # A layer is attention and nothing else, and what would lie in D would take no time.
    return Planned("qwen3_30b_a3b", decoder.model, *lines, rest_s=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--link-gbps", type=float, default=3.0, help="of the link (default %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write_json(arguments.out / f"environment-{_SERVER}.json", environment())
    measure(arguments.out, SCALE, arguments.link_gbps)
    print(report([arguments.out]))


if __name__ == "__main__":
    main()
