"""Hot sets kept on the device: by Triton's interpreter here, compiled on a GPU, which reads homes through the link."""

from __future__ import annotations

import pytest
import torch

from sglang_inplacekv.executors.hot_rows import Homes, HotRows, cpu_counts
from sglang_inplacekv.mapped import mapped_tensor
from sparse_attn.traffic import Policy
from tests.inplacekv import hot_rows_checks as checks
from tests.inplacekv.interpreted import run_interpreted


def test_interpreted() -> None:
    run_interpreted("hot_rows_checks")


def test_sizes_that_do_not_fit_are_refused() -> None:
    pool, shares = torch.zeros(40, 64), cpu_counts(Policy.fetch(), 16, 4, 64, 256)
    with pytest.raises(ValueError, match="hot set of 15 rows for lists of 16: possible are 16 to"):
        HotRows(pool, 0, 2, 15, 100, 16, shares)
    with pytest.raises(ValueError, match="rows 9 .. 41 in a pool of 40"):
        HotRows(pool, 9, 2, 16, 100, 16, shares)
    with pytest.raises(ValueError, match="up to 16 missed entries for lists of 12"):
        HotRows(pool, 0, 2, 16, 100, 12, shares)
    with pytest.raises(ValueError, match="rows of 12 bytes: a multiple of 8"):
        HotRows(torch.zeros(40, 3), 0, 2, 16, 100, 16, shares)
    with pytest.raises(ValueError, match="rows -1 .. 31 in a pool"):
        HotRows(pool, -1, 2, 16, 100, 16, shares)
    with pytest.raises(ValueError, match="0 requests of 100 entries, 16 listed: at least one"):
        HotRows(pool, 0, 0, 16, 100, 16, shares)
    for wrong in (shares.long(), shares - 1, shares + 1):
        with pytest.raises(ValueError, match="shares .*: int32, of 0, 1, .. missed entries"):
            HotRows(pool, 0, 2, 16, 100, 16, wrong)
    for other in (torch.zeros(64, 40).mT, torch.zeros(40, 1, 64), torch.zeros(40, 128)[:, :64]):
        with pytest.raises(ValueError, match="a pool .* two contiguous dimensions are needed"):
            HotRows(other, 0, 2, 16, 100, 16, shares)
    hot = HotRows(pool, 8, 2, 16, 100, 16, shares)
    # 16 rows of 256 bytes a request. A request: 100 + 4 x 16 slots, 4 x 16 of a list, a step, counts and totals.
    assert hot.nbytes == 2 * (16 * 256 + 4 * (164 + 64 + 1 + 3) + 8 * 3) + 4 * 17
    ids, names = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, 20, dtype=torch.int32)[:, 4:]
    for wrong, message in (
        ((ids[:, :8], names), r"ids \(2, 8\) torch.int32 and names \(2, 16\)"),
        ((ids.long(), names), "torch.int64"),
        ((names, names), "contiguous"),
        ((ids, names.mT.contiguous().mT), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            hot.place(*wrong)


def test_homes_that_do_not_fit_are_refused() -> None:
    """The kernels read them by their addresses, wherever those lead."""
    rows, pages = torch.zeros(208, 64), torch.zeros(2, 13, dtype=torch.int32)
    for wrong, message in (
        ((rows, pages, 0), "pages of 0 rows"),
        (
            (rows.mT, pages, 8),
            r"home rows \(64, 208\) torch.float32, strides \(1, 64\): two contiguous dimensions",
        ),
        ((rows[:, ::2], pages, 8), "home rows"),
        ((rows, pages.long(), 8), "pages .*two contiguous dimensions of torch.int32"),
        ((rows, pages[0], 8), "pages"),
        ((rows, pages.mT, 8), "pages"),
    ):
        with pytest.raises(ValueError, match=message):
            Homes(*wrong)
    hot = HotRows(torch.zeros(40, 64), 0, 2, 16, 100, 16, cpu_counts(Policy.fetch(), 16, 4, 64, 256))
    for wrong, message in (
        (Homes(rows[:, :32].contiguous(), pages, 8), "home rows of 16 words, hot ones of 32"),
        (Homes(rows, pages[:1], 8), r"pages \(1, 13\): 2 requests of 100 entries have 13 each"),
        (
            Homes(rows, pages[:, :12].contiguous(), 8),
            r"pages \(2, 12\): 2 requests of 100 entries have 13 each",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            hot.fetch(wrong)


def test_the_cpu_gets_what_the_policy_says() -> None:
    assert cpu_counts(Policy.split(0.5), 5, 64, 512, 1024).tolist() == [0, 0, 1, 2, 2, 2]
    # 64 x (1024 + 2052) bytes of queries and answers are those of 192.2 rows.
    fewest = cpu_counts(Policy.fewest_bytes(), 512, 64, 512, 1024).tolist()
    assert fewest[192] == 0 and fewest[193:] == list(range(193, 513))


def mapped(rows: torch.Tensor) -> torch.Tensor:
    """Rows in pinned host memory, as the GPU reads them there."""
    host = rows.pin_memory()
    device = mapped_tensor(host.data_ptr(), host.shape, (8 * host.shape[1], 8), host.dtype)
    device.host = host  # keeps the memory
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("policy", [Policy.fetch(), Policy.compute(), Policy.split(0.5)])
def test_compiled(policy: Policy, behind: bool) -> None:
    checks.check(checks.SMALL, policy, behind, "cuda", steps=20, to_device=mapped)
    checks.check(checks.WHOLE, policy, behind, "cuda", steps=20, to_device=mapped)
    checks.check(checks.FLASH, policy, behind, "cuda", steps=8, to_device=mapped)


@pytest.mark.gpu
def test_entries_leave_in_order() -> None:
    checks.check_order_of_leaving("cuda")


@pytest.mark.gpu
def test_a_graph_holds_a_step() -> None:
    """Replayed over other lists it does what the calls do."""
    sizes, generator = checks.FLASH, torch.Generator().manual_seed(5)
    homes = checks.homes_of(sizes, generator, "cuda", mapped)
    shares = cpu_counts(Policy.split(0.5), sizes.listed, 64, 512, 8 * sizes.words)

    def hot_rows() -> tuple[HotRows, torch.Tensor]:
        pool = torch.zeros(sizes.batch * sizes.capacity, sizes.words, dtype=torch.int64, device="cuda")
        own = (sizes.batch, sizes.capacity, sizes.entries, sizes.listed, shares)
        return HotRows(pool, 0, *own), pool

    (hot, pool), (other, other_pool) = hot_rows(), hot_rows()
    ids = torch.full((sizes.batch, sizes.listed), -1, dtype=torch.int32, device="cuda")
    names, other_names = torch.empty_like(ids), torch.empty_like(ids)

    def step(own: HotRows, into: torch.Tensor) -> None:
        own.place(ids, into)
        own.fetch(homes)
        own.fetch_behind(homes)

    step(hot, names)  # of empty lists: compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(hot, names)
    step(other, other_names)
    recent = ids.cpu()
    for _ in range(6):
        recent = checks.lists(sizes, generator, recent)
        ids.copy_(recent)
        graph.replay()
        step(other, other_names)
        assert torch.equal(names, other_names) and torch.equal(hot.computed, other.computed)
    assert torch.equal(pool, other_pool) and hot.counts() == other.counts()
    assert 0 < hot.counts().missed < hot.counts().listed
    hot.check_integrity()
