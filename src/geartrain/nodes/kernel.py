"""Kernels: a forward that returns what its backward needs, row by row.

    forward   inputs ─► outputs, residuals          every tensor has n rows
                                 │ kept in the row store of a node
    backward  gradients, residuals of any n' rows ─► input gradients;
              parameter gradients are added to the part's GradientSum

Autograd ties the rows of one forward together. A kernel does not: the rows of its backward may
come from many forwards, in any order, some of them and not others, and no forward runs twice.
The price is that a kernel is written by hand; a module without one is run again from its inputs,
or, where ``keep="activations"`` asks for it, has one derived from a trace.

A module that looks inside bundles has a kernel too, which gets rows of whole bundles and their
``Inside``. A bundle is never cut, so such a kernel may mix its rows (pass messages along its
edges); it may not mix bundles, as those of one backward come from many forwards.

What the gradient means when weights changed in between: the residuals are those of the forward's
weights, the backward multiplies by the weights of now (the *mixed* view). For one affine map that
is the gradient at today's weights; for unchanged weights it is autograd's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar, cast

from torch import Tensor, nn

from geartrain.errors import GraphError, ProtocolError
from geartrain.frames.counted import sliced
from geartrain.frames.message import Gradient, IntArray, Payload
from geartrain.kinds import require_class, require_kind
from geartrain.native.calls import CallForm
from geartrain.native.rows import take
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.inside import Inside

M = TypeVar("M", bound=nn.Module)


class AbstractKernel(ABC):
    """What computes a node: forward that returns residuals, backward that needs no more than those.

    Kernels of rows and of bundles, derived ones, casts around another kernel, and running a module
    again are all of this. It is stateless but for the module that it belongs to: parameters are
    looked up in the module at each call, so that a kernel made once stays right when weights are
    replaced.

    Both methods run under ``no_grad`` and mutate nothing that they are given, but for ``room``.
    Their results may share memory with what they are given; whoever holds such tensors copies
    before writing.
    """

    residuals: int | None = None
    """How many tensors ``forward`` keeps, for as few inputs as it takes; None: unknown. A sequence
    asks, as it tells the residuals of its kernels apart by their number."""

    keeps: Literal["input", "output", "own"] = "own"
    """Whether what it keeps is its one input, or its one output: neighbours in a sequence keep such
    a tensor once."""

    looks_up: bool = False
    """Whether it reads parameters whose gradients are rows in no other way than ``look_up``."""

    room_for: int | None = None
    """Number of the residual that ``forward`` writes into ``room``; None: no such."""

    remembers: bool = False
    """Whether the rows of one forward, if they come back as they left, are answered for less."""

    apart: bool = False
    """Whether the gradients of its parameters are products and sums of rows, or rows of tables: one
    row of the call makes one, or some side by side. Rows of several updates may then come in one
    backward."""

    derivable: bool = False
    """Whether a kernel that is derived from the module may take its place where C makes many calls
    in one: it is written by hand for speed alone."""

    traces: bool = False
    """Whether its first forward with rows of some kind finds out how they are computed; until then
    ``for_rows`` does not know it."""

    keeps_rows: bool = True
    """Whether residuals have a row for each row, so that a node can keep them until the gradient
    comes. If not, the kernel is only used where the loss is in the same node."""

    @abstractmethod
    def forward(
        self, inputs: Payload, inside: Inside | None = None, room: Tensor | None = None
    ) -> tuple[Payload, Payload]:
        """Run the module on n rows (also 0); nothing is remembered.

        Args:
            inputs: The module's inputs, leading dimension n.
            inside: Of the bundles, where the call looks inside them; else None.
            room: Contiguous memory of the shape of residual ``room_for``, to be returned as it.

        Returns:
            Outputs with n rows, or one for each bundle if the node pools; and residuals with n
            rows. Their number, trailing shapes and dtypes are the same in every call with inputs of
            the same kind. Residuals may be inputs or outputs themselves.
        """

    def evaluate(self, inputs: Payload, inside: Inside | None = None) -> Payload:
        """The outputs, where no gradient will come."""
        return self.forward(inputs, inside)[0]

    @abstractmethod
    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        rows: IntArray | None,
        into: GradientSum,
        inside: Inside | None = None,
        *,
        wanted: bool = True,
    ) -> Gradient:
        """Apply the vector-Jacobian product to n' rows.

        Args:
            gradients: One per output, leading dimension n'; None is zero. ``into`` may keep them
                until it is taken from, so nobody writes into them afterwards.
            kept: Residuals of all rows that wait, from any forwards, with memory without meaning
                between them; or only those of these rows, in the gradients' order.
            rows: int64 ``(n',)``, which rows of ``kept`` they are, in the gradients' order; None:
                all of them. ``gathered`` makes that one case; a kernel may spare itself the copy.
            into: Gets the gradients of the parameters that require one; frozen ones are skipped.
            inside: Of these bundles, where the call looks inside them; else None.
            wanted: Whether anybody reads the gradients of the inputs; else they may all be None.

        Returns:
            One gradient per input; None for an integer input and for one that got nothing.
        """

    def for_rows(self, inputs: Payload) -> AbstractKernel | None:
        """What computes rows of this kind as the module is now; None: it is not known yet."""
        return self

    def begin_anew(self) -> bool:
        """A fit begins: be as a kernel that is made now; False: it has to be made."""
        return False

    def listed(self, rows: int) -> CallForm | None:
        """How many calls of it are made in one, from buffers to buffers; None: they are not.

        Args:
            rows: That are expected in all of them.
        """
        return None

    def beside(self, others: Sequence[AbstractKernel]) -> AbstractKernels | None:
        """What computes rows of this kernel and of others in one call; None: each has its own."""
        return None

    def for_bf16(self) -> AbstractKernel | None:
        """The kernel of this module for rows in bfloat16 and weights in float32.

        Its float outputs, and the gradients that it returns, are bfloat16. None: it has none, and
        what is ``rounded`` works in float32 between two casts. A kernel whose products are
        ``affine`` and ``times``, and whose other steps take any dtype, returns itself.
        """
        return None

    def rounded(self) -> AbstractKernel:
        """The kernel for rows in float32 whose products may round what they multiply to bfloat16.

        It stands between casts where rows travel in bfloat16. Itself will do.
        """
        return self


class AbstractKernels(ABC):
    """Several kernels whose rows lie side by side: those of the first, then those of the next.

    What Python does around a kernel (arguments checked, memory found) is done once for all.
    """

    @abstractmethod
    def forward(self, inputs: Payload, sizes: Sequence[int]) -> tuple[Payload, Payload]:
        """Outputs and residuals, as ``AbstractKernel.forward`` of each one's rows gives them.

        Args:
            inputs: Of all rows.
            sizes: Rows of each kernel.
        """

    @abstractmethod
    def backward(
        self,
        gradients: Gradient,
        kept: Payload,
        sizes: Sequence[int],
        into: Sequence[GradientSum],
    ) -> Gradient:
        """The gradients of the inputs.

        Args:
            gradients: One per output, of all rows; None is zero.
            kept: Residuals of all rows.
            sizes: Rows of each kernel.
            into: Gets the gradients of the parameters, by kernel.
        """


def gathered(kept: Payload, rows: IntArray | None) -> Payload:
    """The residuals of the rows that came back, in their order; None: ``kept`` are those."""
    return kept if rows is None else take(kept, rows)


def lying(kept: Payload, rows: IntArray | None) -> Payload | None:
    """The same where they lie, for who is done with them when it returns; None: they are no
    neighbours."""
    if rows is None:
        return kept
    at = sliced(rows)
    return tuple([x[at] for x in kept]) if isinstance(at, slice) else None


def require_counts(name: str, kernels: Sequence[AbstractKernel]) -> tuple[int | None, ...]:
    """How many residuals each kernel has; of one at most it is not known.

    Raises:
        GraphError: Of two of them.
    """
    counts = tuple(kernel.residuals for kernel in kernels)
    if counts.count(None) > 1:
        silent = [
            type(kernel).__name__
            for kernel, count in zip(kernels, counts, strict=True)
            if count is None
        ]
        raise GraphError(
            f"{name}: {' and '.join(silent)} do not say how many residuals they keep; give such a "
            "kernel the attribute residuals"
        )
    return counts


def parted(name: str, kept: Payload, counts: Sequence[int | None]) -> list[Payload]:
    """Residuals of several kernels, which lie side by side, by kernel.

    Raises:
        ProtocolError: There are fewer.
    """
    left = len(kept) - sum(count for count in counts if count is not None)
    if left < 0:
        raise ProtocolError(f"{name}: gradients came before any row was sent forward")
    tensors = iter(kept)
    return [tuple(islice(tensors, left if count is None else count)) for count in counts]


def register_kernel(kind: type[M], factory: Callable[[M], AbstractKernel | None]) -> None:
    """Let ``kernel_of`` answer for modules whose type is exactly ``kind``.

    For modules that are not yours to add a ``row_kernel`` method to. A second registration replaces
    the first.

    Args:
        kind: The module class; its subclasses are not meant, they may compute something else.
        factory: Gets the module; answers None if this one has options that the kernel lacks.
    """
    require_class("register_kernel", kind)
    wanted = "a function of a module that gives a kernel or None"
    require_kind("register_kernel", Callable, wanted, factory=factory)
    _FACTORIES[kind] = cast("Callable[[nn.Module], AbstractKernel | None]", factory)


def kernel_of(module: nn.Module) -> AbstractKernel | None:
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
        return _own_kernel(module, "row_kernel")
    factory = _FACTORIES.get(type(module))
    return None if factory is None else factory(module)


def bundle_kernel_of(module: nn.Module) -> AbstractKernel | None:
    """What the module's own ``bundle_kernel()`` gives, or None: then run the module again.

    None is the answer too where a kernel would pass something over, as for ``kernel_of``.

    Raises:
        GraphError: It gives something else.
    """
    if not may_have_kernel(module) or not hasattr(module, "bundle_kernel"):
        return None
    return _own_kernel(module, "bundle_kernel")


Derive: TypeAlias = Callable[[str, Callable[..., Any], Callable[[str], None]], AbstractKernel]
"""Makes a kernel nobody wrote, from the node's name, its function, and whom to tell of it."""


def register_derivation(derive: Derive) -> None:
    """Let ``derived_kernel`` answer; ``geartrain.nn`` registers the one that traces."""
    _DERIVATIONS[:] = [derive]


def derived_kernel(
    name: str, function: Callable[..., Any], tell: Callable[[str], None] = lambda _: None
) -> AbstractKernel:
    """A kernel that nobody wrote.

    Args:
        name: The node.
        function: Its module or function.
        tell: Is told what has come of it.
    """
    (derive,) = _DERIVATIONS
    return derive(name, function, tell)


def may_have_kernel(module: nn.Module) -> bool:
    """Whether nothing hangs on the module that a kernel would pass over: a hook, a new forward."""
    return not any(_has_hooks(each) or "forward" in vars(each) for each in modules_in(module))


def modules_in(module: nn.Module) -> list[nn.Module]:
    """A module and all inside it, each once, in the order of ``module.modules()``: torch's
    generators, one inside of another, take three times as long, and every fit asks modules for a
    dozen things."""
    if not module._modules:
        return [module]
    found: list[nn.Module] = []
    seen: set[int] = set()
    ahead = [module]
    while ahead:
        each = ahead.pop()
        if id(each) not in seen:
            seen.add(id(each))
            found.append(each)
            if each._modules:
                inner = [one for one in each._modules.values() if one is not None]
                ahead += reversed(inner)
    return found


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """``[*module.parameters()]``, found as ``modules_in`` finds modules; whoever has a
    ``parameters`` of its own is asked."""
    kind = type(module)
    plain = kind.parameters is nn.Module.parameters
    if not plain or kind.named_parameters is not nn.Module.named_parameters:
        return [*module.parameters()]
    found: dict[int, nn.Parameter] = {}
    for each in modules_in(module):
        for parameter in each._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
    return [*found.values()]


def _own_kernel(module: nn.Module, method: str) -> AbstractKernel | None:
    """What the module's method gives; None if its ``forward`` is overridden below the method."""
    order = type(module).__mro__
    kernel_at = next((k for k, c in enumerate(order) if method in vars(c)), 0)
    forward_at = next(k for k, c in enumerate(order) if "forward" in vars(c))
    if forward_at < kernel_at:
        return None
    kernel = getattr(module, method)()
    if kernel is not None and not isinstance(kernel, AbstractKernel):
        raise GraphError(
            f"{type(module).__name__}.{method}() returned {type(kernel).__name__}; expected an "
            "AbstractKernel, or None to have the module run again"
        )
    return kernel


_FACTORIES: dict[type[nn.Module], Callable[[nn.Module], AbstractKernel | None]] = {}
_DERIVATIONS: list[Derive] = []


def _has_hooks(module: nn.Module) -> bool:
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return True
    for parameter in module._parameters.values():
        if parameter is not None and parameter._backward_hooks:
            return True
    return False
