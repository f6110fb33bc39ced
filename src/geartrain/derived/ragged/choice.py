"""``keep="auto"`` of modules that see more than rows apart: autograd, or a ragged program.

    training ─► autograd ─► so many firings and rows are done ─► traced, both ways measured, once
                                                                  ├─► the program from now on
                                                                  └─► autograd for good

When is a matter of counting, as for modules of rows; who wins is remembered for the structure while
the process lives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from geartrain.derived.auto import FIRINGS, LARGE_FIRINGS, LARGE_ROWS, ROWS, UNCLEAR, worth
from geartrain.derived.operands import Operands
from geartrain.derived.ragged.cut import RaggedCut
from geartrain.derived.ragged.derivation import MOST_SEEN, derive_inside, derive_memory
from geartrain.derived.ragged.for_nodes import DerivedRagged
from geartrain.derived.ragged.program import RaggedProgram
from geartrain.derived.registry import kind_of
from geartrain.derived.structure import Structure
from geartrain.errors import GraphError
from geartrain.frames.message import Payload
from geartrain.native import operations
from geartrain.native.calls import SeveralForm
from geartrain.native.fused import available
from geartrain.native.heap import heap
from geartrain.native.steady import firing
from geartrain.nodes.call import as_payload, differentiate, run_module
from geartrain.nodes.choice import UNDECIDED
from geartrain.nodes.gradient import GradientSum
from geartrain.nodes.held import Recalled
from geartrain.nodes.inside import Inside
from geartrain.nodes.method import weights_of
from geartrain.nodes.ragged import AbstractRaggedChoice, AbstractRaggedProgram, RaggedModule

log = logging.getLogger("geartrain.nn")

MOST_KNOWN: Final = 128
"""Structures that are remembered; the oldest is forgotten."""
MOST_LIGHT: Final = 512
"""Rows of a call, on average, up to which those of several updates are taken together: of more,
what products read of each update is copied for longer than a firing takes to begin."""
_TURNS: Final = 8
_FEW_TURNS: Final = 2
_MOST_FUNCTIONS: Final = 16


@final
class _KnownRagged:
    """What became of tracing one structure.

    Args:
        cut: Its programs; None: there are none.
        refused: Why not.
    """

    def __init__(self, cut: RaggedCut | None, refused: str = "") -> None:
        self.cut, self.refused = cut, refused
        self.ratio: float | None = None


@final
@dataclass(frozen=True, slots=True)
class _FoundRagged:
    """What was found for one module.

    Args:
        cut: Its programs.
        structure: What it looks like.
        kind: Of its rows.
        edges: By name of an edge column, whether it is read.
    """

    cut: RaggedCut
    structure: Structure
    kind: Hashable
    edges: Mapping[str, bool]


@final
class _RaggedRegistry:
    """By structure and kind of inputs; any thread may ask."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _KnownRagged] = OrderedDict()
        self._lock = threading.RLock()

    def forget(self) -> None:
        """Start anew."""
        with self._lock:
            self._known.clear()

    def ask(self, key: Hashable, make: Callable[[], RaggedCut]) -> _KnownRagged:
        with self._lock:
            found = self._known.get(key) if key is not None else None
            if found is None:
                try:
                    found = _KnownRagged(make())
                except GraphError as error:
                    found = _KnownRagged(None, str(error))
                if key is not None:
                    self._known[key] = found
                    while len(self._known) > MOST_KNOWN:
                        self._known.popitem(last=False)
            return found


RAGGED_REGISTRY: Final = _RaggedRegistry()
"""The one of this process."""


