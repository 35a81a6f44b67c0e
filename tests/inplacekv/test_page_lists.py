"""What the host believes about page ids is what SGLang's table says, with as few reads as that takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_inplacekv.page_lists import PageLists

G = 4


class Table:
    """SGLang's ReqToTokenPool, as far as page lists use it, and a count of the reads."""

    def __init__(self) -> None:
        self.req_to_token = torch.zeros(5, 64, dtype=torch.int32)
        self.req_generation = torch.zeros(5, dtype=torch.int64)
        self.free_slots = [4]

    def write(self, row: int, pages: list[int]) -> None:
        tokens = torch.tensor(pages)[:, None] * G + torch.arange(G)
        self.req_to_token[row, : tokens.numel()] = tokens.flatten().int()


class Counted(PageLists):
    reads = 0

    def _read(self, index, lengths):
        self.reads += 1
        return super()._read(index, lengths)


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def lists(table: Table) -> Counted:
    return Counted(table, G)


def decode(lists: PageLists, rids: list[str], rows: list[int], lengths: list[int]) -> list[list[int]]:
    return [own.tolist() for own in lists.of_decode(rids, torch.tensor(rows), lengths)]


def extend(
    lists: PageLists, rids: list[str], rows: list[int], lengths: list[int], prefixes: list[int] | None = None
) -> list[list[int]]:
    extended = lists.of_extend(rids, torch.tensor(rows), rows, prefixes or [0] * len(rids), lengths)
    return [own.tolist() for own in extended]


def prefilled(lists: PageLists, table: Table) -> None:
    """Two requests, a of 7 tokens in pages 3 and 9, b of 4 in page 5, that have decoded once."""
    table.write(1, [3, 9])
    table.write(2, [5, 6])
    assert extend(lists, ["a", "b"], [1, 2], [6, 3]) == [[3, 9], [5]]
    assert decode(lists, ["a", "b"], [1, 2], [7, 4]) == [[3, 9], [5]]


def test_a_prompt_without_a_prefix_has_what_the_allocator_handed_out(lists: Counted, table: Table) -> None:
    table.write(1, [3, 9])
    table.write(2, [5, 6])
    lists.handed_out([3, 9, 5])
    assert extend(lists, ["a", "b"], [1, 2], [6, 3]) == [[3, 9], [5]]
    assert decode(lists, ["a", "b"], [1, 2], [7, 4]) == [[3, 9], [5]]
    assert lists.reads == 0


def test_the_chunks_of_a_prompt(lists: Counted, table: Table) -> None:
    table.write(1, [3, 9, 2])
    lists.handed_out([3])
    assert extend(lists, ["a"], [1], [3]) == [[3]]
    lists.handed_out([9, 2])
    assert extend(lists, ["a"], [1], [9], [3]) == [[3, 9, 2]]
    assert lists.reads == 0


@pytest.mark.parametrize(
    "what", ["a prefix from the cache", "freed", "handed on", "another row", "too few", "too many"]
)
def test_an_extend_reads_the_table_when_in_doubt(lists: Counted, table: Table, what: str) -> None:
    table.write(1, [3, 9])
    lists.handed_out([3])
    extend(lists, ["a"], [1], [4])
    rid, row, pages = "a", 1, [9]
    if what == "a prefix from the cache":
        rid = "b"
    elif what == "freed":
        table.write(1, [8])
        lists.page_freed()
    elif what == "handed on":
        table.req_generation[1] += 1
    elif what == "another row":
        row = 2
    elif what == "too few":
        pages = []
    else:
        pages = [9, 7]
    table.write(row, [8, 9] if what == "freed" else [3, 9])
    lists.handed_out(pages)
    assert extend(lists, [rid], [row], [6], [4]) == [[8 if what == "freed" else 3, 9]]
    assert lists.reads == 1


def test_a_row_grows_by_what_the_allocator_handed_out(lists: Counted, table: Table) -> None:
    prefilled(lists, table)
    reads = lists.reads
    lists.handed_out([6])
    assert decode(lists, ["a", "b"], [1, 2], [8, 5]) == [[3, 9], [5, 6]]
    lists.handed_out([7])
    assert decode(lists, ["a", "b"], [1, 2], [9, 6]) == [[3, 9, 7], [5, 6]]
    assert lists.reads == reads


def test_pages_go_out_in_the_order_of_the_batch(lists: Counted, table: Table) -> None:
    table.write(1, [3])
    table.write(2, [5])
    extend(lists, ["a", "b"], [1, 2], [3, 3])
    decode(lists, ["b", "a"], [2, 1], [4, 4])
    lists.handed_out([8, 2])
    assert decode(lists, ["b", "a"], [2, 1], [5, 5]) == [[5, 8], [3, 2]]


