"""Token sequences that every configuration processes alike, and the positions at which their predictions are compared.

What is generated is not sampled but given: a request's `tokens` are its prompt and the continuation that decoding is made
to follow. So two configurations differ in their arithmetic alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

FAMILY = 4  # neighbours in length; every other family shares a prefix
SPECIAL_TOKENS = 5  # the lowest ids


@dataclass(frozen=True)
class WorkloadSize:
    """Prompt lengths are spaced geometrically. The default is 296,000 prompt tokens, of which 35,000 are prefix hits."""

    requests: int = 32
    shortest: int = 1024
    longest: int = 32_000  # with the answer within the 32,768 tokens of Mixtral's context
    steps: int = 64  # decode steps of each request
    prefill_positions: int = 256  # compared of each prompt, at most
    granule: int = 256  # shared prefixes end at its multiples, which are page borders of every configuration

    def lengths(self) -> list[int]:
        growth = math.log(self.longest / self.shortest) / max(1, self.requests - 1)
        return [round(self.shortest * math.exp(growth * i)) for i in range(self.requests)]


@dataclass(frozen=True)
class Request:
    """Position p is where token p has been read and p + 1 is predicted."""

    index: int  # its name in recordings
    tokens: list[int]  # one more than is ever read: the last prediction has a successor too
    prompt_tokens: int
    shared_tokens: int  # of the prompt; possibly served from the prefix cache, hence not compared
    positions: tuple[int, ...]  # compared, ascending: some of the prompt's, then all decode steps

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_tokens]


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival."""

    requests: tuple[Request, ...]
    steps: int

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    def tokens_needed(self, page_size: int) -> int:
        """KV tokens of everything at once in whole pages, nothing shared."""
        return sum(-(-len(request.tokens) // page_size) for request in self.requests) * page_size


def make_workload(vocab_size: int, size: WorkloadSize, seed: int = 0) -> Workload:
    """The same arguments give the same tokens, positions and order."""
    draw = random.Random(seed)
    # One token for each request, which opens its own part: no prefix is longer than meant.
    openers = range(SPECIAL_TOKENS, SPECIAL_TOKENS + size.requests)
    others = range(openers.stop, vocab_size)
    lengths, requests, prefix = size.lengths(), [], []
    for index, length in enumerate(lengths):
        if index % FAMILY == 0:
            # Half of the family's shortest prompt.
            shared = lengths[index] // 2 // size.granule * size.granule if index // FAMILY % 2 == 0 else 0
            prefix = draw.choices(others, k=shared)
        own = [openers[index], *draw.choices(others, k=length - len(prefix) + size.steps)]
        candidates = range(len(prefix), length)
        sampled = sorted(draw.sample(candidates, min(size.prefill_positions, len(candidates))))
        positions = (*sampled, *range(length, length + size.steps))
        requests.append(Request(index, prefix + own, length, len(prefix), positions))
    draw.shuffle(requests)
    return Workload(tuple(requests), size.steps)
