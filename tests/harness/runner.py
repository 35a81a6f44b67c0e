"""A scheduler to run prompts through, as a context manager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from sglang.srt.managers.io_struct import AbortReq

from .dummy_weights import scaled_dummy_weights
from .in_process import InProcessScheduler
from .lifecycle import environment, forced_retraction, live_scheduler, torch_threads
from .requests import Handle, Result, tokenized

MAX_STEPS = 20_000

STRICT_CHECKS = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}


class Runner:
    """One server configuration. Only one Runner may be open in a process at a time.

    `retract_every=n` retracts running requests every n forward passes. `max_total_tokens=None`
    leaves the size of the KV pool to SGLang. `torch_threads` is also the default of OpenMP code
    called from the scheduler's thread. With `dummy_std` the weights are not loaded but drawn, see
    `scaled_dummy_weights`. Other keywords are fields of SGLang's ServerArgs.
    """

    def __init__(
        self,
        model_path,
        *,
        backend: str = "torch_native",
        page_size: int = 16,
        chunked_prefill_size: int = 2048,
        max_running_requests: int = 8,
        max_total_tokens: int | None = 8192,
        disable_radix_cache: bool = False,
        retract_every: int | None = None,
        torch_threads: int = 1,
        dummy_std: float | None = None,
        dummy_seed: int = 0,
        env: dict[str, str] | None = None,
        **server_args,
    ) -> None:
        self._env = STRICT_CHECKS | (env or {})
        self._retract_every = retract_every
        self._torch_threads = torch_threads
        self._dummy_std, self._dummy_seed = dummy_std, dummy_seed
        if dummy_std is not None:
            server_args = {"load_format": "dummy"} | server_args
        self._args = {
            "model_path": str(model_path),
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "dtype": "float32",
            "attention_backend": backend,
            "page_size": page_size,
            "chunked_prefill_size": chunked_prefill_size,
            "max_running_requests": max_running_requests,
            "max_total_tokens": max_total_tokens,
            "disable_radix_cache": disable_radix_cache,
            "disable_overlap_schedule": True,
            "cuda_graph_backend_prefill": "disabled",
            "cuda_graph_backend_decode": "disabled",
            "skip_tokenizer_init": True,
            "random_seed": 0,
        } | server_args
        self._scheduler: InProcessScheduler | None = None
        self._submitted = 0

    def __enter__(self) -> Runner:
        with ExitStack() as stack:
            stack.enter_context(environment(self._env))
            stack.enter_context(torch_threads(self._torch_threads))
            stack.enter_context(forced_retraction(self._retract_every))
            if self._dummy_std is not None:
                stack.enter_context(scaled_dummy_weights(self._dummy_seed, self._dummy_std))
            self._scheduler = stack.enter_context(live_scheduler(self._args))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc) -> None:
        self._scheduler = None
        self._stack.__exit__(*exc)

    def submit(
        self,
        prompt: list[int],
        *,
        want_prompt_logprobs: bool = True,
        delay: int = 0,
        **sampling,
    ) -> Handle:
        """Queue a request that the scheduler receives `delay` steps from now."""
        # SGLang aborts by prefix of the id: no id may be the beginning of another.
        handle = Handle(f"request-{self._submitted:06d}", list(prompt))
        self._submitted += 1
        sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True} | sampling
        message = tokenized(
            handle.rid,
            handle.prompt,
            vocab_size=self.scheduler.model_config.vocab_size,
            want_prompt_logprobs=want_prompt_logprobs,
            **sampling,
        )
        self.scheduler.outbox.handles[handle.rid] = handle
        self.scheduler.inbox.put(message, delay=delay)
        return handle

    def generate(
        self,
        prompts: list[list[int]],
        *,
        stagger: int | None = None,
        want_prompt_logprobs: bool = True,
        **sampling,
    ) -> list[Result]:
        """Run until all are done; request i arrives `i * stagger` steps after the first."""
        handles = [
            self.submit(
                prompt,
                want_prompt_logprobs=want_prompt_logprobs,
                delay=i * (stagger or 0),
                **sampling,
            )
            for i, prompt in enumerate(prompts)
        ]
        self.run_until_idle()
        for handle in handles:
            if handle.finish_reason["type"] == "abort":
                raise RuntimeError(f"{handle.rid} was aborted: {handle.finish_reason}")
        return [handle.result() for handle in handles]

    def step(self, n: int = 1) -> None:
        """Run n iterations of the event loop: at most one batch each."""
        if self.scheduler.enable_overlap:
            raise RuntimeError("the overlapped event loop cannot be left between two steps")
        left = n

        def enough() -> bool:
            nonlocal left
            left -= 1
            return left <= 0

        self.scheduler.drive(enough)

    def step_until(self, condition: Callable[[], bool], *, max_steps: int = MAX_STEPS) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise TimeoutError(f"condition not met after {max_steps} steps")

    def run_until_idle(self, *, max_steps: int = MAX_STEPS) -> None:
        """Serve everything queued; SGLang's leak checks run in the last, idle iteration."""
        steps = 0

        def enough() -> bool:
            nonlocal steps
            steps += 1
            if steps > max_steps:
                raise TimeoutError(f"not idle after {max_steps} steps")
            return self.scheduler.inbox.empty and self.scheduler.is_fully_idle()

        self.scheduler.drive(enough)

    def abort(self, handle: Handle, *, delay: int = 0) -> None:
        """Takes effect `delay` steps after the next one."""
        self.scheduler.inbox.put(AbortReq(rid=handle.rid), delay=delay)

    def flush_cache(self) -> None:
        if not self.scheduler.flush_cache():
            raise RuntimeError("cannot flush the cache while requests are pending")

    def idle_check(self) -> None:
        """Raise if SGLang's own accounting finds tokens, request rows or tree nodes lost."""
        self.run_until_idle()
        free = self.allocator.available_size()
        cached = self.tree_cache.evictable_size()
        total = self.scheduler.max_total_num_tokens
        if free + cached != total:
            raise RuntimeError(f"{free} free + {cached} cached tokens, but {total} in total")

    @property
    def scheduler(self) -> InProcessScheduler:
        if self._scheduler is None:
            raise RuntimeError("this Runner is not open")
        return self._scheduler

    @property
    def model_runner(self):
        return self.scheduler.tp_worker.model_runner

    @property
    def allocator(self):
        return self.scheduler.token_to_kv_pool_allocator

    @property
    def tree_cache(self):
        return self.scheduler.tree_cache

    @property
    def kv_pool(self):
        return self.allocator.get_kvcache()
