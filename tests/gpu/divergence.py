"""How far apart two recordings are, position by position."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from tests.gpu.recording import Recording

ROWS = 128  # positions at once: 128 x 151936 fp64 values are 156 MB


@dataclass(frozen=True)
class Divergence:
    """KL divergence in nats, over positions."""

    median: float
    p99: float
    mean: float
    positions: int

    @classmethod
    def of(cls, values: torch.Tensor) -> Divergence:
        if not len(values) or not values.isfinite().all():
            raise RuntimeError(f"{len(values)} KL values, {int((~values.isfinite()).sum())} not finite")
        median, p99 = values.quantile(torch.tensor([0.5, 0.99], dtype=values.dtype)).tolist()
        return cls(median, p99, values.mean().item(), len(values))

    def within(self, limit: Divergence, factor: float) -> bool:
        return self.median <= factor * limit.median and self.p99 <= factor * limit.p99

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    everywhere: Divergence
    decode: Divergence
    prefill: Divergence
    same_batches: bool  # if not, kernels whose rounding depends on the batch add to the difference

    def phases(self) -> dict[str, Divergence]:
        return {"all": self.everywhere, "decode": self.decode, "prefill": self.prefill}


def kl(other: Recording, reference: Recording) -> Comparison:
    """KL(other || reference) at the positions that both recorded."""
    values, is_decode = position_kl(other, reference)
    return Comparison(
        Divergence.of(values),
        Divergence.of(values[is_decode]),
        Divergence.of(values[~is_decode]),
        other.forwards == reference.forwards,
    )


@torch.no_grad()
def position_kl(other: Recording, reference: Recording) -> tuple[torch.Tensor, torch.Tensor]:
    """KL per common position, [n] fp64, and whether it is of a decode step, [n] bool."""
    if not torch.equal(other.head, reference.head):
        raise RuntimeError("the two recordings are of models with different LM heads")
    places, mine, theirs = _common(other.places, reference.places)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = reference.head.to(device, torch.float32).T
    values = []
    for start in range(0, len(places), ROWS):
        rows = slice(start, start + ROWS)
        p, q = (_logprobs(r.hidden[i[rows]], head) for r, i in ((other, mine), (reference, theirs)))
        values.append((p.exp() * (p - q)).sum(-1).cpu())
    return torch.cat(values), other.is_decode[mine]


def _logprobs(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """fp32 logits, normalised in fp64: an error of log Z would enter a KL of 1e-6 undiminished."""
    return (hidden.to(head.device, head.dtype) @ head).double().log_softmax(-1)


def _common(a: torch.Tensor, b: torch.Tensor) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Places in both, and their rows in each."""
    rows = [{place: row for row, place in enumerate(map(tuple, places.tolist()))} for places in (a, b)]
    both = [place for place in rows[0] if place in rows[1]]
    return both, *(torch.tensor([table[place] for place in both], dtype=torch.int64) for table in rows)
