from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_inplacekv.tickets import Ticket, WaitTimeout
from sglang_inplacekv.windows import WindowTable


def table(count: int) -> tuple[WindowTable, list[int]]:
    released: list[int] = []
    return WindowTable(count, released.append), released


def test_window_stays_with_its_page_until_the_flush_is_acknowledged() -> None:
    windows, released = table(2)
    window = windows.open(7, 1.0)
    ticket = Ticket("flush")
    windows.begin_flush(7, ticket)
    assert windows.acknowledge() == [] and windows.window_of(7) == window and released == []
    ticket.complete()
    (flush,) = windows.acknowledge()
    assert (flush.page, flush.window) == (7, window)
    assert windows.window_of(7) is None and released == [window]


def test_freed_page_gives_its_window_back_at_once_unless_it_is_being_flushed() -> None:
    windows, released = table(2)
    open_window, flushed_window = windows.open(1, 1.0), windows.open(2, 1.0)
    ticket = Ticket("flush")
    windows.begin_flush(2, ticket)
    windows.page_freed(1)
    windows.page_freed(2)
    assert released == [open_window]
    ticket.complete()
    windows.acknowledge()
    assert released == [open_window, flushed_window]
    windows.check_integrity()


def test_new_owner_of_a_page_id_keeps_its_window_when_the_old_flush_ends() -> None:
    windows, _ = table(2)
    windows.open(3, 1.0)
    ticket = Ticket("flush")
    windows.begin_flush(3, ticket)
    windows.page_freed(3)
    fresh = windows.open(3, 1.0)
    ticket.complete()
    windows.acknowledge()
    assert windows.window_of(3) == fresh
    windows.check_integrity()


def test_no_free_window_waits_for_the_oldest_flush() -> None:
    windows, _ = table(1)
    window = windows.open(1, 1.0)
    ticket = Ticket("flush of page 1 to T")
    windows.begin_flush(1, ticket)
    with pytest.raises(
        WaitTimeout, match=r"opening a window for page 2 \(region D\) waited 0.01 s for flush of page 1 to T"
    ):
        windows.open(2, 0.01)
    ticket.complete()
    assert windows.open(2, 0.01) == window


def test_no_window_and_nothing_to_wait_for_says_so() -> None:
    windows, _ = table(1)
    windows.open(1, 1.0)
    with pytest.raises(RuntimeError, match="1 windows, 1 open, none being flushed"):
        windows.open(2, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "flush", "ack", "free"]), st.integers(0, 5)), max_size=60))
def test_any_order_of_events_keeps_the_accounts(events: list[tuple[str, int]]) -> None:
    windows, _ = table(3)
    tickets: list[Ticket] = []
    flushing: set[int] = set()
    for event, page in events:
        if event == "open" and windows.window_of(page) is None and windows.free_count:
            windows.open(page, 0.0)
            flushing.discard(page)
        elif event == "flush" and windows.window_of(page) is not None and page not in flushing:
            tickets.append(Ticket("flush"))
            windows.begin_flush(page, tickets[-1])
            flushing.add(page)
        elif event == "ack" and tickets:
            tickets.pop(0).complete()
            windows.acknowledge()
            flushing = {p for p in flushing if windows.window_of(p) is not None}
        elif event == "free":
            windows.page_freed(page)
            flushing.discard(page)
        windows.check_integrity()
