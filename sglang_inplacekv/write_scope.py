"""WriteScope: decides, when a page is allocated, whether its home is computed on (C) or transferred (T).

The decision is made once and never revised: changing the share changes where new pages go and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

# Where `auto` starts: the bandwidth split B_c / (B_c + B_p) of a host whose DRAM read and PCIe rates are about equal.
AUTO_START_SHARE = 0.5


@dataclass
class WriteScope:
    """Placement state of one server. Pages are counted over the host regions only; D costs neither link."""

    target_share: float
    compute_pages: int = 0
    transfer_pages: int = 0
    fallback_pages: int = 0  # pages that got the other role because the wanted one had no room

    @classmethod
    def from_config(cls, cpu_share: float | None) -> WriteScope:
        return cls(AUTO_START_SHARE if cpu_share is None else cpu_share)

    @property
    def host_pages(self) -> int:
        return self.compute_pages + self.transfer_pages

    def wanted_compute(self, new_pages: int) -> int:
        """How many of `new_pages` host pages should become C, so that the live share comes closest to the target."""
        wanted = int(self.target_share * (self.host_pages + new_pages) + 0.5) - self.compute_pages
        return min(max(wanted, 0), new_pages)
