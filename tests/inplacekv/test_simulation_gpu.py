"""The random traffic of test_simulation on a GPU: FlashInfer, real streams, pinned T, bf16."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.inplacekv.simulation import Simulation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def run(**settings) -> None:
    sim = Simulation(device="cuda", **settings)
    try:
        for _ in range(60):
            sim.step()
        assert sim.arrivals >= 5
        sim.executor.drain()
        sim.regions.check_integrity()
    finally:
        sim.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("device_pages", [0, 7, 200])
def test_random_traffic_is_exact(share: float, device_pages: int, seed: int) -> None:
    run(share=share, device_pages=device_pages, host_pages=40, seed=1000 * device_pages + seed)


@pytest.mark.parametrize("transfer", ["dma", "zero-copy"])
@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("device_pages", [0, 7])
def test_latent_rows_are_exact_too(share: float, device_pages: int, transfer: str) -> None:
    """MLA: one row a token, whose beginning is the value."""
    run(
        share=share,
        device_pages=device_pages,
        host_pages=40,
        seed=device_pages,
        transfer=transfer,
        latent=True,
    )


@pytest.mark.parametrize("latent", [False, True], ids=["kv", "latent"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_stealing_is_exact(share: float, latent: bool) -> None:
    run(share=share, device_pages=7, host_pages=40, seed=3, latent=latent, steals=True)


def test_a_forward_that_no_other_follows_has_its_transfers_counted_once() -> None:
    sim = Simulation(device="cuda", share=0.0, device_pages=0, host_pages=40, seed=6)
    try:
        request = sim.admit()
        for tokens, is_decode in ((4 * sim.page_size, False), (1, True), (1, True)):
            assert sim.grow(request, tokens)
            sim.forward([(request, tokens)], is_decode)
        sim.executor.take_costs()
        assert sim.grow(request, 1)
        with mock.patch.object(sim, "_check_costs"):
            sim.forward([(request, 1)], True)
        torch.cuda.synchronize()
        costs, after = sim.executor.take_costs(), sim.executor.take_costs()
        assert costs.transfer_tokens == 4 * sim.page_size * sim.shape.layers and costs.transfer_s > 0
        assert after.transfer_bytes == 0
    finally:
        sim.close()


@pytest.mark.parametrize("share", [0.0, 0.37])
def test_reading_transfer_pages_in_place_is_exact(share: float) -> None:
    run(share=share, device_pages=7, host_pages=40, seed=5, transfer="zero-copy")
