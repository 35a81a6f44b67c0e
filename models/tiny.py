"""Tiny random MoE checkpoints, made with transformers' own classes.

They are small enough for a CPU test, yet not degenerate: activations keep unit scale through the layers and attention
is sharp (scores with a standard deviation near 2), so the next token depends on keys and values far back. A KV cache
that mixes up, drops or repeats a page therefore shows in the logits.
"""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache import is_prepared, staged

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 512
RECIPE_VERSION = 1
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
    "bos_token_id": SPECIAL_TOKENS.index("<s>"),
    "eos_token_id": SPECIAL_TOKENS.index("</s>"),
    "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
    "dtype": "float32",
}

_GQA: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "head_dim": 64}

# As DeepSeek-V2-Lite: no query compression, a dense first layer, shared experts. The latent is wider than a head's keys,
# which it is not mistaken for then. SGLang reads moe_layer_freq and scoring_func; transformers knows no other values.
_MLA: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 96,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

# As DeepSeek-V4, with every kind of layer. 16 index heads or more: with fewer, scores are often exactly zero and tie.
_V4: dict[str, Any] = {
    **{name: value for name, value in _COMMON.items() if name != "rope_parameters"},
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 48,
    "o_groups": 4,
    "o_lora_rank": 24,
    "sliding_window": 32,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 16,
    "compress_ratios": [0, 4, 128, 4],
    "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 512,
    },
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "num_hash_layers": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 0,
}

# SGLang's Mixtral derives head_dim as hidden_size / heads, hence 256 = 4 * 64 there.
TINY_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_GQA,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "intermediate_size": 256,
        "moe_intermediate_size": 96,
        "num_experts": 4,
        "norm_topk_prob": True,
    },
    "mixtral": {
        **_GQA,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "num_local_experts": 4,
    },
    "deepseek_v2": _MLA,
    "deepseek_v2_yarn": {**_MLA, "rope_parameters": _YARN, "max_position_embeddings": 163840},
    "deepseek_v4": _V4,
}

# Standard deviation of a layer's output over that of its unit-scale input.
_GAIN = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 2.0, "down_proj": 2.0, "lm_head": 2.0}
_GAIN |= {"o_b_proj": 2.0}
_GAIN |= {"kv_a_proj_with_mqa": 1.5, "kv_b_proj": 1.5}  # of a key: its rotated part, and the rest
_NORM_CENTRE = {"q_norm": 1.5, "k_norm": 1.5, "kv_norm": 1.5}
_NORM_JITTER = 0.1
# Of DeepSeek-V4: what transformers makes zeros or ones, which would hide errors of sign and order. (mean, standard deviation)
_V4_DRAWN = {
    "sinks": (0.0, 1.0),
    "position_bias": (0.0, 0.5),
    "e_score_correction_bias": (0.0, 0.1),
    "base": (0.0, 0.5),
    "hc_base": (0.0, 0.5),
    "scale": (1.0, 0.3),
    "hc_scale": (1.0, 0.3),
}


