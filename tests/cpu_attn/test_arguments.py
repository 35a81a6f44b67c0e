"""What is refused, and that the message says why."""

import math

import pytest
import torch

import cpu_attn
from cpu_attn import PagedKV, PageTable, paged_decode
from tests.cpu_attn.reference import int32, make_case

GOOD = {"region": [0, 1, 2], "page": [0, 0, 0], "indptr": [0, 2, 3], "lengths": [20, 16]}


def table(**changes: list[int]) -> PageTable:
    fields = GOOD | changes
    return PageTable(*(int32(fields[name]) for name in ("region", "page", "indptr", "lengths")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"region": [0, 3, 2]}, "entry 1: region 3 of 3"),
        ({"region": [0, -1, 2]}, "region -1"),
        ({"page": [0, 0, 1 << 20]}, "entry 2: page 1048576 of the 4 pages of region 2"),
        ({"page": [-1, 0, 0]}, "page -1"),
        ({"indptr": [0, 3, 2], "lengths": [48, 0]}, "not monotone at request 1: 3 then 2"),
        ({"indptr": [0, 2, 4]}, "exceeds the 3 entries"),
        ({"indptr": [-1, 2, 3]}, "< 0"),
        ({"lengths": [33, 16]}, "request 0: 33 tokens need 3 pages of 16, the table lists 2"),
        ({"lengths": [16, 16]}, "request 0: 16 tokens need 1 pages"),
        ({"lengths": [20, 0]}, "request 1: 0 tokens need 0 pages"),
        ({"lengths": [20, -1]}, r"lengths\[1\] = -1 is outside"),
    ],
)
def test_bad_tables(executor: cpu_attn.Executor, changes: dict, message: str) -> None:
    case = make_case([60, 60])
    with pytest.raises(ValueError, match=message):
        paged_decode(case.q, case.kv, table(**changes), 1.0)
    with pytest.raises(ValueError, match=message):
        paged_decode(case.q, case.kv, table(**changes), 1.0, executor=executor)
    paged_decode(case.q, case.kv, table(), 1.0, executor=executor)


def test_table_may_list_more_than_it_uses() -> None:
    """Entries outside indptr are padding: neither checked nor read."""
    case = make_case([20, 16])
    full = PageTable(int32([9, 0, 0, 9]), int32([9, 0, 1, 9]), int32([1, 3]), int32([20]))
    k = torch.zeros(2, 16, 2, 64)
    out, _ = paged_decode(case.q[:1], PagedKV([(k, k)]), full, 1.0)
    assert not out.any()


@pytest.mark.parametrize("head_dim", [32, 100, 512])
def test_unsupported_head_dim_is_named(head_dim: int) -> None:
    k = torch.zeros(1, 16, 1, head_dim)
    with pytest.raises(ValueError, match=rf"head_dim {head_dim} .*64, 80, 96, 112, 128, 192, 256"):
        PagedKV([(k, k)])


def test_regions_that_do_not_fit() -> None:
    k = torch.zeros(2, 16, 2, 64)
    with pytest.raises(ValueError, match="at least one region"):
        PagedKV([])
    with pytest.raises(ValueError, match="region 1"):
        PagedKV([(k, k), (k[:, :8], k[:, :8])])
    with pytest.raises(ValueError, match="float16"):
        PagedKV([(k, k), (k.half(), k.half())])
    with pytest.raises(ValueError, match="differ"):
        PagedKV([(k, k[:1])])
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        PagedKV([(k.transpose(2, 3).contiguous().transpose(2, 3), k)])
    with pytest.raises(ValueError, match="dtype"):
        PagedKV([(k.double(), k.double())])
    with pytest.raises(ValueError, match="CPU"):
        PagedKV([(k.to("meta"), k)])


def test_table_tensors_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="int32"):
        PageTable(torch.zeros(1, dtype=torch.int64), int32([0]), int32([0, 1]), int32([1]))
    with pytest.raises(ValueError, match="1 \\+ 1"):
        PageTable(int32([0]), int32([0]), int32([0]), int32([1]))
    with pytest.raises(ValueError, match="2 regions and 1 pages"):
        PageTable(int32([0, 0]), int32([0]), int32([0, 1]), int32([1]))
    with pytest.raises(ValueError, match="contiguous"):
        PageTable(int32([0] * 4)[::2], int32([0, 0]), int32([0, 2]), int32([20]))


def test_query_that_does_not_fit() -> None:
    case = make_case([20, 16], kv_heads=2, group=2)
    q = case.q
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        paged_decode(q[:, :3], case.kv, case.table, 1.0)
    with pytest.raises(ValueError, match="1 requests, the page table 2"):
        paged_decode(q[:1], case.kv, case.table, 1.0)
    with pytest.raises(ValueError, match="head_dim 32"):
        paged_decode(q[..., :32], case.kv, case.table, 1.0)
    with pytest.raises(ValueError, match="dtype"):
        paged_decode(q.double(), case.kv, case.table, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        paged_decode(q, case.kv, case.table, 1.0, lse=torch.empty(2, 5))
    with pytest.raises(ValueError, match="threads"):
        paged_decode(q, case.kv, case.table, 1.0, threads=0)


def test_bad_table_writes_nothing() -> None:
    case = make_case([60, 60])
    out = torch.full(case.q.shape, math.pi)
    with pytest.raises(ValueError, match="region 3"):
        paged_decode(case.q, case.kv, table(region=[0, 1, 3]), 1.0, out=out)
    assert (out == math.pi).all()
