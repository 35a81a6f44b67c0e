"""DeepSeek-V4's listed entries: torch on a CPU, and in fp32; the Triton kernel in bf16 on a GPU."""

from __future__ import annotations

import pytest
import torch

from sglang_inplacekv.v4.listed import attend_list
from sparse_attn import Space
from sparse_attn.attend import attend_rows


def inputs(
    width: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, Space, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    q = torch.randn(5, 20, width, generator=generator).to(device, dtype)
    rows = torch.randn(300, 1, width, generator=generator).to(device, dtype)
    places = torch.stack([torch.randperm(300, generator=generator)[:70] for _ in range(5)])
    places[torch.rand(places.shape, generator=generator) < 0.2] = -1
    places[3] = -1
    unlisted = torch.ones(300, dtype=torch.bool)
    unlisted[places[places >= 0]] = False
    rows[unlisted.to(device)] = torch.nan  # as freed pages are, where that is asked for
    return q, Space("cmp", 4, 8, 4, width, width, True, 2 * width), rows, places.to(device)


@pytest.mark.parametrize("width", [64, 48])
def test_on_a_cpu_it_is_torch(width: int) -> None:
    q, space, rows, places = inputs(width, torch.bfloat16, "cpu")
    found, right = attend_list(q, space, rows, places, 0.1), attend_rows(q, space, rows, places[:, None], 0.1)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 64, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    q, space, rows, places = inputs(width, dtype, "cuda")
    found = attend_list(q, space, rows, places, width**-0.5)
    right = attend_rows(q.cpu().float(), space, rows.cpu().float(), places.cpu()[:, None], width**-0.5)
    # 2**-9 and 2**-12 of a weight by its rounding; in fp32 TF32 is off.
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(found[0].cpu(), right[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(found[1].cpu(), right[1], rtol=0, atol=1e-5)
