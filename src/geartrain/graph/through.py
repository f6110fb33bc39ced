"""The operator that runs a module: its checks, its dry run, and which node keeps what.

payload of meta tensors ─► module on meta ─► payload of meta tensors, or a GraphError
keep ─► RowNode with a kernel, RowNode that runs again, GraphNode; ReadoutNode with a loss inside
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.frame import Schema
from geartrain.frames.precision import Precision
from geartrain.graph.dry_run import DryRun, refuse_dtype
from geartrain.graph.imagined import (
    edge_unknown,
    hint,
    imagined,
    imagined_inside,
    on_meta,
    stays_in_evaluation,
)
from geartrain.graph.memory import Holding, sample_mask
from geartrain.graph.operator import (
    ROWS,
    AbstractOperator,
    Keep,
    Made,
    PartLike,
    Spec,
    describe,
    readable,
)
from geartrain.graph.padded import tell_of_padding
from geartrain.graph.sample_rows import SampleRows
from geartrain.graph.use import AbstractUse
from geartrain.nodes.call import Call
from geartrain.nodes.casts import Cast, around
from geartrain.nodes.choice import UNDECIDED, AbstractChoice, Experience, choice_of
from geartrain.nodes.held import Held
from geartrain.nodes.kernel import (
    AbstractKernel,
    bundle_kernel_of,
    derived_kernel,
    kernel_of,
    modules_in,
    parameters_of,
)
from geartrain.nodes.loop.picking import known_picks
from geartrain.nodes.loss import Objective
from geartrain.nodes.memory import AbstractMemoryKernel, ReadAgain, ReadNode, memory_kernel_of
from geartrain.nodes.method import called_by, weights_of
from geartrain.nodes.node import AbstractNode, Place
from geartrain.nodes.payload import Recompute, RowNode
from geartrain.nodes.ragged import AbstractRaggedChoice, RaggedModule, ragged_choice_of
from geartrain.nodes.readout import ReadoutNode
from geartrain.nodes.remembering import Remembering, RememberingRead
from geartrain.nodes.stage import GraphNode
from geartrain.nodes.weights import AbstractWeights


@final
class Through(AbstractOperator):
    """Run a module or a function on the rows."""

    kind = "through"

    def __init__(
        self,
        name: str,
        source: tuple[AbstractOperator, int],
        function: Callable[..., Any],
        part: PartLike | None,
        keep: Keep,
        read: Sequence[str],
        inside: bool,
        pool: bool,
        take: tuple[int, ...] | None = None,
        alone: bool = False,
        use: AbstractUse | None = None,
        memory: Holding | None = None,
    ) -> None:
        super().__init__(name, [[source]])
        self.memory = memory
        self.every_vertex = False
        """Whether each row goes to all vertices of its instance, as a shape knows that makes it."""
        self.function, self.part, self.keep, self.use = function, part, keep, use
        self.experience = Experience()
        """What its nodes have done under ``keep="auto"``; that of all its copies."""
        if use is not None:
            self.ways = use.ways
            if keep != "graph":
                raise GraphError(
                    f"'{name}': {use.detail()} wants autograd's graph of whole messages, but keep "
                    f"is {keep!r}; use keep='graph', with minibatches as bundles"
                )
        together = keep == "graph" or alone or (pool and not inside)
        apart = not (inside or pool or alone or memory is not None)
        masks = apart or (inside and not alone and memory is None)
        kept: Keep = keep if masks or keep != "auto" else "inputs"  # no mask is kept there
        self.dry_run = DryRun(name, called_by(function), mixes=together, keep=kept)
        self.call = Call(function, tuple(read), inside, pool, take, alone, self.dry_run)

    def with_function(self, function: Callable[..., Any]) -> Through:
        """The same node around another function: a copy's own module."""
        if function is self.function:
            return self
        other = copy.copy(self)
        other.dry_run = self.dry_run.again() if self.dry_run.clings else self.dry_run
        other.function = function
        other.call = replace(self.call, function=function, dry_run=other.dry_run)
        return other

    @property
    def module(self) -> nn.Module | None:
        """The module whose weights it uses: its function, or what its method is bound to."""
        return weights_of(self.function)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [] if self.module is None else parameters_of(self.module)

    @property
    def has_parameters(self) -> bool:
        """Whether there are any."""
        return bool(self.parameters)

    @property
    def has_state(self) -> bool:
        """Whether it has parameters, or buffers: then a part keeps them."""
        module = self.module
        return module is not None and bool(parameters_of(module) or [*module.buffers()])

    @property
    def owner(self) -> object:
        """What makes nodes share a part: the part that is named, or the module."""
        return self.part if self.part is not None else self.module

    def detail(self) -> str:
        called = called_by(self.function)
        reads = f", reads {', '.join(self.call.read)}" if self.call.read else ""
        uses = f", {self.use.detail()}" if self.use is not None else ""
        attends = f", attends to {self.memory.name}" if self.memory is not None else ""
        return f"{called}{reads}{attends}{uses}"

    def port_name(self, port: int) -> str:
        return "" if self.use is None else self.use.ports[port]

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        spec = given[0]
        for name in self.call.read:
            readable(self.name, name, spec.columns, schema)
        bundled = spec.bundled and not self.call.pool
        if (self.call.inside or self.call.pool) and not spec.bundled:
            raise GraphError(
                f"'{self.name}': inside and pool are for bundles, but single rows come in; declare "
                "the input with bundle=True, or group(..., how='bundle') first"
            )
        self._refuse_row_mixers()
        payload = None
        held = () if self.memory is None else self.memory.read(self.name, spec)
        if spec.payload is not None and held is not None:
            payload = self._dry_run(spec.payload, schema, held)
        sent = Spec(spec.columns, payload, bundled)
        return [sent] if self.use is None else self.use.specs(self.name, spec, sent)

    def try_out(self, given: Spec, sample_rows: SampleRows, known: Sequence[Tensor | None]) -> None:
        """Run the function on rows that are made up.

        Args:
            given: What comes in.
            sample_rows: Where such rows are.
            known: Of each payload tensor rows of the example, or None.

        Raises:
            GraphError: It uses weights that are not its own, does not take the dtype, or mixes rows
                that may come back apart.
        """
        if given.payload is None:
            return
        self.dry_run.mixes = self.dry_run.mixes or self.written_kernel() is not None
        call, payload = self.call, given.payload
        if self.memory is None:
            self.dry_run.imagine(call, sample_rows.samples(call, payload, known))
            return
        held = self.memory.read(self.name, given)
        if held is None:
            return
        taken = call.taken(len(payload))
        known = [*(known[j] for j in taken), *(None for _ in held[1:]), sample_mask()]
        payload = (*(payload[j] for j in taken), *held)
        call = replace(call, take=None)
        samples = sample_rows.samples(call, payload, known)
        known_by_now = self.dry_run.settled
        self.dry_run.imagine(call, samples)
        if not known_by_now and self.written_kernel() is None:
            which = range(len(taken), len(payload))
            tell_of_padding(self.name, self.detail(), self.function, samples, which)

    def make(
        self,
        place: Place,
        weights: AbstractWeights | None,
        precision: Precision = "full",
        objective: Objective | None = None,
        held: Held | None = None,
    ) -> Made:
        """A fresh node.

        Args:
            place, weights: As for every operator.
            precision: Of the rows.
            objective: Of the loss that alone reads this node and is computed in it; only where
                ``has_kernel``.
            held: The memory that it reads, if it reads one.
        """
        if self.use is not None or self.memory is not None or self.keep == "graph":
            return self._made_together(place, weights, precision, held)
        call, kernel, choice = self.computed(weights, precision, ends=objective is not None)
        if objective is not None:
            return ReadoutNode(place, call, kernel, objective, weights)
        return RowNode(place, call, kernel, weights, choice)

    def _made_together(
        self,
        place: Place,
        weights: AbstractWeights | None,
        precision: Precision,
        held: Held | None,
    ) -> AbstractNode:
        """A node that sees more than rows apart: whole messages, or a memory."""
        call = self.call
        if precision == "bf16":
            call = replace(call, function=Cast(self.function))
        if self.use is not None:
            return self.use.make(place, call, weights)
        if self.memory is None:
            return GraphNode(place, call, weights)
        assert held is not None
        call, kernel, _ = self.computed_with_memory(precision)
        return ReadNode(place, call, kernel, weights, held, place.schema.state[self.memory.column])

    def computed_with_memory(
        self, precision: Precision
    ) -> tuple[Call, AbstractMemoryKernel, RememberingRead | None]:
        """How a module that reads a memory is called, what computes it, and what is derived beside
        that, for C to call where a loop runs whole."""
        call = replace(self.call, dry_run=None)  # what it reads is not made up again
        if precision == "bf16":
            call = replace(call, function=Cast(self.function))
        own = self._memory_kernel() if precision == "full" else None
        columns = len(call.read)
        if own is None and self.keep != "auto":
            return call, ReadAgain(call.function, self.parameters, columns), None
        if own is not None and not own.derivable:
            return call, own, None
        choice, beside = self._ragged_choice(precision), own is not None
        derived = RememberingRead(call.function, self.parameters, columns, choice, beside=beside)
        return (call, derived, None) if own is None else (call, own, derived)

    def _ragged_choice(self, precision: Precision) -> AbstractRaggedChoice | None:
        """Who looks for a program of a module that sees more than rows apart."""
        if precision != "full":
            return None
        call = self.call
        return ragged_choice_of(
            RaggedModule(self.name, self.function, len(call.read), call.pool, self.experience)
        )

    def computed(
        self, weights: AbstractWeights | None, precision: Precision, *, ends: bool = False
    ) -> tuple[Call, AbstractKernel, AbstractChoice | None]:
        """How the module is called, what computes it, and what may choose another kernel, where
        rows may come back apart.

        Args:
            weights, precision: As for ``make``.
            ends: Whether a loss is computed in the same node.
        """
        keep, function, call = self.keep, self.function, self.call
        if precision == "bf16":
            function = Cast(function)
            call = replace(call, function=function)
        if weights is not None and weights.wants_graph is not None and not ends:
            raise GraphError(
                f"'{self.name}': {weights.wants_graph} of part '{weights.name}' is for nodes with "
                f"keep='graph', and this one has keep='{keep}'; give keep='graph' and whole "
                "minibatches as bundles, or leave the part's view and delay alone"
            )
        kernel = None if keep == "inputs" else self._kernel()
        if not ends and kernel is not None and not kernel.keeps_rows:
            kernel = None
        if kernel is not None:
            call = replace(call, dry_run=None)  # who wrote it has seen to it that rows are apart
        masks = kernel is None and self._keeps_masks()
        if kernel is None and (keep == "activations" or masks):
            if self.call.inside:
                raise GraphError(
                    f"'{self.name}': keep='activations' wants a bundle kernel and {self.detail()} "
                    "has none; give it a bundle_kernel() method, or use keep='auto' (a program is "
                    "derived where one is faster) or keep='inputs' (runs the module again)"
                )
            tell = partial(setattr, self.experience, "story")
            kernel = derived_kernel(self.name, self.function, tell)
        if kernel is None and keep == "auto" and call.inside:
            return (
                call,
                Remembering(
                    function,
                    self.parameters,
                    self._ragged_choice(precision),
                    draws=self._keeps_masks_inside(),
                ),
                None,
            )
        if kernel is None:
            again, choice = Recompute(function, self.parameters), None
            if keep == "auto" and self._rows_are_apart():  # and there are no masks to be kept
                choice = choice_of(self.name, function, again, self.experience)
            return call, again, choice
        if precision == "bf16":
            full = self.part is not None and self.part.full_precision
            kernel = around(kernel, full=full)
        return call, kernel, None

    def has_kernel(self) -> bool:
        """Whether its node keeps a kernel's residuals, written by hand or derived."""
        if self.keep in ("inputs", "graph") or self.memory is not None:
            return False
        derived = self.keep == "activations" and not self.call.inside
        return derived or self._kernel() is not None

    def written_kernel(self) -> AbstractKernel | None:
        """The kernel of its node, where somebody has written it."""
        if self.use is not None or self.keep in ("inputs", "graph") or self.memory is not None:
            return None
        return self._kernel()

    @property
    def wants_graph(self) -> bool:
        """Whether it sees bundles, and no kernel but autograd's is known of it so far."""
        derived = self.keep == "auto" and self.experience.chosen == "derived"
        sees = not derived and (self.call.inside or self.memory is not None)
        return sees and (self._memory_kernel() if self.memory else self._kernel()) is None

    def keeps(self) -> str:
        """``keep``, and whether it means a kernel that is derived."""
        if self.memory is not None:
            if self._memory_kernel() is not None:
                return "activations"
            if self.experience.story != UNDECIDED and self.keep == "auto":
                return f"auto: {self.experience.story}"
            whole = "auto: autograd's graph of a call where a loop runs whole, or runs again"
            return whole if self.keep == "auto" else self.keep
        if self.use is not None or self.keep in ("inputs", "graph") or self._kernel() is not None:
            return self.keep
        if self.keep == "activations":
            known = self.experience.story != UNDECIDED
            story = self.experience.story if known else "derived"
            return self.keep if self.call.inside else f"activations, {story}"
        if self._keeps_masks() or self._keeps_masks_inside():
            return "auto: derived, for the mask"
        if self.module is None and known_picks(self.function, self.call.take) is not None:
            return "auto: picks"
        if self.call.inside:
            if self.experience.story != UNDECIDED:
                return f"auto: {self.experience.story}"
            return "auto: autograd's graph of a firing, or runs again"
        story = self.experience.story if self._chooses() else "runs again"
        return f"auto: {story}"

    def _chooses(self) -> bool:
        """Whether ``auto`` finds its kernel while it works."""
        return self.keep == "auto" and self._rows_are_apart() and not self._keeps_masks()

    def _keeps_masks(self) -> bool:
        """Whether ``auto`` derives at once, as running again would draw another mask."""
        if self.keep != "auto" or not self._rows_are_apart():
            return False
        return self.dry_run.draws or any(self._dropouts())

    def _keeps_masks_inside(self) -> bool:
        """The same of a module that looks inside its bundles."""
        inside = self.call.inside and not self.call.alone and self.memory is None
        if self.keep != "auto" or self.use is not None or not inside or self._kernel() is not None:
            return False
        return self.dry_run.draws or any(self._dropouts())

    def _rows_are_apart(self) -> bool:
        return not (
            self.call.inside or self.call.pool or self.call.alone or self.memory is not None
        )

    def _dropouts(self) -> Iterator[nn.Module]:
        if isinstance(self.function, nn.Module):
            for module in modules_in(self.function):
                if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                    yield module

    def _kernel(self) -> AbstractKernel | None:
        if not isinstance(self.function, nn.Module):
            return None
        return bundle_kernel_of(self.function) if self.call.inside else kernel_of(self.function)

    def _memory_kernel(self) -> AbstractMemoryKernel | None:
        if not isinstance(self.function, nn.Module) or self.keep == "inputs":
            return None
        return memory_kernel_of(self.function)

    def _refuse_row_mixers(self) -> None:
        if self.keep == "graph" or not isinstance(self.function, nn.Module):
            return
        if self.keep != "inputs" and self._kernel() is not None:
            return
        for inner, module in self.function.named_modules():
            where = f"'{self.name}': {type(module).__name__} ({inner or 'the module itself'})"
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                if stays_in_evaluation(module, self.function):
                    continue  # each row by the statistics that it has
                raise GraphError(
                    f"{where} mixes rows of different instances; use LayerNorm or GroupNorm, send "
                    "whole minibatches as bundles with keep='graph', or, if its statistics are "
                    "to stay as they are, have a train() that leaves it in evaluation"
                )
            if self.keep == "activations" or self._keeps_masks() or self._keeps_masks_inside():
                continue  # a derived kernel keeps the mask, or refuses
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise GraphError(
                    f"{where} would draw another mask when the module is run again for its "
                    f"gradient; {self._instead_of_dropout()}"
                )

    def _instead_of_dropout(self) -> str:
        own = "as a node of its own before or behind this one, where it keeps the mask"
        keyed = "geartrain.nn.RowDropout inside the module with a key for each row, which read="
        if self.memory is not None:
            return f"use it {own}, or {keyed} brings"
        if self.call.inside or self.call.pool or self.call.alone:
            return f"use it {own}, or keep='graph'"
        return (
            "use keep='activations' or geartrain.nn.RowDropout as a node of its own (they keep the "
            "mask), or keep='graph' with bundles"
        )

    def _dry_run(
        self, payload: tuple[Tensor, ...], schema: Schema, held: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        if self.call.take is not None and max(self.call.take) >= len(payload):
            raise GraphError(
                f"'{self.name}': takes payload {max(self.call.take)}, but rows of "
                f"{describe(payload)} come, payload 0..{len(payload) - 1}"
            )
        payload = tuple(payload[j] for j in self.call.taken(len(payload)))
        read = [torch.empty(ROWS, dtype=torch.int64, device="meta") for _ in self.call.read]
        inside = imagined_inside(schema) if self.call.inside else None
        rows = ROWS
        try:
            outputs = imagined(self.function, (*payload, *held, *read), inside)
        except NotImplementedError:
            return None
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            counted = isinstance(error, TypeError) and "positional argument" in str(error)
            if "meta" in str(error) or ((self.call.read or self.call.inside) and not counted):
                return None  # needs values: only a real run can tell
            refuse_dtype(
                self.name,
                called_by(self.function),
                self.call,
                (*payload, *held),
                lambda changed: on_meta(self.function, changed),
            )
            raise GraphError(
                f"'{self.name}': {self.detail()} does not take rows of {describe(payload)}"
                f"{f' with a memory of {describe(held)}' if held else ''}: {error}"
                f"{hint(self.call, payload, error, attends=bool(held))}"
            ) from error
        except KeyError as error:
            story = edge_unknown(self.call, error, schema)
            if not story:
                raise
            raise GraphError(f"'{self.name}': {self.detail()} {story}") from error
        except GraphError as error:
            raise GraphError(f"'{self.name}': {error}") from None
        if self.call.pool:
            return tuple(y.new_empty((ROWS, *y.shape[1:])) for y in outputs)
        for y in outputs:
            if y.ndim == 0 or y.shape[0] != rows:
                raise GraphError(
                    f"'{self.name}': {self.detail()} made {tuple(y.shape)} of {rows} rows of "
                    f"{describe(payload)}; it must keep the leading dimension, one row for each"
                )
        return outputs
