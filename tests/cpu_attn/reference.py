"""The formula the kernel must follow, and paged inputs to try it on."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_attn import PagedKV, PageTable

LN2 = math.log(2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [heads, d], k and v [tokens, kv_heads, d] -> out [heads, d], base-2 lse [heads], fp64."""
    if len(k) == 0:
        return torch.zeros(q.shape).double(), torch.full(q.shape[:1], -math.inf).double()
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) * scale
    out = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1) / LN2


def int32(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


@dataclass
class Case:
    """Requests scattered over regions of three layouts; whatever no request lists is NaN."""

    q: Tensor  # [batch, q_heads, d]
    kv: PagedKV
    table: PageTable
    scale: float
    k: list[Tensor]  # per request [tokens, kv_heads, d]
    v: list[Tensor]

    def expected(self) -> tuple[Tensor, Tensor]:
        results = [attend(q, k, v, self.scale) for q, k, v in zip(self.q, self.k, self.v)]
        return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def empty_regions(pages: int, page_size: int, kv_heads: int, d: int, dtype: torch.dtype) -> list:
    """Token-major, head-major, and K and V of one head interleaved in one buffer; all NaN."""
    nan = math.nan
    token_major = [torch.full((pages, page_size, kv_heads, d), nan, dtype=dtype) for _ in range(2)]
    head_major = [
        torch.full((pages, kv_heads, page_size, d), nan, dtype=dtype).permute(0, 2, 1, 3) for _ in range(2)
    ]
    both = torch.full((pages, kv_heads, 2, page_size, d), nan, dtype=dtype)
    interleaved = [both[:, :, i].permute(0, 2, 1, 3) for i in range(2)]
    return [tuple(token_major), tuple(head_major), tuple(interleaved)]


def make_case(
    lengths: list[int],
    *,
    page_size: int = 16,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    q_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    per_region = max(1, -(-sum(counts) // 3)) + 1  # one page a region stays unlisted
    regions = empty_regions(per_region, page_size, kv_heads, head_dim, dtype)
    slots = torch.randperm(3 * (per_region - 1), generator=random)[: sum(counts)].tolist()
    region = [slot % 3 for slot in slots]
    page = [slot // 3 for slot in slots]
    keys, values, entry = [], [], 0
    for length, count in zip(lengths, counts):
        shape = (length, kv_heads, head_dim)
        keys.append(torch.randn(shape, generator=random).to(dtype))
        values.append(torch.randn(shape, generator=random).to(dtype))
        for i in range(count):
            k, v = regions[region[entry]]
            tokens = slice(i * page_size, min(length, (i + 1) * page_size))
            k[page[entry], : tokens.stop - tokens.start] = keys[-1][tokens]
            v[page[entry], : tokens.stop - tokens.start] = values[-1][tokens]
            entry += 1
    indptr = torch.tensor([0, *counts]).cumsum(0)
    q = torch.randn(len(lengths), kv_heads * group, head_dim, generator=random).to(q_dtype or dtype)
    table = PageTable(int32(region), int32(page), int32(indptr), int32(lengths))
    return Case(q, PagedKV(regions), table, head_dim**-0.5, keys, values)