def test_asked_twice_in_a_step(lists: Counted, table: Table) -> None:
    prefilled(lists, table)
    lists.handed_out([6])
    first = decode(lists, ["a", "b"], [1, 2], [8, 5])
    assert decode(lists, ["a", "b"], [1, 2], [8, 5]) == first


@pytest.mark.parametrize("what", ["freed", "unknown", "too few pages", "too many pages", "jumped"])
def test_the_table_is_read_when_in_doubt(lists: Counted, table: Table, what: str) -> None:
    prefilled(lists, table)
    table.write(1, [3, 4, 8])  # the prefix cache put page 4 in the place of page 9
    lengths, rids, pages = [8, 5], ["a", "b"], [6]
    if what == "freed":
        lists.page_freed()
    elif what == "unknown":
        rids = ["c", "b"]
    elif what == "too few pages":
        pages = []
    elif what == "too many pages":
        pages = [6, 7]
    else:
        lengths = [9, 5]
    lists.handed_out(pages)
    reads = lists.reads
    wanted = [[3, 4] if lengths[0] == 8 else [3, 4, 8], [5, 6]]
    assert decode(lists, rids, [1, 2], lengths) == wanted
    assert lists.reads == reads + 1


def test_verifying_notices_a_rewritten_row(table: Table) -> None:
    lists = PageLists(table, G, verify=True)
    prefilled(lists, table)
    table.write(1, [3, 4])
    with pytest.raises(RuntimeError, match=r"request a has pages \[3, 4\], the host believed \[3, 9\]"):
        decode(lists, ["a"], [1], [8])


def test_a_prefix_is_live_from_when_its_request_starts(lists: Counted, table: Table) -> None:
    prefilled(lists, table)
    lists.starts(torch.tensor([8, 7]))
    lists.starts(torch.tensor([2]))
    assert [own.tolist() for own in lists.live_pages()] == [[3, 9], [5], [8, 7], [2]]
    table.write(3, [8, 7, 6])
    extend(lists, ["c"], [3], [9])  # its own pages tell from here on
    assert [own.tolist() for own in lists.live_pages()] == [[3, 9], [5], [8, 7, 6]]
    lists.starts(torch.tensor([1]))
    lists.clear()
    assert not lists.live_pages()


def test_live_pages_are_those_of_rows_that_still_belong_to_their_request(
    lists: Counted, table: Table
) -> None:
    prefilled(lists, table)

    def live() -> list[int]:
        return sorted(np.concatenate([*lists.live_pages(), np.empty(0, int)]).tolist())

    assert live() == [3, 5, 9]
    table.free_slots.append(1)
    assert live() == [5]
    table.req_generation[2] += 1
    assert live() == []


def test_a_request_that_moved_to_another_row_keeps_its_entry(lists: Counted, table: Table) -> None:
    """Retracted from row 1 and extended again in row 3, before another request gets row 1."""
    prefilled(lists, table)
    table.write(3, [11, 12])
    extend(lists, ["a"], [3], [7])
    table.write(1, [13])
    extend(lists, ["c"], [1], [4])
    assert sorted(own.tolist() for own in lists.live_pages()) == [[5], [11, 12], [13]]


def test_two_requests_of_one_id_are_never_taken_for_each_other(lists: Counted, table: Table) -> None:
    table.write(1, [3, 9])
    table.write(2, [5, 6])
    extend(lists, ["a", "a"], [1, 2], [6, 5])
    for step in range(2):
        assert decode(lists, ["a", "a"], [1, 2], [7 + step, 6 + step]) == [[3, 9], [5, 6]]
    assert decode(lists, ["a"], [1], [8]) == [[3, 9]]


def test_a_namesake_that_has_ended_is_not_taken_for_the_one_that_decodes(
    lists: Counted, table: Table
) -> None:
    """It ended with its prefill, all its pages went to the cache, and nothing was freed."""
    table.write(1, [3, 9, 4])
    table.write(2, [5, 6])
    lists.handed_out([3, 9])
    extend(lists, ["a"], [1], [7])
    decode(lists, ["a"], [1], [8])
    lists.handed_out([5, 6])
    extend(lists, ["a"], [2], [8])
    lists.handed_out([4])
    assert decode(lists, ["a"], [1], [9]) == [[3, 9, 4]]


def test_what_the_cache_gives_up_is_no_reason_to_read(lists: Counted, table: Table) -> None:
    table.write(1, [3, 9])
    lists.handed_out([3])
    extend(lists, ["a"], [1], [4])
    lists.page_freed(evicted=True)
    lists.handed_out([9])
    assert extend(lists, ["a"], [1], [6], [4]) == [[3, 9]]
    assert lists.reads == 0 and lists.frees == 1
