"""From a loop of the graph to the node that runs it whole.

streams of the region ─► values: which of them share a buffer, which are read through others
operators ─► stages: steps, groups and joins without payload; modules with their kernels
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

from geartrain.errors import GraphError
from geartrain.frames.frame import Schema
from geartrain.frames.precision import Precision
from geartrain.graph.ends import Losing
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Made, Port, Spec
from geartrain.graph.operators import (
    Copying,
    Detaching,
    Grouping,
    Joining,
    Splitting,
    Ungrouping,
)
from geartrain.graph.region import Region
from geartrain.graph.streams import LoopStreams, Picks, Stream
from geartrain.graph.through import Through
from geartrain.nodes.control import AbstractStep
from geartrain.nodes.group import Group
from geartrain.nodes.held import Held
from geartrain.nodes.join import JoinNode
from geartrain.nodes.kernel import AbstractKernel
from geartrain.nodes.loop.columns import Detached, Picked, SideBySide, SomeColumns
from geartrain.nodes.loop.door import LoopDoor
from geartrain.nodes.loop.judging import Judged
from geartrain.nodes.loop.node import LoopNode
from geartrain.nodes.loop.picking import count_arguments, known_picks
from geartrain.nodes.loop.plan import AbstractStage, CallStage, StoreStage
from geartrain.nodes.loop.planner import LoopEntry, Planner, StageOrder
from geartrain.nodes.loop.stages import (
    ExitStage,
    FlatmapStage,
    GroupStage,
    HoldStage,
    JoinStage,
    PassStage,
    SideStage,
    StepStage,
    UnbundleStage,
    UngroupStage,
)
from geartrain.nodes.loop.turn import Inner, Reads
from geartrain.nodes.loop.values import AbstractValue, Grouped, Parted, Stored, Unbundled
from geartrain.nodes.memory import AbstractMemoryKernel
from geartrain.nodes.node import Place
from geartrain.nodes.structure import Flatmap, Ungroup
from geartrain.nodes.weights import AbstractWeights


@final
class Looping(AbstractOperator):
    """A loop that runs whole, or its door.

    Args:
        name: Of the node.
        region: The loop.
        members: Its operators.
    """

    kind = "loop"

    def __init__(self, name: str, region: Region, members: Sequence[AbstractOperator]) -> None:
        super().__init__(name, [])
        self.region, self.members = region, members

    @property
    def throughs(self) -> list[Through]:
        """The modules in it."""
        return [o for o in self.members if isinstance(o, Through)]

    @property
    def losses(self) -> list[int]:
        """Numbers of the losses in it."""
        return [o.id for o in self.members if isinstance(o, Losing)]

    @property
    def memories(self) -> list[int]:
        """Numbers of the operators outside that hold what is read in it."""
        return [memory.id for memory in memories_of(self.members, self.region)]

    def specs(self, given: Sequence[Spec], schema: Schema) -> list[Spec]:
        raise GraphError(f"'{self.name}' is made after a graph has been checked")

    def make(self, place: Place, weights: AbstractWeights | None) -> Made:
        raise GraphError(f"'{self.name}' is made of the operators in it")


def memories_of(operators: Sequence[AbstractOperator], region: Region) -> list[Holding]:
    """What is held outside a loop and read in it, each once."""
    read = {
        o.memory.id: o.memory
        for o in operators
        if isinstance(o, Through) and o.memory is not None and o.id in region.operators
    }
    return [memory for number, memory in read.items() if number not in region.operators]


def make_loop(
    looping: Looping,
    place: Place,
    door_place: Place,
    readers: Mapping[Port, Port],
    streams: Callable[[Picks], LoopStreams],
    throughs: Mapping[int, tuple[Through, AbstractWeights | None]],
    precision: Precision,
    held: Mapping[int, Held],
    losses: Mapping[int, int],
) -> tuple[LoopDoor, LoopNode]:
    """Fresh nodes.

    Args:
        looping: The loop.
        place, door_place: Of the nodes.
        readers: Output port in it to the input port that it leads to, merges resolved.
        streams: What is known of its streams, by who in it only picks.
        throughs: By number of the operator, with a copy's own function, and its weights.
        precision: Of the rows.
        held: By number of the operator that holds it, each memory outside that is read in it.
        losses: By number of the operator, the number that each loss in it has among nodes.
    """
    around = streams, throughs, precision, held, losses
    return _Builder(looping, place, readers, *around).nodes(door_place)


@final
class _Builder:
    def __init__(
        self,
        looping: Looping,
        place: Place,
        readers: Mapping[Port, Port],
        streams: Callable[[Picks], LoopStreams],
        throughs: Mapping[int, tuple[Through, AbstractWeights | None]],
        precision: Precision,
        held: Mapping[int, Held],
        losses: Mapping[int, int],
    ) -> None:
        self._held, self._losses = held, losses
        self._judged: list[Judged] = []
        self._region = looping.region
        self._members = {o.id: o for o in looping.members}
        self._place, self._readers = place, readers
        self._copy = place.name[len(looping.name) :]
        self._throughs, self._precision = throughs, precision
        found = {o.id: self._picked(o) for o in looping.throughs}
        self._picks = {number: picks for number, picks in found.items() if picks is not None}
        self._streams = streams(self._picks)
        self._count = 0
        self._own: dict[Stream, AbstractValue] = {}
        self._made: dict[Stream, AbstractValue] = {}
        self._stages: dict[int, AbstractStage] = {}
        self._inner: list[Inner] = []
        self._tapes = self._streams.tapes and not looping.region.deciders.parting
        self._looked: set[Stream] = set()  # streams that may lie where others do
        self._sides: set[int] = set()  # picks of joined rows that are rows of one of their ports

    def nodes(self, door_place: Place) -> tuple[LoopDoor, LoopNode]:
        region, place = self._region, self._place
        entering = [self._value(("in", *port)) for port in region.entries]
        leaving = [self._value(("out", *port)) for port in region.exits]
        for operator in self._members.values():
            self._stages[operator.id] = self._stage(operator)
        exits = [ExitStage(k) for k in range(len(region.exits))]
        between: list[AbstractStage] = []
        for operator in self._members.values():
            stage = self._stages[operator.id]
            for port in range(operator.ways):
                if (operator.id, port) in self._streams.back:
                    stage.back[port] = operator.id, port
                here = operator.id, port
                if here in region.exits:
                    target: tuple[AbstractStage, int] = (exits[region.exits.index(here)], 0)
                else:
                    reader, into = self._readers[here]
                    target = self._stages[reader], into
                made = self._own.get(("out", *here)) or self._value(("out", *here))
                met = self._met(here)
                if made is not met:
                    assert isinstance(met, Stored)
                    store = StoreStage(len(between), made, met)
                    store.leads(0, *target)
                    between.append(store)
                    target = store, 0
                stage.leads(port, *target)
        entries = []
        for value, (reader, into) in zip(entering, region.entries, strict=True):
            assert isinstance(value, Stored)
            entries.append(LoopEntry(value, self._stages[reader], into))
        stages = [*self._stages.values(), *between, *exits]
        if self._streams.order is None:
            self._streams.order = StageOrder.of(stages)
        counted = len(exits), len(self._judged), self._count
        planner = Planner(entries, stages, *counted, self._streams.order)
        counts = (region.inputs, region.bundles) if region.counted else None
        door = LoopDoor(door_place, counts, len(entries), leaving)
        for name in (name for some in counts or () for name in some):
            place.arena.count_fed(name)
        node = LoopNode(
            place,
            door,
            planner,
            self._inner,
            entering,
            leaving,
            ahead=set(region.deciding) <= set(region.deciders.parting),
            gathers=self._streams.gathers,
            holds=self._streams.holds,
            tapes=self._tapes,
            losses=self._judged,
            parted=[
                v for v in {*self._made.values(), *self._own.values()} if isinstance(v, Parted)
            ],
        )
        door.beside = node.id
        return door, node

    # Which streams have rows of one value.

    def _met(self, here: Port) -> AbstractValue:
        """The value that rows of a port are of where they come to."""
        reader = None
        if here not in self._region.exits:
            reader = self._members[self._readers[here][0]]
        if isinstance(reader, Holding):
            return self._value(("out", reader.id, 0))
        return self._value(("out", *here))

    def _value(self, key: Stream) -> AbstractValue:
        """The value that a stream has rows of."""
        root = self._streams.root(key)
        found = self._made.get(root)
        if found is None:
            maker = self._streams.maker(root)
            if maker is not None:
                found = self._virtual(*maker)
            else:
                found = self._past(root) or self._beside(root) or Stored(self._number())
            self._made[root] = found
        return found

    def _past(self, root: Stream) -> Picked | None:
        """The value of a stream of which some rows are picked of those that modules make the others
        of: they all lie where these do, and none is copied."""
        if self._tapes or root in self._looked:
            return None
        self._looked.add(root)
        makers = self._plain_makers(root)
        picks = [o for o in makers if o.id in self._picks]
        which = {tuple(self._picks[o.id]) for o in picks}
        sources = {self._streams.root(("in", o.id, 0)) for o in makers}
        if len(picks) == len(makers) or len(which) != 1 or len(sources) != 1 or root in sources:
            return None
        (some,), source = which, self._value(("in", makers[0].id, 0))
        if not isinstance(source, Stored) or len(set(some)) < len(some):
            return None
        found = Picked(self._number(), source, some)
        self._own |= {("out", o.id, 0): found for o in picks}
        return found

    def _plain_makers(self, root: Stream) -> Sequence[Through]:
        """What makes the rows of a stream, where these are all modules that make a row of each row,
        and nobody holds them; else nothing."""
        streams = self._streams
        makers, around = streams.makers(root), (*streams.ends(root), *streams.makers(root))
        if streams.enters(root) or any(isinstance(o, Holding | Ungrouping) for o in around):
            return ()
        found = [o for o in makers if isinstance(o, Through) and self._is_plain(o)]
        return found if len(found) == len(makers) else ()

    def _beside(self, root: Stream) -> Stored | None:
        """The value of a stream of which some rows are picked of joined ones, all of a port whose
        rows modules make: they all lie where these do, and none is copied."""
        makers = self._plain_makers(root)
        picks = [o for o in makers if o.id in self._picks]
        sides = {self._side(o) for o in picks}
        side = sides.pop() if len(sides) == 1 else None
        if self._tapes or side in (None, root) or len(picks) == len(makers):
            return None
        behind = self._plain_makers(side)
        if not behind or any(o.id in self._picks for o in behind):
            return None
        found = self._value(side)
        if not isinstance(found, Stored):
            return None
        self._sides |= {o.id for o in picks}
        self._own |= {("out", o.id, 0): found for o in picks}
        return found

    def _side(self, pick: Through) -> Stream | None:
        """The stream of a port of a join of which a pick takes all that there is, where each port
        brings one tensor; None: it picks something else."""
        maker, which = self._streams.maker(("in", pick.id, 0)), self._picks[pick.id]
        if maker is None or not isinstance(maker[0], Joining) or maker[0].how != "tuple":
            return None
        joining, _ = maker
        call = self._throughs[pick.id][0].call
        arguments = None if call.take is not None else count_arguments(call.function)
        if len(which) > 1 or arguments != len(joining.sources):
            return None
        return self._streams.root(("in", joining.id, which[0]))

    def _is_plain(self, operator: Through) -> bool:
        """Whether a module makes a row of each row, and reads nothing else."""
        call = self._throughs[operator.id][0].call
        return operator.memory is None and not call.inside and not call.pool

    def _number(self) -> int:
        self._count += 1
        return self._count - 1

    def _virtual(self, operator: AbstractOperator, port: int) -> AbstractValue:
        key = "out", operator.id, port
        found = self._own.get(key)
        if found is not None:
            return found
        sources = [self._value(("in", operator.id, p)) for p in range(len(operator.sources))]
        number = self._number()
        if isinstance(operator, Grouping):
            found = Grouped(number, sources[0], operator.how)
        elif isinstance(operator, Joining):
            found = SideBySide(number, sources, operator.how)
        elif isinstance(operator, Splitting):
            found = SomeColumns(number, sources[0], operator.sizes, port)
        elif isinstance(operator, Ungrouping) and operator.id in self._region.deciders.parting:
            found = Parted(number, sources[0], operator.parts)
        elif isinstance(operator, Ungrouping):
            found = Unbundled(number, sources[0])
        elif operator.id in self._picks:
            found = Picked(number, sources[0], self._picks[operator.id])
        else:
            found = Detached(number, sources[0])
        self._own[key] = found
        return found

    # Stages.

    def _picked(self, operator: Through) -> Sequence[int] | None:
        """The tensors of its rows that a module gives, where it does nothing else."""
        through, weights = self._throughs[operator.id]
        call = through.call
        if operator.memory is not None or weights is not None:
            return None
        if call.read or call.inside or call.pool:
            return None
        return known_picks(call.function, call.take)

    def _stage(self, operator: AbstractOperator) -> AbstractStage:
        place = replace(self._place, name=operator.name + self._copy)
        if isinstance(operator, Through):
            return self._call(operator, place)
        if isinstance(operator, Losing):
            place = replace(place, id=self._losses[operator.id])
            source = self._value(("in", operator.id, 0))
            self._judged.append(Judged(operator.objective(place), source))
            return ExitStage(len(self._judged) - 1, judged=True)
        if isinstance(operator, Copying | Splitting | Detaching):
            for port in range(0 if isinstance(operator, Copying) else operator.ways):
                self._virtual(operator, port)
            return PassStage(operator.ways)
        if isinstance(operator, Joining):
            joined = self._virtual(operator, 0)
            other = copy.copy(operator)
            other.how = "tuple"
            made = other.make(place, None)
            assert isinstance(made, JoinNode) and isinstance(joined, SideBySide)
            return JoinStage(made, joined, len(operator.sources))
        if isinstance(operator, Holding):
            return HoldStage(place.schema.state[operator.column])
        made = operator.make(place, None)
        if isinstance(operator, Grouping):
            grouped = self._virtual(operator, 0)
            assert isinstance(made, Group) and isinstance(grouped, Grouped)
            return GroupStage(made, grouped)
        if isinstance(made, Ungroup):
            return _ungrouping(made, self._virtual(operator, 0))
        if isinstance(made, Flatmap):
            return FlatmapStage(made, self._read(operator))
        assert isinstance(made, AbstractStep)
        return StepStage(made, self._read(operator))

    def _read(self, operator: AbstractOperator) -> AbstractValue | None:
        """What the functions of an operator that decides read of its rows."""
        if operator.id not in self._region.deciding:
            return None
        return self._value(("in", operator.id, 0))

    def _call(self, operator: Through, place: Place) -> AbstractStage:
        if operator.id in self._picks:
            self._value(("out", operator.id, 0))
            self._virtual(operator, 0)
            if operator.id not in self._sides:
                return PassStage(1)
            joined = self._value(("in", operator.id, 0))
            return SideStage(joined.number, self._picks[operator.id][0])
        through, weights = self._throughs[operator.id]
        through.experience.goes_whole()
        reads, choice, twin = None, None, None
        kernel: AbstractKernel | AbstractMemoryKernel
        if operator.memory is None:
            call, kernel, choice = through.computed(weights, self._precision)
        else:
            call, kernel, twin = through.computed_with_memory(self._precision)
            column = place.schema.state[operator.memory.column]
            reads = Reads(self._memory(operator.memory), column)
        source = self._value(("in", operator.id, 0))
        into, which = self._into(operator)
        rest = choice, weights, source, reads
        self._inner.append(Inner(place.name, place, call, kernel, *rest, twin=twin))
        alone = operator.memory is not None or call.inside or call.pool
        kin = None if alone else (source.number, into.number, which, call.take, call.read)
        number = len(self._inner) - 1
        return CallStage(number, source, into, pools=call.pool, kin=kin, which=which)

    def _into(self, operator: Through) -> tuple[Stored, tuple[int, ...] | None]:
        """The value that a module makes rows of, and which tensors of it; None: all."""
        into = self._value(("out", operator.id, 0))
        if isinstance(into, Picked):
            assert isinstance(into.source, Stored)
            return into.source, tuple(into.which)
        assert isinstance(into, Stored)
        return into, None

    def _memory(self, memory: Holding) -> Held | Stored:
        """What is read: held outside, or a value."""
        if memory.id not in self._members:
            return self._held[memory.id]
        value = self._value(("out", memory.id, 0))
        assert isinstance(value, Stored)
        return value


def _ungrouping(made: Ungroup, value: AbstractValue) -> AbstractStage:
    if isinstance(value, Unbundled):
        return UnbundleStage(made, value)
    assert isinstance(value, Parted)
    return UngroupStage(made, value)


def door_name(name: str) -> str:
    """What the door of a loop is called."""
    return f"{name} door"
