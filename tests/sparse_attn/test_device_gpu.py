"""The same selectors and composition with the device's side on a GPU, against the CPU. fp32 matrix products without TF32."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from sparse_attn import GrowingStore, LayerInputs, Selector
from sparse_attn.attend import attend_selection
from sparse_attn.compose import Composer
from sparse_attn.cpu_side import TorchCpuSide
from sparse_attn.traffic import Policy
from tests.sparse_attn.small import KINDS, part, selector_of, tokens_of

SCALE = 0.2


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    if type(value).__module__ == "sparse_attn.compressor":
        value = copy.copy(value)
        vars(value).update(moved(vars(value), device))
    return value


def on_gpu(selector: Selector) -> Selector:
    selector = copy.copy(selector)
    vars(selector).update(moved(vars(selector), "cuda"))
    return selector


class HostCopy:
    """Entries of a store on the device, as if they lay in host memory."""

    def __init__(self, store: GrowingStore) -> None:
        self._store = store

    def slots(self, space: str, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert ids.device.type == "cpu"
        rows, slots = self._store.slots(space, ids.cuda())
        return rows.cpu(), slots.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_and_cpu_agree(kind: str, share: float) -> None:
    here = selector_of(kind)
    there = on_gpu(here)
    x = tokens_of(here, 80, seed=2)
    state, other = here.new_state(), there.new_state()
    home = HostCopy(other.store)
    composer = Composer(
        there,
        SCALE,
        Policy.split(share),
        resident=other.store,
        home=home,
        cpu=TorchCpuSide(home),
        hot_entries=6,
        device="cuda",
    )
    for first, last in [(0, 45), *((i, i + 1) for i in range(45, 80))]:
        piece: LayerInputs = part(x, first, last)
        here.observe(state, piece)
        selection = here.select(state, piece)
        outs = attend_selection(piece.q, selection, here.spaces, state.store, SCALE)
        wanted = here.finish(outs, piece, selection)
        found = composer.forward(other, moved(piece, "cuda"))
        assert found.device.type == "cuda"
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4)
    composer.rollback(other, 5)
