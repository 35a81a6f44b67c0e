"""Small checkpoints, real configurations and long texts that need no network.

The folder is ``models/`` in the checkout and ``sglang_inplacekv.models`` when installed. Importing it is cheap:
torch and transformers load only when a checkpoint is made.
"""

from .cache import checkpoint_path, models_dir
from .released import RELEASED_KINDS, write_config
from .smollm2 import prepare_smollm2
from .text import long_text, text_topics
from .tiny import TINY_KINDS, make_tiny

__all__ = [
    "RELEASED_KINDS",
    "TINY_KINDS",
    "checkpoint_path",
    "long_text",
    "make_tiny",
    "models_dir",
    "prepare_smollm2",
    "text_topics",
    "write_config",
]
