"""Checkpoint tensors into the model: names, quantised tensors, experts, and that nothing is missing or left over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from .names import SCALE, canonical
from .quantised import dequantise, is_quantised

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_TABLE = "tid2eid"


def load_tensors(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill every parameter and persistent buffer of `model`. ValueError where one is missing, unknown or misshapen."""
    targets = {**dict(model.named_parameters()), **_persistent_buffers(model)}
    missing = {name: target.numel() for name, target in targets.items()}
    for name, tensor in plain_tensors(weights):
        target_name, target = _slot(targets, name)
        if target is None:
            raise ValueError(f"the checkpoint has {name}, which the model has not")
        _fill(target, tensor, name)
        missing[target_name] -= target.numel()
    if short := sorted(name for name, left in missing.items() if left):
        raise ValueError(
            f"the checkpoint lacks {len(short)} tensors or parts of them: {', '.join(short[:5])}"
        )


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _slot(targets: dict[str, torch.Tensor], name: str) -> tuple[str, torch.Tensor | None]:
    """The parameter that a tensor fills or, of the experts, the part of it."""
    match = _EXPERT.match(name)
    if match is None:
        return name, targets.get(name)
    owner, expert, part = match[1], int(match[2]), match[3]
    target_name = f"{owner}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
    stacked = targets.get(target_name)
    if stacked is None or expert >= len(stacked):
        return target_name, None
    own = stacked.data[expert]
    return target_name, own if part == "down" else own.chunk(2)[part == "up"]


def _fill(target: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    if target.shape[1:] != tensor.shape[1:] or len(target) < len(tensor):
        raise ValueError(f"{name} is {tuple(tensor.shape)}, the model's is {tuple(target.shape)}")
    # SGLang pads the vocabulary; all else is of one size.
    if len(target) != len(tensor) and not name.startswith(("embed_tokens.", "lm_head.")):
        raise ValueError(f"{name} is {tuple(tensor.shape)}, the model's is {tuple(target.shape)}")
    target.data[: len(tensor)].copy_(tensor)
    target.data[len(tensor) :].zero_()


def plain_tensors(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the model's names, FP8 and FP4 dequantised to fp32, draft blocks left out.

    A weight and its scales may come in any order. ValueError if one comes without the other.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        own = canonical(name)
        if own is None:
            continue
        is_scale = own.endswith(f".{SCALE}") and not own.startswith("hc_head.") and "_hc." not in own
        if not is_scale and (own.endswith(_TABLE) or not is_quantised(tensor)):
            yield own, tensor
            continue
        stem = own.removesuffix(f".{SCALE}").removesuffix(".weight")
        other = waiting.pop(stem, None)
        if other is None:
            waiting[stem] = tensor
        else:
            weight, scale = (other, tensor) if is_scale else (tensor, other)
            yield f"{stem}.weight", dequantise(weight, scale)
    if waiting:
        raise ValueError(
            f"weights without scales or scales without weights: {', '.join(sorted(waiting)[:5])}"
        )
