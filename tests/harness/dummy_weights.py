"""Random weights for `load_format="dummy"` under which a model computes something.

SGLang's own are uniform within 1e-3: attention scores and expert choices are then all but constant, norms multiply by
about zero, and a KV cache that lost half its pages would hardly show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from sglang.srt.model_loader import loader


@contextmanager
def scaled_dummy_weights(seed: int, std: float = 0.02) -> Iterator[None]:
    """Models loaded in this block get normal weights of `std`, norm weights 1 and biases 0.

    A parameter's values depend on `seed`, its name, shape, dtype and device only: every attention backend gets the
    same ones.
    """

    def initialize(model: torch.nn.Module) -> None:
        fill_parameters(model, seed, std)

    with mock.patch.object(loader, "initialize_dummy_weights", initialize):
        yield


@torch.no_grad()
def fill_parameters(model: torch.nn.Module, seed: int, std: float) -> None:
    """Draw in place, on each parameter's device and in its dtype: 57 GB take no second copy."""
    for name, parameter in model.named_parameters():
        if not parameter.dtype.is_floating_point:
            raise TypeError(f"{name} is {parameter.dtype}: dummy weights are for unquantised models")
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            generator = torch.Generator(parameter.device).manual_seed(_seed_of(seed, name))
            parameter.normal_(0.0, std, generator=generator)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "little")
