"""How fast this host attends and transfers a model's KV, measured in a second or two."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

import cpu_attn
from cpu_attn.bench_inputs import WAIT_S, page_table, random_sets
from sglang_inplacekv.planning import ModelKV
from sglang_inplacekv.roofline import Line

_LAYER_BYTES = 64 * 2**20  # of one attention call: long enough that starting it does not count
_COPY_BYTES = 256 * 2**20
_ROUNDS = 9


def measure_cpu(model: ModelKV, team: cpu_attn.Executor) -> Line:
    """The CPU's line, by attending random KV of this shape in place, cold in all caches."""
    shape = model.shape
    pages = -(-_LAYER_BYTES // (model.layer_token_bytes * shape.page_size))
    tokens = pages * shape.page_size
    buffers = [data.view(shape.dtype) for data in random_sets(tokens * model.layer_token_bytes, team)]
    submit = _submitter(model, team, buffers, page_table(1, tokens, shape.page_size))
    times = []
    for index in range(max(_ROUNDS, len(buffers))):
        job = submit(index % len(buffers))
        job.wait(WAIT_S)
        times.append(job.seconds)
    return Line(cpu_attn.hand_over_seconds(team), statistics.median(times) / tokens)


def _submitter(
    model: ModelKV, team: cpu_attn.Executor, buffers: list[torch.Tensor], table: cpu_attn.PageTable
) -> Callable[[int], cpu_attn.Job]:
    """Queues attention over buffer i, which is laid out as region C is."""
    shape = model.shape
    q, scale = torch.randn(1, model.q_heads, shape.head_dim).to(shape.dtype), shape.head_dim**-0.5
    if shape.value_dim is not None:
        rows = [data.view(-1, shape.page_size, 1, shape.head_dim) for data in buffers]
        latents = [cpu_attn.PagedLatent([own], shape.value_dim) for own in rows]
        return lambda index: team.submit_paged_mla_decode(q, latents[index], table, scale)
    inner = (2, shape.kv_heads, shape.page_size, shape.head_dim)
    blocks = [data.view(-1, *inner).transpose(2, 3) for data in buffers]
    layers = [cpu_attn.PagedKV([(own[:, 0], own[:, 1])]) for own in blocks]
    return lambda index: team.submit_paged_decode(q, layers[index], table, scale)


def measure_link() -> float:
    """Bytes a second of a long copy from pinned memory to the GPU."""
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(_ROUNDS):
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return _COPY_BYTES / statistics.median(times)
