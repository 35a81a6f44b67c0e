"""Which pages keep their tail records, and what happens when a copy fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_inplacekv.models.deepseek_v4 import V4Geometry
from sglang_inplacekv.queues import WorkQueue
from sglang_inplacekv.v4.layout import WINDOW, V4Layout
from sglang_inplacekv.v4.records import RecordTable, TailRecords
from tests.models.v4_checkpoints import FLASH


def test_the_least_recently_used_record_gives_way() -> None:
    table = RecordTable(3)
    first = table.take([10, 11, 12])
    assert sorted(first.values()) == [0, 1, 2] and not table.lost_records
    assert table.use(10) == first[10]
    assert table.take([13]) == {13: first[11]}
    assert table.lost_records == 1 and 11 not in table and 10 in table
    assert table.resumable([10, 11, 12, 14]) == 3
    assert table.resumable([10, 11]) == 1
    assert table.resumable([11]) == table.resumable([]) == 0
    table.check_integrity([10, 12, 13])


def test_records_die_with_their_pages() -> None:
    table = RecordTable(2)
    slots = table.take([5, 6])
    assert table.drop([6, 7]) == [slots[6]]
    with pytest.raises(KeyError):
        table.use(6)
    assert table.take([8]) == {8: slots[6]} and not table.lost_records
    with pytest.raises(RuntimeError, match=r"tail records of free pages \[8\]"):
        table.check_integrity([5])
    table._free.append(0)
    with pytest.raises(RuntimeError, match="1 free"):
        table.check_integrity([5, 8])


def test_a_page_that_stays_gets_the_record() -> None:
    table = RecordTable(2)
    slots = table.take([5, 6])
    for page, other in ((5, 6), (7, 8), (5, 5)):
        table.hand_over(page, other)
        table.check_integrity([5, 6])
        assert table.use(5) == slots[5] and table.use(6) == slots[6]
    table.hand_over(5, 9)
    assert table.use(9) == slots[5] and 5 not in table
    assert table.drop([5]) == []
    table.check_integrity([6, 9])


def test_more_pages_in_a_forward_than_records() -> None:
    table = RecordTable(2)
    table.take([1])
    assert list(table.take([2, 3, 4, 5])) == [4, 5] and table.lost_records == 3
    assert RecordTable(0).take([1, 2]) == {}
    table.check_integrity([4, 5])


@pytest.mark.parametrize("fails", [False, True])
def test_a_record_is_read_whole_or_not_at_all(fails: bool) -> None:
    """Its ticket is the last layer's, and fails with the one before."""
    layout, queue = V4Layout(V4Geometry.from_config(FLASH), torch.float32, 128), WorkQueue("write", 5)
    executor = SimpleNamespace(submit_write=queue.submit)
    records = TailRecords(layout, 1, executor, poison=True, wait_timeout_s=5)
    slots = list(records.table.take([9]).values())
    parts = {space: torch.randn(shape) for space, (shape, _) in layout.record_parts.items()}
    layers = len(parts[WINDOW])
    for layer, window in enumerate(parts[WINDOW]):
        wrong = fails and layer == layers - 2
        records.write(layer, slots, [window[:5] if wrong else window], [records.journals(layer, parts)])
    if fails:
        with pytest.raises(RuntimeError, match=f"tail records .0., layer {layers - 2}, which failed"):
            records.read(9, "a request")
    else:
        assert all(torch.equal(rows, parts[space]) for space, rows in records.read(9, "a request").items())
        records.pages_freed([9])
        with pytest.raises(RuntimeError, match="goes on after page 9, which has no tail record"):
            records.read(9, "a request")
    queue.close()
