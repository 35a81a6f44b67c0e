"""What the exactness tests share: prompts, stock SGLang's results, and servers whose regions are watched.

The reference is SGLang's own torch_native backend in fp32 without prefix reuse. Both sides add the same numbers in another
order, which moves a logprob by about 1e-5; a lost, repeated or foreign page moves it by 0.01 and more.
"""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sglang_inplacekv.executors.tile_stream import plan_tiles
from sglang_inplacekv.layout import ROLE_TRANSFER
from sglang_inplacekv.models import checkpoint_path, long_text, make_tiny, prepare_smollm2
from sglang_inplacekv.queues import WorkQueue
from tests.harness import Handle, Result, Runner, compare

PAGE, CHUNK, NEW_TOKENS = 16, 64, 32
TOLERANCE = 1e-4
VOCABULARY = range(5, 512)  # of the tiny models, special tokens excluded


@functools.cache
def model(kind: str) -> Path:
    return prepare_smollm2() if kind == "smollm2" else make_tiny(kind, checkpoint_path(f"tiny-{kind}"))


def prompts(*lengths: int, seed: int = 0, vocabulary: range = VOCABULARY) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.choice(vocabulary) for _ in range(length)] for length in lengths]


@functools.cache
def text_tokens(kind: str) -> list[int]:
    """Some thousand tokens of real prose."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model(kind))(long_text(20_000)).input_ids


def pages(tokens: int, page_size: int = PAGE) -> int:
    return -(-tokens // page_size)


def tokens_needed(batch: list[list[int]], new_tokens: int = NEW_TOKENS, page_size: int = PAGE) -> int:
    """KV tokens of the whole batch, in whole pages, nothing shared. The last token of an answer is never written."""
    return sum(pages(len(prompt) + new_tokens - 1, page_size) for prompt in batch) * page_size


_known: dict[tuple[str, tuple[int, ...]], Result] = {}


def stock(kind: str, batch: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[Result]:
    """Stock torch_native's results, each computed once per session. No Runner may be open while new ones are."""
    missing = {}
    for prompt in map(tuple, batch):
        if (kind, prompt) not in _known or len(_known[kind, prompt].output_ids) < new_tokens:
            missing[prompt] = None
    if missing:
        todo = [list(prompt) for prompt in missing]
        capacity = tokens_needed(todo, new_tokens) + 4096
        with Runner(model(kind), disable_radix_cache=True, max_total_tokens=capacity) as runner:
            results = runner.generate(todo, max_new_tokens=new_tokens)
        _known.update({(kind, prompt): result for prompt, result in zip(missing, results)})
    return [first_tokens(_known[kind, tuple(prompt)], new_tokens) for prompt in batch]


def first_tokens(result: Result, count: int) -> Result:
    return Result(
        result.output_ids[:count],
        result.output_logprobs[:count],
        result.prompt_logprobs,
        result.finish_reason,
        result.cached_tokens,
    )


def compare_first_tokens(expected: list[Result], handles: list[Handle], wanted: list[int]) -> None:
    """Each handle's result with as many tokens of what is expected as it was asked for."""
    compare(
        [first_tokens(result, count) for result, count in zip(expected, wanted)],
        [handle.result() for handle in handles],
        tolerance=TOLERANCE,
    )


def so_far(handle: Handle) -> Result:
    """What a request has answered, finished or not."""
    return Result(handle.output_ids, handle.output_logprobs, handle.prompt_logprobs, {}, 0)


