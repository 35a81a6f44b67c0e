"""What of each request a ForwardBatch computes, and in which pages it lies, for every attention backend of ours."""

from __future__ import annotations

from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_inplacekv.compat import BACKEND_NAME
from sglang_inplacekv.page_lists import PageLists
from sglang_inplacekv.step_plan import Span


def spans_of(batch: ForwardBatch, lists: PageLists) -> list[Span]:
    """In the order of the batch. A decode may be asked for twice. RuntimeError on any other forward than decode and extend."""
    lengths, index = batch.seq_lens_cpu.tolist(), batch.req_pool_indices
    # SGLang's own warm-up forwards belong to no request.
    rids = batch.rids or [f"warm-up {i}" for i in range(batch.batch_size)]
    if batch.forward_mode.is_decode():
        prefixes = [length - 1 for length in lengths]
        pages = lists.of_decode(rids, index, lengths)
    elif batch.forward_mode.is_extend():
        prefixes = list(batch.extend_prefix_lens_cpu)
        pages = lists.of_extend(rids, index, rows_of(batch), prefixes, lengths)
    else:
        raise RuntimeError(f"forward mode {batch.forward_mode} is not supported by {BACKEND_NAME}")
    return [Span(*span) for span in zip(rids, pages, prefixes, lengths, strict=True)]


def rows_of(batch: ForwardBatch) -> list[int]:
    """Rows of SGLang's table, by request. Waits for the device where SGLang does not tell the host, as in decodes."""
    known = batch.req_pool_indices_cpu
    return (batch.req_pool_indices if known is None else known).tolist()
