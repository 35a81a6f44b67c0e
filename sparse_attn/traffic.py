"""Bytes that the split of a selection moves between device and host, and when sending queries is less than fetching entries."""

from __future__ import annotations

from dataclasses import dataclass

_FP32 = 4


def answer_bytes(tokens: int, heads: int, dv: int) -> int:
    """Of the CPU's part of a layer: fp32 outputs and LSEs."""
    return tokens * heads * (dv + 1) * _FP32


def exchange_bytes(tokens: int, heads: int, dk: int, dv: int, query_bytes: int) -> int:
    """What the CPU's part of a layer costs the link: queries there, fp32 outputs and LSEs back. query_bytes: of one element."""
    return tokens * heads * dk * query_bytes + answer_bytes(tokens, heads, dv)


def break_even_misses(
    heads: int, dk: int, dv: int, query_bytes: int, entry_bytes: int, tokens: int = 1
) -> float:
    """Missed entries of a step above which the CPU's answers are fewer bytes than the entries themselves."""
    return exchange_bytes(tokens, heads, dk, dv, query_bytes) / entry_bytes


@dataclass(frozen=True)
class Policy:
    """Of the selected entries without a copy on the device, the CPU attends a share where they lie; the rest is fetched.

    cpu_share None: all or none of them in each step, whichever moves fewer bytes.
    """

    cpu_share: float | None

    def __post_init__(self) -> None:
        if self.cpu_share is not None and not 0 <= self.cpu_share <= 1:
            raise ValueError(f"cpu_share must be 0 to 1, is {self.cpu_share}")

    @classmethod
    def compute(cls) -> Policy:
        return cls(1.0)

    @classmethod
    def fetch(cls) -> Policy:
        return cls(0.0)

    @classmethod
    def split(cls, cpu_share: float) -> Policy:
        return cls(cpu_share)

    @classmethod
    def fewest_bytes(cls) -> Policy:
        return cls(None)

    def cpu_entries(self, missed: int, entry_bytes: int, exchange: int) -> int:
        """How many of `missed` entries the CPU attends; exchange: what its part costs the link."""
        if self.cpu_share is None:
            return missed if missed * entry_bytes > exchange else 0
        return round(self.cpu_share * missed)


@dataclass
class Traffic:
    """Counts since start. An entry that several queries or heads of one step list is fetched once."""

    steps: int = 0
    listed: int = 0  # entries of the lists in spilled spaces, all queries and heads
    hits: int = 0  # of them with a copy on the device
    selected_entries: int = 0  # different ones, summed over the steps
    cpu_entries: int = 0  # of these, attended by the CPU
    fetched_entries: int = 0
    selected_bytes: int = 0  # what fetching all of them in every step would have moved
    query_bytes: int = 0  # to the host
    homed_bytes: int = 0  # to the host: new entries
    answer_bytes: int = 0  # to the device
    fetched_bytes: int = 0  # to the device

    @property
    def hit_rate(self) -> float:
        return self.hits / self.listed if self.listed else 0.0

    @property
    def link_bytes(self) -> int:
        """Both directions."""
        return self.query_bytes + self.homed_bytes + self.answer_bytes + self.fetched_bytes
