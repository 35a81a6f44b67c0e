"""The CPU attention team, and the cores it is pinned to."""

from __future__ import annotations

import os

import torch

import cpu_attn
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.topology import Topology, read_topology

# Longer than what lies between two layers' jobs in a step that waits for the CPU.
_SPIN_S = 2e-3


def spin_s(team_threads: int) -> float:
    """How long to spin before sleeping, beside a GPU: not at all where the team has every core and would be kept from one."""
    return _SPIN_S if team_threads < cpu_attn.default_threads() else 0.0


def topology(device: str = "cpu") -> Topology:
    """This host as this process sees it; on cuda, seen from the current GPU."""
    return read_topology(os.sched_getaffinity(0), _gpu_address() if device == "cuda" else None)


def _gpu_address() -> str:
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def team_cores(threads: int | None, device: str = "cpu") -> list[int]:
    """One core for each CPU attention thread: the best ones, and `threads` or as many as may be."""
    found = topology(device)
    wanted = threads or found.most_threads
    if wanted > len(found.cores):
        raise ConfigError(
            f"--inplacekv-threads: asked {wanted}, possible are 1 to {len(found.cores)} on this process's cores"
        )
    # In order of their numbers, so that neighbours in the team are neighbours on the host.
    return sorted(found.cores[:wanted])


def make_team(threads: int | None, device: str) -> cpu_attn.Executor:
    """The team of a server on `device`, cuda or cpu. Without a GPU nobody spins: the torch executor needs the cores."""
    cores = team_cores(threads, device)
    return cpu_attn.Executor(cores=cores, spin_s=spin_s(len(cores)) if device == "cuda" else 0.0)
