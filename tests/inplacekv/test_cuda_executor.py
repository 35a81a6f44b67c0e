"""The random traffic of test_simulation through CudaExecutor, with fakes for CUDA and FlashInfer.

The current stream runs at once, copies as late as they may. test_simulation_gpu has real kernels and real time.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import wraps
from itertools import cycle
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention import flashinfer_mla_backend

from sglang_inplacekv.executors import hand_over, merge_kernel
from sparse_attn.attend import LOG2E
from tests.inplacekv import fake_cuda, simulation
from tests.inplacekv.fake_cuda import FakeStream
from tests.inplacekv.simulation import SimRequest, Simulation

ROWS = (6, 8)  # of captured decodes
Q_HEADS = 6  # of the simulation
OVER_FLASHINFER = ("flashinfer_paged", "flashinfer_mla", "host_reads", "device_attention", "cuda")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple:
    """q [n, q_heads, d] over k, v [m, kv_heads, d]: fp32 out and lse, base 2."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (scale * LOG2E)
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1 + len(k) - len(q)).bool(), -torch.inf)
    lse = torch.logsumexp(scores / LOG2E, -1) * LOG2E
    return torch.einsum("hnm,mhd->nhd", torch.exp2(scores - lse[..., None]), v), lse.T


class Wrapper:
    """What the two wrappers of FlashInfer have in common."""

    def __init__(self, _: torch.Tensor, layout: str, **settings: Any) -> None:
        assert layout in ("NHD", "HND")
        self.layout = layout

    def reset_workspace_buffer(self, *_: torch.Tensor) -> None:
        pass

    def finish(self, q: torch.Tensor, parts: Sequence[tuple], out: Any, lse: Any) -> tuple:
        done = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        assert len(done[0]) == len(q), "planned for another number of rows"
        if out is None:
            return done
        out.copy_(done[0])
        lse.copy_(done[1])
        return out, lse


class Paged(Wrapper):
    def plan(self, rows, pages, indices, last, q_heads, kv_heads, head_dim, page_size, **settings) -> None:
        assert not settings["causal"] and len(indices) == pages[-1] and (pages.diff() > 0).all()
        self.lists = rows.tolist(), pages.tolist(), indices.clone(), last.tolist()
        self.page_size, self.scale = page_size, settings["sm_scale"]

    def run(self, q, kv, out=None, lse=None, return_lse=False):
        rows, pages, indices, last = self.lists
        kv, parts = kv.unbind(1) if isinstance(kv, torch.Tensor) else kv, []
        for request, spare in enumerate(last):
            own = indices[pages[request] : pages[request + 1]].long()
            tokens = len(own) * self.page_size - self.page_size + spare
            k, v = (self._tokens(part[own])[:tokens] for part in kv)
            parts.append(attend(q[rows[request] : rows[request + 1]], k, v, self.scale, causal=False))
        return self.finish(q, parts, out, lse)

    def _tokens(self, pages: torch.Tensor) -> torch.Tensor:
        return (pages if self.layout == "NHD" else pages.transpose(1, 2)).flatten(0, 1)


class Ragged(Wrapper):
    def plan(self, rows, tokens, q_heads, kv_heads, head_dim, **settings) -> None:
        assert settings["causal"] and rows.equal(tokens)
        self.rows, self.scale = rows.tolist(), settings["sm_scale"]

    def run(self, q, k, v, return_lse):
        spans = [slice(*pair) for pair in zip(self.rows, self.rows[1:], strict=False)]
        parts = [attend(q[own], k[own], v[own], self.scale, causal=True) for own in spans]
        return self.finish(q, parts, None, None)


def merge_states(out, lse, parts) -> None:
    weights = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(weights / LOG2E, 0) * LOG2E
    shares = torch.exp2(weights - total)[..., None]
    out.copy_(sum(share * part.nan_to_num() for share, (part, _) in zip(shares, parts, strict=True)))
    if lse is not None:
        lse.copy_(total)


