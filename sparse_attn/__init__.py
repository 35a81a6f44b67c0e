"""Native sparse attention: which entries a query attends, and attending them on two sides at once.

Standalone: needs torch and einops, nothing else of this project.
"""

from sparse_attn.base import (
    Closed,
    EntryStore,
    LayerInputs,
    Segment,
    Selection,
    Selector,
    SelectorState,
    Space,
)

__all__ = [
    "Closed",
    "EntryStore",
    "LayerInputs",
    "Segment",
    "Selection",
    "Selector",
    "SelectorState",
    "Space",
]
