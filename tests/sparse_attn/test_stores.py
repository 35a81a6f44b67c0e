from __future__ import annotations

import pytest
import torch

from sparse_attn import GrowingStore, Space

SPACES = {
    "win": Space("win", 1, 1, 1, dk=2, dv=2, v_in_k=True, entry_bytes=8, ring=10),
    "slc": Space("slc", 1, 1, 1, dk=2, dv=1, v_in_k=False, entry_bytes=24, kv_heads=2),
}


def rows_of(first: int, last: int, heads: int = 1, width: int = 2) -> torch.Tensor:
    return torch.arange(first, last, dtype=torch.float32)[:, None, None].expand(-1, heads, width)


def test_keeps_all_of_a_space_and_of_a_ring_what_it_promises_in_bounded_memory() -> None:
    store = GrowingStore(SPACES)
    end = 0
    for count in [3, 1, 50, *[1] * 100, 7]:
        store.append("win", end, rows_of(end, end + count))
        store.append("slc", end, rows_of(end, end + count, 2, 3))
        behind, end = max(0, end - 10), end + count
        assert torch.equal(store.rows("win", behind, end), rows_of(behind, end))
        assert torch.equal(store.rows("slc", 0, end), rows_of(0, end, 2, 3))
    assert store.slots("win", torch.tensor([end - 1]))[0].shape[0] <= 2 * (50 + 10)
    with pytest.raises(IndexError, match="of win asked"):
        store.rows("win", 0, 1)


def test_finds_rows_of_ids_and_leaves_padding() -> None:
    store = GrowingStore(SPACES)
    store.append("win", 0, rows_of(0, 40))
    store.append("win", 40, rows_of(40, 100))
    ids = torch.tensor([[99, -1, 60]])
    rows, slots = store.slots("win", ids)
    assert slots[0, 1] == -1 and rows[slots[ids >= 0], 0, 0].tolist() == [99.0, 60.0]
    for wrong in (100, 3):
        with pytest.raises(IndexError, match="asked"):
            store.slots("win", torch.tensor([wrong]))
    rows, slots = store.slots("slc", torch.tensor([-1, -1]))
    assert rows.shape == (0, 2, 3) and slots.tolist() == [-1, -1]


def test_ends_earlier_after_truncate_and_refuses_gaps() -> None:
    store = GrowingStore(SPACES)
    store.append("slc", 0, rows_of(0, 9, 2, 3))
    store.truncate("slc", 4)
    assert store.count("slc") == 4
    with pytest.raises(ValueError, match="slc holds 4 entries, 5 is not the next"):
        store.append("slc", 5, rows_of(5, 6, 2, 3))
    with pytest.raises(ValueError, match=r"entries of slc are \(2, 3\), not \(1, 2\)"):
        store.append("slc", 4, rows_of(4, 5))
    store.append("slc", 4, rows_of(70, 71, 2, 3))
    assert store.rows("slc", 3, 5)[:, 0, 0].tolist() == [3.0, 70.0]
    with pytest.raises(ValueError, match="cannot end at 9"):
        store.truncate("slc", 9)
