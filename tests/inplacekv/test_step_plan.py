"""What a Planner keeps from the last decode never shows: one that has no past plans the same."""

from __future__ import annotations

import random
from dataclasses import astuple, replace

import numpy as np
import pytest

from sglang_inplacekv.homes import HomeTable
from sglang_inplacekv.layout import ROLE_COMPUTE, ROLE_TRANSFER, RegionSizes
from sglang_inplacekv.step_plan import Planner, Reads, Span
from sglang_inplacekv.tickets import Ticket
from sglang_inplacekv.windows import WindowTable
from sglang_inplacekv.write_scope import WriteScope

SIZE = 4
SIZES = RegionSizes(
    device_pages=3, window_pages=6, host_pages=24, chunk_pages=3, tile_pages=2, page_size=SIZE
)


def parts() -> tuple[HomeTable, WindowTable]:
    return HomeTable(SIZES, WriteScope(0.5), 1.0), WindowTable(SIZES.window_pages, lambda window: None)


def span(label: str, pages: list[int], length: int) -> Span:
    return Span(label, np.array(pages, dtype=np.int64), length - 1, length)


def same(one: Reads, other: Reads) -> bool:
    return all(map(np.array_equal, astuple(one), astuple(other)))


def test_nothing_is_located_twice_while_nothing_changes() -> None:
    homes, windows = parts()
    planner, pages = Planner(homes, windows, 1.0), homes.allocate(5)
    assert pages is not None
    first, second = (planner.build([span("r", pages, length)], True).reads[0] for length in (18, 19))
    assert second.compute_pages is first.compute_pages and second.transfer_pages is first.transfer_pages
    assert second.device_tokens == first.device_tokens + 1


def test_pages_that_come_back_in_a_chunk_of_the_other_role_are_read_there() -> None:
    homes, windows = parts()
    planner = Planner(homes, windows, 1.0)
    homes.scope.target_share = 0.0
    device, host = homes.allocate(3), homes.allocate(3)
    assert device is not None and host is not None
    read = planner.build([span("r", [*host, *device], 4 * SIZE + 1)], True).reads[0]
    assert read.transfer_pages.tolist() == host and homes.role_of(host[0]) == ROLE_TRANSFER
    homes.free(host)
    homes.role[SIZES.chunk_of(host[0])] = ROLE_COMPUTE
    read = planner.build([span("s", [*host, *device], 4 * SIZE + 1)], True).reads[0]
    assert read.compute_pages.tolist() == host and not len(read.transfer_pages)


@pytest.mark.parametrize("seed", range(20))
def test_a_planner_without_a_past_plans_the_same(seed: int) -> None:
    """Requests that come, grow, end and leave their pages to others; windows that open, are flushed and close."""
    rng, (homes, windows) = random.Random(seed), parts()
    planner, running, kept = Planner(homes, windows, 1.0), {}, 0
    flushes: list[Ticket] = []

    def fresh() -> Planner:
        return Planner(homes, windows, 1.0)

    before: list[Reads] = []
    for step in range(120):
        homes.scope.target_share = rng.choice((0.0, 0.5, 1.0))
        if rng.random() < 0.1 and len(running) < 3 and (pages := homes.allocate(rng.randint(1, 4))):
            running[f"r{step}"] = pages, (len(pages) - 1) * SIZE
        for label, (pages, length) in list(running.items()):
            ends = rng.random() < 0.03 or (length == len(pages) * SIZE and not homes.free_pages)
            if ends:
                homes.free(pages)
                for page in pages:
                    windows.page_freed(page)
                del running[label]
                continue
            if length == len(pages) * SIZE:
                pages = pages + (homes.allocate(1) or [])
            running[label] = pages, length + 1
        for ticket in flushes:
            if not ticket.done and (rng.random() < 0.5 or windows.free_count < 3):
                ticket.complete()
        windows.acknowledge()
        spans = [span(label, *each) for label, each in running.items()]
        if rng.random() < 0.2:
            rng.shuffle(spans)
        if not spans:
            continue
        for each in spans:
            if rng.random() < 0.05:  # as when its next chunk comes: nothing is written twice here
                prefix = replace(each, prefix=each.length, length=each.length)
                assert same(planner.build([prefix], False).reads[0], fresh().build([prefix], False).reads[0])
        plan, expected = planner.build(spans, True), fresh().build(spans, True)
        assert all(map(same, plan.reads, expected.reads)) and plan.pending == expected.pending
        kept += sum(
            one.transfer_pages is other.transfer_pages for one, other in zip(before, plan.reads, strict=False)
        )
        before = plan.reads
        for each in spans:
            each.pages[:] = -1  # the caller's own
        for page in plan.flush_pages:
            flushes.append(Ticket("flush"))
            windows.begin_flush(page, flushes[-1])
            homes.set_ticket([page], flushes[-1])
    assert kept > 20, "something was kept"
