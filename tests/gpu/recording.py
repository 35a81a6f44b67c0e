"""What a server predicts at a workload's positions, kept as final hidden states.

A full distribution is the hidden state times the LM head. The hidden states lose nothing and are 74 times smaller than the
logits of a vocabulary of 152K; the head, equal in all configurations, is kept once. So the fp32 logits are computed where
two recordings are compared, and thousands of positions cost some ten megabytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.gpu.workload import Request, Workload

if TYPE_CHECKING:
    from tests.harness import Handle, Runner

HEAD_FILE = "head.pt"
Slice = tuple[int, int, int]  # request, tokens read before this forward, tokens read after it


@dataclass
class Recording:
    """`hidden[i]`, in the model's dtype, predicts the token after position `places[i, 1]` of request `places[i, 0]`."""

    places: torch.Tensor  # [n, 2] int64, sorted
    hidden: torch.Tensor  # [n, hidden_size]
    is_decode: torch.Tensor  # [n] bool
    head: torch.Tensor  # [vocabulary, hidden_size]
    forwards: list[list[Slice]]  # the batches, in order
    cached_tokens: int  # prompt tokens served from the prefix cache
    decode_reads: dict[str, int] = field(default_factory=dict)  # tokens attended by region, ours only

    def save(self, folder: Path, name: str) -> Path:
        """Write `name`.pt; the head goes to a file of its own, RuntimeError if another one is there already."""
        folder.mkdir(parents=True, exist_ok=True)
        head_file, fields = folder / HEAD_FILE, dict(vars(self))
        head = fields.pop("head")
        if not head_file.exists():
            torch.save(head, head_file)
        elif not torch.equal(torch.load(head_file), head):
            raise RuntimeError(f"{name}: its LM head is not that of {head_file}")
        torch.save(fields, folder / f"{name}.pt")
        return folder / f"{name}.pt"

    @staticmethod
    def load(folder: Path, name: str, head: torch.Tensor | None = None) -> Recording:
        fields = torch.load(folder / f"{name}.pt")
        return Recording(**fields, head=torch.load(folder / HEAD_FILE) if head is None else head)


def record(runner: Runner, workload: Workload) -> Recording:
    """Run `workload` from an empty prefix cache through an open Runner."""
    runner.flush_cache()
    with _recorder(runner, workload) as recorder:
        for request in workload.requests:
            handle = runner.submit(
                request.prompt, max_new_tokens=workload.steps + 1, want_prompt_logprobs=False
            )
            recorder.requests[handle.rid] = request
            recorder.handles.append(handle)
        runner.run_until_idle()
    return recorder.result()


@contextmanager
def _recorder(runner: Runner, workload: Workload) -> Iterator[_Recorder]:
    model_runner = runner.model_runner
    model = model_runner.model
    recorder = _Recorder(model.lm_head.weight[: model.config.vocab_size], model_runner.sample)
    hook = model.logits_processor.register_forward_pre_hook(recorder.before_logits)
    model_runner.sample = recorder.sample
    try:
        yield recorder
    finally:
        del model_runner.sample
        hook.remove()


@dataclass
class _Recorder:
    head: torch.Tensor
    stock_sample: Callable[..., torch.Tensor]
    requests: dict[str, Request] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)
    forwards: list[list[Slice]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)

    def before_logits(self, module: torch.nn.Module, args: tuple) -> None:
        """Keep the rows of the compared positions, before SGLang prunes all but the last of each request."""
        hidden, batch = args[1], args[3]
        spans = _spans(batch)
        rows, first = [], 0
        for rid, before, after in spans:
            request = self.requests[rid]
            for position in request.positions:
                if before <= position < after:
                    rows.append(first + position - before)
                    self.places.append((request.index, position))
            first += after - before
        self.forwards.append([(self.requests[rid].index, before, after) for rid, before, after in spans])
        if rows:
            self.hidden.append(hidden[torch.tensor(rows, device=hidden.device)])

    def sample(self, logits_output, batch) -> torch.Tensor:
        """Sample as ever, for SGLang's bookkeeping, and answer with what is to come."""
        sampled = self.stock_sample(logits_output, batch)
        given = [self.requests[rid].tokens[after] for rid, _, after in _spans(batch)]
        return torch.tensor(given, dtype=sampled.dtype, device=sampled.device)

    def result(self) -> Recording:
        self._check()
        places, hidden = torch.tensor(self.places), torch.cat(self.hidden).cpu()
        order = torch.tensor(sorted(range(len(places)), key=self.places.__getitem__))
        places = places[order]
        prompt_tokens = {request.index: request.prompt_tokens for request in self.requests.values()}
        limits = torch.tensor([prompt_tokens[request] for request in places[:, 0].tolist()])
        return Recording(
            places,
            hidden[order],
            places[:, 1] >= limits,
            self.head.detach().cpu(),
            self.forwards,
            sum(handle.cached_tokens for handle in self.handles),
        )

    def _check(self) -> None:
        for handle in self.handles:
            request = self.requests[handle.rid]
            if handle.output_ids != request.tokens[request.prompt_tokens :]:
                raise RuntimeError(f"request {request.index} left its tokens: {handle.finish_reason}")
            if handle.retractions:
                raise RuntimeError(f"request {request.index} was retracted: the pool is too small")
        wanted = {(r.index, position) for r in self.requests.values() for position in r.positions}
        seen = Counter(self.places)
        wrong = {place: seen[place] for place in wanted | set(seen) if seen[place] != 1}
        if wrong:
            raise RuntimeError(f"{len(wrong)} positions not seen once, such as {next(iter(wrong.items()))}")


def _spans(batch) -> list[tuple[str, int, int]]:
    """(request id, tokens read before, tokens read after) of each request in a ForwardBatch."""
    after = batch.seq_lens_cpu.tolist()
    is_decode = batch.forward_mode.is_decode()
    before = [length - 1 for length in after] if is_decode else batch.extend_prefix_lens_cpu
    return list(zip(batch.rids, before, after, strict=True))
