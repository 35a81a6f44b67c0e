"""Measurements on a GPU host: `python -m benchmarks.gpu`. Not installed; may import tests.harness."""