def on_the_cpu(make):
    @wraps(make)
    def made(*size, device=None, pin_memory=False, **settings):
        return make(*size, **settings)

    return made


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Of sglang_inplacekv.executors, by name, imported over a FlashInfer of ours. Nobody else sees them."""
    prefill, mla = ModuleType("flashinfer.prefill"), ModuleType("flashinfer.mla")
    prefill.BatchPrefillWithPagedKVCacheWrapper, prefill.BatchPrefillWithRaggedKVCacheWrapper = Paged, Ragged
    mla.BatchMLAPagedAttentionWrapper = mla.MLAPlanMetadata = None
    names = {name: f"sglang_inplacekv.executors.{name}" for name in OVER_FLASHINFER}
    with pytest.MonkeyPatch.context() as patch:
        for module in (ModuleType("flashinfer"), prefill, mla):
            patch.setitem(sys.modules, module.__name__, module)
        for name in names.values():
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(full) for name, full in names.items()}
        for name in names.values():
            del sys.modules[name]


@pytest.fixture
def cuda(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """sglang_inplacekv.executors.cuda, to be run without CUDA."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # there is little in each call, and the team has threads of its own
    cuda = modules["cuda"]
    fake_cuda.install(monkeypatch)
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, on_the_cpu(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for module in (cuda, modules["flashinfer_paged"]):
        monkeypatch.setattr(module, "to_gpu", torch.from_numpy)
    monkeypatch.setattr(cuda, "PlanFence", nullcontext)
    monkeypatch.setattr(hand_over, "mapped_tensor", at_address)
    monkeypatch.setattr(hand_over, "wait_for_value", lambda *_: None)
    monkeypatch.setattr(merge_kernel, "_launch", merge_states)
    yield cuda
    torch.set_num_threads(threads)


def executors(cuda: ModuleType) -> dict[str, type]:
    class Eager(cuda.CudaExecutor):
        """The current stream has no later: the CPU's answer has to be there when the layer goes on."""

        def decode_host(self, layer, q, scale) -> None:
            super().decode_host(layer, q, scale)
            self._collect_answer()

    class Graphed(Eager):
        """Decodes as a server replays them: of more rows than there are requests, D's attention as it was captured. Two at a
        time of either size, then two that no graph fits."""

        def __init__(self, regions) -> None:
            super().__init__(regions)
            self._sizes, self._graph_rows = cycle(rows for rows in (*ROWS, None) for _ in range(2)), None
            self._geometry = None  # of what has been captured

        def begin_forward(self, plan, graph_rows=None) -> None:
            if self._geometry is None:
                self.reserve_rows(max(ROWS))
                for rows in ROWS:
                    self.begin_capture(rows)
                    head_dim = self.regions.shape.head_dim
                    q = torch.zeros(rows, Q_HEADS, head_dim)
                    self.decode_device(0, q, head_dim**-0.5)
                    self._geometry = self._geometry_of(q, head_dim**-0.5)
            self._graph_rows = next(self._sizes) if plan.is_decode else None
            super().begin_forward(plan, self._graph_rows)

        def write_layer(self, layer, *parts) -> None:
            if self._graph_rows is None:
                super().write_layer(layer, *parts)
            else:
                self.write_decoded(layer, *(padded(part, self._graph_rows) for part in parts))

        def decode(self, layer, q, scale, out) -> None:
            if self._graph_rows is None:
                super().decode(layer, q, scale, out)
                return
            rows, whole = padded(q, self._graph_rows), padded(out, self._graph_rows)
            state = self._device.run_captured(layer, rows, self._geometry, max(ROWS))
            self.decode_host(layer, rows, scale)
            self.decode_merge(state, whole)
            out.copy_(whole[: len(out)])

    return {"eager": Eager, "graphs": Graphed}


def padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat((part, torch.full((rows - len(part), *part.shape[1:]), torch.nan)))


def at_address(address, shape, _, dtype) -> torch.Tensor:
    (count,) = shape
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=dtype)


def synchronize() -> None:
    for stream in list(FakeStream.numbered.values()):
        stream.synchronize()


@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("device_pages", [0, 7])
@pytest.mark.parametrize(("steals", "form"), [(False, "eager"), (True, "eager"), (True, "graphs")])
def test_random_traffic_is_exact(
    cuda: ModuleType,
    modules: dict[str, ModuleType],
    share: float,
    device_pages: int,
    steals: bool,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = mock.Mock(wraps=modules["host_reads"].compute_table)
    monkeypatch.setattr(modules["host_reads"], "compute_table", tables)
    monkeypatch.setattr(simulation, "make_executor", lambda regions, _: executors(cuda)[form](regions))
    sim = Simulation(share=share, device_pages=device_pages, host_pages=40, seed=11, steals=steals)
    try:
        with mock.patch.object(sim, "_check_costs") as decoded:
            for _ in range(60):
                sim.step()
        assert 0 < tables.call_count < 0.9 * decoded.call_count, "some decodes read what the last one did"
        assert isinstance(sim.executor, cuda.CudaExecutor) and sim.arrivals >= 5
        sim.executor.drain()
        costs = sim.executor.take_costs()
        assert (costs.cpu_tokens > 0) == (share > 0) and (costs.transfer_tokens > 0) == (share < 1)
        sim.regions.check_integrity()
    finally:
        sim.close()


@pytest.fixture
def decoding(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Simulation, SimRequest]]:
    """A simulation with a request whose prompt is done, all of it in T, half of which the CPU is to take."""
    monkeypatch.setattr(simulation, "make_executor", lambda regions, _: executors(cuda)["eager"](regions))
    sim = Simulation(share=0.0, device_pages=0, host_pages=40, seed=11, layers=3, jitter=False, steals=True)
    try:
        request = sim.admit()
        assert sim.room_for(request, 26)
        sim.forward([(request, 26)], is_decode=False)
        sim.executor.drain()
        assert sim.room_for(request, 1)
        sim.regions.scope.target_share = 0.5
        yield sim, request
    finally:
        sim.close()


