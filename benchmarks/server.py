"""A Runner that requests are timed on: SGLang's own event loop, stamps taken where its answers leave it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang.srt.managers.io_struct import BatchTokenIDOutput

from tests.harness import Handle, Runner
from tests.harness.requests import tokenized

from .forward_log import ForwardLog
from .prompts import Streams
from .scale import Shape


@dataclass(frozen=True)
class Arrival:
    """One message of the scheduler: at one time, some tokens for some requests."""

    at_s: float
    tokens: dict[str, int]


@dataclass(frozen=True)
class Served:
    """What became of some requests that were submitted together."""

    submitted_s: float
    handles: list[Handle]
    arrivals: list[Arrival]

    @property
    def refusals(self) -> list[str]:
        return [str(h.finish_reason.get("message")) for h in self.handles if _is_refused(h)]

    def check(self) -> Served:
        """Raise RuntimeError with SGLang's words if it refused any of them."""
        if self.refusals:
            raise RuntimeError(f"{len(self.refusals)} of {len(self.handles)} refused: {self.refusals[0]}")
        return self

    @property
    def end_to_end_s(self) -> float:
        return self.arrivals[-1].at_s - self.submitted_s

    @property
    def first_token_s(self) -> list[float]:
        """Seconds from submission to each request's first token."""
        first: dict[str, float] = {}
        for arrival in self.arrivals:
            for rid, count in arrival.tokens.items():
                if count:
                    first.setdefault(rid, arrival.at_s)
        return [first[handle.rid] - self.submitted_s for handle in self.handles if handle.rid in first]

    @property
    def decode_stamps_s(self) -> list[float]:
        """When each step was done in which every request got a token."""
        everyone = {handle.rid for handle in self.handles}
        return [a.at_s for a in self.arrivals if everyone <= {rid for rid, n in a.tokens.items() if n}]

    @property
    def output_tokens(self) -> int:
        return sum(len(handle.output_ids) for handle in self.handles)

    @property
    def retractions(self) -> int:
        return sum(handle.retractions for handle in self.handles)


def _is_refused(handle: Handle) -> bool:
    return handle.done and handle.finish_reason["type"] == "abort"


class Server:
    """One open Runner. `ours` is its InplaceMHAPool, None on stock SGLang."""

    def __init__(self, runner: Runner, longest_tokens: int) -> None:
        self.runner = runner
        self.streams = Streams(runner.scheduler.model_config.vocab_size, longest_tokens)
        self.ours = runner.kv_pool if hasattr(runner.kv_pool, "regions") else None
        self.log = ForwardLog(self.ours) if self.ours is not None else None
        self._numbers = itertools.count()
        self._arrivals: list[Arrival] = []
        outbox = runner.scheduler.outbox
        send = outbox.send_output

        def timed(output: object, recv_obj: object = None) -> None:
            if isinstance(output, BatchTokenIDOutput):
                counts = {rid: len(ids or ()) for rid, ids in zip(output.rids, output.output_ids)}
                self._arrivals.append(Arrival(time.perf_counter(), counts))
            send(output, recv_obj)

        outbox.send_output = timed

    def serve(
        self,
        prompts: Sequence[list[int]],
        new_tokens: int,
        on_poll: Callable[[list[Arrival]], None] | None = None,
    ) -> Served:
        """Submit all prompts at once and serve until the last is done. `on_poll` sees the arrivals before each iteration."""
        scheduler = self.runner.scheduler
        self._arrivals.clear()
        if self.log is not None:
            self.log.clear()
        messages = [self._request(prompt, new_tokens) for prompt in prompts]
        submitted_s = time.perf_counter()
        for message in messages:
            scheduler.inbox.put(message)

        def enough() -> bool:
            if on_poll is not None:
                on_poll(self._arrivals)
            return scheduler.inbox.empty and scheduler.is_fully_idle()

        scheduler.drive(enough)
        handles = [scheduler.outbox.handles.pop(message.rid) for message in messages]
        return Served(submitted_s, handles, list(self._arrivals))

    def _request(self, prompt: list[int], new_tokens: int):
        """A greedy request without logprobs, which SGLang's users do not ask for by default."""
        # SGLang aborts by prefix of the id: no id may be the beginning of another.
        handle = Handle(f"bench-{next(self._numbers):06d}", prompt)
        scheduler = self.runner.scheduler
        message = tokenized(
            handle.rid,
            prompt,
            vocab_size=scheduler.model_config.vocab_size,
            want_prompt_logprobs=False,
            temperature=0,
            max_new_tokens=new_tokens,
            ignore_eos=True,
        )
        message.return_logprob = False
        scheduler.outbox.handles[handle.rid] = handle
        return message

    def batch(self, shape: Shape) -> list[list[int]]:
        """Prompts of a shape; those of another shape begin alike, so that a cached prefix is not computed again."""
        return [self.streams.prompt(stream, shape.context) for stream in range(shape.batch)]

    def flush(self) -> None:
        """Forget all prefixes, but keep torch's memory: giving it back would slow the next prefill."""
        if not self.runner.scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("cannot flush the cache while requests are pending")

    def set_share(self, share: float) -> None:
        """Aim at another CPU share, with no page placed yet."""
        self.flush()
        self.ours.regions.scope.target_share = share

    def warm_up(self, tokens: int) -> None:
        """Let kernels be compiled and the loop be entered, before anything is timed."""
        self.serve([self.streams.fresh(tokens) for _ in range(2)], 4).check()
        self.flush()
