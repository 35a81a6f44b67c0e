"""Random token ids, with common beginnings only where a benchmark wants them."""

from __future__ import annotations

import functools

import numpy as np

_FIRST_ID = 5  # special tokens stand below


class Streams:
    """Endless random token streams. Two prompts of one stream share their beginning, those of two streams nothing."""

    def __init__(self, vocab_size: int, longest_tokens: int, seed: int = 0) -> None:
        self._vocab_size, self._longest_tokens, self._seed = vocab_size, longest_tokens, seed
        self._fresh = 1_000_000

    def prompt(self, stream: int, tokens: int) -> list[int]:
        """The first `tokens` ids of a stream."""
        if tokens > self._longest_tokens:
            raise ValueError(f"streams are {self._longest_tokens} tokens long, asked {tokens}")
        return self._ids(stream)[:tokens].tolist()

    def fresh(self, tokens: int) -> list[int]:
        """A prompt of a stream that nobody has used."""
        self._fresh += 1
        return self.prompt(self._fresh, tokens)

    @functools.lru_cache(maxsize=64)  # noqa: B019 (one instance a process)
    def _ids(self, stream: int) -> np.ndarray:
        draw = np.random.default_rng((self._seed, stream))
        return draw.integers(_FIRST_ID, self._vocab_size, self._longest_tokens)
