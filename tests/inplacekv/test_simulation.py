"""Exactness of the four regions under random traffic, jitter and poison: the core claim, without a model."""

from __future__ import annotations

import pytest

from tests.inplacekv.simulation import Simulation


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("device_pages", [0, 7, 200])
def test_random_traffic_is_exact(share: float, device_pages: int, seed: int) -> None:
    run(share=share, device_pages=device_pages, seed=1000 * device_pages + seed)


@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("device_pages", [0, 7])
def test_latent_rows_are_exact_too(share: float, device_pages: int) -> None:
    """MLA: one row a token, whose beginning is the value."""
    run(share=share, device_pages=device_pages, seed=device_pages, latent=True)


@pytest.mark.parametrize("latent", [False, True], ids=["kv", "latent"])
@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("device_pages", [0, 7])
def test_stealing_is_exact(share: float, device_pages: int, latent: bool) -> None:
    assert run(share=share, device_pages=device_pages, seed=device_pages, latent=latent, steals=True)


def run(**settings) -> int:
    """The number of pages that were stolen."""
    sim = Simulation(host_pages=40, **settings)
    try:
        for _ in range(60):
            sim.step()
        assert sim.arrivals >= 5
        for request in list(sim.running):
            sim.finish(request, keep=False)
        while sim.evict():
            pass
        sim.executor.drain()
        sim.regions.check_integrity()
        assert sim.regions.homes.free_pages == sim.regions.sizes.pages - 1
        assert sim.regions.windows.free_count == sim.regions.windows.count
        return sim.regions.scope.stolen_pages
    finally:
        sim.close()


def test_regions_are_all_used() -> None:
    """The traffic above would prove little if some region never held a token."""
    sim = Simulation(share=0.5, device_pages=4, host_pages=40, seed=5)
    try:
        held = {"D": 0, "C": 0, "T": 0, "window": 0}
        for _ in range(60):
            sim.step()
            held = {
                region: max(held[region], tokens) for region, tokens in sim.regions.tokens_by_region().items()
            }
        assert all(held.values()), held
    finally:
        sim.close()
