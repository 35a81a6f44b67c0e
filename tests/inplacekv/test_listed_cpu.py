"""The CPU's part of a sparse layer: rows by their entries here, and beside a GPU that waits by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cpu_attn
from sglang_inplacekv.executors.listed_cpu import HomeRows, ListedCpu
from sparse_attn import Space
from sparse_attn.attend import State, attend_rows

BATCH, HEADS, WIDTH, ENTRIES, PAGE, LISTED, SCALE = 2, 16, 64, 200, 16, 24, 0.1
PAGES = -(-ENTRIES // PAGE)
SPACE = Space("cmp", 4, 8, 4, dk=WIDTH, dv=WIDTH, v_in_k=True, entry_bytes=2 * WIDTH)


@pytest.fixture
def team() -> Iterator[cpu_attn.Executor]:
    with cpu_attn.Executor(2) as own:
        yield own


def rows_and_pages(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(BATCH * PAGES * PAGE, WIDTH, generator=generator).to(dtype)
    return rows, torch.randperm(BATCH * PAGES, generator=generator).int().view(BATCH, PAGES)


def lists(step: int) -> torch.Tensor:
    """Of the second step one request has none."""
    generator = torch.Generator().manual_seed(step)
    own = torch.stack([torch.randperm(ENTRIES, generator=generator)[:LISTED].int() for _ in range(BATCH)])
    own[:, LISTED - 5 :] = -1
    own[1, 0 if step == 1 else LISTED :] = -1
    return own


def wanted(q: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, entries: torch.Tensor) -> State:
    page = torch.take_along_dim(pages.long(), entries.long().clamp(min=0) // PAGE, 1)
    names = torch.where(entries < 0, -1, page * PAGE + entries.long() % PAGE)
    return attend_rows(q, SPACE, rows.unsqueeze(1), names.unsqueeze(1), SCALE)


def agree(found: State, right: State) -> None:
    # cpu_attn rounds weights to bf16, 2**-9 of each, where rows are bf16.
    torch.testing.assert_close(found[0].cpu(), right[0], rtol=0, atol=2**-8)
    torch.testing.assert_close(found[1].cpu(), right[1], rtol=0, atol=1e-4)


def test_entries_are_found_through_pages(team: cpu_attn.Executor) -> None:
    rows, pages = rows_and_pages(torch.bfloat16)
    homes = HomeRows(rows, pages, PAGE, ENTRIES)
    q = torch.randn(BATCH, HEADS, WIDTH).bfloat16()
    for step in range(2):
        blocks = cpu_attn.BlockTable(homes.table, lists(step).unsqueeze(1), 1)
        job = team.submit_paged_mla_decode(q, homes.latent, blocks, SCALE)
        agree(job.wait(60), wanted(q, rows, pages, lists(step)))


def test_packed_rows_are_refused() -> None:
    with pytest.raises(
        ValueError, match="asked packed ones of 584 bytes, possible are bf16.*a CPU share of 0"
    ):
        HomeRows(torch.zeros(16, 584, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int32), 16, 16)


def beside_a_gpu(team: cpu_attn.Executor, rows: torch.Tensor, pages: torch.Tensor) -> ListedCpu:
    homes = HomeRows(rows, pages, PAGE, ENTRIES)
    return ListedCpu(homes, team, HEADS, LISTED, SCALE, torch.bfloat16, timeout_s=20)


@pytest.mark.gpu
def test_beside_a_gpu(team: cpu_attn.Executor) -> None:
    rows, pages = rows_and_pages(torch.bfloat16)
    listed = beside_a_gpu(team, rows, pages)
    q = torch.empty(BATCH, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(BATCH, HEADS, WIDTH, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(6):
            q.normal_()
            listed.send(q, lists(step).cuda())
            torch.zeros(2**22, device="cuda").sum()
            listed.begin()
            out.copy_(listed.state[0])  # on the stream, so after the answer
            torch.cuda.current_stream().synchronize()
            right = wanted(q.cpu(), rows, pages, lists(step))
            agree((out, listed.state[1]), right)
        listed.finish()
    assert len(listed.seconds) == 6


@pytest.mark.gpu
def test_a_failure_is_told_and_the_gpu_goes_on(team: cpu_attn.Executor) -> None:
    listed = beside_a_gpu(team, *rows_and_pages(torch.bfloat16))
    q = torch.zeros(BATCH, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    wrong = lists(0)
    wrong[0, 3] = ENTRIES
    listed.send(q, wrong.cuda())
    listed.begin()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=f"block {ENTRIES} at 3 of the {ENTRIES} blocks"):
        listed.finish()
    listed.send(q, lists(0).cuda())
    listed.begin()
    listed.finish()
