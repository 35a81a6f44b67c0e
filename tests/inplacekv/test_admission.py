"""Which requests start although they spill: those D never holds, those with nobody to wait for, those it pays for."""

from __future__ import annotations

import dataclasses
import random

import pytest

from sglang_inplacekv.admission import Demand, DeviceSteps, StepModel, Verdict, decide, spilling_pays
from sglang_inplacekv.config import ADMISSIONS
from sglang_inplacekv.roofline import Line

PAGE, LAYERS = 256, 48
# 33 ms a step for 32,000 tokens, 5 ms for one over D alone: what an H200 of 16 cores was measured to take.
MODEL = StepModel(5e-3, Line(20e-6, 43e-9), Line(0.0, 43e-9), LAYERS, PAGE)


def demand(**changes: int | None) -> Demand:
    """One request of 32,000 tokens waits for a D that holds another one."""
    usual = Demand(
        new_pages=126,
        kept_pages=0,
        room_pages=4,
        device_pages=130,
        host_pages=0,
        new_tokens=256,
        running_tokens=256,
        waiting=1,
    )
    return dataclasses.replace(usual, **changes)


def random_demand(draw: random.Random) -> Demand:
    device = draw.choice((0, 10, 130))
    return Demand(
        new_pages=draw.randint(1, 200),
        kept_pages=draw.randint(0, device),
        room_pages=draw.randint(-50, device),
        device_pages=device,
        host_pages=draw.choice((0, 0, 5, 1000)),
        new_tokens=draw.choice((0, 1, 100, 4096)),
        running_tokens=draw.choice((None, 0, 1, 100, 4096)),
        waiting=draw.randint(0, 40),
    )


def random_model(draw: random.Random) -> StepModel:
    lines = (Line(draw.choice((0.0, 3e-5)), 10 ** draw.uniform(-10, -6)) for _ in range(2))
    return StepModel(10 ** draw.uniform(-4, 0), *lines, LAYERS, PAGE)


def cases(count: int = 2000) -> list[tuple[Demand, StepModel | None]]:
    draw = random.Random(0)
    return [(random_demand(draw), draw.choice((None, random_model(draw)))) for _ in range(count)]


@pytest.mark.parametrize("policy", ADMISSIONS)
def test_what_holds_under_every_policy(policy: str) -> None:
    seen = set()
    for request, model in cases():
        verdict = decide(policy, request, model)
        seen.add(verdict)
        assert (verdict is Verdict.IN_DEVICE) == (request.new_pages <= max(0, request.room_pages))
        if verdict is Verdict.WAITS:
            assert request.running_tokens is not None
            assert request.new_pages + request.kept_pages <= request.device_pages
    assert seen == set(Verdict) - ({Verdict.WAITS} if policy == "spill" else set())


def test_auto_is_queue_but_for_what_pays() -> None:
    differing = 0
    for request, model in cases():
        auto, queue = decide("auto", request, model), decide("queue", request, model)
        if auto is not queue:
            differing += 1
            assert (auto, queue) == (Verdict.SPILLS, Verdict.WAITS)
            assert model is not None and spilling_pays(request, model)
    assert differing > 20


def test_with_nothing_measured_auto_queues() -> None:
    assert decide("auto", demand(), None) is Verdict.WAITS
    assert all(decide("auto", request, None) is decide("queue", request, None) for request, _ in cases())


def test_less_to_spill_never_pays_less() -> None:
    for request, model in cases():
        if model is None or request.room_pages < 1 or not spilling_pays(request, model):
            continue
        for room in range(request.room_pages, request.device_pages + 1):
            assert spilling_pays(dataclasses.replace(request, room_pages=room), model)


@pytest.mark.parametrize("waiting", [1, 31])
def test_where_d_holds_one_request_at_its_best_speed_the_next_one_waits(waiting: int) -> None:
    assert decide("auto", demand(waiting=waiting), MODEL) is Verdict.WAITS


