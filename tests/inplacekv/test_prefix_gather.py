"""Latent prefixes brought together from D and from tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_inplacekv.executors.prefix_gather import PrefixGather
from sglang_inplacekv.executors.tile_stream import plan_tiles
from sglang_inplacekv.layout import RegionSizes
from sglang_inplacekv.step_plan import Reads, Span, StepPlan

PAGE, WIDTH, TILE_PAGES = 4, 3, 2
SIZES = RegionSizes(6, 4, 20, 5, TILE_PAGES, PAGE)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def extend(*reads: Reads) -> StepPlan:
    prefixes = [
        own.device_tokens + PAGE * (len(own.compute_pages) + len(own.transfer_pages)) for own in reads
    ]
    spans = [Span(f"r{i}", pages(), n, n + 1) for i, n in enumerate(prefixes)]
    return StepPlan(spans, is_decode=False, reads=list(reads))


def row(number: int) -> torch.Tensor:
    return torch.full((WIDTH,), float(number))


def gathered(plan: StepPlan) -> list[list[float]]:
    """Each request's rows, sorted. Slot s of host page p holds 1000 + p * PAGE + s, a device slot its number."""
    tiles = plan_tiles(plan, SIZES)
    gather = PrefixGather(plan, tiles, PAGE, torch.from_numpy)
    rows = torch.full((gather.tokens, WIDTH), torch.nan)
    gather.from_device(rows, torch.stack([row(slot) for slot in range(12 * PAGE)]))
    for index, tile in enumerate(tiles):
        buffer = torch.full((TILE_PAGES, PAGE, WIDTH), torch.nan)
        for place, page in enumerate(tile.pages.tolist()):
            buffer[place] = torch.stack([row(1000 + page * PAGE + slot) for slot in range(PAGE)])
        gather.from_tile(rows, index, buffer)
    own = rows.split([span.prefix for span in plan.spans])
    assert all(bool((each == each[:, :1]).all()) for each in own if len(each))
    return [sorted(each[:, 0].tolist()) for each in own]


def host(*ids: int) -> list[float]:
    return [1000.0 + page * PAGE + slot for page in ids for slot in range(PAGE)]


def test_all_regions_and_shared_pages() -> None:
    plan = extend(
        Reads(pages(2, 7), 6, pages(9), pages(12, 13, 14)),
        Reads(pages(), 0, pages(9, 11), pages(12)),
        Reads(pages(3), 4, pages(), pages()),
        Reads(pages(), 0, pages(), pages()),
    )
    assert gathered(plan) == [
        sorted([8.0, 9.0, 10.0, 11.0, 28.0, 29.0, *host(9, 12, 13, 14)]),
        sorted(host(9, 11, 12)),
        [12.0, 13.0, 14.0, 15.0],
        [],
    ]


def test_nothing_in_d() -> None:
    assert gathered(extend(Reads(pages(), 0, pages(9), pages()))) == [host(9)]


def test_reads_that_do_not_cover_the_prefix() -> None:
    plan = extend(Reads(pages(2), 4, pages(), pages()))
    plan.spans[0] = Span("r0", pages(), 5, 6)
    with pytest.raises(RuntimeError, match="prefixes end at rows"):
        PrefixGather(plan, [], PAGE, torch.from_numpy)
