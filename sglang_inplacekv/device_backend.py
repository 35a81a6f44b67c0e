"""SGLang's own attention backend over region D, for forwards that hold no host page.

While everything fits, attention is thus stock's, with its kernels, its CUDA graphs and its fused stores.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend


def make_device_backend(runner) -> AttentionBackend:
    """The stock backend for this device; `runner`'s pool gives it the device tensors while `device_only` holds."""
    if torch.device(runner.device).type == "cuda":
        if runner.use_mla_backend:
            from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

            return FlashInferMLAAttnBackend(runner)
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        return FlashInferAttnBackend(runner)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(runner)