def test_a_team_that_does_not_answer_lets_the_gpu_go_on(
    decoding: tuple[Simulation, SimRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU waits for the answer by itself. An error is no use while whoever handles it waits for the GPU."""
    (sim, request), waits = decoding, []
    monkeypatch.setattr(hand_over, "wait_for_value", lambda _, flag, value: waits.append((flag, value)))
    hung = mock.Mock(wait=mock.Mock(side_effect=TimeoutError("has not ended")))
    monkeypatch.setattr(type(sim.team), "submit_arguments", lambda *_: hung)
    with pytest.raises(RuntimeError, match=r"layer 0, region C: has not ended"):
        sim.forward([(request, 1)], is_decode=True)
    assert waits and all(int(flag) >= value for flag, value in waits)


def test_a_late_answer_of_a_forward_that_was_cut_short_is_waited_for(
    decoding: tuple[Simulation, SimRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to the memory that the next forward's come to."""
    sim, request = decoding
    busy, kv = sim.team.submit_multiply(30_000_000), (request.k, request.v)
    with monkeypatch.context() as patch:
        patch.setattr(type(sim.executor), "_attend_tiles", mock.Mock(side_effect=MemoryError("tiles")))
        with pytest.raises(MemoryError, match="tiles"):
            sim.forward([(request, 1)], is_decode=True)
    assert not busy.done()
    request.k, request.v = kv  # the token is decoded again, now without the CPU
    sim.regions.scope.target_share = 0.0
    with mock.patch.object(sim, "_check_costs"):
        sim.forward([(request, 1)], is_decode=True)
    assert busy.done()


def test_a_captured_latent_call_is_planned_again_as_sglang_plans_its_own(
    cuda: ModuleType, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = mock.create_autospec(flashinfer_mla_backend.fast_mla_prefill_plan)
    monkeypatch.setattr(flashinfer_mla_backend, "fast_mla_prefill_plan", again)
    mla, paged, wrapper = modules["flashinfer_mla"], modules["flashinfer_paged"], mock.Mock()
    monkeypatch.setattr(mla, "BatchMLAPagedAttentionWrapper", mock.Mock(return_value=wrapper))
    monkeypatch.setattr(mla, "MLAPlanMetadata", mock.Mock())
    geometry = paged.Geometry(16, 1, 576, 64, torch.bfloat16, torch.bfloat16, 0.1)
    counts, pages = np.array([1, 2], dtype=np.int32), np.array([7, 3, 4], dtype=np.int32)
    captured = mla.LatentAttention(torch.zeros(1), 512, (2, torch.zeros(8, dtype=torch.int32)))
    plain = mla.LatentAttention(torch.zeros(1), 512)
    for call in (captured, plain):
        for last in ([5, 6], [6, 7]):
            rows = np.ones(2, dtype=np.int32)
            call.plan(geometry, paged.PagedLists(rows, counts, pages, np.array(last, dtype=np.int32)))
    assert wrapper.plan.call_count == 3 and again.call_count == 1
    bound = inspect.signature(flashinfer_mla_backend.fast_mla_prefill_plan).bind(
        *again.call_args.args, **again.call_args.kwargs
    )
    told = {
        name: value.tolist() for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)
    }
    assert told == {
        "qo_indptr_cpu": [0, 1, 2],
        "kv_indptr_cpu": [0, 1, 3],
        "kv_indices": [7, 3, 4],
        "kv_len_arr_cpu": [6, 64 + 7],
    }
    assert bound.arguments["self"] is wrapper and bound.arguments["head_dim_kpe"] == 64
