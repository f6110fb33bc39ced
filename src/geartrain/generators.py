"""Global generators of random numbers; the state of torch's, one thread at a time."""

from __future__ import annotations

import random
import threading
from typing import Final

import numpy as np
import torch
from torch import Tensor

_ONE: Final = threading.Lock()


def torch_state() -> Tensor:
    """The state of torch's global generator on the host, uint8.

    torch makes it under a lock of the generator's, and may have to collect garbage meanwhile. If
    that gives up the interpreter to a thread that wants the same lock, both stand still for ever.
    """
    with _ONE:
        return torch.get_rng_state()


def set_torch_state(state: Tensor) -> None:
    """Set torch's global generator on the host, uint8, as ``torch_state`` has told it."""
    with _ONE:
        torch.set_rng_state(state)


def seed_all(seed: int) -> None:
    """Seed those of torch, of Python and of NumPy, which takes 32 bits.

    Workers are forks of one process: else all of them would draw the same numbers.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
