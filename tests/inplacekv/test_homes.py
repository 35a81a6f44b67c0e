"""Property tests of the home table: exact accounting whatever the order of allocations and frees."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_inplacekv.homes import HomeTable
from sglang_inplacekv.layout import ROLE_COMPUTE, ROLE_NONE, ROLE_TRANSFER, RegionSizes
from sglang_inplacekv.tickets import Ticket, WaitTimeout
from sglang_inplacekv.write_scope import WriteScope


class RecordedPins:
    """The host's side of roles: pinned chunks, and that T is never given one that is not."""

    def __init__(self) -> None:
        self.pinned = {0}
        self.late: list[int] = []  # chunks that were not pinned when T took them
        self.unpinned: list[int] = []

    def is_pinned(self, chunk: int) -> bool:
        return chunk in self.pinned

    def prepare(self, chunk: int, role: int) -> None:
        if role == ROLE_TRANSFER and chunk not in self.pinned:
            self.late.append(chunk)
            self.pinned.add(chunk)
        elif role == ROLE_COMPUTE and chunk in self.pinned:
            self.unpinned.append(chunk)
            self.pinned.remove(chunk)

    def keep_spare(self, empty: Sequence[int]) -> None:
        if empty and not self.pinned & set(empty):
            self.pinned.add(empty[0])


class HomeMachine(RuleBasedStateMachine):
    @initialize(
        device=st.integers(0, 6),
        host=st.integers(1, 24),
        chunk=st.integers(1, 5),
        share=st.floats(0, 1, allow_nan=False),
    )
    def start(self, device: int, host: int, chunk: int, share: float) -> None:
        self.sizes = RegionSizes(device, 2, host, chunk, 2, 4)
        self.pins = RecordedPins()
        self.homes = HomeTable(self.sizes, WriteScope(share), 0.01, self.pins)
        self.live: list[int] = []
        self.role_at_birth: dict[int, int] = {}

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free, device_free = self.homes.free_pages, self.homes.device_free_pages
        pages = self.homes.allocate(count)
        if count > free:
            assert pages is None
            return
        assert pages is not None and len(set(pages)) == count and not set(pages) & set(self.live)
        on_device = [page for page in pages if self.sizes.is_device(page)]
        assert len(on_device) == min(count, device_free), "D first, while it has room"
        self.live += pages
        for page in pages:
            if not self.sizes.is_device(page):
                self.role_at_birth[page] = self.homes.role_of(page)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.live), unique=True))
        self.homes.free(pages)
        self.live = [page for page in self.live if page not in pages]

    @invariant()
    def accounting_is_exact(self) -> None:
        if not hasattr(self, "homes"):
            return
        self.homes.check_integrity()
        assert self.homes.free_pages + len(self.live) == self.sizes.pages - 1
        hosts = [page for page in self.live if not self.sizes.is_device(page)]
        assert all(self.homes.role_of(page) == self.role_at_birth[page] for page in hosts), (
            "a home changed its region"
        )
        chunks_in_use = {self.sizes.chunk_of(page) for page in hosts}
        for chunk, role in enumerate(self.homes.role):
            assert (role == ROLE_NONE) == (chunk not in chunks_in_use)
            assert role == ROLE_NONE or (chunk in self.pins.pinned) == (role == ROLE_TRANSFER)
        empty = set(range(self.sizes.chunks)) - chunks_in_use
        assert not empty or empty & self.pins.pinned, "an empty chunk is pinned ahead"
        assert not self.pins.late, "T waited for a chunk to be pinned"


TestHomeMachine = HomeMachine.TestCase
TestHomeMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def table(
    share: float, device: int = 0, host: int = 12, chunk: int = 2, pins: RecordedPins | None = None
) -> HomeTable:
    return HomeTable(RegionSizes(device, 1, host, chunk, 1, 16), WriteScope(share), 0.05, pins)


