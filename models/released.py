"""Configurations of released models in their real shapes, without weights.

For SGLang's ``--load-format dummy --skip-tokenizer-init``: kernels, memory and traffic are then the real model's, the
text is not. A smaller number of layers keeps every width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .cache import is_prepared, staged

RECIPE_VERSION = 1

# config.json as published, in its order.
RELEASED_KINDS: dict[str, dict[str, Any]] = {
    # Qwen/Qwen3-30B-A3B: 96 KiB of bf16 KV per token
    "qwen3_30b_a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    # mistralai/Mixtral-8x7B-v0.1: 128 KiB of bf16 KV per token
    "mixtral_8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    # deepseek-ai/DeepSeek-V2-Lite, less auto_map, which names code that transformers has: 30.4 KiB of bf16 KV per token
    "deepseek_v2_lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
}


def write_config(kind: str, out_dir: str | Path, *, layers: int | None = None) -> Path:
    """Write the ``config.json`` of the released model ``kind`` to ``out_dir`` and return ``out_dir``.

    ``layers`` replaces the number of layers and nothing else. When ``out_dir`` already holds that configuration, it is
    left alone.
    """
    if kind not in RELEASED_KINDS:
        raise ValueError(f"unknown released model {kind!r}; known kinds: {', '.join(RELEASED_KINDS)}")
    fields = RELEASED_KINDS[kind]
    released = fields["num_hidden_layers"]
    layers = released if layers is None else layers
    if not 1 <= layers <= released:
        raise ValueError(f"{kind} has {released} layers: asked {layers}, possible are 1 to {released}")
    fields = fields | {"num_hidden_layers": layers}
    out_dir = Path(out_dir)
    recipe = json.dumps({"recipe": RECIPE_VERSION, "kind": kind, "fields": fields}, sort_keys=True)
    if not is_prepared(out_dir, recipe):
        with staged(out_dir, recipe) as scratch:
            (scratch / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return out_dir