def test_requests_of_8k_wait_where_d_holds_five_of_them() -> None:
    assert (
        decide("auto", demand(new_pages=33, room_pages=2, device_pages=167, waiting=59), MODEL)
        is Verdict.WAITS
    )


@pytest.mark.parametrize("policy", ADMISSIONS)
@pytest.mark.parametrize(
    "changes", [{"new_pages": 131}, {"kept_pages": 5}, {"device_pages": 0, "room_pages": 0}]
)
def test_what_d_never_holds_starts(policy: str, changes: dict[str, int]) -> None:
    assert decide(policy, demand(**changes), MODEL) is Verdict.SPILLS


@pytest.mark.parametrize("policy", ADMISSIONS)
def test_with_nothing_running_it_starts(policy: str) -> None:
    assert decide(policy, demand(running_tokens=None), MODEL) is Verdict.SPILLS


def test_a_little_host_memory_beside_a_long_step_pays() -> None:
    """A page or two in host memory, beside a batch that streams 100,000 tokens already, and nobody else in the queue."""
    small = demand(new_pages=8, room_pages=0, host_pages=400)
    assert decide("auto", small, MODEL) is Verdict.SPILLS
    assert decide("queue", small, MODEL) is Verdict.WAITS


def test_a_full_queue_is_served_faster_from_d_later() -> None:
    small = demand(new_pages=8, room_pages=0, host_pages=400)
    assert decide("auto", dataclasses.replace(small, waiting=16), MODEL) is Verdict.WAITS


def test_those_that_run_must_run_on_for_long_enough() -> None:
    """What is placed in host memory stays there after they have ended."""
    small = demand(new_pages=8, room_pages=0, host_pages=400, new_tokens=1000, running_tokens=1000)
    assert decide("auto", small, MODEL) is Verdict.SPILLS
    assert decide("auto", dataclasses.replace(small, running_tokens=10), MODEL) is Verdict.WAITS


def test_the_boundary_is_the_formula() -> None:
    """Start if what it adds to a step is less than its part of a step over D."""
    request = demand(
        new_pages=10, room_pages=0, host_pages=100, waiting=3, new_tokens=200, running_tokens=100
    )
    model = dataclasses.replace(
        MODEL, cpu=Line(0.0, 1.0), transfer=Line(0.0, 1e-7)
    )  # the CPU gets next to nothing
    added_s = LAYERS * 10 * PAGE * 1e-7
    even_s = added_s * 3 / 0.5
    assert spilling_pays(request, dataclasses.replace(model, device_s=1.01 * even_s))
    assert not spilling_pays(request, dataclasses.replace(model, device_s=0.99 * even_s))


def test_the_first_page_costs_waiting_for_the_cpu_in_every_layer() -> None:
    """It would cross in no time: below break-even the balanced share is 0, but the step still stops for the CPU."""
    model = dataclasses.replace(MODEL, cpu=Line(2 * MODEL.device_s / LAYERS, 43e-9))
    assert model.step_s(0) == model.device_s
    assert model.step_s(1) == pytest.approx(2 * model.device_s)
    one = demand(new_pages=5, room_pages=4, waiting=2)
    assert one.spilled_pages == 1 and decide("auto", one, model) is Verdict.WAITS
    assert decide("auto", dataclasses.replace(one, host_pages=1), model) is Verdict.SPILLS  # it stops anyway


def test_steps_over_d_are_timed_from_one_to_the_next_only() -> None:
    steps, now = DeviceSteps(), 0.0
    for _ in range(20):
        for _ in range(3):
            steps.begin(now)
            now += 0.005
        steps.interrupt()  # a prefill, or an idle hour
        now += 3600.0
    assert steps.seconds == pytest.approx(0.005)


def test_a_few_steps_tell_nothing() -> None:
    steps = DeviceSteps()
    for i in range(6):
        steps.begin(0.005 * i)
        assert steps.seconds is None
    steps.begin(0.03)
    assert steps.seconds == pytest.approx(0.005)
