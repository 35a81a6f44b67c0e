"""The formula the kernel must follow, and paged inputs to try it on."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_attn import PagedKV, PagedLatent, PageTable

LN2 = math.log(2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [heads, d], k and v [tokens, kv_heads, d] -> out [heads, d], base-2 lse [heads], fp64."""
    if len(k) == 0:
        return torch.zeros(len(q), v.shape[-1]).double(), torch.full(q.shape[:1], -math.inf).double()
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
    kv: PagedKV | PagedLatent
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


def scatter(lengths: list[int], page_size: int, random: torch.Generator) -> tuple[list, list, list, int]:
    """Deal pages to three regions: pages of each request, region and page of each entry, pages a region."""
    counts = [-(-length // page_size) for length in lengths]
    per_region = max(1, -(-sum(counts) // 3)) + 1  # one page a region stays unlisted
    slots = torch.randperm(3 * (per_region - 1), generator=random)[: sum(counts)].tolist()
    return counts, [slot % 3 for slot in slots], [slot // 3 for slot in slots], per_region


def indptr(counts: list[int]) -> Tensor:
    return int32(torch.tensor([0, *counts]).cumsum(0))


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
    counts, region, page, per_region = scatter(lengths, page_size, random)
    regions = empty_regions(per_region, page_size, kv_heads, head_dim, dtype)
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
    q = torch.randn(len(lengths), kv_heads * group, head_dim, generator=random).to(q_dtype or dtype)
    table = PageTable(int32(region), int32(page), indptr(counts), int32(lengths))
    return Case(q, PagedKV(regions), table, head_dim**-0.5, keys, values)


def make_latent_case(
    lengths: list[int],
    *,
    page_size: int = 16,
    heads: int = 16,
    lora_rank: int = 64,
    rope_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    q_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """Rows scattered over a token-major, a head-major and a gapped region; what is not listed is NaN."""
    random = torch.Generator().manual_seed(seed)
    counts, region, page, per_region = scatter(lengths, page_size, random)
    width = lora_rank + rope_dim
    regions = [
        torch.full((per_region, page_size, 1, width), math.nan, dtype=dtype),
        torch.full((per_region, 1, page_size, width), math.nan, dtype=dtype).permute(0, 2, 1, 3),
        torch.full((per_region, page_size, width + 24), math.nan, dtype=dtype)[..., 8 : 8 + width],
    ]
    rows, entry = [], 0
    for length, count in zip(lengths, counts):
        rows.append(torch.randn(length, 1, width, generator=random).to(dtype))
        for tokens in rows[-1].split(page_size) if count else ():
            regions[region[entry]].view(per_region, page_size, -1)[page[entry], : len(tokens)] = tokens[:, 0]
            entry += 1
    q = torch.randn(len(lengths), heads, width, generator=random).to(q_dtype or dtype)
    table = PageTable(int32(region), int32(page), indptr(counts), int32(lengths))
    values = [row[..., :lora_rank] for row in rows]
    return Case(q, PagedLatent(regions, lora_rank), table, width**-0.5, rows, values)
