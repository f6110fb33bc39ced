"""Row kernels: a forward that returns what its backward needs, row by row.

    forward   inputs ─► outputs, residuals          every tensor has n rows
                                 │ kept in the row store of a node
    backward  gradients, residuals of any n' rows ─► input gradients;
              parameter gradients are added to the part's GradientSum

Autograd ties the rows of one forward together. A kernel does not: the rows of its backward may
come from many forwards, in any order, some of them and not others, and no forward runs twice.
The price is that a kernel is written by hand; a module without one is run again from its inputs,
or, where ``keep="activations"`` asks for it, has one derived from a trace.

What the gradient means when weights changed in between: the residuals are those of the forward's
weights, the backward multiplies by the weights of now (the *mixed* view). For one affine map that
is the gradient at today's weights; for unchanged weights it is autograd's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import IntArray
from geartrain.native.rows import take
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside

M = TypeVar("M", bound=nn.Module)


class AbstractKernel(ABC):
    """What computes a node, whatever it is made of; nodes ask for nothing else.

    Row kernels, bundle kernels, casts around another kernel, and running a module again are all of
    this. It is stateless but for the module that it belongs to.
    """

    looks_up: bool = False
    """Whether it reads parameters whose gradients are rows in no other way than ``look_up``."""

    room_for: int | None = None
    """Number of the residual that ``run`` writes into ``room``; None: no such."""

    keeps_rows: bool = True
    """Whether residuals have a row for each row, so that a node can keep them until the gradient
    comes. If not, the kernel is only used where the loss is in the same node."""

    @abstractmethod
    def run(
        self, inputs: tuple[Tensor, ...], inside: Inside | None, room: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Outputs and residuals of n rows; nothing is remembered.

        Args:
            inputs: The module's inputs, leading dimension n.
            inside: Of the bundles, where the call looks inside them.
            room: Contiguous memory of the shape of residual ``room_for``, to be returned as it.
        """

    @abstractmethod
    def answer(
        self,
        gradients: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None,
        *,
        wanted: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs; those of the parameters are added up.

        Args:
            gradients: One per output; None is zero.
            kept: Residuals of many rows, or those of these rows.
            rows: int64, which of those that are kept, in the gradients' order; None: all of them.
            into: Gets the gradients of the parameters that require one.
            inside: Of these bundles, where the call looks inside them.
            wanted: Whether anybody reads the gradients of the inputs; else they may all be None.
        """


class AbstractRowKernel(AbstractKernel):
    """Forward that returns row-indexed residuals, backward that needs no recompute.

    Stateless but for the module it belongs to: the parameters are looked up in the module at
    each call, so that a kernel made once stays right when weights are replaced.

    Both methods run under ``no_grad`` and mutate nothing that they are given. Their results may
    share memory with what they are given; whoever holds such tensors copies before writing.
    """

    @abstractmethod
    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run the module on n rows.

        Args:
            inputs: The module's inputs, one tensor each, leading dimension n (also 0).

        Returns:
            Outputs and residuals, each a tuple of tensors with leading dimension n. Their number,
            trailing shapes and dtypes are the same in every call with inputs of the same kind.
            Residuals may be inputs or outputs themselves.
        """

    def run(
        self, inputs: tuple[Tensor, ...], inside: Inside | None, room: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        with torch.no_grad():
            if room is None:
                return self.forward(*inputs)
            return self.forward_with_room(room, *inputs)

    def answer(
        self,
        gradients: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None,
        *,
        wanted: bool = True,
    ) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            if rows is None:
                return self.backward(gradients, kept, into)
            return self.backward_rows(gradients, kept, rows, into)

    def forward_with_room(
        self, room: Tensor, *inputs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """``forward`` that makes residual ``room_for`` in place, so that nobody copies it.

        Args:
            room: Contiguous memory of that residual's shape; returned as the residual itself.
            inputs: As for ``forward``.
        """
        outputs, residuals = self.forward(*inputs)
        if self.room_for is None:
            return outputs, residuals
        room.copy_(residuals[self.room_for])
        at = self.room_for
        return outputs, (*residuals[:at], room, *residuals[at + 1 :])

    @abstractmethod
    def backward(
        self,
        gradients: tuple[Tensor | None, ...],
        residuals: tuple[Tensor, ...],
        into: GradientSum,
    ) -> tuple[Tensor | None, ...]:
        """Apply the vector-Jacobian product to n' rows.

        Args:
            gradients: One per output, leading dimension n'; None is zero. ``into`` may keep them
                until it is taken from, so nobody writes into them afterwards.
            residuals: The residuals of those rows, in the gradients' order, gathered from any
                forwards.
            into: Gets the gradients of the parameters that require one; frozen ones are skipped.

        Returns:
            One gradient per input; None for an integer input and for one that got nothing.
        """

    def backward_rows(
        self,
        gradients: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        rows: IntArray,
        into: GradientSum,
    ) -> tuple[Tensor | None, ...]:
        """``backward`` whose residuals still lie in the store; override it to read them there.

        Args:
            gradients: As for ``backward``.
            kept: The residuals of all rows that wait, and memory without meaning between them.
            rows: int64 ``(n',)``, where those of the gradients lie.
            into: As for ``backward``.
        """
        return self.backward(gradients, take(kept, rows), into)

    def for_bf16(self) -> AbstractRowKernel | None:
        """The kernel of this module for rows in bfloat16 and weights in float32.

        Its float outputs, and the gradients that it returns, are bfloat16. None: it has none, and
        works in float32 between two casts. A kernel whose products are ``affine`` and ``times``,
        and whose other steps take any dtype, returns itself.
        """
        return None


def register_kernel(kind: type[M], factory: Callable[[M], AbstractRowKernel | None]) -> None:
    """Let ``kernel_of`` answer for modules whose type is exactly ``kind``.

    For modules that are not yours to add a ``row_kernel`` method to. A second registration replaces
    the first.

    Args:
        kind: The module class; its subclasses are not meant, they may compute something else.
        factory: Gets the module; answers None if this one has options that the kernel lacks.
    """
    _FACTORIES[kind] = cast("Callable[[nn.Module], AbstractRowKernel | None]", factory)


def kernel_of(module: nn.Module) -> AbstractRowKernel | None:
    """The kernel that computes what ``module`` computes, or None: then run the module again.

    Asked first is the module's own ``row_kernel()``, then the table that ``register_kernel``
    fills (``geartrain.nn`` registers the common torch modules) by exact type. None is the answer
    for whatever a kernel would pass over in silence: hooks on the module, on one inside it or on a
    parameter, and a ``forward`` that is overridden below the class whose kernel it would be. Asked
    when a graph is built: what is hooked or overridden later is not seen.

    Raises:
        GraphError: ``row_kernel()`` gives something else.
    """
    if not may_have_kernel(module):
        return None
    if hasattr(module, "row_kernel"):
        kernel = own_kernel(module, "row_kernel")
        if kernel is not None and not isinstance(kernel, AbstractRowKernel):
            raise GraphError(
                f"{type(module).__name__}.row_kernel() returned {type(kernel).__name__}; expected "
                f"an AbstractRowKernel, or None to have the module run again"
            )
        return kernel
    factory = _FACTORIES.get(type(module))
    return None if factory is None else factory(module)


def register_derivation(derive: Callable[[str, Callable[..., Any]], AbstractRowKernel]) -> None:
    """Let ``derived_kernel`` answer; ``geartrain.nn`` registers the one that traces."""
    _DERIVATIONS[:] = [derive]


def derived_kernel(name: str, function: Callable[..., Any]) -> AbstractRowKernel:
    """A kernel that nobody wrote, for the module or function of the node ``name``."""
    (derive,) = _DERIVATIONS
    return derive(name, function)


def may_have_kernel(module: nn.Module) -> bool:
    """Whether nothing hangs on the module that a kernel would pass over: a hook, a new forward."""
    return not any(_has_hooks(each) or "forward" in vars(each) for each in module.modules())


def own_kernel(module: nn.Module, method: str) -> object:
    """What the module's method gives; None if its ``forward`` is overridden below the method."""
    order = type(module).__mro__
    kernel_at = next((k for k, c in enumerate(order) if method in vars(c)), 0)
    forward_at = next(k for k, c in enumerate(order) if "forward" in vars(c))
    if forward_at < kernel_at:
        return None
    return cast("Callable[[], object]", getattr(module, method))()


_FACTORIES: dict[type[nn.Module], Callable[[nn.Module], AbstractRowKernel | None]] = {}
_DERIVATIONS: list[Callable[[str, Callable[..., Any]], AbstractRowKernel]] = []


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(p._backward_hooks for p in module.parameters(recurse=False))
    )
