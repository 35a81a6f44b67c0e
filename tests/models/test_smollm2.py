"""SmolLM2 survives the way from GGUF to safetensors: it still knows the capital of France."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_inplacekv.models import prepare_smollm2, smollm2


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return prepare_smollm2()


def test_prepared_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_load_gguf", lambda source: pytest.fail("dequantised again"))
    assert prepare_smollm2() == checkpoint


def test_weights_are_fp32(checkpoint: Path) -> None:
    with safe_open(checkpoint / "model.safetensors", framework="pt") as weights:
        names = weights.keys()
        assert {weights.get_slice(name).get_dtype() for name in names} == {"F32"}


def test_answers_a_chat(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.architectures == ["LlamaForCausalLM"]
    heads = (model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim)
    assert heads == (9, 3, 64)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert int(answer[-1]) == model.config.eos_token_id
