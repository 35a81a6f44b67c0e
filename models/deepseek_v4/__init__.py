"""DeepSeek-V4 as an SGLang model. Importing this imports no SGLang; `served` does."""

from .geometry import V4Geometry, Yarn
from .override import ARCHITECTURE, MODEL_TYPE, override_args, read_config

__all__ = ["ARCHITECTURE", "MODEL_TYPE", "V4Geometry", "Yarn", "override_args", "read_config"]
