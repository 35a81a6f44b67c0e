"""The CPU's pages of a decode in the form that cpu_attn takes."""

from __future__ import annotations

import numpy as np
import torch

import cpu_attn
from sglang_inplacekv.layout import ROLE_COMPUTE, ROLE_TRANSFER, RegionSizes
from sglang_inplacekv.step_plan import StepPlan


def compute_table(plan: StepPlan, sizes: RegionSizes) -> cpu_attn.PageTable | None:
    """The page table over `HostArena.attention_regions`, None if the CPU has no page to attend."""
    pages = np.concatenate([reads.cpu_pages for reads in plan.reads])
    if not len(pages):
        return None
    counts = np.array([len(reads.cpu_pages) for reads in plan.reads])
    computed = [len(reads.compute_pages) for reads in plan.reads]
    stolen = [len(reads.stolen_pages) for reads in plan.reads]
    roles = np.repeat(
        [ROLE_COMPUTE, ROLE_TRANSFER] * len(counts),
        [count for own in zip(computed, stolen, strict=True) for count in own],
    )
    chunk, slot = sizes.locate(pages)
    columns = (
        2 * chunk + roles,
        slot,
        np.concatenate(([0], counts.cumsum())),
        counts * sizes.page_size,
    )
    return cpu_attn.PageTable(*(torch.from_numpy(column.astype(np.int32)) for column in columns))
