"""paged_decode against the formula.

K, V and q of every dtype widen to fp32 exactly and all arithmetic is fp32, so one tolerance serves all
dtypes: a few rounding errors (6e-8) of values of order one. The reference starts from the same
rounded inputs, so quantisation itself does not show here.
"""

import functools
import math

import pytest
import torch

from cpu_attn import SUPPORTED_HEAD_DIMS, PagedKV, PageTable, paged_decode
from tests.cpu_attn.reference import Case, attend, int32, make_case

OUT_TOLERANCE = 3e-6
LSE_TOLERANCE = 3e-6
LENGTHS = {16: [0, 1, 15, 16, 17, 300], 256: [0, 1, 255, 256, 257, 700]}


@functools.cache
def ragged(page_size: int, group: int, head_dim: int, dtype: torch.dtype) -> tuple[Case, tuple]:
    case = make_case(LENGTHS[page_size], page_size=page_size, group=group, head_dim=head_dim, dtype=dtype)
    return case, case.expected()


def assert_close(actual: tuple, expected: tuple) -> None:
    for got, want, tolerance in zip(actual, expected, (OUT_TOLERANCE, LSE_TOLERANCE)):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 12])
def test_matches_formula(each_isa: str, group: int, head_dim: int, dtype: torch.dtype) -> None:
    for page_size in LENGTHS:
        case, expected = ragged(page_size, group, head_dim, dtype)
        for threads in (1, 2, 3):
            result = paged_decode(case.q, case.kv, case.table, case.scale, threads=threads)
            assert_close(result, expected)


@pytest.mark.parametrize("group", [2, 5, 6, 7, 16, 20])
def test_other_groups(each_isa: str, group: int) -> None:
    case = make_case([3, 130], group=group)
    assert_close(paged_decode(case.q, case.kv, case.table, case.scale), case.expected())


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_query_dtype_may_differ(each_isa: str, q_dtype: torch.dtype) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = make_case([70], dtype=dtype, q_dtype=q_dtype)
        assert_close(paged_decode(case.q, case.kv, case.table, case.scale), case.expected())


def test_page_of_one_token(each_isa: str) -> None:
    case = make_case([0, 1, 200], page_size=1)
    assert_close(paged_decode(case.q, case.kv, case.table, case.scale), case.expected())


def test_fewer_heads_than_threads(each_isa: str) -> None:
    case = make_case([1000], kv_heads=1, group=4)
    for threads in (3, 8):
        result = paged_decode(case.q, case.kv, case.table, case.scale, threads=threads)
        assert_close(result, case.expected())


def test_many_heads(each_isa: str) -> None:
    """More KV heads than the prefetcher holds a turn of, in every region layout."""
    case = make_case([150], kv_heads=32, group=1, head_dim=128, page_size=32)
    assert_close(paged_decode(case.q, case.kv, case.table, case.scale), case.expected())


def test_long_sequence_keeps_accuracy(each_isa: str) -> None:
    case = make_case([40_000], page_size=256, kv_heads=1, group=1, dtype=torch.float32)
    out, _ = paged_decode(case.q, case.kv, case.table, case.scale, threads=1)
    expected, _ = case.expected()
    # Outputs are averages of 40,000 values, about 1/200: relative to the whole vector.
    assert (out - expected).norm() < 2e-6 * expected.norm()


def test_bit_identical_repeats(each_isa: str) -> None:
    case = make_case([0, 5, 700, 64, 1300], group=4)
    for threads in (1, 2, 3, 5):
        first = paged_decode(case.q, case.kv, case.table, case.scale, threads=threads)
        for _ in range(5):
            again = paged_decode(case.q, case.kv, case.table, case.scale, threads=threads)
            assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_weights_are_accurate(each_isa: str) -> None:
    """Two tokens with scores 0 and -x: the second weighs 2^-x / (1 + 2^-x)."""
    x = torch.linspace(0, 20, 501)
    k = torch.zeros(len(x), 2, 1, 64)
    v = torch.zeros_like(k)
    k[:, 1, 0, 0] = -x
    v[:, 1] = 1
    table = PageTable(
        torch.zeros(len(x), dtype=torch.int32),
        torch.arange(len(x), dtype=torch.int32),
        torch.arange(len(x) + 1, dtype=torch.int32),
        torch.full((len(x),), 2, dtype=torch.int32),
    )
    q = torch.zeros(len(x), 1, 64)
    q[..., 0] = 1
    out, lse = paged_decode(q, PagedKV([(k, v)]), table, math.log(2))
    weight = torch.exp2(-x.double())
    # Rounding x * log2(e) * ln(2) alone moves the weight by up to 20 * 1.2e-7 * ln(2).
    torch.testing.assert_close(out[:, 0, 0].double(), weight / (1 + weight), rtol=2e-6, atol=0)
    torch.testing.assert_close(lse[:, 0].double(), torch.log2(1 + weight), rtol=0, atol=3e-7)


@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_large_and_small_scores(each_isa: str, factor: float) -> None:
    case = make_case([100], dtype=torch.float32)
    case.scale *= factor
    out, lse = paged_decode(case.q, case.kv, case.table, case.scale)
    expected, expected_lse = case.expected()
    # A score of magnitude s carries an error of about s * 6e-8, and so does the weight.
    tolerance = OUT_TOLERANCE * max(1.0, factor)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=LSE_TOLERANCE, atol=1e-6)


def test_nan_in_a_listed_token_shows(each_isa: str) -> None:
    case = make_case([40])
    k, v = torch.zeros(1, 64, 2, 64), torch.zeros(1, 64, 2, 64)
    k[0, 20] = math.nan
    table = PageTable(int32([0]), int32([0]), int32([0, 1]), int32([40]))
    out, lse = paged_decode(case.q, PagedKV([(k, v)]), table, 1.0)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_regions_may_alias(each_isa: str) -> None:
    """One chunk of memory, page 0 written head-major and page 1 token-major."""
    pages, page_size, heads, d = 2, 16, 2, 64
    memory = torch.empty(2, pages, page_size * heads * d)
    head_major = memory.view(2, pages, heads, page_size, d).permute(0, 1, 3, 2, 4)
    token_major = memory.view(2, pages, page_size, heads, d)
    data = torch.randn(2, pages, page_size, heads, d)
    head_major[:, 0] = data[:, 0]
    token_major[:, 1] = data[:, 1]
    kv = PagedKV([(head_major[0], head_major[1]), (token_major[0], token_major[1])])
    q = torch.randn(1, 4, d)
    table = PageTable(int32([0, 1]), int32([0, 1]), int32([0, 2]), int32([32]))
    out, lse = paged_decode(q, kv, table, 0.1)
    expected, expected_lse = attend(q[0], data[0].flatten(0, 1), data[1].flatten(0, 1), 0.1)
    assert_close((out[0], lse[0]), (expected, expected_lse))


def test_strided_query_and_outputs() -> None:
    case = make_case([30, 50])
    wide = torch.empty(2, 4, 3 * 64, dtype=torch.bfloat16)
    wide[..., 64:128] = case.q
    out, lse = torch.full((2, 4, 100), 7.0), torch.full((4, 2), 7.0)
    result = paged_decode(wide[..., 64:128], case.kv, case.table, case.scale, out=out[..., :64], lse=lse.t())
    assert_close(result, case.expected())
    assert result[0].data_ptr() == out.data_ptr()
    assert (out[..., 64:] == 7).all()


def test_no_requests() -> None:
    case = make_case([10])
    table = PageTable(int32([]), int32([]), int32([0]), int32([]))
    out, lse = paged_decode(case.q[:0], case.kv, table, 1.0)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)
