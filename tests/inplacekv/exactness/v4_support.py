"""Servers of tiny DeepSeek-V4 models whose choices are recorded, and their comparison with transformers."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sglang_inplacekv.models import checkpoint_path, make_tiny
from sglang_inplacekv.v4.layout import ENTRIES
from tests.harness import Handle, Runner
from tests.inplacekv.exactness.support import TOLERANCE
from tests.models.v4_checkpoints import Choices, reference, transformers_model

PAGE = 128
# Scores are near 1, and differ from the reference's by some units in the last place.
NEAR_TIE = 5e-6


@functools.cache
def model() -> Path:
    return make_tiny("deepseek_v4", checkpoint_path("tiny-deepseek_v4"))


class V4Server:
    """A Runner, and what each of its requests has chosen for every token."""

    def __init__(self, runner: Runner, path: Path) -> None:
        self.runner, self.path = runner, path
        self._handles = runner.scheduler.outbox.handles
        self._chosen: dict[str, dict[tuple[str, int], dict[int, torch.Tensor]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        for layer, block in enumerate(runner.model_runner.model.layers):
            block.mlp.gate.register_forward_hook(functools.partial(self._note_experts, layer))
        for attention in runner.model_runner.attn_backend._layers:
            selector = attention.selector
            selector.select = functools.partial(self._note_entries, attention.layer, selector.select)

    def _note_experts(self, layer: int, module, args, out) -> None:
        for request in self.runner.kv_pool.requests:
            self._note(request.span, "experts", layer, out[0][request.rows])

    def _note_entries(self, layer: int, select, state, x):
        selection = select(state, x)
        for segment in selection.segments:
            if segment.space == ENTRIES and segment.ids is not None:
                request = self.runner.kv_pool.states.current(state.store._row)
                self._note(request.span, "entries", layer, segment.ids[:, 0].long())
        return selection

    def _note(self, span, what: str, layer: int, rows: torch.Tensor) -> None:
        own = self._chosen[span.label][what, layer]
        own.update({span.prefix + i: row.clone() for i, row in enumerate(rows)})

    def choices(self, handle: Handle) -> Choices:
        """Of the last token nothing was chosen: it was never given to the model. A cached prefix was chosen for by others."""
        found, tokens = Choices(), len(handle.prompt) + len(handle.output_ids) - 1
        # The request's own last, which count where there are some.
        givers = [(other.rid, shared_tokens(handle, other)) for other in self._handles.values()]
        givers.append((handle.rid, tokens))
        for what, layer in self._chosen[handle.rid]:
            rows: dict[int, torch.Tensor] = {}
            for rid, shared in givers:
                chosen = self._chosen[rid][what, layer]
                rows.update({place: row for place, row in chosen.items() if place < min(shared, tokens)})
            width = max(len(row) for row in rows.values())
            table = torch.full((tokens, width), -1)
            for place, row in rows.items():
                table[place, : len(row)] = row
            getattr(found, what)[layer] = table
        return found

    def assert_equals_transformers(self, *handles: Handle) -> None:
        """Every logprob of prompts and answers to 1e-4, experts and entries the same up to near ties, which are rare."""
        ties = choices = 0
        for handle in handles:
            tokens = [*handle.prompt, *handle.output_ids][:-1]
            served = self.choices(handle)
            wanted = reference(transformers_model(self.path), tokens, served, NEAR_TIE)
            found = torch.tensor([*(handle.prompt_logprobs or []), *handle.output_logprobs[:-1]])
            first = len(wanted.log_probabilities) - len(found)
            differences = (found - wanted.log_probabilities[first:]).abs()
            bad = int(differences.argmax())
            assert differences[bad] <= TOLERANCE, (
                f"{len(handle.prompt)} + {len(handle.output_ids)} tokens: logprob {first + bad} is {found[bad]:.6f}, off by "
                f"{differences[bad]:.1e}"
            )
            ties, choices = ties + wanted.ties, choices + wanted.choices
        assert ties <= 2 + choices // 2000, f"{ties} of {choices} choices were near ties"


def shared_tokens(one: Handle, other: Handle) -> int:
    """How many tokens two sequences begin with in common."""
    pairs = zip([*one.prompt, *one.output_ids], [*other.prompt, *other.output_ids])
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@contextmanager
def server(
    *,
    share: float | str,
    device_tokens: int,
    chunk: int = 2 * PAGE,
    path: Path | None = None,
    seed: int = 7,
    admission: str = "spill",
    **runner_args,
) -> Iterator[V4Server]:
    """Poison, jitter and the strict idle check are on."""
    env = {
        "SGLANG_INPLACEKV_CPU_SHARE": str(share),
        "SGLANG_INPLACEKV_ADMISSION": admission,
        "SGLANG_INPLACEKV_GPU_MEMORY": f"{device_tokens}tok",
        "SGLANG_INPLACEKV_HOST_MEMORY": "8MB",
        "SGLANG_INPLACEKV_POISON": "1",
        "SGLANG_INPLACEKV_VERIFY": "1",
        "SGLANG_INPLACEKV_JITTER_SEED": str(seed),
        "SGLANG_INPLACEKV_WAIT_TIMEOUT_S": "60",
    }
    args = {"page_size": PAGE, "chunked_prefill_size": chunk, "max_total_tokens": None} | runner_args
    path = path or model()
    with Runner(path, backend="inplacekv", env=env, **args) as runner:
        yield V4Server(runner, path)
