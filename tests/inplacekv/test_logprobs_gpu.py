"""Logprobs on a GPU in bf16: as close to the fp32 truth as stock FlashInfer and stock Triton are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_inplacekv.models import make_tiny
from tests.harness import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PROMPT_LENGTHS = (7, 64, 300, 1500, 3000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # head_dim of the real models, so that the kernels are theirs
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("model") / "qwen3_moe", head_dim=128)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 500, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def error(truth: list[list[float]], model: Path, **settings) -> float:
    """Mean |dlogprob| from the truth over all prompt positions."""
    with Runner(model, dtype="bfloat16", chunked_prefill_size=1024, **settings) as runner:
        results = runner.generate(prompts(), max_new_tokens=32)
    gaps = [
        abs(a - b)
        for x, y in zip(truth, results, strict=True)
        for a, b in zip(x, y.prompt_logprobs, strict=True)
    ]
    return sum(gaps) / len(gaps)


@pytest.fixture(scope="module")
def truth(model: Path) -> list[list[float]]:
    """Logprobs of each prompt's tokens after the first, by transformers in fp32."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()
    result = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device="cuda")
        with torch.no_grad():
            logprobs = network(ids).logits[0, :-1].log_softmax(-1)
        result.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return result


@pytest.fixture(scope="module")
def stock_error(model: Path, truth: list[list[float]]) -> float:
    errors = {
        backend: error(truth, model, backend=backend, page_size=1, max_total_tokens=16384)
        for backend in ("flashinfer", "triton")
    }
    print(f"mean |dlogprob| from fp32: {errors}")
    return max(errors.values())


@pytest.mark.parametrize("share", ["0", "0.4", "1"])
@pytest.mark.parametrize("gpu_memory", ["0tok", "512tok", "16384tok"])
def test_as_close_to_fp32_as_stock_is(
    model: Path, truth: list[list[float]], stock_error: float, share: str, gpu_memory: str
) -> None:
    env = {
        "SGLANG_INPLACEKV_HOST_MEMORY": "256MB",
        "SGLANG_INPLACEKV_GPU_MEMORY": gpu_memory,
        "SGLANG_INPLACEKV_CPU_SHARE": share,
        "SGLANG_INPLACEKV_TILE_TOKENS": "512",
        "SGLANG_INPLACEKV_JITTER_SEED": "1",
        "SGLANG_INPLACEKV_POISON": "1",
    }
    ours = error(truth, model, backend="inplacekv", page_size=64, max_total_tokens=None, env=env)
    print(f"mean |dlogprob| from fp32: inplacekv {ours:.5f}, stock {stock_error:.5f}")
    assert ours <= 1.2 * stock_error
