"""The balanced share: formulas against a search, and the cases in which only one side works."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_inplacekv.roofline import Line, balanced_share, layer_seconds

FIXED = st.floats(0.0, 1e-3)
TOKEN = st.floats(1e-11, 1e-6)


@given(FIXED, TOKEN, FIXED, TOKEN, st.integers(1, 10**6))
def test_no_other_share_is_faster(a0: float, a: float, b0: float, b: float, tokens: int) -> None:
    cpu, transfer = Line(a0, a), Line(b0, b)
    best = balanced_share(cpu, transfer, tokens)
    assert 0.0 <= best <= 1.0
    found = layer_seconds(best, cpu, transfer, tokens)
    others = [layer_seconds(i / 200, cpu, transfer, tokens) for i in range(201)]
    assert found <= min(others) * (1 + 1e-9)


def test_long_contexts_split_by_bandwidth() -> None:
    cpu, transfer = Line(30e-6, 1 / 84e9), Line(10e-6, 1 / 52e9)
    assert balanced_share(cpu, transfer, 10**9) == pytest.approx(84 / 136, abs=1e-3)
    assert layer_seconds(0.0, cpu, transfer, 10**9) / layer_seconds(
        84 / 136, cpu, transfer, 10**9
    ) == pytest.approx(136 / 52, rel=0.01)


def test_a_cpu_that_does_not_pay_gets_nothing() -> None:
    assert balanced_share(Line(1e-3, 1e-9), Line(0.0, 1e-9), 1000) == 0.0
    assert balanced_share(Line(0.0, 1e-9), Line(0.0, 1e-9), 0) == 0.0


def test_a_link_that_does_not_pay_gets_nothing() -> None:
    assert balanced_share(Line(0.0, 1e-9), Line(1e-3, 1e-9), 1000) == 1.0
