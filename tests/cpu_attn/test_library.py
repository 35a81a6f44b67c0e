"""Finding the library, choosing the instruction set, counting cores."""

from pathlib import Path

import pytest

import cpu_attn
from cpu_attn.library import _quota_cores, default_threads, library


def test_isa_override(monkeypatch: pytest.MonkeyPatch) -> None:
    best = cpu_attn.isa()
    assert cpu_attn.supported_isas()[0] == "scalar"
    monkeypatch.setenv("CPU_ATTN_ISA", "scalar")
    library.__wrapped__()
    assert cpu_attn.isa() == "scalar"
    monkeypatch.setenv("CPU_ATTN_ISA", "neon-of-another-host")
    with pytest.raises(RuntimeError, match=r"CPU_ATTN_ISA=neon-of-another-host: .* support scalar"):
        library.__wrapped__()
    monkeypatch.setenv("CPU_ATTN_ISA", best)
    library.__wrapped__()
    assert cpu_attn.isa() == best


def test_missing_library_lists_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CPU_ATTN_LIBRARY", str(tmp_path / "nowhere.so"))
    with pytest.raises(RuntimeError, match=r"tried .*nowhere\.so"):
        library.__wrapped__()


@pytest.mark.parametrize(
    ("files", "cgroup", "cores"),
    [
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        ({"cpu.max": "max 100000"}, "0::/", float("inf")),
        ({"cpu.max": "400000 100000", "job/cpu.max": "max 100000"}, "0::/job", 4.0),
        ({"cpu.max": "400000 100000"}, "0::/not/visible/here", 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/", float("inf")),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/", 2.5),
        ({}, "9:name=systemd:/\n0::/", float("inf")),
    ],
)
def test_cgroup_quota(tmp_path: Path, files: dict[str, str], cgroup: str, cores: float) -> None:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "self").write_text(cgroup + "\n")
    assert _quota_cores(tmp_path / "self", root) == cores


def test_default_threads() -> None:
    assert default_threads() >= 1
