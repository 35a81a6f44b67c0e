"""Decode attention: one query token per request against its listed pages."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpu_attn.library import check_threads, default_threads, library
from cpu_attn.paged import (
    FLOAT_DTYPES,
    BlockTable,
    PagedKV,
    PagedLatent,
    PageTable,
    check_cpu,
    check_last_dim,
)

if TYPE_CHECKING:
    from cpu_attn.executor import Executor

# Far above any step; a wait without an end would hide a dead worker.
EXECUTOR_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class DecodeArguments:
    """Checked arguments of one decode, in the order the library takes them."""

    q: Tensor
    kv: PagedKV | PagedLatent
    table: PageTable | BlockTable
    scale: float
    out: Tensor
    lse: Tensor

    @classmethod
    def check(
        cls, q: Tensor, kv: PagedKV | PagedLatent, table: PageTable | BlockTable, scale: float,
        out: Tensor | None = None, lse: Tensor | None = None,
    ) -> "DecodeArguments":  # fmt: skip
        """Check everything but what the tensors hold, which may still change until they are submitted."""
        check_cpu("q", q, FLOAT_DTYPES, 3)
        check_last_dim("q", q)
        batch, heads, head_dim = q.shape
        if head_dim != kv.head_dim:
            raise ValueError(f"q has head_dim {head_dim}, the KV {kv.head_dim}")
        if heads == 0 or heads % kv.kv_heads:
            raise ValueError(f"{heads} query heads are no multiple of {kv.kv_heads} KV heads")
        if batch != table.batch:
            raise ValueError(f"q has {batch} requests, the page table {table.batch}")
        if out is None:
            out = torch.empty(batch, heads, kv.out_dim)
        if lse is None:
            lse = torch.empty(batch, heads)
        check_cpu("out", out, (torch.float32,), 3)
        check_cpu("lse", lse, (torch.float32,), 2)
        check_last_dim("out", out)
        if out.shape != (batch, heads, kv.out_dim) or lse.shape != q.shape[:2]:
            raise ValueError(
                f"out {tuple(out.shape)} and lse {tuple(lse.shape)} do not fit q {tuple(q.shape)}"
                f" and values of {kv.out_dim}"
            )
        return cls(q.detach(), kv, table, float(scale), out.detach(), lse.detach())

    def handles(self) -> tuple:
        return self.q, self.kv.handle, self.table.handle, self.scale, self.out, self.lse

    @property
    def what(self) -> str:
        kind = "paged_decode" if isinstance(self.kv, PagedKV) else "paged_mla_decode"
        return f"{kind} of {self.table.batch} requests"

    def run(self, executor: "Executor | None", threads: int | None) -> tuple[Tensor, Tensor]:
        if executor is not None:
            if threads is not None:
                raise ValueError("threads cannot be given with an executor, which has its own")
            return executor.submit_arguments(self).wait(EXECUTOR_WAIT_S)
        threads = default_threads() if threads is None else check_threads(threads)
        library().decode(*self.handles(), threads)
        return self.out, self.lse


def check_kind(kv: object, kind: type) -> None:
    """Raise ValueError unless `kv` is of the class that the decode reads."""
    if not isinstance(kv, kind):
        raise ValueError(f"kv must be a {kind.__name__}, is a {type(kv).__name__}")


def paged_decode(
    q: Tensor,
    kv: PagedKV,
    table: PageTable | BlockTable,
    scale: float,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    executor: "Executor | None" = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend every query head to the tokens that `table` lists, in place.

    Args:
        q: [batch, q_heads, head_dim] bf16, fp16 or fp32 CPU, not necessarily the KV's dtype;
            q_heads is a multiple of kv_heads, and query head h reads KV head
            h // (q_heads // kv_heads).
        kv: where the pages are.
        table: which pages, [batch] requests; or a BlockTable, which blocks of them.
        scale: multiplies q . k before the softmax.
        out: [batch, q_heads, head_dim] fp32 to write to; allocated when None.
        lse: [batch, q_heads] fp32 to write to; allocated when None.
        executor: run on its threads and wait; otherwise the calling thread and its own team
            of `threads` (default: default_threads()) do the work, with the GIL released.

    Returns:
        (out, lse): softmax(scale * q . k) . v, and log2 of the sum of exp2(scale * log2(e) * q . k).
        An empty request gives zeros and -inf. Bit-identical for equal inputs and thread counts.

    Raises:
        ValueError: on tensors that do not fit each other, and on a page table that is out of range
            or inconsistent, before any page is read.
    """
    check_kind(kv, PagedKV)
    return DecodeArguments.check(q, kv, table, scale, out, lse).run(executor, threads)


def paged_mla_decode(
    q: Tensor,
    kv: PagedLatent,
    table: PageTable | BlockTable,
    scale: float,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    executor: "Executor | None" = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend every query head to the latent rows that `table` lists, in place (absorbed MLA).

    Args:
        q: [batch, q_heads, lora_rank + rope_dim] bf16, fp16 or fp32 CPU, the absorbed query and its
            rotary part in the order of a row; not necessarily the KV's dtype. bf16 q on bf16 rows is
            the fast case where the host multiplies bf16.
        kv: where the pages are.
        table: which pages, or which blocks of them: with block_size 1 a list of rows, as native sparse attention selects.
        scale: multiplies q . row before the softmax.
        out: [batch, q_heads, lora_rank] fp32 to write to; allocated when None.

    Everything else, results and errors included, as for paged_decode; the value of a token is the
    first lora_rank elements of its row.
    """
    check_kind(kv, PagedLatent)
    return DecodeArguments.check(q, kv, table, scale, out, lse).run(executor, threads)
