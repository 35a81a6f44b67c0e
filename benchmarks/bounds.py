"""What the hardware allows a spilled decode step: KV bytes over the joint bandwidth of link and CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .results import rows_of


@dataclass(frozen=True)
class Bounds:
    """GB/s of DMA from host memory to the GPU and of the CPU team's reads, each alone and both at once.

    The defaults are of an earlier H200 host with 15 CPU threads; used, and said, where `transfer` was not measured.
    """

    link_alone: float = 55.2
    cpu_alone: float = 99.0
    link_joint: float = 52.0
    cpu_joint: float = 84.0
    measured: bool = False

    @classmethod
    def of(cls, transfer_parts: Iterable[dict]) -> Bounds:
        rates = {row["what"]: row["gbps"].median for row in rows_of(transfer_parts) if "what" in row}
        names = ("H2D copy alone", "DRAM read alone", "H2D beside DRAM read", "DRAM read beside H2D")
        if not rates.keys() >= set(names):
            return cls()
        return cls(*(rates[name] for name in names), True)

    @property
    def joint(self) -> float:
        return self.link_joint + self.cpu_joint

    @property
    def best_share(self) -> float:
        return self.cpu_joint / self.joint

    def step_ms(self, host_bytes: float, share: float) -> float:
        """Least time at a CPU share: neither side beats its own rate, and together they do not beat the memory's."""
        per_byte = max(share / self.cpu_alone, (1 - share) / self.link_alone, 1 / self.joint)
        return host_bytes * per_byte / 1e6

    def best_ms(self, host_bytes: float) -> float:
        return host_bytes / self.joint / 1e6

    def __str__(self) -> str:
        return (
            f"alone link {self.link_alone:.0f}, CPU {self.cpu_alone:.0f} GB/s; at once {self.link_joint:.0f} + "
            f"{self.cpu_joint:.0f} ({'measured' if self.measured else 'assumed'}); best share {self.best_share:.2f}"
        )
