"""Admission: who waits for D, who spills, and that everybody is answered, with stock's answers."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from sglang_inplacekv import gate as gate_module
from sglang_inplacekv.admission import StepModel, decide
from sglang_inplacekv.config import ADMISSIONS
from sglang_inplacekv.gate import AdmissionGate
from sglang_inplacekv.pool import RegionPool
from sglang_inplacekv.roofline import Line
from tests.harness import Handle, Runner, compare
from tests.inplacekv.exactness.support import (
    CHUNK,
    PAGE,
    TOLERANCE,
    assert_all_returned,
    compare_first_tokens,
    first_tokens,
    page_ids,
    prompts,
    server,
    stock,
)

D_TOKENS = 16 * PAGE
WAITING = ("queue", "auto")  # with a given share nothing is measured, and `auto` queues what fits D


def host_pages(runner: Runner) -> int:
    return runner.kv_pool.regions.scope.host_pages


def run_watching(runner: Runner, handles: list[Handle]) -> tuple[int, int]:
    """Step until all are answered: the most requests that decoded at once, and the most host pages."""
    most_running = most_host = 0
    for _ in range(3000):
        if all(handle.done for handle in handles):
            break
        runner.step()
        most_running = max(most_running, len(runner.scheduler.running_batch.reqs))
        most_host = max(most_host, host_pages(runner))
    runner.run_until_idle()
    return most_running, most_host


@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
@pytest.mark.parametrize(("policy", "share"), [*((policy, 0.37) for policy in ADMISSIONS), ("auto", "auto")])
def test_a_mix_is_answered_as_by_stock(policy, share, radix):
    """Some are larger than D, some share prefixes, some are chunked, and running ones are retracted now and then."""
    batch = prompts(D_TOKENS + 40, 30, CHUNK + 1, D_TOKENS - 40, 3, 2 * CHUNK + 9, D_TOKENS + 3)
    batch += [batch[3][: 5 * PAGE + 3] + batch[1], batch[5] + batch[4]]
    wanted = [24, 20, 12, 6, 20, 9, 15, 30, 10]
    expected = stock("qwen3_moe", batch, max(wanted))
    args = {"share": share, "admission": policy, "disable_radix_cache": not radix, "retract_every": 11}
    with server("qwen3_moe", device_tokens=D_TOKENS, **args) as runner:
        handles = [
            runner.submit(prompt, delay=2 * i, max_new_tokens=n, want_prompt_logprobs=i < 3)
            for i, (prompt, n) in enumerate(zip(batch, wanted))
        ]
        runner.run_until_idle()
        compare_first_tokens(expected, handles, wanted)
        gate = runner.kv_pool.gate
        assert gate.waiting_requests == 0
        if policy != "spill":
            assert gate.spilled_requests >= 2  # at least those larger than D
            assert gate.queued_requests >= 1 or share == "auto"  # what is measured decides
        assert_all_returned(runner)


@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
@pytest.mark.parametrize("policy", ADMISSIONS)
def test_requests_that_fit_d_one_after_the_other_never_spill(policy, radix):
    batch = prompts(*[D_TOKENS - 2 * PAGE] * 4)
    expected = stock("qwen3_moe", batch, PAGE)
    args = {"admission": policy, "disable_radix_cache": not radix}
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, **args) as runner:
        handles = [runner.submit(prompt, max_new_tokens=PAGE) for prompt in batch]
        most_running, most_host = run_watching(runner, handles)
        compare(expected, [handle.result() for handle in handles], tolerance=TOLERANCE)
        gate = runner.kv_pool.gate
        if policy == "spill":
            assert most_running > 1 and most_host
            assert (gate.queued_requests, gate.spilled_requests) == (0, 0)
        else:
            assert (most_running, most_host) == (1, 0)
            assert (gate.queued_requests, gate.spilled_requests) == (3, 0)
        assert_all_returned(runner)


@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
@pytest.mark.parametrize(("spare_pages", "at_once"), [(0, 2), (-1, 1)])
@pytest.mark.parametrize("chunk", [CHUNK, 8 * CHUNK])
def test_as_many_run_as_d_holds_to_the_page(spare_pages, at_once, chunk, radix):
    """Lengths at which every page counts: a prompt that ends a page, and answers that fill their last one.

    A long chunk holds both prompts, so that the second is asked for when the first has been added and has no page yet.
    """
    batch = prompts(4 * PAGE, 4 * PAGE, 4 * PAGE - 3, 4 * PAGE + 5)
    args = {"admission": "queue", "disable_radix_cache": not radix, "chunked_prefill_size": chunk}
    wanted = [2 * PAGE, 2 * PAGE, 2 * PAGE + 3, 2 * PAGE - 5]
    expected = stock("qwen3_moe", batch, max(wanted))
    with server("qwen3_moe", share=0.37, device_tokens=(12 + spare_pages) * PAGE, **args) as runner:
        handles = [runner.submit(prompt, max_new_tokens=n) for prompt, n in zip(batch, wanted)]
        assert run_watching(runner, handles) == (at_once, 0)
        compare_first_tokens(expected, handles, wanted)


@pytest.mark.parametrize("policy", ADMISSIONS)
def test_larger_than_d_starts_at_once(policy):
    small, large = prompts(3 * PAGE, D_TOKENS + 1)
    expected = stock("qwen3_moe", [small, large], 60)
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, admission=policy) as runner:
        first = runner.submit(small, max_new_tokens=60)
        runner.step_until(lambda: first.output_ids)
        second = runner.submit(large, max_new_tokens=60)
        runner.step_until(lambda: second.output_ids)
        assert not first.done and host_pages(runner)
        runner.run_until_idle()
        compare(expected, [first.result(), second.result()], tolerance=TOLERANCE)
        gate = runner.kv_pool.gate
        assert gate.queued_requests == 0 and gate.spilled_requests == (policy != "spill")


@pytest.mark.parametrize("policy", WAITING)
def test_answer_alone_makes_it_larger_than_d(policy):
    """A request counts with all that it may answer."""
    small, other = prompts(3 * PAGE, 4 * PAGE)
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, admission=policy) as runner:
        first = runner.submit(small, max_new_tokens=10 * PAGE)
        runner.step_until(lambda: first.output_ids)
        waits = runner.submit(other, max_new_tokens=12 * PAGE)
        runner.step_until(lambda: first.done)
        assert not waits.output_ids and runner.kv_pool.gate.queued_requests == 1
        runner.run_until_idle()
        first = runner.submit(small, max_new_tokens=10 * PAGE)
        runner.step_until(lambda: first.output_ids)
        starts = runner.submit(other, max_new_tokens=12 * PAGE + 1)
        runner.step_until(lambda: starts.output_ids)
        assert not first.done
        runner.run_until_idle()


@pytest.mark.parametrize("policy", ADMISSIONS)
def test_without_d_everything_spills(policy):
    batch = prompts(30, 45, 60)
    expected = stock("qwen3_moe", batch)
    with server("qwen3_moe", share=0.37, device_tokens=0, admission=policy) as runner:
        handles = [runner.submit(prompt) for prompt in batch]
        most_running, _ = run_watching(runner, handles)
        assert most_running == 3 and runner.kv_pool.gate.queued_requests == 0
        compare(expected, [handle.result() for handle in handles], tolerance=TOLERANCE)


def cache_in_host(runner: Runner) -> list[int]:
    """Leave evictable pages in host memory, by a request that spilled because another one, which is returned, had all of D."""
    filler, spilled = prompts(D_TOKENS - PAGE + 1, 5 * PAGE, seed=9)
    gate = runner.kv_pool.gate
    policy, gate._policy = gate._policy, "spill"
    first = runner.submit(filler, max_new_tokens=PAGE - 2)
    runner.step_until(lambda: first.output_ids)
    runner.submit(spilled, max_new_tokens=2 * PAGE)
    runner.run_until_idle()
    gate._policy = policy
    assert host_pages(runner) >= 5
    return filler


@pytest.mark.parametrize(("new_pages", "waits"), [(3, 0), (4, 1)])
@pytest.mark.parametrize(("policy", "host"), [("queue", False), ("queue", True), ("auto", False)])
def test_a_cached_prefix_is_already_there_and_is_not_evicted_for_its_own_request(
    policy, host, new_pages, waits
):
    """D holds 7 pages of the prefix, which nothing runs on, and 6 of a running request: 3 are left.

    What else is cached, in host memory, does not count as room in D.
    """
    base, other, tail = prompts(7 * PAGE, 4 * PAGE, 2 * PAGE)
    answer = (new_pages - 2) * PAGE
    expected = stock("qwen3_moe", [other, base + tail], 2 * PAGE)
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, admission=policy) as runner:
        if host:
            cache_in_host(runner)
        in_host = host_pages(runner)
        runner.generate([base], max_new_tokens=1)
        running = runner.submit(other, max_new_tokens=2 * PAGE)
        runner.step_until(lambda: running.output_ids)
        hit = runner.submit(base + tail, max_new_tokens=answer, want_prompt_logprobs=False)
        runner.step_until(lambda: running.done)
        assert runner.kv_pool.gate.queued_requests == waits
        assert bool(hit.output_ids) != waits
        runner.run_until_idle()
        assert hit.cached_tokens == 7 * PAGE
        assert host_pages(runner) <= in_host  # evicted since, perhaps
        results = [running.result(), hit.result()]
        compare([expected[0], first_tokens(expected[1], answer)], results, tolerance=TOLERANCE)


@pytest.mark.parametrize("policy", WAITING)
def test_who_waited_gets_d_although_prefixes_fill_it(policy):
    """Idle prefixes count as room, and make room."""
    cached, first, second = prompts(D_TOKENS - PAGE, 8 * PAGE, 8 * PAGE, seed=3)
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, admission=policy) as runner:
        runner.generate([cached], max_new_tokens=1)
        running = runner.submit(first, max_new_tokens=PAGE)
        waits = runner.submit(second, max_new_tokens=PAGE)
        runner.step_until(lambda: running.done)
        assert not waits.output_ids
        runner.step_until(lambda: len(waits.output_ids) == PAGE - 1)
        assert page_ids(runner, waits).max() < runner.kv_pool.regions.sizes.first_host_page
        runner.run_until_idle()
        assert_all_returned(runner)


@pytest.mark.parametrize("policy", WAITING)
def test_aborted_while_it_waits(policy):
    batch = prompts(*[D_TOKENS - 2 * PAGE] * 3)
    expected = stock("qwen3_moe", batch, PAGE)
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, admission=policy) as runner:
        first, aborted, last = (runner.submit(prompt, max_new_tokens=PAGE) for prompt in batch)
        runner.step_until(lambda: len(first.output_ids) > 2)
        gate = runner.kv_pool.gate
        assert gate.waiting_requests == 1 and not aborted.output_ids
        runner.abort(aborted)
        aborted.req = None
        runner.run_until_idle()
        assert aborted.finish_reason["type"] == "abort"
        compare([expected[0], expected[2]], [first.result(), last.result()], tolerance=TOLERANCE)
        gc.collect()
        assert gate.waiting_requests == 0
        assert_all_returned(runner)


@pytest.mark.parametrize("policy", ADMISSIONS)
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
def test_a_full_pool_retracts_and_everybody_is_answered(policy, radix):
    """Room is promised to those that may end early only in part, so that they outgrow D and the whole pool."""
    batch, new_tokens = prompts(70, 30, 45, 60, D_TOKENS // 2, seed=2), 60
    expected = stock("qwen3_moe", batch, new_tokens)
    assert all(1 not in result.output_ids for result in expected), "an answer ends early"
    args = {"host_memory": "4MB", "max_total_tokens": 16 * PAGE, "disable_radix_cache": not radix}
    args |= {"schedule_conservativeness": 0.01, "retract_every": 9, "admission": policy}
    with server("qwen3_moe", share=0.37, device_tokens=13 * PAGE, **args) as runner:
        handles = [
            runner.submit(prompt, delay=2 * i, max_new_tokens=new_tokens, ignore_eos=False)
            for i, prompt in enumerate(batch)
        ]
        runner.run_until_idle()
        assert sum(handle.retractions for handle in handles) > 0
        compare(expected, [handle.result() for handle in handles], tolerance=TOLERANCE)
        assert_all_returned(runner)


@pytest.mark.parametrize(("device_s", "spills"), [(1e3, True), (1e-9, False)])
def test_auto_follows_its_model(monkeypatch, device_s, spills):
    """A request that does not fit beside the running one, of which the model says that it costs little or much."""
    model = StepModel(device_s, Line(0.0, 1e-6), Line(0.0, 1e-6), 4, PAGE)
    monkeypatch.setattr(RegionPool, "step_model", property(lambda pool: model))
    batch = prompts(D_TOKENS - 4 * PAGE, 4 * PAGE)
    expected = stock("qwen3_moe", batch, 2 * PAGE)
    with server("qwen3_moe", share="auto", device_tokens=D_TOKENS, admission="auto") as runner:
        first, second = (runner.submit(prompt, max_new_tokens=2 * PAGE) for prompt in batch)
        runner.step_until(lambda: first.done)
        assert bool(second.output_ids) == spills
        runner.run_until_idle()
        compare(expected, [first.result(), second.result()], tolerance=TOLERANCE)
        gate = runner.kv_pool.gate
        assert (gate.spilled_requests, gate.queued_requests) == ((1, 0) if spills else (0, 1))


def test_auto_weighs_what_those_that_run_read_in_host_memory(monkeypatch):
    demands = []
    monkeypatch.setattr(gate_module, "decide", lambda *args: demands.append(args[1]) or decide(*args))
    model = StepModel(1e-9, Line(0.0, 1e-6), Line(0.0, 1e-6), 4, PAGE)
    monkeypatch.setattr(RegionPool, "step_model", property(lambda pool: model))
    large, small = prompts(D_TOKENS + 3 * PAGE, PAGE)
    with server("qwen3_moe", share="auto", device_tokens=D_TOKENS, admission="auto") as runner:
        first = runner.submit(large, max_new_tokens=PAGE)
        runner.step_until(lambda: first.output_ids)
        in_host = host_pages(runner)
        runner.submit(small, max_new_tokens=2)
        runner.step_until(lambda: len(demands) == 2)
        assert demands[1].host_pages == in_host == 3
        runner.run_until_idle()


def test_the_model_is_there_once_d_and_both_sides_were_measured():
    small, large = prompts(2 * PAGE, D_TOKENS + 8 * PAGE)
    with server("qwen3_moe", share="auto", device_tokens=D_TOKENS, admission="auto") as runner:
        runner.generate([small], max_new_tokens=12)
        assert runner.kv_pool.step_model is None
        runner.generate([large], max_new_tokens=12)
        model = runner.kv_pool.step_model
        assert model.device_s > 0 and model.step_s(8) >= model.step_s(1) >= model.step_s(0) == model.device_s


def test_a_prefix_of_one_that_starts_is_no_room_for_the_next_one():
    """Both are asked for in one pass. D holds the first one's prefix of 7 pages, and 7 are left beside its 2 new ones.

    Idle prefixes in host memory hide that the prefix cannot be evicted any more.
    """
    base, tail, other = prompts(7 * PAGE, PAGE, 7 * PAGE)
    expected = stock("qwen3_moe", [base + tail, other], PAGE)
    args = {"admission": "queue", "chunked_prefill_size": 8 * CHUNK}
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, **args) as runner:
        cache_in_host(runner)
        runner.generate([base], max_new_tokens=1)
        in_host = host_pages(runner)
        assert in_host >= 5
        first, second = (
            runner.submit(prompt, max_new_tokens=PAGE, want_prompt_logprobs=False)
            for prompt in (base + tail, other)
        )
        runner.step_until(lambda: first.output_ids)
        assert first.req.cached_tokens == 7 * PAGE and not second.output_ids
        runner.run_until_idle()
        gate = runner.kv_pool.gate
        assert (gate.queued_requests, gate.spilled_requests) == (1, 0) and host_pages(runner) <= in_host
        compare(expected, [first.result(), second.result()], tolerance=TOLERANCE)
        assert_all_returned(runner)


@pytest.mark.parametrize("policy", ADMISSIONS)
def test_nothing_is_evicted_where_d_holds_what_is_used(policy):
    """D is full of the prefix of the one that starts: to evict what is cached in host memory gains nothing."""
    (tail,) = prompts(3 * PAGE)
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, admission=policy) as runner:
        prefix = cache_in_host(runner)[: D_TOKENS - PAGE]
        homes = runner.kv_pool.regions.homes
        evicted, in_host = homes.device_evicted_tokens, host_pages(runner)
        assert homes.device_free_pages == 1
        spills = runner.submit(prefix + tail, max_new_tokens=1, want_prompt_logprobs=False)
        runner.run_until_idle()
        assert spills.cached_tokens == D_TOKENS - PAGE
        assert homes.device_evicted_tokens == evicted and host_pages(runner) == in_host + 2


def test_a_prefill_that_goes_on_is_none_of_those_that_wait(monkeypatch):
    demands = []
    monkeypatch.setattr(gate_module, "decide", lambda *args: demands.append(args[1]) or decide(*args))
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, admission="queue") as runner:
        for prompt in prompts(CHUNK + PAGE, PAGE, PAGE):
            runner.submit(prompt, max_new_tokens=2)
        runner.run_until_idle()
    assert [demand.waiting for demand in demands] == [3, 2, 1]


@pytest.mark.parametrize("policy", WAITING)
def test_a_head_that_waits_is_read_once(monkeypatch, policy):
    """With preemption by priority it is asked for at every step; what is read waits for the device."""
    calls = Counter()

    def count(owner, name, key):
        original = getattr(owner, name)

        def counted(*args):
            calls[name, key(*args)] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counted)

    base, other, tail = prompts(4 * PAGE, 5 * PAGE, 5 * PAGE)
    args = {"admission": policy, "enable_priority_scheduling": True}
    with server("qwen3_moe", share=0.37, device_tokens=D_TOKENS, **args) as runner:
        count(AdmissionGate, "_demand", lambda gate, adder, req, *_: req.rid)
        count(runner.tree_cache, "prefix_device_indices", lambda req: req.rid)
        count(RegionPool, "live_host_pages", lambda pool: "")
        runner.generate([base], max_new_tokens=1)
        running = runner.submit(other, max_new_tokens=2 * PAGE)
        runner.step_until(lambda: running.output_ids)
        waits = runner.submit(base + tail, max_new_tokens=PAGE, want_prompt_logprobs=False)
        runner.step_until(lambda: running.done)
        assert calls["_demand", waits.rid] > PAGE and calls["prefix_device_indices", waits.rid] == 1
        runner.run_until_idle()
        assert waits.cached_tokens == 4 * PAGE and runner.kv_pool.gate.queued_requests == 1
        assert not calls["live_host_pages", ""]  # with nothing measured, no policy looks at them
