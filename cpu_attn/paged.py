"""Paged KV and page tables: what the kernel reads, described once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_attn.library import library

SUPPORTED_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
# Of a latent row; every multiple up to the largest.
LORA_RANK_MULTIPLE, MAX_LORA_RANK = 32, 512
ROPE_DIM_MULTIPLE, MAX_ROPE_DIM = 16, 128
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


LATENT_WIDTHS = (
    f"a lora_rank that is a multiple of {LORA_RANK_MULTIPLE} up to {MAX_LORA_RANK} + a multiple of {ROPE_DIM_MULTIPLE} up to "
    f"{MAX_ROPE_DIM}"
)


def supports_latent(lora_rank: int, rope_dim: int) -> bool:
    """Whether PagedLatent takes rows of lora_rank + rope_dim elements."""
    return (
        lora_rank % LORA_RANK_MULTIPLE == 0
        and LORA_RANK_MULTIPLE <= lora_rank <= MAX_LORA_RANK
        and rope_dim % ROPE_DIM_MULTIPLE == 0
        and 0 <= rope_dim <= MAX_ROPE_DIM
    )


def check_cpu(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], dims: int) -> None:
    """Raise ValueError unless `tensor` is a CPU tensor of one of `dtypes` with `dims` dimensions."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be a CPU tensor, is on {tensor.device}")
    if tensor.dtype not in dtypes:
        wanted = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be of dtype {wanted}, is {tensor.dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, has shape {tuple(tensor.shape)}")


def check_last_dim(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension of `tensor` is contiguous."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, strides {tensor.stride()}")


class PagedKV:
    """One layer's keys and values, spread over one or more regions of memory.

    Args:
        regions: pairs (k, v) of CPU tensors [pages, page_size, kv_heads, head_dim], bf16, fp16 or
            fp32, with any strides except a contiguous last dimension: a head-major buffer
            [pages, kv_heads, page_size, head_dim] is passed as `.permute(0, 2, 1, 3)`. k and v may
            be views of one buffer, and regions may alias each other. All regions share page_size,
            kv_heads, head_dim and dtype; their numbers of pages may differ.

    The tensors are kept alive; what they hold may change between calls, their storage may not.

    Raises:
        ValueError: on a head_dim outside SUPPORTED_HEAD_DIMS, or a tensor that breaks the above.
    """

    def __init__(self, regions: Sequence[tuple[Tensor, Tensor]]) -> None:
        if not regions:
            raise ValueError("PagedKV needs at least one region")
        first = regions[0][0]
        for index, (k, v) in enumerate(regions):
            self._check(index, k, v, first)
        self.page_size, self.kv_heads, self.head_dim = first.shape[1:]
        self.out_dim = self.head_dim
        self.dtype = first.dtype
        self.pages = tuple(k.shape[0] for k, _ in regions)
        self._tensors = [(k.detach(), v.detach()) for k, v in regions]
        lib = library()
        self.handle = lib.kv_new(self.page_size, self.kv_heads, self.head_dim)
        for k, v in self._tensors:
            lib.kv_add(self.handle, k, v)

    @staticmethod
    def _check(index: int, k: Tensor, v: Tensor, first: Tensor) -> None:
        for name, tensor in ((f"k of region {index}", k), (f"v of region {index}", v)):
            check_cpu(name, tensor, FLOAT_DTYPES, 4)
            if tensor.shape[3] not in SUPPORTED_HEAD_DIMS:
                raise ValueError(f"head_dim {tensor.shape[3]} is not supported, only {SUPPORTED_HEAD_DIMS}")
            if min(tensor.shape[1:3]) < 1:
                raise ValueError(f"{name} has an empty page, shape {tuple(tensor.shape)}")
            check_last_dim(name, tensor)
            if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}, region 0 has pages of"
                    f" {tuple(first.shape[1:])} {first.dtype}"
                )
        if k.shape != v.shape:
            raise ValueError(f"k and v of region {index} differ: {tuple(k.shape)} and {tuple(v.shape)}")


