"""Which cores the CPU team gets, on hosts that are files: NUMA nodes, SMT siblings, affinity, and cgroup quotas v1 and v2."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_inplacekv import cores
from sglang_inplacekv.config import ConfigError
from sglang_inplacekv.topology import Topology, cpu_model, parse_cores, read_topology

GPU = "0000:3b:00.0"


class FakeHost:
    """Trees of /proc and /sys below a folder. Whatever is not set is not there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str | int) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def node(self, number: int, cores: str, gib: int = 64, distances: str = "") -> None:
        folder = f"sys/devices/system/node/node{number}"
        self.write(f"{folder}/cpulist", cores)
        self.write(
            f"{folder}/meminfo", f"Node {number} MemTotal:  {gib * 2**20} kB\nNode {number} MemFree: 1 kB"
        )
        if distances:
            self.write(f"{folder}/distance", distances)

    def siblings(self, *lists: str) -> None:
        for text in lists:
            for core in parse_cores(text):
                self.write(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", text)

    def gpu(self, node: int | str) -> None:
        self.write(f"sys/bus/pci/devices/{GPU}/numa_node", node)

    def quota(self, cores: float, version: int) -> None:
        if version == 2:
            self.write("proc/self/cgroup", "0::/job")
            self.write("sys/fs/cgroup/job/cpu.max", f"{int(cores * 100_000)} 100000")
            return
        self.write("proc/self/cgroup", "7:memory:/job\n4:cpu,cpuacct:/job")
        self.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", int(cores * 100_000))
        self.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", 100_000)

    def read(self, allowed: Iterable[int], gpu: str | None = GPU) -> Topology:
        return read_topology(allowed, gpu, self.root)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


@pytest.fixture
def two_sockets(host: FakeHost) -> FakeHost:
    """Eight physical cores, each twice, siblings eight apart; the GPU on the second socket."""
    host.node(0, "0-3,8-11", distances="10 21")
    host.node(1, "4-7,12-15", distances="21 10")
    host.siblings(*(f"{core},{core + 8}" for core in range(8)))
    host.gpu(1)
    return host


def test_physical_cores_first_and_of_these_the_gpus(two_sockets: FakeHost) -> None:
    found = two_sockets.read(range(16))
    assert found.cores[:4] == (7, 6, 5, 4), "physical, and near"
    assert found.cores[4:8] == (3, 2, 1, 0), (
        "physical: another node's memory bandwidth is worth more than a sibling"
    )
    assert found.cores[8:] == (15, 14, 13, 12, 11, 10, 9, 8)
    assert (found.physical, found.usable, found.most_threads) == (8, 16, 15)
    assert (found.gpu_node, found.near_cores) == (1, 8)


def test_siblings_in_the_other_spelling(host: FakeHost) -> None:
    host.siblings("0-1", "2-3")
    found = host.read(range(4))
    assert found.cores == (2, 0, 3, 1) and found.physical == 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_is_rounded_down(two_sockets: FakeHost, version: int) -> None:
    two_sockets.quota(7.65, version)
    found = two_sockets.read(range(16))
    assert (found.usable, found.most_threads) == (7, 6)
    assert set(found.cores[: found.most_threads]) == {2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_below_one_core_is_one(host: FakeHost, version: int) -> None:
    host.quota(0.5, version)
    assert host.read(range(4)).most_threads == 1


def test_affinity_smaller_than_the_node(two_sockets: FakeHost) -> None:
    found = two_sockets.read([1, 5, 6, 13, 14, 15])
    # 15 is its core's only allowed sibling, so it is that core.
    assert found.cores == (15, 6, 5, 1, 14, 13)
    assert (found.physical, found.usable, found.near_cores) == (4, 6, 5)


def test_affinity_off_the_gpus_node(two_sockets: FakeHost) -> None:
    found = two_sockets.read([0, 1, 2])
    assert found.cores == (2, 1, 0) and found.near_cores == 0 and found.gpu_node == 1


def test_a_node_without_memory_comes_last(host: FakeHost) -> None:
    host.node(0, "0-1", gib=0, distances="10 21")
    host.node(1, "2-3", distances="21 10")
    host.gpu(0)
    assert host.read(range(4)).cores == (3, 2, 1, 0)


def test_a_gpus_node_without_cores_has_close_ones(host: FakeHost) -> None:
    host.node(0, "0-1", distances="10 32 21")
    host.node(1, "2-3", distances="32 10 12")
    host.node(2, "", distances="21 12 10")
    host.gpu(2)
    found = host.read(range(4))
    assert found.cores == (3, 2, 1, 0) and found.near_cores == 0
    host.node(2, "", distances="12 21 10")
    assert host.read(range(4)).cores == (1, 0, 3, 2)


@pytest.mark.parametrize("distances", ["", "10", "10 21 31"])
def test_without_distances_that_make_sense_a_node_is_nearest_itself(host: FakeHost, distances: str) -> None:
    host.node(0, "0-1", distances=distances)
    host.node(1, "2-3")
    host.gpu(0)
    assert host.read(range(4)).cores == (1, 0, 3, 2)


def test_numbers_of_nodes_may_have_gaps(host: FakeHost) -> None:
    host.node(0, "0-1", distances="10 21")
    host.node(8, "2-3", distances="21 10")
    host.gpu(8)
    found = host.read(range(4))
    assert list(found.nodes) == [0, 8] and found.cores == (3, 2, 1, 0)


@pytest.mark.parametrize("node", [-1, "", 5])
def test_a_gpu_whose_node_is_not_told_or_not_there(host: FakeHost, node: int | str) -> None:
    host.node(0, "0-1")
    host.node(1, "2-3")
    host.gpu(node)
    found = host.read(range(4))
    assert found.cores == (3, 2, 1, 0) and found.near_cores == 0
    assert found.gpu_node == (5 if node == 5 else None)


def test_no_sys_and_no_proc_at_all(host: FakeHost) -> None:
    found = host.read([2, 3, 5])
    assert found == Topology(cores=(5, 3, 2), usable=3, physical=3, gpu_node=None, nodes={})
    assert (found.most_threads, host.read([4]).most_threads, host.read([4, 5]).most_threads) == (2, 1, 2)
    assert cpu_model(host.root) == ""


def test_the_gpus_address_may_be_in_capitals(host: FakeHost) -> None:
    host.gpu(1)
    assert read_topology([0], GPU.upper(), host.root).gpu_node == 1


def test_cpu_model(host: FakeHost) -> None:
    host.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n\nmodel name\t: A CPU @ 2 GHz")
    assert cpu_model(host.root) == "A CPU @ 2 GHz"


@pytest.mark.parametrize(
    ("text", "found"),
    [("", []), ("\n", []), ("0", [0]), ("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("0,32", [0, 32])],
)
def test_core_lists(text: str, found: list[int]) -> None:
    assert parse_cores(text) == found


def test_the_team_is_pinned_to_the_best(two_sockets: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(cores, "read_topology", lambda allowed, gpu: two_sockets.read(allowed, gpu))
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
    ):
        assert cores.team_cores(3, "cuda") == [5, 6, 7]
    assert cores.team_cores(3, "cpu") == [5, 6, 7], "without a GPU the last"
    two_sockets.gpu(0)
    with mock.patch.object(cores, "_gpu_address", return_value=GPU):
        assert cores.team_cores(3, "cuda") == [1, 2, 3]
    assert len(cores.team_cores(None)) == 15 and len(cores.team_cores(16)) == 16
    with pytest.raises(ConfigError, match="^--inplacekv-threads: asked 17, possible are 1 to 16 on"):
        cores.team_cores(17)
