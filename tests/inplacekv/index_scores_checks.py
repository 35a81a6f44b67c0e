"""Index scores against fp64. As a program it checks the kernel on Triton's interpreter, which is chosen before the import."""

from __future__ import annotations

import torch

from sglang_inplacekv.executors.index_scores import best_entries, index_scores

SHAPES = ((2, 16, 32, 300), (1, 64, 128, 128))  # batch, heads, dim, entries: a part of a program, a whole one


def check(batch: int, heads: int, dim: int, entries: int, device: str, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(entries)
    queries = torch.randn(batch, heads, dim, generator=generator).bfloat16()
    keys = torch.randn(batch, entries, dim, generator=generator).bfloat16()
    weights = torch.randn(batch, heads, generator=generator) * (heads * dim) ** -0.5
    products = (keys.double() @ queries.double().mT).relu_()
    wanted = (products * weights.double()[:, None]).sum(-1)
    scores = index_scores(queries.to(device), weights.to(device), keys.to(device))
    torch.testing.assert_close(scores.cpu().double(), wanted, rtol=0, atol=tolerance)
    best = torch.empty(batch, entries // 3, dtype=torch.int32, device=device)
    best_entries(scores, best)
    assert torch.equal(best.cpu().sort().values.long(), wanted.topk(entries // 3).indices.sort().values)


if __name__ == "__main__":
    for shape in SHAPES:
        check(*shape, "cpu", 2e-6)
    print("scores agree")
