"""Attention over a sequence equals the base-2 merge of attention over its parts."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpu_attn import PagedKV, PageTable, paged_decode
from tests.cpu_attn.reference import int32

PAGE = 16
PAGES = 12
HEADS, GROUP, D = 2, 4, 64


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp2(a[1], b[1])
    weights = [torch.exp2(part[1] - lse)[..., None].nan_to_num(0.0) for part in (a, b)]
    return a[0] * weights[0] + b[0] * weights[1], lse


def attend(kv: PagedKV, q: Tensor, pages: list[int], last: int, threads: int) -> tuple[Tensor, Tensor]:
    """Attend to `pages` of which the final one holds `last` tokens."""
    length = (len(pages) - 1) * PAGE + last if pages else 0
    table = PageTable(int32([0] * len(pages)), int32(pages), int32([0, len(pages)]), int32([length]))
    return paged_decode(q, kv, table, D**-0.5, threads=threads)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    pages=st.permutations(range(PAGES)).flatmap(lambda p: st.integers(1, PAGES).map(lambda n: p[:n])),
    cut=st.integers(0, PAGES),
    last=st.integers(1, PAGE),
    threads=st.integers(1, 3),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_parts_merge_to_the_whole(
    seed: int, pages: list[int], cut: int, last: int, threads: int, spread: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(PAGES, PAGE, HEADS, D, generator=random).bfloat16() for _ in range(2))
    q = torch.randn(1, HEADS * GROUP, D, generator=random) * spread
    kv = PagedKV([(k, v)])
    cut = min(cut, len(pages))
    whole = attend(kv, q, pages, last, threads)
    first = attend(kv, q, pages[:cut], last if cut == len(pages) else PAGE, threads)
    second = attend(kv, q, pages[cut:], last, threads)
    out, lse = merge(first, second)
    # Scores reach about 5 * spread; an fp32 score of magnitude s is off by about s * 6e-8.
    tolerance = 2e-6 * max(1.0, spread)
    torch.testing.assert_close(out, whole[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(lse, whole[1], rtol=2e-6, atol=2e-6)
    empty = first if cut == 0 else second
    if cut in (0, len(pages)):
        assert not empty[0].any()
        assert torch.isneginf(empty[1]).all()
        full = second if cut == 0 else first
        assert torch.equal(out, full[0])
        assert torch.equal(lse, full[1])
