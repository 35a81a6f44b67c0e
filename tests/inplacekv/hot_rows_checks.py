"""Hot rows against lists in Python. As a program it checks the kernels on Triton's interpreter, chosen before the import."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_inplacekv.executors.hot_rows import Homes, HotRows, cpu_counts
from sparse_attn import Space
from sparse_attn.compose import place
from sparse_attn.hot import HotSet
from sparse_attn.traffic import Policy, exchange_bytes

HEADS = 4
POLICIES = (Policy.fetch(), Policy.compute(), Policy.split(0.5), Policy.fewest_bytes())


@dataclass(frozen=True)
class Sizes:
    batch: int
    capacity: int
    listed: int
    entries: int
    words: int = 8  # int64 of a row
    page_rows: int = 8
    first_row: int = 5  # of the pool, before the sets


SMALL = Sizes(batch=2, capacity=24, listed=11, entries=60)
WHOLE = Sizes(batch=1, capacity=8, listed=8, entries=40)  # a list may need every row
FLASH = Sizes(batch=3, capacity=2048, listed=512, entries=16384, words=73, page_rows=64)


class Model:
    """One request's set: slots by turn, and what is in them."""

    def __init__(self, sizes: Sizes) -> None:
        self.turns = list(range(sizes.capacity))
        self.entry_in: dict[int, int] = {}

    def step(self, ids: list[int], shares: list[int], behind: bool) -> tuple[list[int], list[int]]:
        """(slots of the list's places, -1 where the CPU attends; entries left to the CPU)."""
        slot_of = {entry: slot for slot, entry in self.entry_in.items()}
        missed = [entry for entry in ids if entry >= 0 and entry not in slot_of]
        computed = missed[: shares[len(missed)]]
        used = {slot_of[entry] for entry in ids if entry in slot_of}
        idle = [slot for slot in self.turns if slot not in used]
        admitted = missed if behind else missed[len(computed) :]
        taken = idle[: len(admitted)]
        self.turns = idle[len(taken) :] + [slot for slot in self.turns if slot in used] + taken
        self.entry_in.update(zip(taken, admitted, strict=True))
        new = dict(zip(admitted, taken, strict=True))
        slots = [slot_of.get(entry, -1 if entry in computed else new.get(entry, -1)) for entry in ids]
        return slots, computed


