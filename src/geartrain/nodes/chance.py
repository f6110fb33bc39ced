"""Random numbers of a forward, to be used again when the module runs again.

    with Remembered() as chance: y = f(x; θ then)       what is drawn is kept
    with chance.repeated():      y = f(x; θ now)        and comes again, in the same order
    with generators_kept(...):   f(some rows)           nobody sees that something was drawn
    with Watched() as chance:    f(some rows)           chance.drew: whether something is drawn
    with Evened():               f(some rows)           all that is drawn is the same number
    row_seeds(n)                 a number for each row, of which C makes what is drawn for it

A generator that is set back would serve one thread only: workers draw from the same one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import GraphError
from geartrain.generators import set_torch_state, torch_state
from geartrain.nodes.uncompiled import UncompiledMode

_ATEN: Final = torch.ops.aten
_DROPOUT: Final = _ATEN.native_dropout.default
_FILLING: Final = frozenset(
    (
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
    )
)
_MAKING: Final = frozenset(
    ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like")
)
"""Operators of whose tensors only the shapes matter."""
_CHOOSING: Final = frozenset(("bernoulli", "binomial", "multinomial", "normal", "poisson"))
"""Operators that make a tensor of chances, or of means, that are given."""
_EVEN: Final = 0.75
"""What is drawn where nothing is left to chance: neither of the ends of what is uniform, and above
the usual shares of dropout."""
_LOOKING: Final = frozenset((_ATEN._local_scalar_dense.default, _ATEN.equal.default))
_SEEDS: Final = 2**63 - 1


def row_seeds(n: int) -> Tensor:
    """A seed for each of n rows, int64 ``(n,)``, from torch's default generator of the host.

    Of n rows and then of m come the same as of n + m at once, so calls may be made one by one or
    many at a time, in their order.
    """
    return torch.randint(_SEEDS, (n,))


@contextmanager
def generators_kept(device: torch.device | None) -> Iterator[None]:
    """The global generators stand afterwards as before.

    Args:
        device: Whose generator is kept beside those of the host; None: the host's alone.
    """
    host, numbers, python = torch_state(), np.random.get_state(), random.getstate()
    cuda = device is not None and device.type == "cuda"
    there = torch.cuda.get_rng_state(device) if device is not None and cuda else None
    try:
        yield
    finally:
        set_torch_state(host)
        np.random.set_state(numbers)
        random.setstate(python)
        if there is not None and device is not None:
            torch.cuda.set_rng_state(there, device)


@final
class Remembered(UncompiledMode):
    """Keeps what operators with a seed draw while it is entered; a mode is of one thread.

    Raises:
        GraphError: An operator draws in a way that cannot be repeated for other values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[Tensor] = []

    def repeated(self) -> _Repeated:
        """A mode in which the same numbers come again."""
        return _Repeated(self.drawn)

    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(x.nelement() * x.element_size() for x in self.drawn)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if _draws(function, args, kwargs or {}):
            self.drawn.append(result[1] if function is _DROPOUT else result.clone())
        return result


@final
class Watched(UncompiledMode):
    """Sees whether anything is drawn while it is entered, ``drew``, or a value looked at by Python,
    ``looked``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = self.looked = False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.looked = self.looked or function in _LOOKING
        try:
            self.drew = self.drew or _draws(function, args, kwargs or {})
        except GraphError:  # it draws, and in a way that cannot be repeated
            self.drew = True
        return function(*args, **(kwargs or {}))


@final
class Evened(UncompiledMode):
    """Leaves nothing to chance while it is entered, so that calls with different rows compare.

    Whatever is drawn is one number for all rows, in every call: 1 where it says what is kept (as in
    dropout), 0 for integers, 0.75 for others. What cannot be told from a tensor of numbers that
    were drawn, such as attention with dropout inside a kernel, is as ever.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        try:
            drawn = _draws(function, args, kwargs or {})
        except GraphError:  # it draws by what it is given
            drawn = _base(function) in _CHOOSING or function is _ATEN.bernoulli_.Tensor
        if not drawn:
            return result
        if function is _DROPOUT:
            return args[0].clone(), torch.ones_like(result[1])
        if _base(function).startswith("bernoulli"):
            return result.fill_(1)
        return result.fill_(_EVEN if result.is_floating_point() else 0)


@final
class _Repeated(UncompiledMode):
    """Gives what was drawn, in order."""

    def __init__(self, drawn: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn: Iterator[Tensor] = iter(drawn)

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _draws(function, args, kwargs or {}):
            return function(*args, **(kwargs or {}))
        drawn = next(self._drawn, None)
        if drawn is None:
            raise GraphError(
                f"{function} draws random numbers in the second run of a module that it did not "
                "draw in the first; a module under the view Recomputed() draws the same each time: "
                "use another view"
            )
        if function is _DROPOUT:
            x, p = args[0], args[1]
            return x * drawn * (1 / (1 - p) if p < 1 else 0.0), drawn
        return args[0].copy_(drawn) if _fills(function) else drawn.clone()


def _draws(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers.

    Raises:
        GraphError: It does, and they depend on the values of its arguments.
    """
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    if function is _DROPOUT:
        return args[2] is not False
    if _fills(function) or _base(function) in _MAKING or function is _ATEN.bernoulli.p:
        return True
    if function is _ATEN._fused_sdp_choice.default or _without_dropout(function, args, kwargs):
        return False
    raise GraphError(
        f"{function} draws random numbers that depend on its input, so they cannot be drawn again "
        "for other weights; use another view than Recomputed(), such as Stashed()"
    )


def _fills(function: Any) -> bool:
    """Whether it fills its first argument, whatever was in it."""
    return _base(function) in _FILLING and function is not _ATEN.bernoulli_.Tensor


def _base(function: Any) -> str:
    name: str = function.name()
    return name.removeprefix("aten::").partition(".")[0]


def _without_dropout(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether its share of dropout is zero, as in attention without dropout."""
    for i, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p":
            given = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False
