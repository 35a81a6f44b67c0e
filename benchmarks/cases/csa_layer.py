"""Decode of one DeepSeek-V4 CSA layer whose entries lie in host memory, by policy, beside everything on the GPU.

A policy's step is the same work with the same outcome: draw the walk's next queries, score all index keys, take the best
entries, attend them and the window. What differs is where the entries are. Everything's output is held to that of everything
on the device over the same selection.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

from sglang_inplacekv.cores import make_team
from sglang_inplacekv.executors import packed_rows
from sglang_inplacekv.models.deepseek_v4.geometry import CSA_RATIO, HCA_RATIO
from sglang_inplacekv.roofline import Line, balanced_share
from sparse_attn.traffic import Policy, answer_bytes, exchange_bytes

from ..csa import Content, Walk, content
from ..csa_tables import ALL_ON_GPU, COMPUTE, FETCH, HCA, PREDICTED, SPLIT, WINDOW
from ..layers import device_type
from ..scale import CsaScale
from ..stats import Spread

# A weight's rounding to bf16 is 2**-9 of it at most, once for each of two outputs, which are means of rows of order one. A lost
# or wrong row of some 600 shows tenfold in the heads that weigh it most.
TOLERANCE = 2**-8
_INT32 = 4


@dataclass(frozen=True)
class Measured:
    """Of a step."""

    step_us: Spread
    stages: dict[str, float]  # us on the GPU
    missed: float  # entries of a step, all requests
    computed: float
    cpu_us: float  # of the team


def run(context) -> None:
    csa, device = context.scale.csa, device_type()
    packs = device == "cuda" and csa.geometry.head_dim == packed_rows.WIDTH
    team = make_team(None, device)
    try:
        for tokens in csa.tokens:
            for batch in csa.batches:
                for packed in (False, True) if packs else (False,):
                    what = f"{tokens} tokens, batch {batch}{', packed' if packed else ''}"
                    measure = partial(_measure_content, context, team, tokens, batch, packed)
                    context.part.attempt(what, measure, needs_s=20)
    finally:
        team.close()


def _measure_content(context, team, tokens: int, batch: int, packed: bool) -> None:
    csa, part = context.scale.csa, context.part
    with content(csa.geometry, batch, tokens // CSA_RATIO, team, device_type(), packed=packed) as own:
        for a in csa.walks:
            # What stages take is told of the first walk: at others only what is missed differs.
            Policies(part, csa, own, a, tokens, staged=a == csa.walks[0]).measure()
        if tokens == max(csa.tokens) and batch == 1:
            part.attempt("layers of other kinds", partial(_measure_others, part, own, tokens))


class Policies:
    """All policies over one content and one walk."""

    def __init__(self, part, csa: CsaScale, own: Content, a: float, tokens: int, *, staged: bool) -> None:
        self._part, self._csa, self._own, self._tokens, self._staged = part, csa, own, tokens, staged
        self._walk = Walk.of(own, csa.circle, a)
        self._case = f"batch {own.batch}, a {a}"
        self._found: dict[str, Measured] = {}

    def measure(self) -> None:
        self._attempt(ALL_ON_GPU, None)
        self._attempt(FETCH, 0.0)
        if self._own.packed:
            return  # the CPU attends no packed rows
        self._attempt(COMPUTE, 1.0)
        for share in self._csa.shares:
            self._attempt(SPLIT, share)
        if FETCH in self._found and COMPUTE in self._found:
            share = predicted_share(self._found[FETCH], self._found[COMPUTE])
            if share is not None:
                self._part.row(what=PREDICTED, case=self._case, tokens=self._tokens, predicted=share)
                if share not in (0.0, 1.0, *self._csa.shares):
                    self._attempt(SPLIT, share)

    def _attempt(self, what: str, share: float | None) -> None:
        named = f"{self._tokens} tokens, {self._case}, {what}, share {share}"
        self._part.attempt(named, partial(self._measure, what, share))

    def _measure(self, what: str, share: float | None) -> None:
        csa, own = self._csa, self._own
        layer = _layer(own, self._walk, None if share is None else Policy.split(share), csa.hot_rows)
        try:
            layer.run(csa.warm_up_steps)
            error, before = _error(layer), layer.counts()
            runs = [_step_us(layer, csa.steps) for _ in range(csa.runs)]
            error, after = max(error, _error(layer)), layer.counts()
            steps, device_bytes, team_s = csa.runs * csa.steps, layer.device_bytes, layer.team_s
            stages = layer.stage_us() if self._staged else {}
        finally:
            layer.close()
        missed, computed = ((getattr(after, n) - getattr(before, n)) / steps for n in ("missed", "computed"))
        cpu_us = 1e6 * statistics.median(team_s[-steps:]) if team_s else 0.0
        self._found[what] = found = Measured(Spread.of(runs), stages, missed, computed, cpu_us)
        listed = own.batch * csa.geometry.index_topk
        self._part.row(
            what=f"{what}, packed" if own.packed else what,
            case=self._case,
            tokens=self._tokens,
            share=share,
            batch=own.batch,
            entries=own.entries,
            row_bytes=own.row_bytes,
            step_us=found.step_us,
            stage_us={name: round(value, 2) for name, value in stages.items()},
            cpu_us=cpu_us,
            hit_rate=None if share is None else 1 - missed / listed,
            missed=missed,
            computed=computed,
            **_traffic(own, missed, computed),
            device_bytes=device_bytes,
            error=error,
        )


def _traffic(own: Content, missed: float, computed: float) -> dict[str, float]:
    """Bytes of a step. All that is missed crosses, in the CPU's part behind the answer."""
    geometry = own.geometry
    shape = (own.batch, geometry.heads, geometry.head_dim)
    answers = lists = queries = 0
    if computed:
        answers, lists = answer_bytes(*shape), _INT32 * own.batch * geometry.index_topk
        queries = exchange_bytes(*shape, geometry.head_dim, own.keys.itemsize) - answers
    return {"to_device_bytes": missed * own.row_bytes + answers, "to_host_bytes": float(queries + lists)}


