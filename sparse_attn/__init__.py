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
from sparse_attn.compressor import CompressorWeights
from sparse_attn.dsa import DsaConfig, DsaIndexerWeights, DsaSelector, DsaWeights
from sparse_attn.nsa import MlpWeights, NsaConfig, NsaSelector, NsaWeights
from sparse_attn.stores import GrowingStore
from sparse_attn.v4 import IndexerWeights, V4Config, V4Selector, V4Weights

__all__ = [
    "Closed",
    "CompressorWeights",
    "DsaConfig",
    "DsaIndexerWeights",
    "DsaSelector",
    "DsaWeights",
    "EntryStore",
    "GrowingStore",
    "IndexerWeights",
    "LayerInputs",
    "MlpWeights",
    "NsaConfig",
    "NsaSelector",
    "NsaWeights",
    "Segment",
    "Selection",
    "Selector",
    "SelectorState",
    "Space",
    "V4Config",
    "V4Selector",
    "V4Weights",
]
