"""Decodes over a BlockTable against the formula over the listed tokens; all others are NaN.

Tolerances as for dense decodes: the same kernels, over fewer tokens.
"""

import math

import pytest
import torch
from torch import Tensor

from cpu_attn import BlockTable, Executor, PagedKV, PagedLatent, PageTable, paged_decode, paged_mla_decode
from tests.cpu_attn.reference import Case, attend, int32, make_case, make_latent_case

TOLERANCE = 3e-6
WAIT_S = 60.0


def decode(case: Case, table: PageTable | BlockTable, **how) -> tuple[Tensor, Tensor]:
    function = paged_mla_decode if isinstance(case.kv, PagedLatent) else paged_decode
    return function(case.q, case.kv, table, case.scale, **how)


def draw_lists(
    lengths: list[int], lists: int, block_size: int, share: float = 0.4, seed: int = 1
) -> list[list[list[int]]]:
    """About `share` of each request's blocks, in random order; each list of a request its own."""
    random = torch.Generator().manual_seed(seed)
    drawn = []
    for length in lengths:
        blocks = -(-length // block_size)
        chosen = [torch.randperm(blocks, generator=random).tolist() for _ in range(lists)]
        drawn.append([order[: math.ceil(share * blocks)] for order in chosen])
    return drawn


def as_tensor(lists: list[list[list[int]]], seed: int = 2) -> Tensor:
    """[batch, lists, most], with the -1 of shorter lists anywhere between."""
    random = torch.Generator().manual_seed(seed)
    most = max(len(one) for request in lists for one in request) + 3
    blocks = torch.full((len(lists), len(lists[0]), most), -1, dtype=torch.int32)
    for b, request in enumerate(lists):
        for i, one in enumerate(request):
            where = torch.randperm(most, generator=random)[: len(one)]
            blocks[b, i, where.sort().values] = int32(one)
    return blocks


def tokens_of(blocks: list[int], block_size: int, length: int) -> Tensor:
    starts = torch.tensor(blocks, dtype=torch.long)[:, None] * block_size
    tokens = (starts + torch.arange(block_size)).flatten()
    return tokens[tokens < length]


def expected(case: Case, lists: list, block_size: int) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for q, k, v, request in zip(case.q, case.k, case.v, lists):
        heads = torch.arange(k.shape[1]).split(k.shape[1] // len(request))
        parts = []
        for own, queries, one in zip(heads, q.chunk(len(request)), request):
            tokens = tokens_of(one, block_size, len(k))
            parts.append(attend(queries, k[tokens][:, own], v[tokens][:, own], case.scale))
        outs.append(torch.cat([out for out, _ in parts]))
        lses.append(torch.cat([lse for _, lse in parts]))
    return torch.stack(outs), torch.stack(lses)


def poison(case: Case, lists: list, block_size: int) -> None:
    """Overwrite with NaN what no list of its request names."""
    region, page, indptr, lengths = (tensor.tolist() for tensor in case.table._tensors)
    for b, request in enumerate(lists):
        named = torch.cat([tokens_of(one, block_size, lengths[b]) for one in request])
        for token in set(range(lengths[b])) - set(named.tolist()):
            entry = indptr[b] + token // case.kv.page_size
            held = case.kv._tensors[region[entry]]
            for tensor in held if isinstance(held, tuple) else (held,):
                tensor[page[entry], token % case.kv.page_size] = math.nan


def check(case: Case, lists: list, block_size: int, threads: tuple[int, ...] = (1, 2, 3)) -> None:
    poison(case, lists, block_size)
    table = BlockTable(case.table, as_tensor(lists), block_size)
    want = expected(case, lists, block_size)
    for count in threads:
        for got, exact in zip(decode(case, table, threads=count), want):
            torch.testing.assert_close(got.double(), exact, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("per_head", [False, True], ids=["one list", "a list a KV head"])
@pytest.mark.parametrize(("page_size", "block_size"), [(16, 16), (256, 32), (256, 1), (16, 64), (1, 32)])
def test_matches_formula(each_isa: str, page_size: int, block_size: int, per_head: bool) -> None:
    lengths = [0, 1, 31, 33, 700, 1500]
    for group in (1, 4, 8, 9):
        case = make_case(lengths, page_size=page_size, group=group)
        check(case, draw_lists(lengths, 2 if per_head else 1, block_size), block_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_other_dtypes_and_widths(each_isa: str, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case([500, 40], head_dim=head_dim, dtype=dtype, kv_heads=3)
    check(case, draw_lists([500, 40], 3, 32), 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("page_size", [1, 64])
def test_selected_entries_of_deepseek_v4(each_mla_isa: str, page_size: int, dtype: torch.dtype) -> None:
    """Rows that are key and value in full, 64 query heads, lists of single entries."""
    lengths = [0, 1, 130, 900]
    case = make_latent_case(
        lengths, page_size=page_size, heads=64, lora_rank=512, rope_dim=0, dtype=dtype, seed=3
    )
    check(case, draw_lists(lengths, 1, 1, share=0.6), 1)


@pytest.mark.parametrize("block_size", [1, 32, 128])
def test_latent_rows_with_a_rotary_part(each_mla_isa: str, block_size: int) -> None:
    case = make_latent_case([700, 129], page_size=32, heads=16)
    check(case, draw_lists([700, 129], 1, block_size), block_size)


def test_all_blocks_in_order_give_the_bits_of_the_dense_decode(each_isa: str) -> None:
    case = make_case([0, 5, 700, 1300], page_size=32)
    every = [[list(range(-(-length // 32)))] for length in (0, 5, 700, 1300)]
    table = BlockTable(case.table, as_tensor(every), 32)
    for threads in (1, 3):
        dense = decode(case, case.table, threads=threads)
        assert all(torch.equal(a, b) for a, b in zip(decode(case, table, threads=threads), dense))


def test_bit_identical_repeats(each_isa: str) -> None:
    case = make_case([700, 64, 1300])
    table = BlockTable(case.table, as_tensor(draw_lists([700, 64, 1300], 2, 16)), 16)
    for threads in (1, 3):
        first = decode(case, table, threads=threads)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(decode(case, table, threads=threads), first))


def test_empty_lists_are_neutral(each_isa: str) -> None:
    case = make_case([40, 0, 60])
    for most in (0, 4):
        nothing = torch.full((3, 1, most), -1, dtype=torch.int32)
        out, lse = decode(case, BlockTable(case.table, nothing, 16), threads=2)
        assert not out.any()
        assert (lse == -math.inf).all()
    nobody = PageTable(int32([]), int32([]), int32([0]), int32([]))
    table = BlockTable(nobody, torch.empty(0, 1, 4, dtype=torch.int32), 16)
    assert paged_decode(case.q[:0], case.kv, table, 1.0)[0].shape == (0, 4, 64)


def test_one_list_of_two_is_empty(each_isa: str) -> None:
    case = make_case([100])
    check(case, [[[], [2, 0]]], 16)


def test_lists_take_turns_with_dense_decodes(executor: Executor) -> None:
    case = make_case([300, 40])
    lists = draw_lists([300, 40], 2, 16)
    table = BlockTable(case.table, as_tensor(lists), 16)
    for _ in range(3):
        jobs = [executor.submit_paged_decode(case.q, case.kv, t, case.scale) for t in (table, case.table)]
        for job, want in zip(jobs, (expected(case, lists, 16), case.expected())):
            for got, exact in zip(job.wait(WAIT_S), want):
                torch.testing.assert_close(got.double(), exact, rtol=TOLERANCE, atol=TOLERANCE)


def test_pages_of_unlisted_blocks_may_be_anything(executor: Executor) -> None:
    """As the pages that the GPU holds are, in a table of all pages."""
    k = torch.randn(2, 16, 1, 64)
    pages = PageTable(int32([-1, 0, 77]), int32([-1, 1, 1 << 30]), int32([0, 3]), int32([48]))
    q = torch.randn(1, 1, 64)
    out, _ = paged_decode(q, PagedKV([(k, k)]), BlockTable(pages, int32([[[1]]]), 16), 1.0, executor=executor)
    want, _ = attend(q[0], k[1], k[1], 1.0)
    torch.testing.assert_close(out[0].double(), want, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(ValueError, match="entry 2: region 77 of 1"):
        paged_decode(q, PagedKV([(k, k)]), BlockTable(pages, int32([[[1, 2]]]), 16), 1.0)


@pytest.mark.parametrize(
    ("blocks", "block_size", "message"),
    [
        ([[[0, 3]], [[0, 0]]], 16, "request 1, list 0: block 0 is listed twice"),
        ([[[0, 4]], [[0, 1]]], 16, "request 0, list 0: block 4 at 1 of the 4 blocks of its 60 tokens"),
        ([[[0, -2]], [[0, 1]]], 16, "block -2 at 1 of the 4"),
        ([[[0, 1 << 30]], [[0, 1]]], 1, "block 1073741824 at 1 of the 60"),
        ([[[0], [1]], [[0], [9]]], 16, "request 1, list 1: block 9"),
        (
            [[[0], [1], [2]], [[0], [1], [2]]],
            16,
            "3 lists a request, must be 1 or one for each of 2 KV heads",
        ),
        ([[[0]], [[0]]], 24, "blocks of 24 tokens and pages of 16: one must be a multiple"),
        ([[[0]], [[0]]], 1 << 31, "at most 1073741824"),
    ],
)
def test_bad_blocks_write_nothing(executor: Executor, blocks: list, block_size: int, message: str) -> None:
    case = make_case([60, 60])
    table = BlockTable(case.table, int32(blocks), block_size)
    out = torch.full((2, 4, 64), math.pi)
    with pytest.raises(ValueError, match=message):
        paged_decode(case.q, case.kv, table, 1.0, out=out)
    with pytest.raises(ValueError, match=message):
        executor.submit_paged_decode(case.q, case.kv, table, 1.0, out=out).wait(WAIT_S)
    assert (out == math.pi).all()
    good = BlockTable(case.table, int32([[[1, 0]], [[2, -1]]]), 16)
    decode(case, good, executor=executor)


def test_bad_tables_are_refused_with_lists_too() -> None:
    case = make_case([60, 60])
    bad = PageTable(int32([0] * 8), int32([0] * 8), int32([0, 4, 8]), int32([60, 65]))
    with pytest.raises(ValueError, match="request 1: 65 tokens need 5 pages"):
        decode(case, BlockTable(bad, int32([[[0]], [[0]]]), 16))


def test_lists_that_do_not_fit() -> None:
    case = make_case([60, 60])
    good = int32([[[0]], [[0]]])
    with pytest.raises(ValueError, match="int32"):
        BlockTable(case.table, good.long(), 16)
    with pytest.raises(ValueError, match="3 dimensions"):
        BlockTable(case.table, good[0], 16)
    with pytest.raises(ValueError, match="blocks must be contiguous"):
        BlockTable(case.table, good.expand(2, 1, 4)[:, :, ::2], 16)
    with pytest.raises(ValueError, match="blocks of 1 requests, the page table has 2"):
        BlockTable(case.table, good[:1], 16)
    with pytest.raises(ValueError, match="no lists"):
        BlockTable(case.table, good[:, :0], 16)
    with pytest.raises(ValueError, match="block_size must be at least 1, is 0"):
        BlockTable(case.table, good, 0)


def test_read_pieces_checks_its_pieces(executor: Executor) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    executor.submit_read_pieces(buffer, torch.tensor([0, 3072]), 1024).wait(WAIT_S)
    for starts in ([3073], [-1]):
        with pytest.raises(ValueError, match="do not all lie in 4096 bytes"):
            executor.submit_read_pieces(buffer, torch.tensor(starts), 1024)
