from collections.abc import Iterator

import pytest

import cpu_attn
from cpu_attn.library import select_isa


@pytest.fixture(params=cpu_attn.supported_isas())
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with every instruction set this host can run."""
    before = cpu_attn.isa()
    select_isa(request.param)
    yield request.param
    select_isa(before)


@pytest.fixture
def executor() -> Iterator[cpu_attn.Executor]:
    with cpu_attn.Executor(2) as team:
        yield team