def server(
    kind: str,
    *,
    share: float | str,
    device_tokens: int,
    host_memory: str = "24MB",
    tile_tokens: int = 3 * PAGE,
    seed: int = 7,
    poison: bool = True,
    admission: str = "spill",
    **runner_args,
) -> Runner:
    """Our backend with poison and jitter on. A layer of a hundred streamed tokens takes several tiles.

    Requests do not wait for D unless a test is about that: most are about what happens to those that spill.
    """
    env = {
        "SGLANG_INPLACEKV_CPU_SHARE": str(share),
        "SGLANG_INPLACEKV_ADMISSION": admission,
        "SGLANG_INPLACEKV_GPU_MEMORY": f"{device_tokens}tok",
        "SGLANG_INPLACEKV_HOST_MEMORY": host_memory,
        "SGLANG_INPLACEKV_TILE_TOKENS": str(tile_tokens),
        "SGLANG_INPLACEKV_POISON": str(int(poison)),
        "SGLANG_INPLACEKV_VERIFY": "1",
        "SGLANG_INPLACEKV_JITTER_SEED": str(seed),
        "SGLANG_INPLACEKV_WAIT_TIMEOUT_S": "60",
    }
    args = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_total_tokens": None} | runner_args
    return Runner(model(kind), backend="inplacekv", env=env, **args)


def slow_queues(monkeypatch, seconds: float, *names: str) -> None:
    """Make every job of these queues late, whatever the jitter draws: a missing wait then shows each time."""
    jitter = WorkQueue._delay

    def delay(queue: WorkQueue) -> None:
        jitter(queue)
        if queue.name in names:
            time.sleep(seconds)

    monkeypatch.setattr(WorkQueue, "_delay", delay)


@dataclass
class Traffic:
    """What all forwards since `watch` read and held. `window` are pages open or being flushed, in tokens."""

    decode: Counter = field(default_factory=Counter)  # tokens attended, summed over requests and steps
    extend: Counter = field(default_factory=Counter)
    held: Counter = field(default_factory=Counter)  # the most tokens held at once during a decode step
    most_tiles: int = 0  # of one layer of one decode step
    mid_page_extends: int = 0
    device_forwards: int = 0  # run by SGLang's own backend, all pages in D
    pending_reads: int = 0  # pages read while their write was under way


def watch(runner: Runner) -> Traffic:
    pool, seen = runner.kv_pool, Traffic()
    begin = type(pool).begin_forward.__get__(pool)
    begin_on_device = type(pool).begin_device_forward.__get__(pool)

    def held() -> None:
        for region, tokens in pool.regions.tokens_by_region().items():
            seen.held[region] = max(seen.held[region], tokens)

    def begin_forward(spans, is_decode, graph_rows=None):
        plan = begin(spans, is_decode, graph_rows)
        (seen.decode if is_decode else seen.extend).update(plan.attended_tokens(pool.page_size))
        seen.pending_reads += len(plan.pending)
        seen.mid_page_extends += sum(s.prefix % pool.page_size > 0 for s in spans if not is_decode)
        if is_decode:
            held()
            tiles = plan_tiles(plan, pool.regions.sizes)
            seen.most_tiles = max(seen.most_tiles, sum(t.role == ROLE_TRANSFER for t in tiles))
        return plan

    def begin_device_forward(spans, is_decode):
        begin_on_device(spans, is_decode)
        seen.device_forwards += 1
        read = sum(s.length if is_decode else s.prefix for s in spans)
        (seen.decode if is_decode else seen.extend).update({"D": read})
        seen.mid_page_extends += sum(s.prefix % pool.page_size > 0 for s in spans if not is_decode)
        if is_decode:
            held()

    pool.begin_forward, pool.begin_device_forward = begin_forward, begin_device_forward
    return seen


def page_ids(runner: Runner, handle: Handle) -> np.ndarray:
    """Pages of a running request, in order."""
    row = runner.scheduler.req_to_token_pool.req_to_token[handle.req.kv.req_pool_idx]
    written = len(handle.prompt) + len(handle.output_ids) - 1
    return (row[:written:PAGE] // PAGE).numpy()


def assert_all_returned(runner: Runner) -> None:
    """Idle, with the prefix cache emptied, the server holds no page and no window."""
    runner.idle_check()
    runner.flush_cache()
    pool = runner.kv_pool
    pool.executor.drain()
    pool.regions.check_integrity()
    assert runner.allocator.available_size() == runner.scheduler.max_total_num_tokens
    assert not any(pool.regions.tokens_by_region().values()), pool.regions.tokens_by_region()
    assert pool.regions.windows.free_count == pool.regions.windows.count
