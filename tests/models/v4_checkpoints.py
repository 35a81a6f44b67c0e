"""DeepSeek-V4 checkpoints for tests, and transformers' own model of one."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}
PRO = FLASH | {
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
}
# The widths of a tiny model of which every FP8 and FP4 block is whole or, of FP8, cut off.
QUANTISED_WIDTHS = {"hidden_size": 160, "moe_intermediate_size": 96}


@functools.cache
def transformers_model(path: Path) -> DeepseekV4ForCausalLM:
    """In fp32. Of its expert backends the eager one alone computes as it is written."""
    model = DeepseekV4ForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    model.config._experts_implementation = "eager"
    return model.eval()


def released_names(name: str) -> str:
    """Of what transformers saves, the name in released checkpoints."""
    name = {"model.embed_tokens.weight": "embed.weight"}.get(name, name.removeprefix("model."))
    name = name.replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def write_released(source: Path, out: Path, *, quantised: bool) -> Path:
    """`source`, as transformers saves it, with the names of a released checkpoint; `quantised`: attention FP8, experts FP4.

    Returns `out`. A second folder beside it, `plain`, is what the quantised one stands for, as transformers saves it.
    """
    tensors, released, plain = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        own = released_names(name)
        if quantised and ".experts." in own:
            weight, scale, plain[name] = fp4(tensor)
        elif quantised and is_linear(own):
            weight, scale, plain[name] = fp8(tensor)
        else:
            released[own] = plain[name] = tensor
            continue
        released[own] = weight
        released[own.removesuffix("weight") + "scale"] = scale
    released["mtp.0.enorm.weight"] = torch.zeros(3)
    for folder, weights in ((out, released), (out.parent / "plain", plain)):
        folder.mkdir()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        for file in source.iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_text(file.read_text())
    if quantised:
        fields = json.loads((out / "config.json").read_text())
        fields["quantization_config"] = FLASH["quantization_config"]
        (out / "config.json").write_text(json.dumps(fields))
    return out


def is_linear(name: str) -> bool:
    parts = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
    return name.split(".")[-2:-1] in [[part] for part in parts] and ".compressor." not in name


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3, ue8m0 scales of 128 x 128 blocks, what they stand for)."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, 128, columns, 128)
    exponents = blocks.abs().amax((1, 3)).div(448).log2().ceil()
    scale = torch.exp2(exponents)[:, None, :, None]
    low = (blocks / scale).to(torch.float8_e4m3fn)
    cut = (slice(weight.shape[0]), slice(weight.shape[1]))
    whole = (low.float() * scale).view(padded.shape)
    return (
        low.view(padded.shape)[cut].contiguous(),
        (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu),
        whole[cut].contiguous(),
    )


def fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(two e2m1 a byte, ue8m0 scales of 32 columns, what they stand for), by searching the nearest of the 16 values."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = weight.view(len(weight), -1, 32)
    exponents = blocks.abs().amax(-1, keepdim=True).div(6).log2().ceil()
    scale = torch.exp2(exponents)
    codes = ((blocks / scale)[..., None] - values).abs().argmin(-1)
    whole = (values[codes] * scale).view(weight.shape)
    codes = codes.view(len(weight), -1, 2).to(torch.uint8)
    packed = codes[..., 0] + 16 * codes[..., 1]
    return (
        packed.view(torch.int8),
        (exponents[..., 0] + 127).to(torch.uint8).view(torch.float8_e8m0fnu),
        whole,
    )


def log_probabilities(model: DeepseekV4ForCausalLM, tokens: list[int]) -> torch.Tensor:
    """fp32 [tokens - 1]: of each token after the first, by one forward without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    known = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    assert known.isfinite().all()
    return known


@dataclass
class Choices:
    """What a served sequence chose, by layer: experts [tokens, k], and CSA entries [tokens, k], -1 for none; in any order."""

    experts: dict[int, torch.Tensor] = field(default_factory=dict)
    entries: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Reference:
    """One forward without a cache that chooses for itself, but for near ties, where it chooses as the served model did.

    A gap between the last chosen and the first not chosen that is no more than rounding is no choice: another order of sums
    may choose otherwise, and all that follows differs.
    """

    log_probabilities: torch.Tensor  # fp32 [tokens - 1], of each token after the first
    ties: int  # near ties where it would have chosen otherwise
    choices: int


def reference(model: DeepseekV4ForCausalLM, tokens: list[int], served: Choices, near_tie: float) -> Reference:
    """Raises AssertionError where the served model chose otherwise by more than `near_tie`."""
    found = Reference(torch.empty(0), 0, 0)

    def agreed(what: str, scores: torch.Tensor, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Rows of `own` and `other` [tokens, k]: the other's where it is as good. scores [tokens, n], -1 means no choice."""
        found.choices += len(own)
        sets = [
            ids.sort(-1).values
            for ids in (own, torch.nn.functional.pad(other, (0, own.shape[1] - other.shape[1]), value=-1))
        ]
        for row in (sets[0] != sets[1]).any(-1).nonzero()[:, 0].tolist():
            lists = [set(ids[row].tolist()) - {-1} for ids in sets]
            assert len(lists[0]) == len(lists[1]), (
                f"{what}, token {row}: {lists[1]} chosen instead of {lists[0]}"
            )
            worst = [scores[row, sorted(ids)].min() for ids in lists]
            assert worst[0] - worst[1] < near_tie, (
                f"{what}, token {row}: chose {lists[1] - lists[0]} instead of {lists[0] - lists[1]}, worse by "
                f"{worst[0] - worst[1]:.1e}"
            )
            found.ties += 1
        return sets[1]

    def of_router(layer: int, module, _, out):
        logits, _, own = out
        scores = module.score_fn(logits)
        if not isinstance(module, theirs.DeepseekV4TopKRouter):
            assert torch.equal(own, served.experts[layer]), "the table's experts"
            return None
        biased = scores + module.e_score_correction_bias
        experts = agreed(f"layer {layer}, experts", biased, own, served.experts[layer])
        weights = scores.gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True) * module.routed_scaling_factor, experts

    scored = {}

    def of_indexer(layer: int, _, __, out):
        return agreed(f"layer {layer}, entries", scored[layer], out[0], served.entries[layer])[None]

    hooks = []
    for layer, block in enumerate(model.model.layers):
        hooks.append(block.mlp.gate.register_forward_hook(functools.partial(of_router, layer)))
        if isinstance(block.self_attn.compressor, theirs.DeepseekV4CSACompressor):
            indexer = block.self_attn.compressor.indexer
            note = lambda _, __, out, layer=layer: scored.__setitem__(layer, out[0])  # noqa: E731
            hooks.append(indexer.scorer.register_forward_hook(note))
            hooks.append(indexer.register_forward_hook(functools.partial(of_indexer, layer)))
    try:
        found.log_probabilities = log_probabilities(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found
