"""Which cores this process may keep busy, and which of them lie best. Reads /proc and /sys below a root, so that tests fake it.

What a container hides or a kernel does not tell is no error: the cores it would have told apart are then equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cpu_attn.library import default_threads

ROOT = Path("/")
_SYSTEM = Path("sys/devices/system")
_HERE, _ELSEWHERE = 10, 20  # the kernel's distances of a node to itself and, by convention, to the next


@dataclass(frozen=True)
class Node:
    """A NUMA node. It may have no cores, or no memory."""

    cores: frozenset[int]
    memory_bytes: int | None  # None: not told
    distances: tuple[int, ...]  # to the nodes in order of their numbers


@dataclass(frozen=True)
class Topology:
    cores: tuple[int, ...]  # that affinity allows, the best for attention first
    usable: int  # how many of them the cgroup's quota keeps busy, rounded down; at least 1
    physical: int  # cores without their SMT siblings
    gpu_node: int | None  # None: no GPU, or the host does not tell
    nodes: Mapping[int, Node]

    @property
    def most_threads(self) -> int:
        """The largest team that leaves a core to the scheduler, where there are more than two."""
        return self.usable - 1 if self.usable > 2 else self.usable

    @property
    def near_cores(self) -> int:
        """Allowed cores on the GPU's node; 0 where that is unknown."""
        node = None if self.gpu_node is None else self.nodes.get(self.gpu_node)
        return 0 if node is None else len(node.cores.intersection(self.cores))


def read_topology(allowed: Iterable[int], gpu: str | None = None, root: Path = ROOT) -> Topology:
    """allowed: the affinity. gpu: PCI address as /sys spells it, 0000:3b:00.0.

    Order of cores: one of each physical core before its SMT siblings, which add no bandwidth; then nodes with memory before
    those without; then the closer to the GPU the better; then the last first, since SGLang's own threads tend to start on the
    first.
    """
    allowed = sorted(set(allowed))
    nodes, gpu_node = read_nodes(root), gpu_numa_node(gpu, root)
    turns = {core: _smt_turn(core, allowed, root) for core in allowed}
    ranks = {core: _node_rank(core, nodes, gpu_node) for core in allowed}
    return Topology(
        cores=tuple(sorted(allowed, key=lambda core: (turns[core], ranks[core], -core))),
        usable=default_threads(allowed, root),
        physical=sum(turn == 0 for turn in turns.values()),
        gpu_node=gpu_node,
        nodes=nodes,
    )


def read_nodes(root: Path = ROOT) -> dict[int, Node]:
    """NUMA nodes by number; none where /sys shows none."""
    found = {}
    for path in (root / _SYSTEM / "node").glob("node[0-9]*"):
        memory = re.search(r"MemTotal:\s*(\d+) kB", _text(path / "meminfo"))
        found[int(path.name.removeprefix("node"))] = Node(
            cores=frozenset(parse_cores(_text(path / "cpulist"))),
            memory_bytes=int(memory.group(1)) * 1024 if memory else None,
            distances=tuple(int(each) for each in re.findall(r"\d+", _text(path / "distance"))),
        )
    return dict(sorted(found.items()))


def gpu_numa_node(gpu: str | None, root: Path = ROOT) -> int | None:
    """Of the PCI device at address `gpu`; None where the kernel knows none (-1) or shows no such device."""
    text = "" if gpu is None else _text(root / "sys/bus/pci/devices" / gpu.lower() / "numa_node").strip()
    return int(text) if text.isdecimal() else None


def parse_cores(text: str) -> list[int]:
    """The kernel's lists of cores: "0-3,8" is 0, 1, 2, 3, 8. Empty is none."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [core for first, last in ranges for core in range(int(first), int(last or first) + 1)]


def cpu_model(root: Path = ROOT) -> str:
    """The CPU's name; empty where the kernel tells none."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else ""


def _smt_turn(core: int, allowed: list[int], root: Path) -> int:
    """0 for the first allowed core of a physical one, 1 for the next."""
    siblings = parse_cores(_text(root / _SYSTEM / f"cpu/cpu{core}/topology/thread_siblings_list"))
    return sum(sibling < core for sibling in set(siblings).intersection(allowed))


def _node_rank(core: int, nodes: Mapping[int, Node], gpu_node: int | None) -> tuple[bool, int]:
    """(has no memory, distance from the GPU): the less the better."""
    own = next((number for number, node in nodes.items() if core in node.cores), None)
    if own is None:
        return False, _HERE
    bare = nodes[own].memory_bytes == 0
    if gpu_node is None or gpu_node not in nodes:
        return bare, _HERE
    told = nodes[gpu_node].distances
    if len(told) == len(nodes):
        return bare, told[list(nodes).index(own)]
    return bare, _HERE if own == gpu_node else _ELSEWHERE


def _text(path: Path) -> str:
    """Empty where there is no such file, or none for us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
