"""Drive SGLang's own scheduler inside the test process, one configuration after another."""

from .compare import Comparison, compare
from .dummy_weights import scaled_dummy_weights
from .requests import Handle, Result
from .runner import Runner

__all__ = ["Comparison", "Handle", "Result", "Runner", "compare", "scaled_dummy_weights"]
