"""Where the random number generators stand, as JSON.

    random_state_to_json() ─► document ─► load_random_state(document): the same numbers again

Covers the global generators of torch (CPU, and CUDA once it is in use), numpy and Python, and any
generators of your own, by name.

Some of these libraries believe a state that says where in a block of numbers the next one lies, and
read there. So states are tried on generators of no use, and looked at, before any is set.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch

from geartrain.codec import Json, decode, encode, require_like
from geartrain.errors import CheckpointError
from geartrain.generators import set_torch_state, torch_state

RandomSource: TypeAlias = torch.Generator | np.random.Generator | random.Random

_NONE: Final[Mapping[str, RandomSource]] = MappingProxyType({})


def random_state_to_json(generators: Mapping[str, RandomSource] = _NONE) -> dict[str, Json]:
    """The states of the global generators and of these; some 15 kB of JSON, no tensors.

    Args:
        generators: Own generators by name. numpy's may use any of its bit generators.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch left it so
    cuda = torch.cuda.get_rng_state_all() if used else []
    return {
        "torch": encode(torch_state().numpy(), "torch"),
        "cuda": [encode(state.numpy(), "cuda") for state in cuda],
        "numpy": encode(np.random.get_state(legacy=False), "numpy"),
        "python": encode(random.getstate(), "python"),
        "own": {name: _state(generator, name) for name, generator in generators.items()},
    }


@final
@dataclass(frozen=True, slots=True)
class RandomState:
    """What ``check_random_state`` has found in order.

    Args:
        steps: Sets a generator; and the state to set it to.
    """

    steps: Sequence[tuple[Callable[[Any], object], Any]]

    def set(self) -> None:
        """Set the generators."""
        for setter, state in self.steps:
            setter(state)


def load_random_state(
    document: Mapping[str, Json], generators: Mapping[str, RandomSource] = _NONE
) -> None:
    """Set the global generators and these, in place, to where they stood; all or none.

    CUDA states are set if this process sees as many CUDA devices as there are states, and are
    otherwise left out: a run that moves to other devices draws other numbers there anyway.

    Raises:
        CheckpointError: A state is missing, damaged, or that of another kind of generator.
    """
    check_random_state(document, generators).set()


def check_random_state(
    document: Mapping[str, Json], generators: Mapping[str, RandomSource] = _NONE
) -> RandomState:
    """The states that ``load_random_state`` would set; nothing is changed.

    Raises:
        CheckpointError: A state is missing, damaged, or that of another kind of generator.
    """
    own, cuda = document.get("own"), document.get("cuda")
    if not isinstance(own, Mapping) or not isinstance(cuda, list):
        raise CheckpointError(
            "random generators: expected an object of generators of one's own and a list of CUDA's "
            f"beside the others, found a {type(own).__name__} and a {type(cuda).__name__}; use the "
            "document as it was written"
        )
    steps = [_checked(name, own.get(name), generators[name]) for name in generators]
    steps += [
        (set_torch_state, _tried("torch", document.get("torch"), _torch_state("cpu"))),
        (np.random.set_state, _tried("numpy", document.get("numpy"), _numpy_global)),
        (random.setstate, _tried("python", document.get("python"), _python_state)),
    ]
    here = len(cuda) == torch.cuda.device_count()
    states = [
        _tried("cuda", each, _torch_state(f"cuda:{k}") if here else _tensor)
        for k, each in enumerate(cuda)
    ]
    if states and here:
        steps.append((torch.cuda.set_rng_state_all, states))
    return RandomState(steps)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn from the global generators meanwhile, they stand afterwards as before."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch left it so
    cuda = torch.cuda.get_rng_state_all() if on_cuda else []
    host, numpy_state = torch_state(), np.random.get_state(legacy=False)
    python_state = random.getstate()
    try:
        yield
    finally:
        set_torch_state(host)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def _state(generator: RandomSource, name: str) -> Json:
    match generator:
        case torch.Generator():
            return encode(generator.get_state().numpy(), name)
        case np.random.Generator():
            return encode(generator.bit_generator.state, name)
        case random.Random():
            return encode(generator.getstate(), name)
    raise TypeError(
        f"generator '{name}' is a {type(generator).__name__}; expected a torch.Generator, "
        f"numpy.random.Generator or random.Random"
    )


