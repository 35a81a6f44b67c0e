"""The share's benchmarks on a host without a GPU: `python -m benchmarks.share_simulation --out DIR`.

Two clocks, one of them SIMULATED. The CPU's side is real: one thread attends KV in place. The link is simulated: for each layer it
waits as long as its bytes would take at a declared rate, and copies nothing, so that it takes neither core nor memory
from the CPU's side. Nothing is merged: what is tried is the controller and the share, never the GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import cpu_attn
from cpu_attn.bench_inputs import fill_random, page_table
from cpu_attn.probe import huge_buffer
from sglang_inplacekv.feedback import Costs
from sglang_inplacekv.host_rates import measure_cpu
from sglang_inplacekv.roofline import Line
from sglang_inplacekv.write_scope import WriteScope

from .cases import share_growing, share_hogs, share_sweep
from .decoder import Decoder
from .environment import environment
from .hogs import cpu_hog
from .layers import PAGE_TOKENS, qwen
from .report import report
from .results import Budget, Part, write_json
from .scale import FULL, Shape, ShareScale

_WAIT_S = 60.0
_SERVER = "simulated"
_BUDGET_S = 600.0
SCALE = replace(
    FULL.share,
    layers=4,
    shapes=(Shape(1, 2048), Shape(1, 8192), Shape(1, 32768)),
    growing_tokens=(2048, 32768),
    growing_pages=1,
    growing_shares=(0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    hog=Shape(1, 16384),
    hog_grow_steps=60,
)


class SimulatedDecoder(Decoder):
    """One sequence of up to `tokens` in Qwen3-30B-A3B's shape; `link_gbps` may change at any time."""

    def __init__(self, scale: ShareScale, tokens: int, core: int, link_gbps: float) -> None:
        self.team, self._costs = cpu_attn.Executor(cores=[core]), Costs()
        super().__init__(WriteScope(0.0), cpu_attn.hand_over_seconds(self.team))
        self.model, self.link_gbps = qwen(scale.layers), link_gbps
        shape = self.model.shape
        pages = tokens // PAGE_TOKENS
        # [pages, 2, kv_heads, G, d], as region C.
        inner = (2, shape.kv_heads, PAGE_TOKENS, shape.head_dim)
        layers = [huge_buffer(pages * self._page_bytes, self.team) for _ in range(shape.layers)]
        for layer in layers:
            fill_random(layer)
        blocks = [layer.view(shape.dtype).view(-1, *inner).transpose(2, 3) for layer in layers]
        self._kv = [cpu_attn.PagedKV([(own[:, 0], own[:, 1])]) for own in blocks]
        self._q = torch.randn(1, self.model.q_heads, shape.head_dim).to(shape.dtype)

    def place(self, shape: Shape) -> None:
        self.scope.compute_pages = self.scope.transfer_pages = 0
        self._add(shape.batch * shape.context // PAGE_TOKENS)

    def grow(self) -> None:
        self._add(1)

    def _add(self, pages: int) -> None:
        computed = self.scope.wanted_compute(pages)
        self.scope.compute_pages += computed
        self.scope.transfer_pages += pages - computed

    def _take_costs(self) -> Costs:
        taken, self._costs = self._costs, Costs()
        return taken

    def _host_tokens(self) -> int:
        return self.scope.host_pages * PAGE_TOKENS

    def _attend(self) -> tuple[int, int, int]:
        scope = self.scope
        stolen = scope.wanted_stolen(scope.compute_pages, scope.transfer_pages)
        computed, streamed = scope.compute_pages + stolen, scope.transfer_pages - stolen
        table = page_table(1, computed * PAGE_TOKENS, PAGE_TOKENS) if computed else None
        for kv in self._kv:
            job = None
            if table is not None:
                scale = self.model.shape.head_dim**-0.5
                job = self.team.submit_paged_decode(self._q, kv, table, scale)
            if streamed:
                self._costs.transfer_s += self._cross(streamed * self._page_bytes)
                self._costs.transfer_tokens += streamed * PAGE_TOKENS
            if job is not None:
                job.wait(_WAIT_S)
                self._costs.cpu_s += job.seconds
                self._costs.cpu_tokens += computed * PAGE_TOKENS
        return scope.compute_pages * PAGE_TOKENS, stolen * PAGE_TOKENS, streamed * PAGE_TOKENS

    @property
    def _page_bytes(self) -> int:
        return self.model.layer_token_bytes * PAGE_TOKENS

    def _cross(self, nbytes: int) -> float:
        """Wait until so many bytes would have come over the declared link, and return how long that was."""
        begun_s = time.perf_counter()
        time.sleep(nbytes / (self.link_gbps * 1e9))
        return time.perf_counter() - begun_s

    @contextmanager
    def slower_link(self, factor: float) -> Iterator[None]:
        before, self.link_gbps = self.link_gbps, self.link_gbps / factor
        try:
            yield
        finally:
            self.link_gbps = before


def measure(out: Path, scale: ShareScale, link_gbps: float, hog_factor: float = 2.0) -> None:
    """Write what the cases of the same names write on a GPU host, of server 'simulated'."""
    *_, core = sorted(os.sched_getaffinity(0))
    hog_tokens = scale.hog.context + scale.hog_grow_steps * PAGE_TOKENS
    tokens = max(scale.growing_tokens[1], hog_tokens, *(shape.context for shape in scale.shapes))
    decoder = SimulatedDecoder(scale, tokens, core, link_gbps)
    model, series = decoder.model, {}
    link = Line(0.0, model.layer_token_bytes / (link_gbps * 1e9))
    planned = share_sweep.Planned("qwen3_30b_a3b", model, measure_cpu(model, decoder.team), link)
    hogs = {
        share_hogs.LINK: (
            partial(decoder.slower_link, hog_factor),
            lambda: f"link {hog_factor:g} times slower",
        ),
        share_hogs.CPU: (partial(cpu_hog, [core]), lambda: "1 process"),
    }
    parts = {
        name: Part(out / "parts" / f"{name}.{_SERVER}.json", name, _SERVER, "none", Budget(_BUDGET_S))
        for name in ("share_sweep", "share_growing", "share_hogs")
    }
    for shape in scale.shapes:
        share_sweep.compare(parts["share_sweep"], scale, decoder, planned, shape)
    steps = share_growing.compare(parts["share_growing"], scale, decoder)
    write_json(out / share_growing.SERIES_FILE, share_growing.points(steps))
    for name, hog in hogs.items():
        share_hogs.compare(parts["share_hogs"], scale, decoder, name, *hog, series)
    write_json(out / share_hogs.SERIES_FILE, series)
    decoder.team.close()


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
