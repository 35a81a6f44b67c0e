"""ggml's flash attention, which llama.cpp decodes with on a CPU, for python -m cpu_attn.bench --ggml.

`pip install ggml-python` compiles ggml for the CPU it runs on. Nothing else needs it.
"""

import ctypes
import importlib
import time
from typing import Any

import torch
from torch import Tensor

GRAPH_BYTES = 16 << 20


class GgmlAttention:
    """Decodes on a thread pool of its own. Raises RuntimeError where ggml-python is not installed."""

    def __init__(self, threads: int) -> None:
        try:
            self._ggml: Any = importlib.import_module("ggml")
        except ImportError as error:
            raise RuntimeError("--ggml needs ggml-python: pip install ggml-python") from error
        ggml = self._ggml
        ggml.ggml_cpu_init()
        self._threads = threads
        self._params = ggml.ggml_threadpool_params_default(threads)
        self._params.poll = 0  # its threads sleep between calls, so as not to disturb whatever is timed next
        self._pool = ggml.ggml_threadpool_new(ctypes.byref(self._params))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, float]:
        """q [batch, q_heads, d] fp32, k and v [batch, kv_heads, tokens, d] fp16, contiguous: out as q, and seconds."""
        ggml = self._ggml
        context = ggml.ggml_init(ggml.ggml_init_params(mem_size=GRAPH_BYTES, mem_buffer=None, no_alloc=True))
        try:
            batch, heads, d = q.shape
            _, kv_heads, tokens, _ = k.shape
            own_q = self._wrap(context, ggml.GGML_TYPE_F32, q, (d, 1, heads, batch))
            own_k, own_v = (
                self._wrap(context, ggml.GGML_TYPE_F16, x, (d, tokens, kv_heads, batch)) for x in (k, v)
            )
            result = ggml.ggml_flash_attn_ext(context, own_q, own_k, own_v, None, scale, 0.0, 0.0)
            out = torch.empty_like(q)
            result.contents.data = out.data_ptr()
            graph = ggml.ggml_new_graph(context)
            ggml.ggml_build_forward_expand(graph, result)
            plan = ggml.ggml_graph_plan(graph, self._threads, self._pool)
            work = torch.empty(max(1, plan.work_size), dtype=torch.uint8)
            plan.work_data = ctypes.cast(work.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
            start = time.perf_counter()
            code = ggml.ggml_graph_compute(graph, ctypes.byref(plan))
            seconds = time.perf_counter() - start
            if code:
                raise RuntimeError(f"ggml_graph_compute returned {code}")
            return out, seconds
        finally:
            ggml.ggml_free(context)

    def _wrap(self, context: Any, kind: int, tensor: Tensor, shape: tuple[int, ...]) -> Any:
        wrapped = self._ggml.ggml_new_tensor_4d(context, kind, *shape)
        wrapped.contents.data = tensor.data_ptr()
        return wrapped

    def close(self) -> None:
        self._ggml.ggml_threadpool_free(self._pool)