def _checked(
    name: str, document: Json, generator: RandomSource
) -> tuple[Callable[[Any], object], Any]:
    match generator:
        case torch.Generator():
            state = _tried(name, document, _torch_state(generator.device))
            return generator.set_state, state
        case np.random.Generator():
            bits: Any = generator.bit_generator
            state = _tried(name, document, lambda s: _numpy_state(s, type(bits)(), name))
            return lambda s: setattr(bits, "state", s), state
        case random.Random():
            return generator.setstate, _tried(name, document, _python_state)


def _tried(name: str, document: Json, trial: Callable[[Any], Any]) -> Any:
    """What the trial makes of the state.

    Raises:
        CheckpointError: It refuses it.
    """
    state = decode(document, name)
    try:
        return trial(state)
    except (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(
            f"random generator '{name}': a state of type {type(state).__name__} cannot be set "
            f"({error}); expected one that random_state_to_json took from such a generator. Pass "
            f"the generators under the names and of the kinds that were saved"
        ) from error


def _tensor(state: Any) -> torch.Tensor:
    if not isinstance(state, np.ndarray) or state.dtype != np.uint8 or state.ndim != 1:
        raise TypeError("it is no array of bytes")
    return torch.from_numpy(state)


def _torch_state(device: torch.device | str) -> Callable[[Any], torch.Tensor]:
    def trial(state: Any) -> torch.Tensor:
        found = _tensor(state)
        torch.Generator(device=device).set_state(found)
        if torch.device(device).type == "cpu":
            _require_mersenne(found)
        return found

    return trial


def _require_mersenne(state: torch.Tensor) -> None:
    """Numbers that are left in the block and the place of the next make a block: torch reads there.

    The layout is that of torch's CPU generator; of one that is laid out otherwise nothing is said.
    """
    new = torch.Generator().get_state()
    if _LAYOUT.unpack_from(bytes(new[: _LAYOUT.size].numpy()))[1:] != (1, 1, 0):
        return
    _, left, _, place = _LAYOUT.unpack_from(bytes(state[: _LAYOUT.size].numpy()))
    if (left, place) != (1, 0) and not (1 <= left <= _BLOCK and left + place == _BLOCK + 1):
        raise ValueError(f"number {place} of a block with {left} left is none of its {_BLOCK}")


_LAYOUT: Final = struct.Struct("=QiiQ")  # seed, left, seeded, next
_BLOCK: Final = 624  # numbers of the Mersenne twister


def _numpy_global(state: Any) -> Any:
    own: Any = np.random.get_state(legacy=False)
    require_like(state, own, "numpy")
    if own["bit_generator"] == "MT19937":
        np.random.RandomState().set_state(state)
    _require_places(state)
    return state


def _numpy_state(state: Any, bits: Any, name: str) -> Any:
    own = bits.state
    bits.state = state
    require_like(state, own, name)
    _require_places(state)
    return state


def _require_places(state: Any) -> None:
    """numpy reads at these places of its blocks without a look."""
    for key, value in state.items():
        if isinstance(value, dict):
            _require_places(value)
        elif key in _PLACES and not 0 <= value <= _PLACES[key]:
            raise ValueError(f"{key} is {value}, expected 0 to {_PLACES[key]}")


_PLACES: Final = {"pos": _BLOCK, "buffer_pos": 4}  # MT19937, Philox


def _python_state(state: Any) -> Any:
    random.Random().setstate(state)
    left = state[2]
    if left is not None and not (isinstance(left, float) and math.isfinite(left)):
        raise ValueError(f"the number that is left of a pair is {left!r:.40}")
    return state