def make_tiny(kind: str, out_dir: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the tiny checkpoint ``kind`` to ``out_dir`` and return its path.

    ``overrides`` are fields of the transformers config (``num_hidden_layers=1``). The same arguments give the same
    bytes; when ``out_dir`` already holds that checkpoint, it is left alone. A larger ``vocab_size`` is allowed, the
    tokenizer then never produces the extra ids.
    """
    if kind not in TINY_KINDS:
        raise ValueError(f"unknown tiny checkpoint {kind!r}; known kinds: {', '.join(TINY_KINDS)}")
    out_dir = Path(out_dir)
    fields = {**TINY_KINDS[kind], **overrides}
    if fields["vocab_size"] < VOCAB_SIZE:
        raise ValueError(f"vocab_size={fields['vocab_size']} is below the tokenizer's {VOCAB_SIZE}")
    recipe = _recipe(kind, seed, fields)
    if is_prepared(out_dir, recipe):
        return out_dir
    model = _build_model(kind, fields, seed)
    with staged(out_dir, recipe) as scratch:
        model.save_pretrained(scratch)
        _build_tokenizer(fields["max_position_embeddings"]).save_pretrained(scratch)
    return out_dir


def _recipe(kind: str, seed: int, fields: dict[str, Any]) -> str:
    made_by = {"recipe": RECIPE_VERSION, "transformers": version("transformers"), "kind": kind, "seed": seed}
    return json.dumps({**made_by, "fields": fields}, sort_keys=True)


def _build_model(kind: str, fields: dict[str, Any], seed: int) -> PreTrainedModel:
    import torch

    config_class, model_class = _classes(kind)
    # transformers would keep a misspelt field and ignore it.
    known = {*config_class().to_dict(), *TINY_KINDS[kind]}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{kind} config has no field {', '.join(unknown)}")
    model = model_class._from_config(config_class(**fields), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            _fill(name, weight, generator)
        for name, buffer in sorted(model.named_buffers()):
            _fill_buffer(name.rsplit(".", 1)[-1], buffer, fields, generator)
    return model


def _classes(kind: str) -> tuple[Any, Any]:
    """Of the configuration and the model, asked by model type; SGLang makes the type deepseek_v4 mean a config of its own."""
    if kind == "deepseek_v4":
        from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

        return DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = CONFIG_MAPPING[kind.removesuffix("_yarn")]
    return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def _fill(name: str, weight: Any, generator: Any) -> None:
    """Draw one weight in place; ``weight`` is ``[out, in]``, ``[experts, out, in]`` or a norm's ``[features]``."""
    layer = next((part for part in reversed(name.split(".")) if part != "weight"), "")
    if layer in _V4_DRAWN:
        weight.normal_(*_V4_DRAWN[layer], generator=generator)
    elif weight.dim() == 1:
        weight.normal_(_NORM_CENTRE.get(layer, 1.0), _NORM_JITTER, generator=generator)
    elif layer == "embed_tokens":
        weight.normal_(0.0, 1.0, generator=generator)
    else:
        weight.normal_(0.0, _GAIN.get(layer, 1.0) / math.sqrt(weight.shape[-1]), generator=generator)


def _fill_buffer(name: str, buffer: Any, fields: dict[str, Any], generator: Any) -> None:
    """Draw a buffer that a checkpoint keeps: the router's bias, and experts by token id, those of one token all different."""
    if name in _V4_DRAWN:
        buffer.normal_(*_V4_DRAWN[name], generator=generator)
    elif name == "tid2eid":
        import torch

        order = torch.rand(len(buffer), fields["n_routed_experts"], generator=generator).argsort(1)
        buffer.copy_(order[:, : buffer.shape[1]])


def _build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `VOCAB_SIZE` ids: any text round-trips, common English words are short."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_WORDS], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} ids, expected {VOCAB_SIZE}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


# Trained on a fixed word list, not on a text of the Python in use, so that every machine gets the same tokenizer.
_TRAINING_WORDS = """
 the of and to in is that for it as with on be by this an or are from at not which when can if a one all has have was
 will would there their they you we he she his her its but what so up out about into than then them these those some
 any each other only also more most such no new first two time may must should could been being were had do does did
 made make use used using name names object objects value values class classes function functions method methods call
 called type types expression expressions statement statements string strings number numbers list sequence argument
 arguments attribute attributes module import return returns instance default operator operation index key keys memory
 cache page pages token tokens model models attention layer layers head heads query window region context long decode
 compute transfer stream read write move place share host device thread threads batch request requests server time
 people world work working water place places great every where after before between through same another because
 under while again against during without within part parts number place point hand day year way man men woman old
 good little much many own see come came go went get give take know think say said tell ask find look seem feel try
 leave right left high low long short small large early late next last few public private able different important
"""
