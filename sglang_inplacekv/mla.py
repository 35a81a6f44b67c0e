"""How SGLang's DeepSeek models call attention under our backend."""

from __future__ import annotations

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from sglang_inplacekv.compat import BACKEND_NAME


def _absorbed(attn, forward_batch) -> AttnForwardMethod:
    """Attention over latent rows, of a prefill as well.

    On a GPU a prefill is cheaper over the keys and values that the rows expand to, chunk by chunk; SGLang does that with
    Triton kernels, which a host without a GPU cannot run.
    """
    return AttnForwardMethod.MLA


def register() -> None:
    """Without this, an unknown backend's prefix-free prefills take the expanded form and write no latent rows through it."""
    AttentionBackendRegistry.register(BACKEND_NAME, _absorbed)
