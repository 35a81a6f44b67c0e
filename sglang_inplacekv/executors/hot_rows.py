"""Hot sets of one layer on the device, a request each, kept without the host: sparse_attn's HotSet and Policy as GPU kernels.

A step places what each request selects: what is held keeps its row, and of what is not a policy gives the first ones to the
CPU and has the others fetched into rows of entries that have not been selected for longest (exact LRU; of those last
selected together, the one that came first). Nothing that this step selects loses its row in it. A step never waits for the
GPU, and all addresses are fixed, so a CUDA graph may hold it.

An entry that the CPU attends may be fetched too, behind the attention ("behind"), for later steps. That is the default: the
GPU waits for the CPU's answer meanwhile, so it takes no time of its own, and without it the set stays what it is and every
step misses as much as the first one. Its price is that a step moves both the queries and the entries. Without it, as in
sparse_attn's Composer, only what is fetched to be attended becomes hot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparse_attn.traffic import Policy, exchange_bytes

_MOST_ROWS = 16384  # of a hot set: one program orders all of them
_WORD = torch.int64  # rows are copied in words; the packed ones, 584 bytes, are multiples of no larger one


@dataclass(frozen=True)
class Homes:
    """Entries of a layer in host memory: entry e of request b is row pages[b, e // page_rows] * page_rows + e % page_rows.

    Raises ValueError where tensors are of another form: the kernels read them by their addresses.
    """

    rows: torch.Tensor  # [rows, row] as the device reads them, contiguous
    pages: torch.Tensor  # int32 [batch, pages], on the device, contiguous
    page_rows: int

    def __post_init__(self) -> None:
        if self.page_rows < 1:
            raise ValueError(f"pages of {self.page_rows} rows")
        check_matrix("home rows", self.rows)
        check_matrix("pages", self.pages, torch.int32)


@dataclass(frozen=True)
class Counts:
    """Since start, over steps and requests."""

    listed: int
    missed: int
    computed: int  # of these, left to the CPU


def check_matrix(what: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """ValueError unless `tensor` is contiguous and has two dimensions and, if one is given, this dtype."""
    if tensor.dim() != 2 or not tensor.is_contiguous() or (dtype is not None and tensor.dtype != dtype):
        wanted = "two contiguous dimensions" + (f" of {dtype}" if dtype else "")
        raise ValueError(
            f"{what} {tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}: {wanted} are needed"
        )


def cpu_counts(policy: Policy, listed: int, heads: int, width: int, row_bytes: int) -> torch.Tensor:
    """What the policy leaves to the CPU of 0, 1, .. `listed` missed entries of one query: int32 [listed + 1], bf16 queries."""
    exchange = exchange_bytes(1, heads, width, width, torch.bfloat16.itemsize)
    counts = [policy.cpu_entries(missed, row_bytes, exchange) for missed in range(listed + 1)]
    return torch.tensor(counts, dtype=torch.int32)


@triton.jit
def _look_up(
    ids,
    slot_of,
    used,
    step,
    names,
    missed,
    places,
    counts,
    entries,
    capacity,
    listed,
    first_row,
    name_stride,
    BLOCK: tl.constexpr,
):
    """Name the rows of what is held, and list what is not: its ids, packed, and their places in the list."""
    request = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < listed
    entry = tl.load(ids + request * listed + place, mask=inside, other=-1)
    there = entry >= 0
    slot = tl.load(slot_of + request.to(tl.int64) * entries + entry, mask=there, other=-1)
    held, miss = slot >= 0, there & (slot < 0)
    now = tl.zeros([BLOCK], tl.int32) + tl.load(step + request) + 1
    tl.store(used + request * capacity + slot, now, mask=held)
    name = tl.where(held, first_row + request * capacity + slot, -1)
    tl.store(names + request.to(tl.int64) * name_stride + place, name, mask=inside)
    rank = tl.cumsum(miss.to(tl.int32), 0) - 1
    count = tl.sum(miss.to(tl.int32), 0)
    tl.store(missed + request * listed + rank, entry, mask=miss)
    tl.store(places + request * listed + rank, place, mask=miss)
    tl.store(
        missed + request * listed + place, tl.full([BLOCK], -1, tl.int32), mask=inside & (place >= count)
    )
    tl.store(counts + request * 3, tl.sum(there.to(tl.int32), 0))
    tl.store(counts + request * 3 + 1, count)


@triton.jit
def _make_room(
    slot_of,
    entry_in,
    used,
    order,
    step,
    names,
    missed,
    places,
    targets,
    computed,
    counts,
    totals,
    shares,
    entries,
    capacity,
    listed,
    first_row,
    name_stride,
    batch,
    BEHIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give rows to what was missed. order [2, batch, capacity]: slots, least recently selected first, before and after."""
    request = tl.program_id(0)
    now = tl.load(step + request) + 1
    count = tl.load(counts + request * 3 + 1)
    for_cpu = tl.load(shares + count)
    first = for_cpu
    if BEHIND:
        first = for_cpu * 0
    wanted = count - first
    place = tl.arange(0, ROWS)
    inside = place < capacity
    base = request * capacity
    before = ((now + 1) % 2 * batch) * capacity + base
    slot = tl.load(order + before + place, mask=inside, other=0)
    idle = inside & (tl.load(used + base + slot, mask=inside, other=0) != now)
    idle_rank = tl.cumsum(idle.to(tl.int32), 0) - 1
    idle_count = tl.sum(idle.to(tl.int32), 0)
    taken = idle & (idle_rank < wanted)
    to = tl.where(idle, idle_rank - wanted, idle_count - wanted + place - idle_rank - 1)
    to = tl.where(taken, capacity - wanted + idle_rank, to)
    tl.store(order + (now % 2 * batch) * capacity + base + to, slot, mask=inside)
    rank = first + idle_rank
    entry = tl.load(missed + request * listed + rank, mask=taken, other=0)
    former = tl.load(entry_in + base + slot, mask=taken, other=-1)
    # Which thread reads a slot's entry and which one writes it is the compiler's choice.
    tl.debug_barrier()
    own_slots = slot_of + request.to(tl.int64) * entries
    tl.store(own_slots + former, tl.full([ROWS], -1, tl.int32), mask=taken & (former >= 0))
    tl.store(own_slots + entry, slot, mask=taken)
    tl.store(entry_in + base + slot, entry, mask=taken)
    tl.store(targets + request * listed + rank, slot, mask=taken)
    fetched = taken & (rank >= for_cpu)
    at = tl.load(places + request * listed + rank, mask=fetched, other=0)
    tl.store(names + request.to(tl.int64) * name_stride + at, first_row + base + slot, mask=fetched)
    place = tl.arange(0, BLOCK)
    left = tl.load(missed + request * listed + place, mask=place < for_cpu, other=-1)
    tl.store(computed + request * listed + place, left, mask=place < listed)
    tl.store(counts + request * 3 + 2, for_cpu)
    total = totals + request * 3
    tl.store(total, tl.load(total) + tl.load(counts + request * 3))
    tl.store(total + 1, tl.load(total + 1) + count)
    tl.store(total + 2, tl.load(total + 2) + for_cpu)
    tl.store(step + request, now)


@triton.jit
def _fetch(
    homes,
    pages,
    missed,
    targets,
    counts,
    rows,
    capacity,
    listed,
    page_count,
    page_rows,
    COMPUTED: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one missed entry to its row: of those that the CPU attends, or of the others."""
    rank, request = tl.program_id(0), tl.program_id(1)
    for_cpu = tl.load(counts + request * 3 + 2)
    chosen = (rank >= for_cpu) & (rank < tl.load(counts + request * 3 + 1))
    if COMPUTED:
        chosen = rank < for_cpu
    if chosen:
        entry = tl.load(missed + request * listed + rank)
        page = tl.load(pages + request * page_count + entry // page_rows)
        source = page.to(tl.int64) * page_rows + entry % page_rows
        target = (request * capacity + tl.load(targets + request * listed + rank)).to(tl.int64)
        word = tl.arange(0, BLOCK)
        value = tl.load(homes + source * WORDS + word, mask=word < WORDS)
        tl.store(rows + target * WORDS + word, value, mask=word < WORDS)


class HotRows:
    """Hot sets of `batch` requests, `capacity` rows each, in a pool of rows.

    Args:
        pool: [rows, row], contiguous, of whole 8-byte words a row; the sets are rows first_row .. + batch * capacity.
        entries: the most entries of a request.
        listed: the most that a step selects, and no more than `capacity`: all of a selection is held at once.
        shares: what the CPU gets of so many missed entries, from cpu_counts.
        behind: fetch what the CPU attends, too.

    Raises ValueError where the sizes do not fit each other.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        first_row: int,
        batch: int,
        capacity: int,
        entries: int,
        listed: int,
        shares: torch.Tensor,
        *,
        behind: bool = True,
    ) -> None:
        if min(batch, entries, listed) < 1:
            raise ValueError(f"{batch} requests of {entries} entries, {listed} listed: at least one of each")
        if not listed <= capacity <= _MOST_ROWS:
            raise ValueError(
                f"a hot set of {capacity} rows for lists of {listed}: possible are {listed} to {_MOST_ROWS}"
            )
        if len(shares) != listed + 1:
            raise ValueError(f"shares of up to {len(shares) - 1} missed entries for lists of {listed}")
        if shares.dtype != torch.int32 or any(
            not 0 <= own <= missed for missed, own in enumerate(shares.tolist())
        ):
            raise ValueError(f"shares {shares.tolist()} {shares.dtype}: int32, of 0, 1, .. missed entries")
        check_matrix("a pool", pool)
        end_row = first_row + batch * capacity
        if first_row < 0 or end_row > len(pool):
            raise ValueError(f"rows {first_row} .. {end_row} in a pool of {len(pool)} rows")
        if pool.shape[1] * pool.itemsize % _WORD.itemsize:
            raise ValueError(
                f"rows of {pool.shape[1] * pool.itemsize} bytes: a multiple of {_WORD.itemsize} is needed"
            )
        self.capacity, self.listed, self._first_row, self._behind = capacity, listed, first_row, behind
        self._entries, self._batch = entries, batch
        self._all_computed = shares.tolist() == list(range(listed + 1))
        self.computes = bool(shares.any())  # whether the CPU may get anything
        device = pool.device
        self._rows = pool[first_row:end_row].view(_WORD)
        self._shares = shares.to(device)

        def ints(*shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        self._slot_of = ints(batch, entries, fill=-1)  # of an entry, -1 where it is not held
        self._entry_in = ints(batch, capacity, fill=-1)  # of a slot, -1 where it is free
        self._used = ints(batch, capacity)  # step in which a slot was last found
        self._order = torch.arange(capacity, dtype=torch.int32, device=device).repeat(2, batch, 1)
        self._step = ints(batch)
        self._missed, self._targets, self._places = (ints(batch, listed, fill=-1) for _ in range(3))
        self.computed = ints(batch, listed, fill=-1)  # entries left to the CPU in this step, -1 behind them
        self._counts = ints(batch, 3)  # of this step: Counts
        self._totals = torch.zeros(batch, 3, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Of rows and books."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, torch.Tensor))

    def place(self, ids: torch.Tensor, names: torch.Tensor) -> None:
        """Begin a step. Into names [batch, listed] int32 go the pool's rows of what the device attends, -1 for the rest.

        ids: int32 [batch, listed], contiguous, entries of each request, none twice, -1 for none. Of the missed ones those that
        come first are the CPU's: with ascending lists the division is that of sparse_attn.compose.place. Rows that are
        named have their entries after `fetch`. names' last dimension is contiguous. Raises ValueError on other lists.
        """
        shape = self._missed.shape
        if not (ids.shape == names.shape == shape and ids.dtype == names.dtype == torch.int32):
            raise ValueError(
                f"ids {tuple(ids.shape)} {ids.dtype} and names {tuple(names.shape)} {names.dtype}: both must be "
                f"{tuple(shape)} int32"
            )
        if not ids.is_contiguous() or names.stride(1) != 1:
            raise ValueError("ids must be contiguous, and names in their last dimension")
        listed, block = self.listed, triton.next_power_of_2(self.listed)
        _look_up[(self._batch,)](
            ids, self._slot_of, self._used, self._step, names, self._missed, self._places, self._counts,
            self._entries, self.capacity, listed, self._first_row, names.stride(0), BLOCK=block,
        )  # fmt: skip
        rows = triton.next_power_of_2(self.capacity)
        _make_room[(self._batch,)](
            self._slot_of, self._entry_in, self._used, self._order, self._step, names, self._missed, self._places,
            self._targets, self.computed, self._counts, self._totals, self._shares, self._entries, self.capacity,
            listed, self._first_row, names.stride(0), self._batch, BEHIND=self._behind, ROWS=rows, BLOCK=block,
            num_warps=8 if rows > 1024 else 4,
        )  # fmt: skip

    def fetch(self, homes: Homes) -> None:
        """Bring what the device attends of the missed entries, through the link."""
        if not self._all_computed:
            self._copy(homes, computed=False)

    def fetch_behind(self, homes: Homes) -> None:
        """Bring what the CPU attends for later steps; nothing if it is not to be kept."""
        if self._behind and self.computes:
            self._copy(homes, computed=True)

    def _copy(self, homes: Homes, *, computed: bool) -> None:
        words = homes.rows.view(_WORD)
        if words.shape[1] != self._rows.shape[1]:
            raise ValueError(f"home rows of {words.shape[1]} words, hot ones of {self._rows.shape[1]}")
        least = -(-self._entries // homes.page_rows)
        if homes.pages.shape[0] != self._batch or homes.pages.shape[1] < least:
            raise ValueError(
                f"pages {tuple(homes.pages.shape)}: {self._batch} requests of {self._entries} entries have {least} each"
            )
        # A warp a row: the link is kept busy by many rows at once, not by any one.
        _fetch[(self.listed, self._batch)](
            words, homes.pages, self._missed, self._targets, self._counts, self._rows, self.capacity, self.listed,
            homes.pages.shape[1], homes.page_rows, COMPUTED=computed, WORDS=words.shape[1],
            BLOCK=triton.next_power_of_2(words.shape[1]), num_warps=1,
        )  # fmt: skip

    def forget(self, request: int) -> None:
        """Empty the set of one request: another begins in its place."""
        self._slot_of[request], self._entry_in[request] = -1, -1

    def counts(self) -> Counts:
        """Waits for the GPU."""
        return Counts(*self._totals.sum(0).tolist())

    def held(self, request: int) -> torch.Tensor:
        """Entries that a request holds, ascending, on the host. Waits for the GPU."""
        own = self._entry_in[request]
        return own[own >= 0].sort().values.cpu()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless entries and slots point at each other and every slot has its turn. Waits for the GPU."""
        for request in range(self._batch):
            slots, own = self._slot_of[request].cpu(), self.held(request)
            listed = int((slots >= 0).sum())
            if listed != len(own) or not torch.equal(
                self._entry_in[request].cpu()[slots[own.long()].long()], own
            ):
                raise RuntimeError(
                    f"request {request}: {len(own)} slots are taken, {listed} entries have one"
                )
            order = self._order[int(self._step[request]) % 2, request].sort().values.tolist()
            if order != list(range(self.capacity)):
                raise RuntimeError(
                    f"request {request}: {len(set(order))} of {self.capacity} slots have a turn"
                )
