"""geartrain: asynchronous model-parallel training."""

__version__ = "0.1.0"
