"""How SGLang's DeepSeek models call attention under our backend."""

from __future__ import annotations

from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    _dispatch_mla_subtype,
    handle_attention_flashinfer,
)
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from sglang_inplacekv.compat import BACKEND_NAME


def register() -> None:
    """Without a handler of its own a backend's prefix-free prefills take a form that writes no latent rows through it."""
    AttentionBackendRegistry.register(BACKEND_NAME, _choose_form)


def _choose_form(attention, forward_batch) -> AttnForwardMethod:
    """Absorbed: attention over latent rows. Expanded: over the keys and values that they stand for, cheaper for many queries.

    A decode is absorbed. A prefill on a GPU is expanded, chunk by chunk where it has a prefix: host rows have to cross anyhow.
    SGLang expands with Triton kernels, so a host without a GPU absorbs.
    """
    pool = get_token_to_kv_pool()
    if not pool.on_gpu or not forward_batch.forward_mode.is_extend():
        return _dispatch_mla_subtype(attention, forward_batch)
    if pool.device_only:
        return handle_attention_flashinfer(attention, forward_batch)
    return AttnForwardMethod.MHA_CHUNKED_KV
