"""A CSA layer's decode where there is no GPU: torch on the CPU in its place, and cpu_attn for the CPU's part as it is."""

from __future__ import annotations

import torch

import cpu_attn
from sglang_inplacekv.executors.hot_rows import Counts
from sglang_inplacekv.executors.listed_cpu import HomeRows
from sparse_attn import Space
from sparse_attn.attend import State, attend_rows, merge
from sparse_attn.compose import Placement, place
from sparse_attn.hot import HotSet
from sparse_attn.indexer import top_ids
from sparse_attn.traffic import Policy, exchange_bytes

from .csa import PAGE_ROWS, Content, Walk

_WAIT_S = 60.0


class StandIn:
    """As GpuLayer, by sparse_attn's hot sets and division, a request at a time."""

    def __init__(self, content: Content, walk: Walk, policy: Policy | None, hot_rows: int) -> None:
        self.content, self._walk, self._policy = content, walk, policy
        geometry = content.geometry
        self._space: Space = geometry.spaces()["cmp"]
        self._hot = [HotSet(self._space, 0 if policy is None else hot_rows) for _ in range(content.batch)]
        self._homes = HomeRows(content.home, content.pages, PAGE_ROWS, content.entries)
        self._exchange = exchange_bytes(1, geometry.heads, geometry.head_dim, geometry.head_dim, 4)
        self._turn = self._listed = self._missed = self._computed = 0
        self._states: list[list[State]] = []
        self.team_s: list[float] = []
        self.q, self.ids, self.out = walk.queries[0], torch.empty(0), torch.empty_like(walk.queries[0])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        content, walk = self.content, self._walk
        self._turn = (self._turn + 1) % len(walk)
        self.q = walk.queries[self._turn]
        queries, weights = walk.index_queries[self._turn], walk.index_weights[self._turn]
        scores = ((content.keys @ queries.mT).relu_() * weights[:, None]).sum(-1)
        all_seen = torch.full((content.batch, 1), content.entries)
        self.ids = top_ids(scores, all_seen, content.geometry.index_topk)
        if self._policy is None:
            self.out = self.reference()
            return
        windows = content.window_names()
        self._states = [
            [self._attend(own, content.pool, names)] for own, names in zip(self.q, windows, strict=True)
        ]
        placements = [self._place(request) for request in range(content.batch)]
        out, lse = self._compute(placements)
        parts = [[*own, (out[i : i + 1], lse[i : i + 1])] for i, own in enumerate(self._states)]
        self.out = torch.cat([merge(own, content.sink)[0] for own in parts])

    def _attend(self, q: torch.Tensor, rows: torch.Tensor, names: torch.Tensor) -> State:
        names = names.long().view(1, 1, -1)
        return attend_rows(q.unsqueeze(0), self._space, rows.unsqueeze(1), names, self.content.geometry.scale)

    def _place(self, request: int) -> Placement:
        """Attend what is held and what is fetched; all that was missed is held from then on."""
        hot, policy = self._hot[request], self._policy
        assert policy is not None
        ids = self.ids[request].long().view(1, 1, -1)
        placement = place(ids, hot, policy, self._exchange)
        hot.begin_step()
        hot.use(placement.hot)
        q, states = self.q[request], self._states[request]
        if len(hot):
            states.append(self._attend(q, hot.rows[:, 0], placement.hot))
        tile = self._home_rows(request, placement.fetched)
        states.append(self._attend(q, tile, placement.tile))
        computed = placement.cpu[placement.cpu >= 0]
        missed = torch.cat((computed, placement.fetched)).sort().values
        hot.admit(missed, self._home_rows(request, missed).unsqueeze(1))
        self._listed += ids.numel()
        self._missed += len(missed)
        self._computed += len(computed)
        return placement

    def _home_rows(self, request: int, entries: torch.Tensor) -> torch.Tensor:
        page = self.content.pages[request].long()[entries // PAGE_ROWS]
        return self.content.home[page * PAGE_ROWS + entries % PAGE_ROWS]

    def _compute(self, placements: list[Placement]) -> State:
        lists = torch.stack([placement.cpu.view(1, -1).int() for placement in placements])
        blocks = cpu_attn.BlockTable(self._homes.table, lists, 1)
        scale = self.content.geometry.scale
        job = self.content.team.submit_paged_mla_decode(self.q, self._homes.latent, blocks, scale)
        state = job.wait(_WAIT_S)
        if lists.amax() >= 0:
            self.team_s.append(job.seconds)
        return state

    def counts(self) -> Counts:
        return Counts(self._listed, self._missed, self._computed)

    @property
    def device_bytes(self) -> int:
        content = self.content
        rows = content.entries if self._policy is None else self._hot[0].capacity
        return content.kept_bytes + content.batch * rows * content.row_bytes

    def reference(self) -> torch.Tensor:
        content = self.content
        names = content.names(self.ids)
        states = [self._attend(q, content.pool, own) for q, own in zip(self.q, names, strict=True)]
        return torch.cat([merge([state], content.sink)[0] for state in states])

    def stage_us(self) -> dict[str, float]:
        """Nothing: these would be another machine's."""
        return {}

    def close(self) -> None:
        pass
