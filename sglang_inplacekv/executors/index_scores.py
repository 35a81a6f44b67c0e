"""The lightning indexer's scores on a GPU: of every entry, in one pass over the keys, and the entries that score best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ENTRIES = 128  # scored by one program


@triton.jit
def _score(
    queries,
    weights,
    keys,
    scores,
    entries,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    request = tl.program_id(1)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, column = tl.arange(0, HEADS), tl.arange(0, DIM)
    place = request.to(tl.int64) * entries + entry
    key = tl.load(keys + place[:, None] * DIM + column[None, :], mask=(entry < entries)[:, None], other=0.0)
    query = tl.load(queries + (request * HEADS + head)[:, None] * DIM + column[None, :])
    if WIDEN:  # triton's interpreter, which has no products of bf16
        key, query = key.to(tl.float32), query.to(tl.float32)
    by_head = tl.dot(key, tl.trans(query), input_precision="ieee")
    weight = tl.load(weights + request * HEADS + head)
    score = tl.sum(tl.maximum(by_head, 0.0) * weight[None, :], 1)
    tl.store(scores + place, score, mask=entry < entries)


def index_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Score the entries of each request for one query: fp32 [batch, entries], as sparse_attn.indexer defines them.

    queries [batch, heads, dim] rotated and keys [batch, entries, dim] of one dtype, weights fp32 [batch, heads] with the scales
    in them, all contiguous; heads and dim are powers of two of 16 at least. Sums in fp32. Raises ValueError on other shapes.
    """
    if (queries.dim(), weights.dim(), keys.dim()) != (3, 2, 3):
        raise ValueError(
            f"queries {tuple(queries.shape)}, weights {tuple(weights.shape)} and keys {tuple(keys.shape)}: 3, 2 and 3 "
            "dimensions are needed"
        )
    batch, heads, dim = queries.shape
    entries = keys.shape[1]
    if not queries.dtype.is_floating_point or weights.dtype != torch.float32:
        raise ValueError(f"queries of {queries.dtype} and weights of {weights.dtype}, which must be fp32")
    if heads & (heads - 1) or dim & (dim - 1) or min(heads, dim) < 16:
        raise ValueError(f"{heads} index heads of {dim}: both must be powers of two of at least 16")
    if keys.shape != (batch, entries, dim) or weights.shape != (batch, heads) or keys.dtype != queries.dtype:
        raise ValueError(
            f"queries {tuple(queries.shape)} {queries.dtype} and weights {tuple(weights.shape)} do not fit keys "
            f"{tuple(keys.shape)} {keys.dtype}"
        )
    if not (queries.is_contiguous() and weights.is_contiguous() and keys.is_contiguous()):
        raise ValueError("queries, weights and keys must be contiguous")
    scores = torch.empty(batch, entries, device=queries.device)
    _score[(triton.cdiv(entries, _ENTRIES), batch)](
        queries,
        weights,
        keys,
        scores,
        entries,
        HEADS=heads,
        DIM=dim,
        BLOCK=_ENTRIES,
        WIDEN=not queries.is_cuda,
    )
    return scores


def best_entries(scores: torch.Tensor, out: torch.Tensor) -> None:
    """Into out int32 [batch, k] the k best of each request, in no order; of equal scores any. Nothing waits for the GPU.

    Raises ValueError on another `out`.
    """
    if out.dtype != torch.int32 or len(out) != len(scores) or out.shape[1] > scores.shape[1]:
        raise ValueError(f"the best of scores {tuple(scores.shape)} into {tuple(out.shape)} {out.dtype}")
    out.copy_(scores.topk(out.shape[1], -1, sorted=False).indices)
