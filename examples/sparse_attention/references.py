"""Who is asked whether it is right: transformers' DeepSeek-V4 on the same weights, and the served model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Scores are near 1, and two orders of summation differ by some units in the last place.
NEAR_TIE = 5e-6
CHUNK_TOKENS = 256


class Oracle:
    """transformers' model, which is led by our choices of entries and experts where those are as good as its own.

    Where the last one chosen and the first one left out score the same but for rounding, either is right, and all that
    follows differs. RuntimeError where a choice of ours is worse than that.

    Args:
        entries: by CSA layer, int64 [tokens, k], ascending, -1 for none.
        experts: by layer, int64 [tokens, k].
    """

    def __init__(self, path: Path, entries: Mapping[int, Tensor], experts: Mapping[int, Tensor]) -> None:
        from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

        model = DeepseekV4ForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
        model.config._experts_implementation = "eager"  # the one that computes as it is written
        self._model, self._first = model.eval(), 0
        self.choices = self.near_ties = 0
        scored: dict[int, Tensor] = {}
        for number, layer in enumerate(model.model.layers):
            if number in entries:
                indexer = layer.self_attn.compressor.indexer
                note = lambda _, __, scores, number=number: scored.update({number: scores[0]})  # noqa: E731
                indexer.scorer.register_forward_hook(note)
                indexer.register_forward_hook(partial(self._of_indexer, number, scored, entries[number]))
            if isinstance(layer.mlp.gate, DeepseekV4TopKRouter):  # others read a table
                layer.mlp.gate.register_forward_hook(partial(self._of_router, number, experts[number]))

    @torch.no_grad()
    def logits(self, tokens: list[int], last: int) -> Tensor:
        """[last, vocab] of the last tokens of a whole sequence, through transformers' own cache."""
        from transformers import DynamicCache

        cache, found = DynamicCache(config=self._model.config), []
        for first in range(0, len(tokens), CHUNK_TOKENS):
            self._first = first
            chunk = torch.tensor([tokens[first : first + CHUNK_TOKENS]])
            found.append(self._model(chunk, past_key_values=cache, use_cache=True).logits[0].float())
        return torch.cat(found)[-last:]

    def _of_indexer(self, layer: int, scored: dict[int, Tensor], ours: Tensor, _, __, own: Tensor) -> Tensor:
        rows = ours[self._first : self._first + own.shape[1]]
        return self._led(f"layer {layer}, entries", scored[layer], own[0], rows)[None]

    def _of_router(self, layer: int, ours: Tensor, module: Any, _, out: Any):
        logits, _, own = out
        scores = module.score_fn(logits)
        rows = ours[self._first : self._first + len(own)]
        led = self._led(f"layer {layer}, experts", scores + module.e_score_correction_bias, own, rows)
        weights = scores.gather(1, led)
        return logits, weights / weights.sum(-1, keepdim=True) * module.routed_scaling_factor, led

    def _led(self, what: str, scores: Tensor, own: Tensor, ours: Tensor) -> Tensor:
        """own and ours [tokens, k], -1 for none; scores [tokens, n]. `own`, with our choice in rows of another near tie."""
        self.choices += len(own)
        led = own.clone()
        for row, (theirs, picked) in enumerate(zip(own.tolist(), ours.tolist(), strict=True)):
            theirs, picked = set(theirs) - {-1}, set(picked) - {-1}
            if theirs == picked:
                continue
            gap = abs(float(scores[row, sorted(theirs)].min() - scores[row, sorted(picked)].min()))
            if len(theirs) != len(picked) or gap > NEAR_TIE:
                raise RuntimeError(
                    f"{what}, token {self._first + row}: {picked} chosen for {theirs}, by {gap:g}"
                )
            self.near_ties += 1
            led[row] = torch.tensor(sorted(picked) + [-1] * (led.shape[1] - len(picked)))
        return led


def served_tokens(
    path: Path, prompt: list[int], count: int, share: float, page_tokens: int, device_tokens: int
) -> list[int]:
    """What sglang.Engine answers greedily over our backend. To be called below `if __name__ == "__main__"`."""
    import sglang

    os.environ |= {
        "SGLANG_INPLACEKV_CPU_SHARE": str(share),
        "SGLANG_INPLACEKV_GPU_MEMORY": f"{device_tokens}tok",
        "SGLANG_INPLACEKV_HOST_MEMORY": "16MB",
    }
    engine = sglang.Engine(
        model_path=str(path),
        attention_backend="inplacekv",
        device="cpu",
        dtype="float32",
        page_size=page_tokens,
        chunked_prefill_size=4 * page_tokens,
        max_running_requests=1,
        log_level="error",
    )
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    try:
        return engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"]
    finally:
        engine.shutdown()