class PagedLatent:
    """One layer's latent rows (absorbed MLA), spread over one or more regions of memory.

    A token is one row, shared by all query heads: lora_rank elements that are both part of the key
    and the value, then the elements of the rotary key.

    Args:
        regions: CPU tensors [pages, page_size, 1, lora_rank + rope_dim], or without the head axis;
            bf16, fp16 or fp32, with any strides except a contiguous last dimension. Regions may
            alias each other. All share page_size, width and dtype; their numbers of pages may differ.
        lora_rank: how many elements of a row are its value: a multiple of 32 up to 512. The rest is
            a multiple of 16 up to 128, or nothing.

    The tensors are kept alive; what they hold may change between calls, their storage may not.

    Raises:
        ValueError: on a width that is not supported, or a tensor that breaks the above.
    """

    kv_heads = 1

    def __init__(self, regions: Sequence[Tensor], lora_rank: int) -> None:
        if not regions:
            raise ValueError("PagedLatent needs at least one region")
        rows = [region.detach() for region in regions]
        rows = [region.unsqueeze(2) if region.dim() == 3 else region for region in rows]
        for index, region in enumerate(rows):
            self._check(index, region, rows[0])
        self.page_size, _, self.head_dim = rows[0].shape[1:]
        self.lora_rank = self.out_dim = lora_rank
        self._check_width()
        self.dtype = rows[0].dtype
        self.pages = tuple(region.shape[0] for region in rows)
        self._tensors = rows
        lib = library()
        self.handle = lib.kv_new_latent(self.page_size, self.head_dim, lora_rank)
        for region in rows:
            lib.kv_add(self.handle, region, region)

    @staticmethod
    def _check(index: int, rows: Tensor, first: Tensor) -> None:
        name = f"region {index}"
        check_cpu(name, rows, FLOAT_DTYPES, 4)
        check_last_dim(name, rows)
        if rows.shape[1] < 1 or rows.shape[2] != 1:
            raise ValueError(f"{name} must have tokens a page and one head, has shape {tuple(rows.shape)}")
        if rows.shape[1:] != first.shape[1:] or rows.dtype != first.dtype:
            raise ValueError(
                f"{name} is {tuple(rows.shape)} {rows.dtype}, region 0 has pages of"
                f" {tuple(first.shape[1:])} {first.dtype}"
            )

    def _check_width(self) -> None:
        rank, rope = self.lora_rank, self.head_dim - self.lora_rank
        if not supports_latent(rank, rope):
            raise ValueError(f"rows of lora_rank {rank} + {rope} are not supported, only {LATENT_WIDTHS}")


class PageTable:
    """The pages of each request of one step, shared by all layers.

    Args:
        region: [entries] int32, which region of the PagedKV entry i lies in.
        page: [entries] int32, which page of that region.
        indptr: [batch + 1] int32; request b owns entries indptr[b] .. indptr[b + 1].
        lengths: [batch] int32, tokens of request b; they fill its pages in order, every page but
            the last completely. 0 with no entries is legal.

    All CPU and contiguous; kept alive and read when a decode runs, so they must not change while
    one is in flight. Shapes and dtypes are checked here, contents by each decode.

    Raises:
        ValueError: on a wrong dtype, device or shape.
    """

    def __init__(self, region: Tensor, page: Tensor, indptr: Tensor, lengths: Tensor) -> None:
        tensors = {"region": region, "page": page, "indptr": indptr, "lengths": lengths}
        for name, tensor in tensors.items():
            check_cpu(name, tensor, (torch.int32,), 1)
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous")
        if region.shape != page.shape:
            raise ValueError(f"{len(region)} regions and {len(page)} pages listed")
        if len(indptr) != len(lengths) + 1:
            raise ValueError(f"indptr must have {len(lengths)} + 1 elements, has {len(indptr)}")
        self.batch = len(lengths)
        self._tensors = tuple(tensors.values())
        self.handle = library().table_new(*self._tensors)


class BlockTable:
    """Of the tokens in a PageTable, the blocks that each request attends; a decode takes it in the table's place.

    Block i of a request is its tokens [i, i + 1) * block_size, the last one as far as its length goes. A decode over it equals
    attention over the listed tokens alone; no other page is looked at, so it may be listed as anything.

    Args:
        table: all pages of each request, [batch] requests.
        blocks: [batch, lists, most] int32, contiguous CPU: block numbers in any order, no block twice in a list, -1 anywhere
            for none. lists is 1, for all KV heads, or the number of KV heads, whose query heads then attend their own list.
        block_size: tokens a block, a multiple of the page size or a part of it. 1 lists tokens, or whatever entries
            a row of the KV stands for.

    Like the table it is kept alive and read when a decode runs. Shapes and dtypes are checked here, contents by each decode.
    ValueError is raised for a block that is negative, beyond the request's length or listed twice, a page of it that is out
    of range, and a block_size or a number of lists that does not fit the KV.

    Raises:
        ValueError: on a wrong dtype, device, shape or size.
    """

    def __init__(self, table: PageTable, blocks: Tensor, block_size: int) -> None:
        check_cpu("blocks", blocks, (torch.int32,), 3)
        if not blocks.is_contiguous():
            raise ValueError("blocks must be contiguous")
        if blocks.shape[0] != table.batch:
            raise ValueError(f"blocks of {blocks.shape[0]} requests, the page table has {table.batch}")
        if blocks.shape[1] < 1:
            raise ValueError(f"blocks has no lists, shape {tuple(blocks.shape)}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, is {block_size}")
        self.batch = table.batch
        self._kept = table, blocks
        self.handle = library().table_with_blocks(table.handle, blocks, block_size)
