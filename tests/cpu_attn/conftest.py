from collections.abc import Iterator

import pytest

import cpu_attn
from cpu_attn.library import select_isa

WIDE_ISAS = ("scalar", "avx2", "avx512", "neon")
TILE_ISAS = ("amx", "amx-emulated")
DECODE_ISAS = (*WIDE_ISAS, *TILE_ISAS)  # avx512bf16 takes paged_decode from avx512
MLA_ISAS = (*WIDE_ISAS, "avx512bf16", *TILE_ISAS)


def selected(name: str) -> Iterator[str]:
    before = cpu_attn.isa()
    select_isa(name)
    yield name
    select_isa(before)


def selected_or_skipped(name: str) -> Iterator[str]:
    needed = "avx512" if name == "amx-emulated" else name
    if needed not in cpu_attn.supported_isas():
        pytest.skip(f"this host and build have no {needed}, only {', '.join(cpu_attn.supported_isas())}")
    yield from selected(name)


@pytest.fixture(params=DECODE_ISAS)
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with every kernel of K and V, AMX's on emulated tiles too; skip what cannot run."""
    yield from selected_or_skipped(request.param)


@pytest.fixture(params=MLA_ISAS)
def each_mla_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with every MLA kernel, AMX's on emulated tiles too; skip what cannot run."""
    yield from selected_or_skipped(request.param)


@pytest.fixture
def executor() -> Iterator[cpu_attn.Executor]:
    with cpu_attn.Executor(2) as team:
        yield team