@pytest.mark.parametrize(("share", "computed"), [(0.0, 0), (0.37, 4), (0.5, 6), (1.0, 12)])
def test_live_share_follows_the_target(share: float, computed: int) -> None:
    homes = table(share, chunk=1)
    for _ in range(12):
        homes.allocate(1)
    assert (homes.scope.compute_pages, homes.scope.transfer_pages) == (computed, 12 - computed)
    assert homes.scope.fallback_pages == 0


def test_falls_back_to_the_other_role_only_when_no_chunk_is_left() -> None:
    homes = table(1.0, host=4, chunk=2)
    homes.scope.target_share = 0.0
    homes.allocate(1)
    homes.scope.target_share = 1.0
    pages = homes.allocate(3)
    assert [homes.role_of(page) for page in pages].count(ROLE_TRANSFER) == 1
    assert [homes.role_of(page) for page in pages].count(ROLE_COMPUTE) == 2
    assert homes.scope.fallback_pages == 1


def test_transfer_pages_of_one_allocation_are_adjacent() -> None:
    pages = table(0.0, chunk=6).allocate(5)
    assert pages == list(range(pages[0], pages[0] + 5))


def test_transfer_takes_chunks_from_the_low_end_and_compute_from_the_high_end() -> None:
    homes = table(0.5)
    pages = homes.allocate(6)
    assert [homes.role_of(page) for page in pages] == [ROLE_COMPUTE] * 3 + [ROLE_TRANSFER] * 3
    assert [homes.sizes.chunk_of(page) for page in pages] == [5, 5, 4, 0, 0, 1]


def test_pinned_chunks_go_to_transfer_first_and_to_compute_last() -> None:
    homes = table(0.0, host=6, chunk=1, pins=RecordedPins())
    pages = homes.allocate(3)
    assert [homes.sizes.chunk_of(page) for page in pages] == [0, 1, 2]
    homes.free(pages[1:2])
    assert homes._pins.pinned == {0, 1, 2, 3}, "a chunk stays pinned when its pages are freed"
    homes.scope.target_share = 1.0
    pages += homes.allocate(4)
    assert [homes.sizes.chunk_of(page) for page in pages[3:]] == [5, 4, 3, 1]
    assert homes._pins.unpinned == [3, 1], "others first"


def test_a_chunk_changes_hands_after_the_last_write_to_it() -> None:
    homes = table(0.0, host=2, chunk=2, pins=RecordedPins())
    page, other = homes.allocate(2)
    ticket = Ticket("prefill write")
    homes.set_ticket([other], ticket)
    homes.free([page, other])
    homes.scope.target_share = 1.0
    with pytest.raises(WaitTimeout, match=f"giving page {other}'s chunk 0 a new role waited 0.05 s"):
        homes.allocate(1)
    assert not homes._pins.unpinned


def test_double_free_and_foreign_ids_are_refused() -> None:
    homes = table(0.5, device=2)
    (page,) = homes.allocate(1)
    homes.free([page])
    for bad in (page, 0, 99):
        with pytest.raises(RuntimeError, match="freed but not allocated"):
            homes.free([bad])


def test_freed_page_waits_for_its_ticket_before_it_is_handed_out() -> None:
    homes = table(0.0, host=1, chunk=1)
    (page,) = homes.allocate(1)
    ticket = Ticket("flush of a page")
    homes.set_ticket([page], ticket)
    homes.free([page])
    assert homes.free_pages == 1, "a freed page counts as free at once"
    with pytest.raises(WaitTimeout, match=f"handing out page {page} waited 0.05 s for flush of a page"):
        homes.allocate(1)


def test_failed_write_is_not_forgotten() -> None:
    homes = table(0.0)
    (page,) = homes.allocate(1)
    ticket = Ticket("flush")
    homes.set_ticket([page], ticket)
    ticket.fail(ValueError("boom"))
    with pytest.raises(RuntimeError, match="boom"):
        homes.outstanding()
