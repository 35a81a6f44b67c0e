"""Logprobs on a GPU in bf16: as close to the fp32 truth as stock FlashInfer and stock Triton are.

As users run it: decode under CUDA graphs, overlap schedule on, no waits but the executor's own. What is generated is judged by
the truth about itself.

bf16 flips the choice of a tiny MoE's router now and then, so a mean over few tokens is one of chance: over 354 generated tokens
equally right computations differed by 11% (standard deviation, ten servers on an H200). Over ten times as many it is 4%, and
the limit of 1.2 between two such means is four deviations away.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_inplacekv.models import make_tiny
from tests.harness import Result, Runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

COPIES = 5
PROMPT_LENGTHS = (7, 64, 300, 1500, 3000) * COPIES
# Windows open, fill and are flushed; the batch shrinks while forwards are in flight.
NEW_TOKENS = (192, 80, 144, 180, 112) * COPIES
EVERYTHING = 40960  # tokens
SERVED = {"disable_overlap_schedule": False, "cuda_graph_backend_decode": "full"}
Truth = Callable[[list[int]], list[float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # head_dim of the real models, so that the kernels are theirs
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("model") / "qwen3_moe", head_dim=128)


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    """Logprobs of a sequence's tokens after the first, by transformers in fp32."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()

    def logprobs(tokens: list[int]) -> list[float]:
        ids = torch.tensor([tokens], device="cuda")
        with torch.no_grad():
            every = network(ids).logits[0, :-1].log_softmax(-1)
        return every.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    return logprobs


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 500, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def served(model: Path, **settings) -> list[Result]:
    with Runner(model, dtype="bfloat16", chunked_prefill_size=1024, **(SERVED | settings)) as runner:
        handles = [
            runner.submit(prompt, max_new_tokens=new)
            for prompt, new in zip(prompts(), NEW_TOKENS, strict=True)
        ]
        runner.run_until_idle()
        return [handle.result() for handle in handles]


def errors(truth: Truth, results: list[Result]) -> tuple[float, float]:
    """Mean |dlogprob| from the truth over all prompt positions, and over all generated ones."""
    prompt_gaps, output_gaps = [], []
    for prompt, result in zip(prompts(), results, strict=True):
        right = truth(prompt + result.output_ids)
        own = len(prompt) - 1
        prompt_gaps += [abs(a - b) for a, b in zip(right[:own], result.prompt_logprobs, strict=True)]
        output_gaps += [abs(a - b) for a, b in zip(right[own:], result.output_logprobs, strict=True)]
    return sum(prompt_gaps) / len(prompt_gaps), sum(output_gaps) / len(output_gaps)


@pytest.fixture(scope="module")
def stock_errors(model: Path, truth: Truth) -> tuple[float, float]:
    """The larger ones of two stock backends."""
    found = [
        errors(truth, served(model, backend=backend, page_size=1, max_total_tokens=EVERYTHING))
        for backend in ("flashinfer", "triton")
    ]
    print(f"mean |dlogprob| from fp32 (prompt, output), flashinfer and triton: {found}")
    return max(prompt for prompt, _ in found), max(output for _, output in found)


def ours(model: Path, gpu_memory: str, share: str, **settings) -> list[Result]:
    env = {
        "SGLANG_INPLACEKV_HOST_MEMORY": "512MB",
        "SGLANG_INPLACEKV_GPU_MEMORY": gpu_memory,
        "SGLANG_INPLACEKV_CPU_SHARE": share,
        "SGLANG_INPLACEKV_TILE_TOKENS": "512",
    }
    return served(model, backend="inplacekv", page_size=64, max_total_tokens=None, env=env, **settings)


def check(truth: Truth, stock: tuple[float, float], results: list[Result]) -> None:
    found = errors(truth, results)
    print(f"mean |dlogprob| from fp32 (prompt, output): inplacekv {found}, stock {stock}")
    assert found[0] <= 1.2 * stock[0] and found[1] <= 1.2 * stock[1]


@pytest.mark.parametrize("share", ["0", "0.4", "1"])
@pytest.mark.parametrize("gpu_memory", ["0tok", "2048tok", f"{EVERYTHING}tok"])
def test_as_close_to_fp32_as_stock_is(
    model: Path, truth: Truth, stock_errors: tuple[float, float], share: str, gpu_memory: str
) -> None:
    check(truth, stock_errors, ours(model, gpu_memory, share))


def test_without_graphs_and_overlap(model: Path, truth: Truth, stock_errors: tuple[float, float]) -> None:
    eager = {"disable_overlap_schedule": True, "cuda_graph_backend_decode": "disabled"}
    check(truth, stock_errors, ours(model, "2048tok", "0.4", **eager))
