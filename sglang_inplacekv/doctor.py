"""What a host has that decides how fast, or whether, this extension serves."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import torch

import cpu_attn
from sglang_inplacekv.arena import host_memory_available
from sglang_inplacekv.compat import SGLANG_VERSION
from sglang_inplacekv.cores import topology
from sglang_inplacekv.probes import host_rates
from sglang_inplacekv.topology import Topology

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_BATCHED_COPIES_SINCE = (13, 0)


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    advice: str | None = None  # None: as it should be


def examine(redo: bool = False) -> list[Finding]:
    """redo: measure again what an earlier run has kept."""
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    here = topology(device)
    return [
        sglang(),
        plugin(),
        instruction_set(),
        cores(here.most_threads, here.usable, has_gpu),
        nodes(here, has_gpu),
        rates(device, redo),
        huge_pages(_HUGE_PAGES),
        Finding("host memory", f"{host_memory_available() / 1e9:.1f} GB that host and cgroup still allow"),
        *(gpu() if has_gpu else [Finding("GPU", "none: the torch executor plays its part")]),
    ]


def sglang() -> Finding:
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "not installed"
    advice = f"install sglang=={SGLANG_VERSION}: hooks are bound to that release"
    return Finding("SGLang", found, None if found == SGLANG_VERSION else advice)


def plugin() -> Finding:
    names = [entry.value for entry in entry_points(group="sglang.srt.plugins")]
    found = "sglang_inplacekv.plugin:register" in names
    return Finding(
        "plugin",
        "registered" if found else "not registered with SGLang",
        None if found else "install this package (pip install .), so that SGLang finds its entry point",
    )


def instruction_set() -> Finding:
    try:
        found, supported = cpu_attn.isa(), cpu_attn.supported_isas()
    except RuntimeError as error:
        return Finding("CPU attention", "does not run", str(error))
    advice = None if found != "scalar" else "neither AVX2 nor NEON is in use: attention will be slow"
    return Finding("CPU attention", f"{found}, possible are {', '.join(supported)}", advice)


def cores(team: int, usable: int, has_gpu: bool) -> Finding:
    """Beside a GPU a core should be left to whoever feeds the team."""
    found = f"at most {team} attention threads of {usable} cores that affinity and cgroup quota allow"
    advice = "no core is left beside the team: --inplacekv-threads below that lets it spin between layers"
    return Finding("cores", found, advice if has_gpu and team >= usable else None)


def nodes(here: Topology, has_gpu: bool) -> Finding:
    """Where the allowed cores lie. Attention beside a GPU wants those on its node."""
    own = [number for number, node in here.nodes.items() if node.cores.intersection(here.cores)]
    bare = [number for number, node in here.nodes.items() if node.memory_bytes == 0]
    found = f"{here.physical} physical of {len(here.cores)} cores, on {_numbered(own)} of {len(here.nodes)}"
    found += f"; without memory {_numbered(bare)}" if bare else ""
    if not has_gpu:
        return Finding("topology", found)
    if here.gpu_node is None:
        return Finding("topology", f"{found}; the GPU's node is not told")
    found += f"; the GPU on node {here.gpu_node} with {here.near_cores} of them"
    has_cores = here.gpu_node in here.nodes and bool(here.nodes[here.gpu_node].cores)
    advice = f"affinity leaves out the cores of the GPU's node: numactl --cpunodebind={here.gpu_node}"
    return Finding("topology", found, advice if has_cores and not here.near_cores else None)


def _numbered(numbers: list[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else "no node"


def rates(device: str, redo: bool) -> Finding:
    """The knee of memory reads: a model whose attention is bound by arithmetic may get more threads when it is served."""
    try:
        return Finding("rates", str(host_rates(None, device, redo=redo)))
    except RuntimeError as error:  # no library, or the GPU does not let itself be measured
        return Finding("rates", "not measured", str(error))


def huge_pages(path: Path) -> Finding:
    """`always [madvise] never`: the chosen one stands in brackets."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    chosen = re.search(r"\[(\w+)\]", text)
    found = chosen.group(1) if chosen else "unknown"
    advice = f"echo madvise > {path}: without huge pages the CPU reads its KV more slowly"
    return Finding("huge pages", found, None if found in ("always", "madvise") else advice)


def gpu() -> list[Finding]:
    properties = torch.cuda.get_device_properties(0)
    found = [Finding("GPU", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")]
    runtime = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    advice = "13.0 or newer copies a tile in one call; before, each run of pages is a call of its own"
    found.append(
        Finding("CUDA", str(torch.version.cuda), None if runtime >= _BATCHED_COPIES_SINCE else advice)
    )
    return [*found, locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])]


def locked_memory(limit_bytes: int) -> Finding:
    """The T region is pinned: the process may need to lock as much as --inplacekv-host-memory."""
    if limit_bytes == resource.RLIM_INFINITY:
        return Finding("locked memory", "no limit")
    return Finding(
        "locked memory",
        f"at most {limit_bytes} bytes by ulimit -l, which some drivers heed: raise it if pinning fails",
    )
