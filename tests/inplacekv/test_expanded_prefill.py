"""Prefills whose latent rows SGLang expands (MLA on a GPU): the form chosen, the rows of each chunk, the end of a forward.

On a CPU, with stand-ins for SGLang's batch and for what only a GPU has; tests/inplacekv/test_mla_gpu.py runs the real thing.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_deepseek_mha_mixin import ForwardBatchDeepSeekMHAMixin
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from sglang_inplacekv import mla
from sglang_inplacekv.backend import InplaceAttnBackend
from sglang_inplacekv.cores import spin_s
from sglang_inplacekv.pool import InplaceMLAPool
from sglang_inplacekv.step_plan import Span, StepPlan

RANK, ROPE, LAYERS = 6, 2, 3
PREFIXES = (5, 0, 12)


def batch(chunk_tokens: int) -> SimpleNamespace:
    """What SGLang's prepare_chunked_prefix_cache_info leaves, cut by its own function."""
    count = max(1, -(-max(PREFIXES) // chunk_tokens))
    cut = ForwardBatchDeepSeekMHAMixin.get_prefix_chunk_seq_lens
    own = SimpleNamespace(batch_size=len(PREFIXES))
    starts, sizes = cut(own, torch.tensor(PREFIXES), count, chunk_tokens)
    return SimpleNamespace(
        num_prefix_chunks=count,
        prefix_chunk_idx=0,
        prefix_chunk_starts_cpu=starts,
        prefix_chunk_seq_lens_cpu=sizes,
        extend_prefix_lens_cpu=list(PREFIXES),
        attn_attend_prefix_cache=None,
    )


@pytest.fixture
def pool() -> InplaceMLAPool:
    pool = InplaceMLAPool.__new__(InplaceMLAPool)
    spans = [Span(f"r{i}", np.empty(0, np.int64), prefix, prefix + 1) for i, prefix in enumerate(PREFIXES)]
    rows = torch.arange(sum(PREFIXES)).float()[:, None].expand(-1, RANK + ROPE)
    reads = mock.Mock(side_effect=lambda layer: rows + 100 * layer)
    vars(pool).update(
        device_only=False,
        plan=StepPlan(spans, is_decode=False),
        executor=SimpleNamespace(read_prefix=reads),
        dtype=torch.float32,
        start_layer=0,
        end_layer=LAYERS,
        kv_lora_rank=RANK,
    )
    return pool


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 5, 12, 100])
def test_chunks_partition_every_prefix(pool: InplaceMLAPool, chunk_tokens: int) -> None:
    forward = batch(chunk_tokens)
    pool.begin_prefix(forward)
    for layer_id in range(LAYERS):
        layer, seen = SimpleNamespace(layer_id=layer_id), [[] for _ in PREFIXES]
        for chunk in range(forward.num_prefix_chunks):
            forward.prefix_chunk_idx = chunk
            sizes = forward.prefix_chunk_seq_lens_cpu[chunk].tolist()
            latent, rope = pool.get_mla_kv_buffer(layer, torch.empty(sum(sizes)))
            assert latent.shape == (sum(sizes), 1, RANK) and rope.shape == (sum(sizes), 1, ROPE)
            for own, rows in zip(seen, latent[:, 0, 0].split(sizes), strict=True):
                own += rows.tolist()
        found = [row for own in seen for row in own]
        assert [len(own) for own in seen] == list(PREFIXES)
        assert found == [100.0 * layer_id + row for row in range(sum(PREFIXES))]
    assert pool.executor.read_prefix.call_count == LAYERS, "the tiles of a layer cross once"
    assert pool._extend_batch is None and pool._prefix_rows is None, "nothing is kept"


def test_another_number_of_tokens_than_planned(pool: InplaceMLAPool) -> None:
    pool.begin_prefix(batch(100))
    with pytest.raises(RuntimeError, match="a prefix chunk of 3 tokens, 17 planned"):
        pool.get_mla_kv_buffer(SimpleNamespace(layer_id=0), torch.empty(3))


@pytest.mark.parametrize("prefixes", [PREFIXES, (0, 0, 0)])
def test_a_forward_ends_once_after_its_last_call(prefixes: tuple[int, ...]) -> None:
    """SGLang attends the chunk itself, then each chunk of the prefixes, layer by layer; LSEs leave in base e."""
    forward = batch(5)
    forward.extend_prefix_lens_cpu = list(prefixes)
    forward.forward_mode = SimpleNamespace(is_extend=lambda: True)
    calls: list[str] = []
    device = mock.Mock()
    device.forward_extend.side_effect = lambda *_: calls.append("attend") or (torch.ones(1), torch.ones(1))
    backend = InplaceAttnBackend.__new__(InplaceAttnBackend)
    end = mock.Mock(side_effect=lambda: calls.append("end"))
    executor = SimpleNamespace(end_forward=end)
    vars(backend).update(
        pool=SimpleNamespace(device_only=False, executor=executor),
        _device=device,
        _on_gpu=True,
        _shape=SimpleNamespace(value_dim=RANK),
        _last_layer=LAYERS - 1,
    )
    chunks = range(forward.num_prefix_chunks if any(prefixes) else 0)
    for layer_id in range(LAYERS):
        layer = SimpleNamespace(layer_id=layer_id)
        for chunk in (None, *chunks):
            forward.attn_attend_prefix_cache = chunk is not None
            forward.prefix_chunk_idx = chunk
            _, lse = backend.forward_extend(None, None, None, layer, forward, save_kv_cache=False)
            assert lse.item() == pytest.approx(math.log(2))
    assert calls == ["attend"] * (LAYERS * (1 + len(chunks))) + ["end"]


@pytest.mark.parametrize(
    ("on_gpu", "device_only", "is_extend", "form"),
    [
        (False, False, True, "absorbed"),
        (True, False, False, "absorbed"),
        (True, False, True, AttnForwardMethod.MHA_CHUNKED_KV),
        (True, True, True, "stock"),
        (False, True, True, "absorbed"),
    ],
)
def test_form(on_gpu: bool, device_only: bool, is_extend: bool, form: object) -> None:
    pool = SimpleNamespace(on_gpu=on_gpu, device_only=device_only)
    forward = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: is_extend))
    with (
        mock.patch.object(mla, "get_token_to_kv_pool", return_value=pool),
        mock.patch.object(mla, "_dispatch_mla_subtype", return_value="absorbed"),
        mock.patch.object(mla, "handle_attention_flashinfer", return_value="stock"),
    ):
        assert mla._choose_form(None, forward) == form


def test_a_team_of_all_cores_does_not_spin() -> None:
    with mock.patch("cpu_attn.default_threads", return_value=4):
        assert spin_s(4) == 0.0 < spin_s(3)
