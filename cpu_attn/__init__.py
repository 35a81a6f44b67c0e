"""Attention over a paged KV cache that stays where it is, on CPU threads.

Standalone: needs torch tensors and apache-tvm-ffi, nothing else of this project. The compiled part
is loaded on first use, so importing this package never fails for want of it.
"""

from cpu_attn.decode import DecodeArguments, paged_decode, paged_mla_decode
from cpu_attn.executor import Executor, Job, Signal
from cpu_attn.library import default_threads, isa, supported_isas
from cpu_attn.paged import (
    LATENT_WIDTHS,
    SUPPORTED_HEAD_DIMS,
    BlockTable,
    PagedKV,
    PagedLatent,
    PageTable,
    supports_latent,
)
from cpu_attn.probe import hand_over_seconds, multiply_probe_gflops, read_probe_gbps

__all__ = [
    "LATENT_WIDTHS",
    "SUPPORTED_HEAD_DIMS",
    "BlockTable",
    "DecodeArguments",
    "Executor",
    "Job",
    "PageTable",
    "PagedKV",
    "PagedLatent",
    "Signal",
    "default_threads",
    "hand_over_seconds",
    "isa",
    "multiply_probe_gflops",
    "paged_decode",
    "paged_mla_decode",
    "read_probe_gbps",
    "supported_isas",
    "supports_latent",
]