def predicted_share(fetch: Measured, compute: Measured) -> float | None:
    """The share that balances both sides, by roofline.py: lines through what the two ends took. None without GPU times.

    After an entry is placed the CPU's side takes the hand-over and its attention, the link's side fetching, and attention on
    the device.
    """
    if not fetch.stages or not fetch.missed or not compute.computed:
        return None
    placed_us = sum(compute.stages[name] for name in ("draw", "select", "place"))
    waited_us = compute.step_us.median - placed_us - fetch.stages["merge"]
    cpu = Line(max(0.0, waited_us - compute.cpu_us), compute.cpu_us / compute.computed)
    link = Line(fetch.stages["attend"], max(0.0, fetch.stages["fetch"]) / fetch.missed)
    return round(balanced_share(cpu, link, fetch.missed), 2)


def _layer(own: Content, walk: Walk, policy: Policy | None, hot_rows: int):
    if own.device.type == "cuda":
        from ..csa_gpu import GpuLayer

        return GpuLayer(own, walk, policy, hot_rows)
    from ..csa_stand_in import StandIn

    return StandIn(own, walk, policy, hot_rows)


def _error(layer) -> float:
    """Of the latest step, against everything on the device over the same selection. RuntimeError beyond TOLERANCE."""
    error = float((layer.out - layer.reference()).abs().max())
    if not error <= TOLERANCE:  # NaN too
        raise RuntimeError(
            f"the output is {error:.2e} from that of everything on the device, {TOLERANCE:.2e} allowed"
        )
    return error


def _step_us(layer, steps: int) -> float:
    begun_s = time.perf_counter()
    layer.run(steps)
    return 1e6 * (time.perf_counter() - begun_s) / steps


def _measure_others(part, own: Content, tokens: int) -> None:
    """Layers of the other kinds, which the device attends alone: HCA and windows. Without a GPU nothing is to be told."""
    if own.device.type != "cuda":
        return
    from ..csa_gpu import dense_us

    for what, rows in ((HCA, tokens // HCA_RATIO), (WINDOW, 0)):
        part.row(
            what=f"{what}, packed" if own.packed else what,
            case="batch 1",
            tokens=tokens,
            step_us=Spread.of(dense_us(own, rows)),
            device_bytes=(rows + own.geometry.window) * own.row_bytes,
        )