@final
class RaggedChoice(AbstractRaggedChoice):
    """Chooses for one node.

    Args:
        module: Of the node.
    """

    def __init__(self, module: RaggedModule) -> None:
        self._module, self._experience = module, module.experience
        self._done = module.experience.done
        self._found: _FoundRagged | None = None
        self._made: DerivedRagged | None = None  # of what was found, once it is asked for
        self._structure: Structure | None = None
        self._kind: Hashable = None
        self._dtype = torch.float32
        self._settled = False
        self._checked = 0
        self._look_up()

    @property
    def program(self) -> DerivedRagged | None:
        if self._made is None and self._found is not None:
            program = RaggedProgram(self._found.cut, Operands(self._module.function))
            self._made = DerivedRagged(program, self._module.columns, self._found.edges)
        return self._made

    @property
    def replaced(self) -> bool:
        return self._found is not None

    def take_over(self, before: AbstractRaggedChoice) -> None:
        if isinstance(before, RaggedChoice) and before._found is self._found:
            made = before._made
            if made is not None and self._made is None and made.begin_anew():
                self._made = made

    @property
    def light(self) -> bool:
        return self._done.rows <= MOST_LIGHT * self._done.firings

    @property
    def undecided(self) -> bool:
        return not self._settled and self._found is None

    @property
    def _evaluated(self) -> bool:
        """Whether the module is in the mode of evaluations: a program is of that of training."""
        module = weights_of(self._module.function)
        return module is not None and not module.training

    def inside(self, inputs: Payload, inside: Inside) -> AbstractRaggedProgram | None:
        if self._settled:
            return None
        if self._found is not None:
            return self._valid(kind_of(inputs))
        if self._evaluated or not self._ripe(inputs):
            return None
        kind = kind_of(inputs)
        edges, key, make = self._inside(kind, inputs, inside)
        return self._decide(kind, key, make, edges, inputs, inside, None)

    def at_once(self, inputs: Payload, inside: Inside) -> AbstractRaggedProgram | None:
        if self._evaluated:
            return None
        kind = kind_of(inputs)
        if self._found is None or not self._is_of_now(kind):
            edges, key, make = self._inside(kind, inputs, inside)
            known = self._known(kind, key, make)
            if known.cut is None:
                raise GraphError(
                    f"'{self._module.name}': it draws random numbers, and no program is found for "
                    f"it that keeps what is drawn ({known.refused}); use keep='graph'"
                )
            self._tell("derived, for the mask")
            self._take(self._find(known.cut, len(inputs), edges))
        return self.program

    def _inside(
        self, kind: Hashable, inputs: Payload, inside: Inside
    ) -> tuple[Mapping[str, Tensor], Hashable, Callable[[], RaggedCut]]:
        """Edge columns of bundles, what programs for them are known by, and what makes these."""
        edges, module = _edges_of(inside), self._module
        make = partial(derive_inside, module.function, inputs, edges, pools=module.pools)
        return edges, (kind, tuple((k, x.dtype) for k, x in edges.items()), module.pools), make

    def _is_of_now(self, kind: Hashable) -> bool:
        """Whether the program is for rows of this kind, and for the module as it is."""
        structure = self._structure
        same = structure is not None and structure.now() == structure.settings
        return same and kind == self._kind and available(self._dtype)

    def memory(self, inputs: Payload, memory: Recalled) -> AbstractRaggedProgram | None:
        if self._settled:
            return None
        if self._found is not None:
            if not memory.lengths.all():
                self.give_up("its rows read bundles of nothing")
                return None
            return self._valid((kind_of(inputs), kind_of(memory.payload)))
        if self._evaluated or not self._ripe(inputs) or not memory.lengths.all():
            return None
        kind = kind_of(inputs), kind_of(memory.payload)

        def make() -> RaggedCut:
            columns = self._module.columns
            return derive_memory(self._module.function, inputs, memory.some(MOST_SEEN), columns)

        return self._decide(kind, (kind, "memory"), make, {}, inputs, None, memory)

    def read_at_once(self, inputs: Payload, memory: Payload) -> None:
        if not self.undecided or self._evaluated:
            return
        kind = kind_of(inputs), kind_of(memory)
        likes = tuple([x[:0] for x in memory])
        columns = self._module.columns
        make = partial(derive_memory, self._module.function, inputs, likes, columns)
        known = self._known(kind, (kind, "memory"), make)
        self._settled = known.cut is None
        if known.cut is not None:
            self._take(self._find(known.cut, len(inputs), {}))

    def listed(self, inputs: Payload, memory: Payload | None) -> SeveralForm | None:
        if self._settled or self._found is None:
            return None
        kind = kind_of(inputs)
        found = self._valid(kind if memory is None else (kind, kind_of(memory)))
        return None if found is None else found.listed

    def give_up(self, why: str) -> None:
        self._found, self._made, self._settled = None, None, True
        self._experience.chosen = "again"
        self._tell(f"autograd ({why})")

    def _look_up(self) -> None:
        """Take the program that was found in another fit, if there is one."""
        experience, function = self._experience, self._module.function
        known, found = experience.known.get(id(function), (None, None))
        if known is function and isinstance(found, _FoundRagged) and experience.chosen == "derived":
            same = found.structure.now() == found.structure.settings
            if same and available(found.cut.dtype):
                self._take(found)

    def _take(self, found: _FoundRagged) -> None:
        self._found, self._made = found, None
        self._structure, self._kind = found.structure, found.kind
        self._dtype = found.cut.dtype

    def _valid(self, kind: Hashable) -> DerivedRagged | None:
        """The program, if it is for rows of this kind, and for the module as it is now."""
        number, structure = firing.number, self._structure
        assert structure is not None
        if self._evaluated:
            return None
        if not number or number != self._checked:
            if not available(self._dtype):
                self.give_up("there are no native kernels")
                return None
            if structure.now() != structure.settings:
                self.give_up("its settings change while it works")
                return None
            self._checked = number
        if kind != self._kind:
            self.give_up("its rows change their kind while it works")
            return None
        return self.program

    def _ripe(self, inputs: Payload) -> bool:
        if not all(x.is_cpu for x in inputs):
            return False
        done = self._done
        done.firings += 1
        done.rows += inputs[0].shape[0]
        ripe = done.firings >= FIRINGS and done.rows >= ROWS
        ripe = ripe or (done.firings >= LARGE_FIRINGS and done.rows >= LARGE_ROWS)
        typical = 2 * inputs[0].shape[0] * done.firings >= done.rows
        watched = operations.listening or _get_current_dispatch_mode() is not None
        return ripe and typical and not watched

    def _decide(
        self,
        kind: Hashable,
        key: Hashable,
        make: Callable[[], RaggedCut],
        edges: Mapping[str, Tensor],
        inputs: Payload,
        inside: Inside | None,
        memory: Recalled | None,
    ) -> AbstractRaggedProgram | None:
        experience, function = self._experience, self._module.function
        if experience.chosen == "again":
            self._settled = True
            return None
        known = self._known(kind, key, make)
        if known.cut is None:
            self._settled = True
            self._tell(f"autograd (cannot be cut: {known.refused})")
            return None
        found = self._find(known.cut, len(inputs), edges)
        if experience.chosen is None:
            if known.ratio is None:
                operands = Operands(function)
                tried = DerivedRagged(
                    RaggedProgram(known.cut, operands), self._module.columns, found.edges
                )
                parameters = [x for x in operands.tensors() if isinstance(x, nn.Parameter)]
                known.ratio = _ratio(tried, self._module, parameters, inputs, inside, memory)
            if known.ratio > worth(experience):
                self._settled = True
                experience.chosen = "again"
                self._tell(f"autograd (derived would take {known.ratio:.2f} of it)")
                return None
            experience.chosen = "derived"
            self._tell(f"derived, {known.ratio:.2f} of autograd")
        elif experience.story == UNDECIDED:
            self._tell("derived, as chosen before")
        if len(experience.known) >= _MOST_FUNCTIONS:
            experience.known.clear()
        experience.known[id(function)] = function, found
        self._take(found)
        return self.program

    def _known(self, kind: Hashable, key: Hashable, make: Callable[[], RaggedCut]) -> _KnownRagged:
        """What became of tracing the module as it is now."""
        structure = self._structure = Structure(self._module.function)
        self._kind, whole = kind, None
        if structure.key is not None:
            native = available(torch.float32)
            whole = structure.key, key, torch.get_default_dtype(), native
        return RAGGED_REGISTRY.ask(whole, make)

    def _find(self, cut: RaggedCut, inputs: int, edges: Mapping[str, Tensor]) -> _FoundRagged:
        """Programs, for the module as it was when it was asked for them."""
        assert self._structure is not None
        used = {name: inputs + 2 + k in cut.used for k, name in enumerate(edges)}
        return _FoundRagged(cut, self._structure, self._kind, used)

    def _tell(self, story: str) -> None:
        if self._experience.story != story:
            self._experience.story = story
            log.info("'%s', keep='auto': %s", self._module.name, story)


