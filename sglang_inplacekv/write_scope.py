"""WriteScope: decides, when a page is allocated, whether its home is computed on (C) or transferred (T).

The decision is made once and never revised: changing the share changes where new pages go. What lies in T can still be attended
by the CPU, in place, for a step (stealing). So where the share is ours to choose, fewer pages go to C than it asks for, and
each step steals the rest. The share then moves both ways at once, down to what lies in C.
"""

from __future__ import annotations

from dataclasses import dataclass

# Where `auto` starts on a host whose rates are not known: the bandwidth split B_c / (B_c + B_p) of equal DRAM and PCIe rates.
AUTO_START_SHARE = 0.5
# Of the target share, where stealing fills it up.
PLACED_OF_TARGET = 0.8


@dataclass
class WriteScope:
    """Placement state of one server. Pages are counted over the host regions only; D costs neither link."""

    target_share: float  # of the host tokens that a decode reads, for the CPU
    steals: bool = False  # else placement alone brings the share about
    step_share: float | None = None  # what the next step should attend instead of the target, by stealing
    compute_pages: int = 0
    transfer_pages: int = 0
    fallback_pages: int = 0  # pages that got the other role because the wanted one had no room
    stolen_pages: int = 0  # T pages that the CPU attended, summed over steps and requests

    @classmethod
    def from_config(cls, cpu_share: float | None) -> WriteScope:
        """A share that the user gives is what pages are placed by, and nothing is stolen."""
        return cls(AUTO_START_SHARE, steals=True) if cpu_share is None else cls(cpu_share)

    @property
    def host_pages(self) -> int:
        return self.compute_pages + self.transfer_pages

    def wanted_compute(self, new_pages: int) -> int:
        """How many of `new_pages` host pages should become C, so that the live share comes closest to the target."""
        share = self.target_share * (PLACED_OF_TARGET if self.steals else 1.0)
        wanted = int(share * (self.host_pages + new_pages) + 0.5) - self.compute_pages
        return min(max(wanted, 0), new_pages)

    def wanted_stolen(self, compute_pages: int, transfer_pages: int) -> int:
        """How many T pages of a decode that reads so many of each the CPU shall attend."""
        if not self.steals:
            return 0
        share = self.target_share if self.step_share is None else self.step_share
        wanted = int(share * (compute_pages + transfer_pages) + 0.5) - compute_pages
        return min(max(wanted, 0), transfer_pages)
