from collections.abc import Iterator

import pytest

import cpu_attn
from cpu_attn.library import select_isa

# The others take paged_decode from avx512.
WIDE_ISAS = ("scalar", "avx2", "avx512")
MLA_ISAS = (*WIDE_ISAS, "avx512bf16", "amx", "amx-emulated")


def selected(name: str) -> Iterator[str]:
    before = cpu_attn.isa()
    select_isa(name)
    yield name
    select_isa(before)


@pytest.fixture(params=[isa for isa in WIDE_ISAS if isa in cpu_attn.supported_isas()])
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with every instruction set this host can run."""
    yield from selected(request.param)


@pytest.fixture(params=MLA_ISAS)
def each_mla_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with every MLA kernel, AMX's on emulated tiles too; skip what cannot run."""
    needed = "avx512" if request.param == "amx-emulated" else request.param
    if needed not in cpu_attn.supported_isas():
        pytest.skip(f"this host and build have no {needed}, only {', '.join(cpu_attn.supported_isas())}")
    yield from selected(request.param)


@pytest.fixture
def executor() -> Iterator[cpu_attn.Executor]:
    with cpu_attn.Executor(2) as team:
        yield team
