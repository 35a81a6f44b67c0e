"""What is installed, under which names and at which versions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, entry_points, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(*files: str) -> list[tuple[str, str]]:
    """Read requirements files; raise where a line is not an exact pin."""
    found = []
    for file in files:
        for line in (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines():
            if requirement := line.partition("#")[0].strip():
                match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)", requirement)
                assert match, f"requirements/{file}: {requirement!r} is not an exact pin"
                found.append((re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]))
    return found


def constant(file: str, name: str) -> str:
    match = re.search(rf'^{name} = "([^"]+)"$', (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert match, f"{file} has no line {name} = ..."
    return match[1]


def test_requirements_name_each_package_once() -> None:
    names = [name for name, _ in pins("cpu.txt", "test.txt")]
    assert sorted(names) == sorted(set(names))


def test_installed_versions_are_the_pinned_ones() -> None:
    wrong = {name: (pin, version(name)) for name, pin in pins("cpu.txt", "test.txt") if version(name) != pin}
    assert not wrong, f"pinned and installed versions differ, run make setup: {wrong}"


def test_one_sglang_version_everywhere() -> None:
    sglang = constant("sglang_inplacekv/compat.py", "SGLANG_VERSION")
    assert dict(pins("cpu.txt"))["sglang"] == sglang
    assert PYPROJECT["project"]["optional-dependencies"]["sglang"] == [f"sglang=={sglang}"]


def test_library_is_built_against_the_pinned_tvm_ffi() -> None:
    pinned = f"apache-tvm-ffi=={dict(pins('cpu.txt'))['apache-tvm-ffi']}"
    assert pinned in PYPROJECT["build-system"]["requires"]


def test_version_is_in_the_changelog() -> None:
    released = PYPROJECT["project"]["version"]
    assert version("sglang-inplacekv") == released
    assert re.search(rf"^## {re.escape(released)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_sglang_finds_the_plugin() -> None:
    plugins = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "inplacekv"]
    assert [e.value for e in plugins] == ["sglang_inplacekv.plugin:register"]
    assert callable(plugins[0].load())


def test_imports_from_any_directory(tmp_path: Path) -> None:
    program = (
        "import multiprocessing, cpu_attn, sparse_attn, sglang_inplacekv.models as m\n"
        "if __name__ == '__main__':\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    with spawn.Pool(1) as pool:\n"
        "        assert pool.apply(m.long_text, (10,)) == m.long_text(10)\n"
        "    print(m.__name__)\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sglang_inplacekv.models\n"


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(out),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    assert re.fullmatch(r"sglang_inplacekv-.*-py3-none-.*linux.*\.whl", wheel.name), wheel.name
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_installs_no_other_top_level_name(wheel_files: list[str]) -> None:
    top_level = {name.partition("/")[0] for name in wheel_files if ".dist-info/" not in name}
    assert top_level == {"sglang_inplacekv", "cpu_attn", "sparse_attn"}


def test_wheel_has_models_and_the_compiled_library(wheel_files: list[str]) -> None:
    for source in (ROOT / "models").rglob("*.py"):
        assert f"sglang_inplacekv/models/{source.relative_to(ROOT / 'models')}" in wheel_files
    assert any(re.fullmatch(r"cpu_attn/.*\.so", name) for name in wheel_files)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_files)


def test_license_of_the_distribution() -> None:
    assert distribution("sglang-inplacekv").metadata["License-Expression"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


# Which of these a folder may import; torch, numpy and the standard library are free to all.
FORBIDDEN = {
    "cpu_attn": {"sglang", "sglang_inplacekv", "sparse_attn", "models", "flashinfer", "transformers"},
    "models": {"sglang_inplacekv", "models", "cpu_attn", "flashinfer"},
    "sparse_attn": {"sglang", "sglang_inplacekv", "models", "flashinfer", "transformers"},
    "sglang_inplacekv": {"models", "tests"},
}


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_dependencies_point_one_way(folder: str) -> None:
    for source in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported = {str(node.module).partition(".")[0]}
            else:
                continue
            assert not imported & FORBIDDEN[folder], (
                f"{source}:{node.lineno}: {folder} must not import {imported}"
            )