def _edges_of(inside: Inside) -> dict[str, Tensor]:
    """Edge columns, where the bundles are whole instances that have some."""
    try:
        return dict(inside.edges)
    except GraphError:
        return {}


def _ratio(
    program: DerivedRagged,
    module: RaggedModule,
    parameters: list[nn.Parameter],
    inputs: Payload,
    inside: Inside | None,
    memory: Recalled | None,
) -> float:
    """What the program takes of the time of autograd, forward and back; they take turns."""
    into = GradientSum(parameters)
    learning = [p for p in parameters if p.requires_grad]
    given = tuple([x.detach() for x in inputs])
    best = [float("inf"), float("inf")]
    ways: tuple[Callable[[], None], ...] = (
        lambda: _by_program(program, given, into, inside, memory),
        lambda: _by_autograd(module, given, learning, into, inside, memory),
    )
    heap.tried()
    with torch.no_grad(), torch.random.fork_rng([]):
        for turn in range(_TURNS):
            for k, way in enumerate(ways):
                began = time.thread_time()
                way()
                for parameter in parameters:
                    into.take(parameter)
                if turn:
                    best[k] = min(best[k], time.thread_time() - began)
            if turn >= _FEW_TURNS and not UNCLEAR[0] < best[0] / best[1] < UNCLEAR[1]:
                break
    return best[0] / best[1]


