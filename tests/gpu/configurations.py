"""What is compared: a model, the workloads, and the settings of our servers. SGLang is not imported here, see servers.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import AutoConfig

from tests.gpu.workload import Workload, WorkloadSize, make_workload

OURS, FAULTS = "ours", "faults"
SHARES = {OURS: (0.0, 0.4, 1.0), FAULTS: (0.0, 1.0)}


@dataclass(frozen=True)
class Fault:
    """One page misread by every request in every decode step. All host pages are in its region: `share` is 0 or 1."""

    kind: str  # "lost" or "repeated"
    region: str  # "C" or "T"

    @property
    def share(self) -> float:
        return float(self.region == "C")

    @property
    def name(self) -> str:
        return f"{share_name(self.share)}-{self.region}-{self.kind}"


def share_name(share: float) -> str:
    return f"{OURS}-{share:g}"


PLANTED = (Fault("lost", "C"), Fault("repeated", "T"))
FAULT_NAMES = tuple(fault.name for fault in PLANTED)
RIGHT_NAMES = tuple((part, share_name(share)) for part, shares in SHARES.items() for share in shares)


@dataclass(frozen=True)
class Profile:
    """What all servers of one comparison have in common. `dummy_std=None` loads the checkpoint's weights."""

    model: Path
    size: WorkloadSize = field(default_factory=WorkloadSize)
    layers: int | None = None  # None: as the model's configuration says
    dtype: str = "bfloat16"
    page_size: int = 256  # ours; stock's is 1
    chunk_tokens: int = 8192
    device_tokens: int = 1024  # D homes: most tokens have host homes
    shares: tuple[float, ...] = SHARES[OURS]
    faults: tuple[Fault, ...] = ()
    # Of the negative control: requests of about three pages, of which two at least are at home from the first decode step on.
    # Random weights attend nearly evenly, so a page more or less among k is little: read twice it adds (k - 1) / (k + 1)^2 of
    # the mean's own variance, most at k = 3; lost, 1 / (k - 1). Page size alone changes nothing: pages of 64 keep the requests
    # short, and the granule keeps them from sharing a prefix.
    control_size: WorkloadSize = field(
        default_factory=lambda: WorkloadSize(32, 176, 200, steps=24, prefill_positions=16)
    )
    control_page_size: int = 64
    dummy_std: float | None = 0.02
    seed: int = 0
    env: dict[str, str] = field(default_factory=dict)

    def workload(self) -> Workload:
        return make_workload(self.config().vocab_size, self.size, self.seed)

    def tokens_needed(self) -> int:
        return self.workload().tokens_needed(self.page_size)

    def config(self):
        return AutoConfig.from_pretrained(self.model)

    def kv_bytes_per_token(self) -> int:
        config = self.config()
        if rank := getattr(config, "kv_lora_rank", None):
            width = rank + config.qk_rope_head_dim
        else:
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            width = 2 * config.num_key_value_heads * head_dim
        layers = self.layers or config.num_hidden_layers
        return layers * width * getattr(torch, self.dtype).itemsize

    def names(self) -> list[str]:
        """Recordings of our server, in order."""
        return [*map(share_name, self.shares), *(fault.name for fault in self.faults)]

    def control(self) -> Profile:
        """Faults, and the same requests without: what is noticed shall be the fault and not the small pages."""
        return replace(
            self,
            size=self.control_size,
            page_size=self.control_page_size,
            device_tokens=0,
            shares=SHARES[FAULTS],
            faults=PLANTED,
        )

    def parts(self, configs: Sequence[str]) -> dict[str, Profile]:
        """Comparisons that `configs` ask for, each with a workload of its own, by the name of our server."""
        parts = {OURS: self, FAULTS: self.control()}
        return {name: profile for name, profile in parts.items() if name in configs}
