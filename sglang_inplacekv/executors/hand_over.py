"""What decode_host leaves for decode_merge, and the queries' way to the CPU team, at fixed addresses."""

from __future__ import annotations

import torch

from cpu_attn import Signal
from sglang_inplacekv.executors.merge_kernel import State
from sglang_inplacekv.executors.stream_wait import wait_for_value
from sglang_inplacekv.mapped import mapped_tensor


class HandOver:
    """Buffers for decodes of up to `rows` rows, one layer at a time. widths: of q, and of attention's output.

    transferred ([rows, heads, out_dim] in q's dtype, [rows, heads] fp32) is the state over P. computed, both fp32, is the
    CPU's, which the GPU reads where the team wrote it, in pinned memory: a copy would queue behind those of the tiles. One set
    is enough: the host writes only after a layer's q has arrived, which the GPU sent after it had merged the layer before, of
    an earlier forward too.

    The GPU waits for the team's answer by itself, on a flag that the team raises. So the host need not come in between: it has
    queued all of the next layer by then.
    """

    def __init__(self, rows: int, heads: int, widths: tuple[int, int], dtype: torch.dtype) -> None:
        head_dim, out_dim = widths
        self.rows, self._shape = rows, (heads, out_dim)
        self._q = torch.empty(rows, heads, head_dim, dtype=dtype, pin_memory=True)
        self._host = torch.zeros(rows * heads * (out_dim + 1), pin_memory=True)
        self._mapped = mapped_tensor(self._host.data_ptr(), self._host.shape, (4,), torch.float32)
        self._out = torch.zeros(rows, heads, out_dim, dtype=dtype, device="cuda")
        self._lse = torch.zeros(rows, heads, device="cuda")
        self._sent = torch.cuda.Event()
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._answers = 0

    def send(self, q: torch.Tensor, current: torch.cuda.Stream) -> torch.Tensor:
        """Queue the copy of q on the current stream and return where it comes to, in pinned memory."""
        target = self._q[: len(q)]
        target.copy_(q, non_blocking=True)
        self._sent.record(current)
        return target

    def await_q(self) -> None:
        """Wait until the q that was sent has arrived."""
        self._sent.synchronize()

    def next_answer(self) -> Signal:
        """The signal to submit the next job with."""
        self._answers += 1
        return Signal(self._flag, self._signal_value())

    def queue_wait(self, signal: Signal, current: torch.cuda.Stream) -> None:
        """Make the current stream wait for the job that was submitted with `signal`: nothing else wakes the GPU."""
        wait_for_value(current, signal.flag, signal.value)

    def give_up(self) -> None:
        """Let the GPU go on, whatever it then reads: the team does not answer. Whoever handles that may wait for the GPU."""
        self._flag[0] = self._signal_value()

    def _signal_value(self) -> int:
        return (self._answers + 2**31) % 2**32 - 2**31

    def transferred(self, rows: int) -> State:
        return self._out[:rows], self._lse[:rows]

    def computed(self, rows: int) -> State:
        return self._split(self._mapped, rows)

    def to_compute(self, rows: int) -> State:
        """Where the team puts the state of a decode of `rows` rows, in pinned memory."""
        return self._split(self._host, rows)

    def begin(self, rows: int, *, computed: bool, transferred: bool) -> None:
        """Before the first layer of a decode of `rows` rows: a region that is not read is an empty state for all layers."""
        if not computed:
            self.computed(rows)[1].fill_(-torch.inf)
        if not transferred:
            self.transferred(rows)[1].fill_(-torch.inf)

    def clear_padding(self, rows: int, real_rows: int) -> None:
        """Make the rows of `to_compute` that no request has empty. Once a forward, after its first await_q."""
        self.to_compute(rows)[1][real_rows:] = -torch.inf

    def _split(self, buffer: torch.Tensor, rows: int) -> State:
        heads, out_dim = self._shape
        values = rows * heads * out_dim
        out, lse = buffer[:values], buffer[values : values + rows * heads]
        return out.view(rows, heads, out_dim), lse.view(rows, heads)