def _by_program(
    program: DerivedRagged,
    inputs: Payload,
    into: GradientSum,
    inside: Inside | None,
    memory: Recalled | None,
) -> None:
    if memory is None:
        assert inside is not None
        outputs, kept = program.inside(inputs, inside)
        program.backward(kept, outputs, into, None)
        return
    outputs, kept = program.memory(inputs, memory)
    floats = {i: x for i, x in kept.call.held.items() if x.is_floating_point()}
    sums = {i: torch.zeros_like(x) for i, x in floats.items()}
    program.program.backward(kept, outputs, into, sums)


def _by_autograd(
    module: RaggedModule,
    inputs: Payload,
    learning: list[nn.Parameter],
    into: GradientSum,
    inside: Inside | None,
    memory: Recalled | None,
) -> None:
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    args: list[Tensor] = leaves
    if memory is not None:
        tensors, mask = memory.padded()
        for x in tensors:
            x.requires_grad_(x.is_floating_point())
        at = len(leaves) - module.columns
        args = [*leaves[:at], *tensors, mask, *leaves[at:]]
    with torch.enable_grad():
        outputs = as_payload(run_module(module.function, args, inside))
    wanted = [x for x in args if x.requires_grad]
    found = differentiate(outputs, tuple([y.detach() for y in outputs]), [*wanted, *learning])
    for parameter, d in zip(learning, found[len(wanted) :], strict=True):
        if d is not None:
            into.add(parameter, d)
