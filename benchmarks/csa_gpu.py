"""A CSA layer's decode on a GPU by one policy, under CUDA graphs, and how long its parts take there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from sglang_inplacekv.executors.hot_rows import Counts, Homes, HotRows, cpu_counts
from sglang_inplacekv.executors.index_scores import best_entries, index_scores
from sglang_inplacekv.executors.listed_cpu import HomeRows, ListedCpu
from sglang_inplacekv.executors.merge_kernel import State, merge
from sglang_inplacekv.executors.row_attention import attend_listed
from sglang_inplacekv.mapped import mapped_tensor
from sparse_attn.attend import LOG2E
from sparse_attn.traffic import Policy

from .csa import PAGE_ROWS, Content, Walk

_WAIT_S = 60.0
_UNROLLED, _REPEATS = 8, 9  # steps in a graph that is timed, and how often


def sink_state(content: Content) -> State:
    """The sink as a partial state, which is merged like any other: a score without a value."""
    batch, geometry = content.batch, content.geometry
    out = torch.zeros(batch, geometry.heads, geometry.head_dim, device=content.device)
    return out, (content.sink * LOG2E).repeat(batch, 1)


class GpuLayer:
    """policy None: everything is on the device. q, ids and out are those of the latest step."""

    def __init__(self, content: Content, walk: Walk, policy: Policy | None, hot_rows: int) -> None:
        self.content, self._walk = content, walk
        geometry, batch = content.geometry, content.batch
        k, device = geometry.index_topk, content.device
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._index_q, self._index_w, self.q = (
            torch.empty_like(part[0]) for part in (walk.index_queries, walk.index_weights, walk.queries)
        )
        self.ids = torch.full((batch, k), -1, dtype=torch.int32, device=device)
        self._names = torch.full((batch, geometry.window + k), -1, dtype=torch.int32, device=device)
        self._names[:, : geometry.window] = content.window_names()
        self._listed = self._names[:, geometry.window :]
        self.out = torch.empty(batch, geometry.heads, geometry.head_dim, device=device)
        self._sink = sink_state(content)
        self._state: State = self._sink
        self._hot: HotRows | None = None
        self._cpu: ListedCpu | None = None
        self._stages: dict[str, Callable[[], None]] = {"draw": self._draw, "select": self._select}
        if policy is None:
            self._pool = content.pool
            self._bases = content.bases()
            self._stages |= {"place": self._name_all, "attend": self._attend, "merge": self._merge}
        else:
            self._spill(policy, hot_rows)
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._graphs = self._captured()

    def _spill(self, policy: Policy, hot_rows: int) -> None:
        content, geometry = self.content, self.content.geometry
        k, batch = geometry.index_topk, content.batch
        rows, windows = batch * hot_rows, content.pool[: content.first_entry]
        self._pool = torch.cat((windows, windows.new_zeros(rows, windows.shape[1])))
        shares = cpu_counts(policy, k, geometry.heads, geometry.head_dim, content.row_bytes)
        hot = HotRows(self._pool, content.first_entry, batch, hot_rows, content.entries, k, shares)
        home = content.home.view(torch.int64)
        strides = [8 * stride for stride in home.stride()]
        mapped = mapped_tensor(home.data_ptr(), home.shape, strides, home.dtype)
        self._homes = Homes(mapped, content.pages.to(content.device), PAGE_ROWS)
        self._hot = hot
        self._stages |= {
            "place": lambda: hot.place(self.ids, self._listed),
            "fetch": lambda: hot.fetch(self._homes),
            "attend": self._attend,
        }
        if hot.computes:
            homes = HomeRows(content.home, content.pages, PAGE_ROWS, content.entries)
            self._cpu = ListedCpu(
                homes, content.team, geometry.heads, k, geometry.scale, self.q.dtype, _WAIT_S
            )
            self._stages["fetch behind"] = lambda: hot.fetch_behind(self._homes)
        self._stages["merge"] = self._merge

    def _draw(self) -> None:
        """The next queries of the walk."""
        self._turn.add_(1).remainder_(len(self._walk))
        walk = self._walk
        for into, part in (
            (self._index_q, walk.index_queries), (self._index_w, walk.index_weights), (self.q, walk.queries),
        ):  # fmt: skip
            torch.index_select(part, 0, self._turn, out=into.unsqueeze(0))

    def _select(self) -> None:
        best_entries(index_scores(self._index_q, self._index_w, self.content.keys), self.ids)

    def _name_all(self) -> None:
        torch.add(self.ids, self._bases, out=self._listed)

    def _attend(self) -> None:
        self._state = attend_listed(self.q, self._pool, self._names, self.content.geometry.scale)

    def _merge(self) -> None:
        computed = [] if self._cpu is None else [self._cpu.state]
        merge(self.out, [self._state, *computed, self._sink])

    def _captured(self) -> list[torch.cuda.CUDAGraph]:
        """The step in one piece, or in three: cut where q goes to the CPU, and where its answer is awaited."""
        pieces = [list(self._stages.values())]
        if self._cpu is not None:
            placed, merged = list(self._stages).index("place") + 1, len(self._stages) - 1
            stages = pieces[0]
            pieces = [stages[:placed], stages[placed:merged], stages[merged:]]
        with torch.cuda.stream(self._stream):
            for stage in self._stages.values():  # kernels are compiled before the capture
                stage()
        # What one piece leaves the next one reads: they share their memory.
        shared = torch.cuda.graph_pool_handle()
        return [captured(piece, self._stream, shared) for piece in pieces]

    def run(self, steps: int) -> None:
        """Decode so many steps and wait for the last one."""
        with torch.cuda.stream(self._stream):
            for _ in range(steps):
                self._step()
            if self._cpu is not None:
                self._cpu.finish()
            self._stream.synchronize()

    def _step(self) -> None:
        first, *rest = self._graphs
        first.replay()
        if self._cpu is not None:
            assert self._hot is not None
            middle, last = rest
            self._cpu.send(self.q, self._hot.computed)
            middle.replay()
            self._cpu.begin()
            last.replay()

    @property
    def team_s(self) -> list[float]:
        """Seconds of the CPU's team, by step; none where it has no part."""
        return [] if self._cpu is None else self._cpu.seconds

    def counts(self) -> Counts:
        return Counts(0, 0, 0) if self._hot is None else self._hot.counts()

    @property
    def device_bytes(self) -> int:
        """What the layer needs there: keys, windows, and entries or the hot set."""
        # On the device entries take what they take at home.
        return self.content.kept_bytes + (self.content.home if self._hot is None else self._hot).nbytes

    def reference(self) -> torch.Tensor:
        """The latest step's output with everything on the device."""
        content = self.content
        out, names = torch.empty_like(self.out), content.names(self.ids)
        merge(out, [attend_listed(self.q, content.pool, names, content.geometry.scale), self._sink])
        return out

    def stage_us(self) -> dict[str, float]:
        """GPU time of the stages, by what each adds to a graph of several steps. The last use of the layer: hot rows go stale.

        Of a layer with a CPU part all but the merge, which waits for it.
        """
        names = [name for name in self._stages if self._cpu is None or name != "merge"]
        stages, found, before = self._stages, {}, 0.0
        for count, name in enumerate(names, 1):
            graph = captured([stages[own] for own in names[:count]] * _UNROLLED, self._stream)
            after = graph_us(graph, self._stream) / _UNROLLED
            found[name], before = after - before, after
        return found

    def close(self) -> None:
        """Free its graphs and memory now: a stage refers to the layer, and garbage must not be collected during a capture."""
        self._graphs.clear()
        self._stages.clear()


def captured(calls: Sequence[Callable[[], None]], stream: torch.cuda.Stream, *pool) -> torch.cuda.CUDAGraph:
    """As torch.cuda.graph does, without collecting garbage each time."""
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(*pool)
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    return graph


def graph_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Median GPU time of a replay that was queued while another ran."""
    times = []
    with torch.cuda.stream(stream):
        for _ in range(_REPEATS):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begun.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(1e3 * begun.elapsed_time(ended))
    return statistics.median(times)


def dense_us(content: Content, rows: int) -> list[float]:
    """GPU time of one layer that attends its window and `rows` entries, all of them on the device, in each of some runs."""
    geometry = content.geometry
    q = torch.randn(content.batch, geometry.heads, geometry.head_dim, device=content.device).bfloat16()
    names = content.names(torch.arange(rows, dtype=torch.int32, device=content.device)[None])
    sink, out = sink_state(content), torch.empty(q.shape, device=content.device)

    def layer() -> None:
        merge(out, [attend_listed(q, content.pool, names, geometry.scale), sink])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer()
    graph = captured([layer] * _UNROLLED, stream)
    return [graph_us(graph, stream) / _UNROLLED for _ in range(_REPEATS)]