def homes_of(sizes: Sizes, generator: torch.Generator, device: str, to_device=None) -> Homes:
    """Random rows, each request's pages in any order."""
    pages = -(-sizes.entries // sizes.page_rows)
    order = torch.randperm(sizes.batch * pages, generator=generator).int().view(sizes.batch, pages)
    shape = (sizes.batch * pages * sizes.page_rows, sizes.words)
    rows = torch.randint(2**62, shape, generator=generator)
    rows = rows.to(device) if to_device is None else to_device(rows)
    return Homes(rows, order.to(device), sizes.page_rows)


def lists(sizes: Sizes, generator: torch.Generator, recent: torch.Tensor) -> torch.Tensor:
    """[batch, listed] ascending entries, a part of them those of the step before, -1 behind them."""
    ids = torch.full((sizes.batch, sizes.listed), -1, dtype=torch.int32)
    for own, last in zip(ids, recent, strict=True):
        count = sizes.listed - int(torch.randint(min(4, sizes.listed), (), generator=generator))
        kept = last[(last >= 0) & (torch.rand(len(last), generator=generator) < 0.5)]
        new = torch.randperm(sizes.entries, generator=generator).int()
        both = torch.cat((kept, new[~torch.isin(new, kept)]))[:count]
        own[:count] = both.sort().values
    return ids


def check(
    sizes: Sizes, policy: Policy, behind: bool, device: str, steps: int, to_device=None, seed: int = 0
) -> None:
    """Names, the CPU's list, what is held, and every row that is named, step by step."""
    generator = torch.Generator().manual_seed(seed)
    homes = homes_of(sizes, generator, device, to_device)
    row_bytes = 8 * sizes.words
    width = row_bytes // 2
    pool_rows = sizes.first_row + sizes.batch * sizes.capacity
    pool = torch.full((pool_rows, sizes.words), -7, dtype=torch.int64, device=device)
    shares = cpu_counts(policy, sizes.listed, HEADS, width, row_bytes)
    hot = HotRows(
        pool, sizes.first_row, sizes.batch, sizes.capacity, sizes.entries, sizes.listed, shares, behind=behind
    )
    models = [Model(sizes) for _ in range(sizes.batch)]
    names = torch.full((sizes.batch, 3 + sizes.listed), -9, dtype=torch.int32, device=device)
    recent = torch.full((sizes.batch, sizes.listed), -1, dtype=torch.int32)
    listed = missed = computed = 0
    for step in range(steps):
        if step == steps // 2:  # another request in the place of the last one
            hot.forget(sizes.batch - 1)
            models[-1].entry_in.clear()
        before = [hot.held(request) for request in range(sizes.batch)]
        recent = lists(sizes, generator, recent)
        hot.place(recent.to(device), names[:, 3:])
        hot.fetch(homes)
        own_names = names.cpu()
        assert (own_names[:, :3] == -9).all()
        for request, model in enumerate(models):
            ids = recent[request].tolist()
            slots, for_cpu = model.step(ids, shares.tolist(), behind)
            first = sizes.first_row + request * sizes.capacity
            wanted = [-1 if slot < 0 else first + slot for slot in slots]
            assert own_names[request, 3:].tolist() == wanted, f"step {step}, request {request}"
            assert hot.computed[request].tolist() == for_cpu + [-1] * (sizes.listed - len(for_cpu))
            assert hot.held(request).tolist() == sorted(model.entry_in.values())
            check_division(sizes, policy, before[request], recent[request], for_cpu, width)
            check_rows(homes, request, ids, pool, wanted)
            listed += sum(entry >= 0 for entry in ids)
            computed += len(for_cpu)
            missed += len(set(ids) - {-1} - set(before[request].tolist()))
        hot.fetch_behind(homes)
        for request, model in enumerate(models):
            first = sizes.first_row + request * sizes.capacity
            rows = [first + slot for slot in model.entry_in]
            check_rows(homes, request, list(model.entry_in.values()), pool, rows)
        hot.check_integrity()
    found = hot.counts()
    assert (found.listed, found.missed, found.computed) == (listed, missed, computed)
    assert (pool[: sizes.first_row] == -7).all()


def check_rows(homes: Homes, request: int, ids: list[int], pool: torch.Tensor, rows: list[int]) -> None:
    pairs = [(entry, row) for entry, row in zip(ids, rows, strict=True) if row >= 0]
    if pairs:
        entries, named = torch.tensor(pairs, device=pool.device).unbind(1)
        page = homes.pages[request].long()[entries // homes.page_rows]
        assert torch.equal(pool[named], homes.rows[page * homes.page_rows + entries % homes.page_rows])


def check_division(
    sizes: Sizes, policy: Policy, held: torch.Tensor, ids: torch.Tensor, for_cpu: list[int], width: int
) -> None:
    """As sparse_attn divides the same list over the same set."""
    space = Space("cmp", 4, 8, 4, dk=width, dv=width, v_in_k=True, entry_bytes=2 * width)
    same = HotSet(space, sizes.capacity)
    same.admit(held.long(), torch.zeros(len(held), 1, width))
    divided = place(ids.long().view(1, 1, -1), same, policy, exchange_bytes(1, HEADS, width, width, 2))
    assert divided.cpu[divided.cpu >= 0].tolist() == for_cpu


def check_order_of_leaving(device: str) -> None:
    """One entry a step, so that none was last selected together with another: the set is HotSet's."""
    sizes = Sizes(batch=1, capacity=4, listed=1, entries=12)
    generator = torch.Generator().manual_seed(3)
    pool = torch.zeros(20, sizes.words, dtype=torch.int64, device=device)
    shares = cpu_counts(Policy.fetch(), 1, HEADS, 32, 64)
    hot = HotRows(pool, 0, 1, sizes.capacity, sizes.entries, 1, shares)
    same = HotSet(Space("cmp", 4, 8, 4, dk=1, dv=1, v_in_k=True, entry_bytes=2), sizes.capacity)
    names = torch.empty(1, 1, dtype=torch.int32, device=device)
    for _ in range(40):
        entry = torch.randint(sizes.entries, (1,), generator=generator)
        same.begin_step()
        slots = same.slots(entry)
        same.use(slots)
        if slots < 0:
            same.admit(entry, torch.zeros(1, 1, 1))
        hot.place(entry.int().view(1, 1).to(device), names)
        everything = torch.arange(sizes.entries)
        assert torch.equal(hot.held(0).long(), everything[same.slots(everything) >= 0])


if __name__ == "__main__":
    for own_policy in POLICIES:
        for own_behind in (True, False):
            if own_behind or own_policy.cpu_share:
                check(SMALL, own_policy, own_behind, "cpu", steps=8)
    check(WHOLE, Policy.split(0.5), True, "cpu", steps=10)
    check_order_of_leaving("cpu")
    print("hot rows agree")
