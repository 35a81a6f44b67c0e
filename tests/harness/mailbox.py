"""In-memory ends of the scheduler's message channels."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput

from .requests import Handle


class Inbox:
    """Request receiver: polled once per iteration of the scheduler's event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, object]] = []
        self._polls = 0
        self.on_poll: Callable[[], None] = lambda: None

    def put(self, message: object, *, delay: int = 0) -> None:
        self._waiting.append((self._polls + delay, message))

    @property
    def empty(self) -> bool:
        return not self._waiting

    def recv_requests(self, local_reqs: list | None = None) -> list:
        self.on_poll()
        due = [message for when, message in self._waiting if when <= self._polls]
        self._waiting = [entry for entry in self._waiting if entry[0] > self._polls]
        self._polls += 1
        return [*(local_reqs or ()), *due]


class Outbox:
    """Sender towards tokenizer and detokenizer: files what arrives under its request."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}
        self.other: list[object] = []  # answers to control requests

    def send_output(self, output: object, recv_obj: object = None) -> None:
        if isinstance(output, BatchTokenIDOutput):
            for row, rid in enumerate(output.rids):
                _record(self.handles[rid], output, row)
        elif isinstance(output, AbortReq):
            reason = output.finished_reason or {"type": "abort", "message": "aborted"}
            self.handles[output.rid].finish_reason = dict(reason)
        else:
            self.other.append(output)


def _record(handle: Handle, output: BatchTokenIDOutput, row: int) -> None:
    handle.output_ids += output.output_ids[row]
    # A message that only refuses requests carries no logprobs at all.
    if output.output_token_logprobs_val:
        handle.output_logprobs += output.output_token_logprobs_val[row]
    if output.input_token_logprobs_val and (prompt := output.input_token_logprobs_val[row]):
        # The first token has nothing before it: SGLang sends None for it.
        handle.prompt_logprobs = list(prompt[1:])
    handle.cached_tokens = output.cached_tokens[row]
    handle.retractions = output.retraction_counts[row]
    if output.finished_reasons[row] is not None:
        handle.finish_reason = dict(output.finished_reasons[row])
