"""DeepSeek-V4 behind a real launch_server on a CPU host, selected as any model is: no flag but the backend's."""

from __future__ import annotations

import pytest
import torch

from examples.serving import Server
from sglang_inplacekv.models import checkpoint_path, long_text, make_tiny
from tests.e2e.clients import TOLERANCE, chat, completion, generate
from tests.models.v4_checkpoints import log_probabilities, transformers_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FLAGS = ["--attention-backend", "inplacekv", "--sleep-on-idle", "--page-size", "128"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_INPLACEKV_GPU_MEMORY": "256tok",
    "SGLANG_INPLACEKV_HOST_MEMORY": "16MB",
    "SGLANG_INPLACEKV_ADMISSION": "spill",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_INPLACEKV_JITTER_SEED": "7",
    "SGLANG_INPLACEKV_POISON": "1",
}


def test_served_like_any_model() -> None:
    from transformers import AutoTokenizer

    path = make_tiny("deepseek_v4", checkpoint_path("tiny-deepseek_v4"))
    prompt = long_text(1500, topic="objects")[:1500]
    with Server(path, *FLAGS, env=ENVIRONMENT) as server:
        answer = generate(server, prompt, prompt_logprobs=True)
        again = completion(server, prompt)
        assert again.text == answer.text and answer.cached_tokens == 0
        # Of 858 tokens one at least is computed.
        assert answer.prompt_tokens == 858 and generate(server, prompt).cached_tokens == 6 * 128
        assert len(chat(server, "Hello").logprobs)
        assert "InplaceKV prefix cache: " in server.log
    tokens = AutoTokenizer.from_pretrained(path)(prompt).input_ids
    wanted = log_probabilities(transformers_model(path), tokens)
    found = torch.tensor(answer.prompt_logprobs)
    assert len(found) == len(wanted) > 3 * 128
    # A near tie of experts or entries could end the agreement; for this prompt there is none.
    assert (found - wanted).abs().max() < TOLERANCE
