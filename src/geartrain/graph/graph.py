"""Streams of messages: what a user writes, and the wiring that comes out of it.

    graph = Graph(vertex=("parent", "slot", "label"))
    nodes = graph.loop()                                   a Phi: sources are joined later
    nodes.join(graph.input("word").through(leaf))
    nodes.through(readout).loss(cross_entropy, target="label")
    inner, root = nodes.where(lambda m: m.parent >= 0)     a Cond
    pairs = inner.group(by={"vertex": lambda m: m.parent}, size=2, order="slot")
    nodes.join(pairs.through(branch))
    root.stop()

A stream is an output port of an operator. Used twice, it is broadcast. ``check`` finds what cannot
work before anything moves; ``wire`` makes fresh nodes, as often as one likes.

Source: static graphs for dynamic control flow, Gaunt et al. 2017, arXiv:1705.09786.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import nn

from geartrain.errors import GraphError
from geartrain.frames.frame import Schema, View
from geartrain.frames.instance import Instance
from geartrain.graph import checking, drawing, wiring
from geartrain.graph.gear import Gear, Geared
from geartrain.graph.loops import Run
from geartrain.graph.memory import Holding
from geartrain.graph.operator import AbstractOperator, Input, Keep, PartLike
from geartrain.graph.operators import (
    Detaching,
    Flatmapping,
    Grouping,
    Joining,
    Losing,
    Merging,
    Moving,
    Outputting,
    Replaying,
    Routing,
    Splitting,
    Stopping,
    Ungrouping,
)
from geartrain.graph.overlap import Overlapped, OverlapRule
from geartrain.graph.synthetic import Synthesizing
from geartrain.graph.through import AbstractUse, Through
from geartrain.nodes.gather import Column, How
from geartrain.nodes.loss import Metric, Target
from geartrain.nodes.method import bound, path_inside, weights_of
from geartrain.nodes.replay import REPLAY, Draw, Replays


@final
class Stream:
    """Rows on their way from one operator to the next; every verb gives the stream behind it."""

    __slots__ = ("_graph", "operator", "port")

    def __init__(self, graph: Graph, operator: AbstractOperator, port: int = 0) -> None:
        self._graph, self.operator, self.port = graph, operator, port

    def through(
        self,
        module: Callable[..., Any] | PartLike,
        *,
        name: str | None = None,
        part: PartLike | None = None,
        keep: Keep | None = None,
        read: str | Sequence[str] = (),
        inside: bool = False,
        pool: bool = False,
        take: int | Sequence[int] | None = None,
        alone: bool = False,
        gear: Gear | None = None,
    ) -> Stream:
        """Run a module, or any function of rows (PPT, NPT).

        Args:
            module: Maps tensors ``(n, ...)`` to one or several ``(n, ...)``, each row on its own. A
                ``Part`` stands for its module. Also a method of a module, or a ``partial`` of
                either: then the module's weights learn. A function has no weights of its own.
            name: In errors, traces and drawings; default: the module's class.
            part: The part that owns the weights, if the module is a piece of it. The same module
                used twice, itself or by its methods, is the same part.
            keep: What the way back needs: ``inputs`` (the module runs again, exact at the weights
                of now), ``activations`` (a row kernel), ``graph`` (autograd's graph of one
                message), ``auto`` (a kernel where there is one, else inputs).
            read: Frame or state columns handed to the module after the payload, as tensors
                ``(n,)``.
            inside: For bundles: the module gets an ``Inside`` (lengths, edges) as its last
                argument.
            pool: For bundles: the module makes one row of each bundle.
            take: Which payload tensors the module gets, by number; the others end here with a zero
                gradient. None: all of them.
            alone: Run one message at a time: for bundles that are minibatches already, which would
                otherwise share a batch, and an update, with whatever waits beside them.
            gear: The speed at which it learns, with ``keep="graph"``; default: its part's. Replays
                of a part's gear begin at the first node that is written for it.
        """
        function, part = _function_and_part("through", module, part)
        gear = gear if gear is not None else part.gear if part is not None else None
        stream = self
        if gear is not None and gear.replays and self._graph._first_of(part):
            stream = self._replay(gear.replay_rule(), None)
        use = Geared(gear) if gear is not None else None
        return stream._run(
            "through",
            function,
            part,
            name,
            keep,
            take,
            read=read,
            inside=inside,
            pool=pool,
            alone=alone,
            use=use,
        )

    def hold(self, *, name: str | None = None) -> Stream:
        """Hold each bundle, so that rows behind may read it by reference (``attend``).

        The bundle itself goes on: what is made of it, pooled to a row or ungrouped, knows where it
        is held, and so does all that follows, round loops and through routes. It is held once,
        until all behind it has been answered; the gradients of all that has read it are added up
        where it is, and leave once.

        Args:
            name: In errors, traces and drawings.
        """
        operator = Holding(self._graph._name(name, "memory"), self._source)
        self._graph._columns.append(operator.column)
        return self._graph._add(operator)

    def attend(
        self,
        to: Stream,
        module: Callable[..., Any] | PartLike,
        *,
        name: str | None = None,
        part: PartLike | None = None,
        keep: Keep | None = None,
        read: str | Sequence[str] = (),
        take: int | Sequence[int] | None = None,
    ) -> Stream:
        """Run a module on rows, each with the bundle that is held for it.

        Args:
            to: What ``hold`` gave; the rows have come from there, by whatever way.
            module: Gets the payload ``(n, ...)``; the tensors of the memory ``(n, longest, ...)``,
                zeros behind the end of each; a mask ``(n, longest)``, True up to the end, all False
                for an empty bundle; and the columns of ``read``. Gives one or several ``(n,
                ...)``, each row on its own, whatever the longest is. ``nn.DotAttention`` and
                ``nn.AdditiveAttention`` are such modules, and have kernels.
            name, part, read, take: As for ``through``. Of bundles each row reads.
            keep: ``auto`` (a memory kernel where the module has one, else inputs) or ``inputs``
                (the module runs again).

        Source: Bahdanau et al. 2015, arXiv:1409.0473.
        """
        self._graph._own((to,))
        if not isinstance(to.operator, Holding):
            raise GraphError(
                f"attend() reads what hold() gave, but '{to.operator.name}' is a "
                f"{to.operator.kind}; hold its bundles first: held = stream.hold()"
            )
        function, part = _function_and_part("attend", module, part)
        _refuse_gear("attend", part)
        chosen = keep or (part.keep if part is not None else "auto")
        if chosen not in ("auto", "inputs"):
            raise GraphError(
                f"attend(keep={chosen!r}): rows that read a memory come back apart; give 'auto' or "
                "'inputs'"
            )
        return self._run(
            "attend", function, part, name, chosen, take, read=read, alone=False, memory=to.operator
        )

    def overlap(
        self,
        module: Callable[..., Any] | PartLike,
        *,
        rule: OverlapRule = "sum",
        name: str | None = None,
        part: PartLike | None = None,
        take: int | Sequence[int] | None = None,
    ) -> tuple[Stream, Stream]:
        """Run a module that learns from its own head and from the loss of the part above.

        For minibatches as bundles; autograd's graph is kept. The first and the last part of a stack
        are ordinary: ``through``.

        Args:
            module: As for ``through``.
            rule: Whose gradient the weights get: the ``sum``, or that of the ``later`` loss, from
                above (the own one where none comes).
            name, part, take: As for ``through``.

        Returns:
            The stream for the part above, whose gradient trains this part and goes no further, and
            the stream for the own head, whose gradient goes on to the part below.

        Source: Laskin et al. 2020, arXiv:2012.03837.
        """
        if rule not in ("sum", "later"):
            raise ValueError(f"overlap(rule={rule!r}): give 'sum' or 'later'")
        function, part = _function_and_part("overlap", module, part)
        _refuse_gear("overlap", part)
        up = self._run("overlap", function, part, name, "graph", take, use=Overlapped(rule))
        return up, Stream(self._graph, up.operator, 1)

    def synthesize(
        self,
        module: Callable[..., Any] | PartLike,
        *,
        name: str | None = None,
        part: PartLike | None = None,
        take: int | Sequence[int] | None = None,
    ) -> Stream:
        """Answer with a guessed gradient at once, and pass the rows on.

        The true gradient, when it comes, trains the module on the squared distance and goes no
        further. Begin with a last layer of zeros: the first guesses then move nothing.

        Args:
            module: Gets the payload, gives the gradient of its first tensor (or a tuple: of the
                first few), in its shape.
            name, part: As for ``through``.
            take: Which payload tensors the module gets: ``(0, 1)`` with targets, ``0`` without.

        Source: Jaderberg et al. 2016, arXiv:1608.05343.
        """
        function, part = _function_and_part("synthesize", module, part)
        _refuse_gear("synthesize", part)
        return self._run("synthesize", function, part, name, "graph", take, use=Synthesizing())

    def replay(
        self,
        *,
        times: int = 1,
        buffer: int = 1,
        draw: Draw = "newest",
        max_age: int | None = None,
        fresh: bool = True,
        seed: int = 0,
        name: str | None = None,
    ) -> Stream:
        """Store rows, and send stored ones again when their gradient has been handed down.

        Everything behind learns from the replays, nothing before. Another ``replay`` further on
        passes them. They are told apart by the state column ``replay``, 0 for fresh rows: so
        ``where(lambda m: m.replay == 0)`` ends replays early. Targets must ride along in the
        payload.

        Args:
            times: Replays after each fresh message.
            buffer: Messages that are stored.
            draw: ``newest``; ``least_used`` (the freshest of them, and being sent fresh is a use:
                with one minibatch in flight that is the newest, too); ``uniform``.
            max_age: Drop those that came more than so many minibatches ago.
            fresh: Whether fresh rows are sent themselves. False: they are answered zero at once,
                and ``times`` drawn ones are sent, the first of which counts as fresh further on
                (decoupled greedy learning).
            seed: Of ``uniform``.

        Source: buffers as in Belilovsky et al. 2020, arXiv:1901.08164.
        """
        return self._replay(Replays(times, buffer, draw, max_age, fresh, seed), name)

    def _replay(self, rule: Replays, name: str | None) -> Stream:
        self._graph._declare(REPLAY)
        return self._graph._add(Replaying(self._graph._name(name, "replay"), self._source, rule))

    def _run(
        self,
        verb: str,
        function: Callable[..., Any],
        part: PartLike | None,
        name: str | None,
        keep: Keep | None,
        take: int | Sequence[int] | None,
        *,
        read: str | Sequence[str] = (),
        inside: bool = False,
        pool: bool = False,
        alone: bool = True,
        use: AbstractUse | None = None,
        memory: Holding | None = None,
    ) -> Stream:
        taken = (take,) if isinstance(take, int) else None if take is None else tuple(take)
        if taken is not None and (not taken or min(taken) < 0 or len(set(taken)) < len(taken)):
            raise ValueError(f"{verb}() got take={take}; numbers of payload tensors, each once")
        default = part.name if part is not None and part.name else _called(function)
        chosen = keep or (part.keep if part is not None else "auto")
        if use is not None and chosen == "auto":
            chosen = "graph"
        columns = (read,) if isinstance(read, str) else tuple(read)
        operator = Through(
            self._graph._name(name, default),
            self._source,
            function,
            part,
            chosen,
            columns,
            inside,
            pool,
            taken,
            alone,
            use,
            memory,
        )
        if isinstance(function, nn.Module):
            alike = (o for o in self._graph.throughs() if type(o.function) is type(function))
            if (other := next(alike, None)) is not None:
                operator.experience.done = other.experience.done
        return self._graph._add(operator)

    def where(
        self, predicate: Callable[[View], Any], *, name: str | None = None
    ) -> tuple[Stream, Stream]:
        """Split rows in two (Cond): those for which the predicate holds, and the others.

        Args:
            predicate: Gets a ``View`` of n rows, returns n booleans (numpy or torch).
        """
        operator = Routing(self._graph._name(name, "where"), self._source, predicate, 2, True)
        yes = self._graph._add(operator)
        return yes, Stream(self._graph, operator, 1)

    def route(
        self, choose: Callable[[View], Any], ways: int, *, name: str | None = None
    ) -> tuple[Stream, ...]:
        """Split rows over several streams (Cond).

        Args:
            choose: Gets a ``View`` of n rows (state, frame, ``payload``), returns n integers in
                ``[0, ways)``.
            ways: How many streams.
        """
        if ways < 1:
            raise ValueError(f"route() got ways={ways}; at least one")
        operator = Routing(self._graph._name(name, "route"), self._source, choose, ways, False)
        self._graph._add(operator)
        return tuple(Stream(self._graph, operator, k) for k in range(ways))

    def move(self, *, name: str | None = None, **fields: Callable[[View], Any] | int) -> Stream:
        """Give state columns new values (Isu): ``move(vertex=lambda m: m.parent, step=0)``.

        No inverse is needed. ``vertex`` and ``edge`` are numbered inside the instance.
        """
        if not fields:
            raise ValueError("move() got no column; name one: move(vertex=lambda m: m.parent)")
        for column in fields:
            self._graph._declare(column)
        return self._graph._add(Moving(self._graph._name(name, "move"), self._source, fields))

    def group(
        self,
        by: str | Sequence[str] | Mapping[str, Callable[[View], Any] | int],
        size: int | Column,
        *,
        order: Column | None = None,
        how: How = "stack",
        name: str | None = None,
    ) -> Stream:
        """Collect the members of a key into one row (Group).

        Args:
            by: State columns of the key, or column to the function that sets it first:
                ``by={"vertex": lambda m: m.parent}`` gathers children at their parent. A group
                never spans instances.
            size: How many members a group has: a number, a column, or a function of the ``View``.
            order: Position 0..size-1 of a member: a column or a function; None sorts by state. Like
                ``size`` it sees the member as it came, before ``by`` sets anything.
            how: ``stack`` makes ``(n, size, ...)``; ``sum``, ``mean``, ``max`` reduce; ``bundle``
                makes one message of all members, which may be of any number.
        """
        columns: Mapping[str, Callable[[View], Any] | int | None]
        if isinstance(by, Mapping):
            columns = dict(by)
            for column in columns:
                self._graph._declare(column)
        else:
            columns = dict.fromkeys((by,) if isinstance(by, str) else by)
        if isinstance(size, int) and size < 1:
            raise ValueError(f"group() got size={size}; at least one member")
        if how not in ("stack", "sum", "mean", "max", "bundle"):
            raise ValueError(f"group() got how={how!r}; one of stack, sum, mean, max, bundle")
        operator = Grouping(
            self._graph._name(name, "group"), self._source, columns, size, order, how
        )
        return self._graph._add(operator)

    def ungroup(self, *, index: str | None = None, name: str | None = None) -> Stream:
        """Turn each row of k parts ``(n, k, ...)``, or each bundle, into k rows (Ungroup).

        Args:
            index: State column that numbers the parts from 0; ``vertex`` puts part i at vertex i.
        """
        if index is not None:
            self._graph._declare(index)
        return self._graph._add(Ungrouping(self._graph._name(name, "ungroup"), self._source, index))

    def flatmap(
        self,
        over: str = "edge",
        *,
        count: Callable[[View], Any] | None = None,
        name: str | None = None,
    ) -> Stream:
        """Send each row once for each edge that leaves its vertex (Flatmap); none is allowed.

        Args:
            over: ``edge``: the state column ``edge`` then names the edge. With ``count``: the
                column that numbers the copies from 0.
            count: Gets a ``View``, returns each row's number of copies.
        """
        if over == "edge" and count is None and self._graph.edge is None:
            raise GraphError(
                "flatmap over edges, but instances have none: declare Graph(edge=()) or with "
                "columns"
            )
        if over != "edge" and count is None:
            raise ValueError(
                f"flatmap(over={over!r}) wants count=..., the number of copies of a row"
            )
        self._graph._declare(over)
        return self._graph._add(
            Flatmapping(self._graph._name(name, "flatmap"), self._source, over, count)
        )

    def split(self, *sizes: int, name: str | None = None) -> tuple[Stream, ...]:
        """Cut the last dimension into pieces (Split)."""
        if not sizes or min(sizes) < 1:
            raise ValueError(f"split() got sizes {sizes}; one or more, each at least 1")
        operator = Splitting(self._graph._name(name, "split"), self._source, sizes)
        self._graph._add(operator)
        return tuple(Stream(self._graph, operator, k) for k in range(len(sizes)))

    def loss(
        self,
        criterion: Callable[..., Any],
        target: Target = None,
        *,
        metrics: Mapping[str, Callable[..., Any] | Metric] | None = None,
        weight: Target = None,
        name: str | None = None,
        label: str | None = "loss",
        alone: bool = False,
    ) -> None:
        """End the stream in a loss, whose gradient starts the way back at once.

        Args:
            criterion: ``(prediction, target) -> (n,)``, one loss a row. torch's functions with a
                ``reduction`` are asked for none. A method ``with_gradient`` of it, ``(prediction,
                target) -> (losses, their gradient at the prediction)``, spares autograd.
            target: A frame or state column, a function of the ``View``, or None: the criterion gets
                the prediction alone.
            metrics: Name to ``Metric`` or ``(prediction, target) -> (n,)``.
            weight: Scales the rows' losses: a column or a function.
            label: What its mean is called in reports; losses of one label are averaged together.
                None: it trains, and is not reported.
            alone: Judge one message at a time: for bundles that are minibatches.
        """
        named = {
            key: m if isinstance(m, Metric) else Metric(m) for key, m in (metrics or {}).items()
        }
        operator = Losing(
            self._graph._name(name, "loss"),
            self._source,
            criterion,
            target,
            named,
            weight,
            label,
            alone,
        )
        self._graph._add(operator)

    def head(
        self,
        module: Callable[..., Any] | PartLike,
        criterion: Callable[..., Any],
        target: Target = None,
        *,
        name: str | None = None,
        metrics: Mapping[str, Callable[..., Any] | Metric] | None = None,
        part: PartLike | None = None,
        keep: Keep | None = None,
    ) -> Stream:
        """Put a local loss beside the stream; its gradient joins the stream's.

        Args:
            module, name, part, keep: As for ``through``.
            criterion, target, metrics: As for ``loss``.

        Returns:
            This stream. Detach it behind the head and only the local loss trains what is before.
        """
        head = self.through(module, name=name, part=part, keep=keep)
        head.loss(criterion, target, metrics=metrics)
        return self

    def output(
        self, name: str | None = None, *, take: int | None = None, alone: bool = False
    ) -> None:
        """End the stream in rows that ``Session.predict`` returns.

        Args:
            name: The key of its rows where there are several outputs.
            take: The payload tensor that is collected; None: all of them.
            alone: Collect one message at a time: for bundles that are minibatches.
        """
        operator = Outputting(self._graph._name(name, "output"), self._source, take, alone)
        self._graph._add(operator)

    def stop(self, *, name: str | None = None) -> None:
        """Swallow the rows; their gradient is zero."""
        self._graph._add(Stopping(self._graph._name(name, "stop"), [[self._source]]))

    def detach(self, *, name: str | None = None) -> Stream:
        """Pass the rows on and answer zero at once: no gradient crosses here."""
        return self._graph._add(Detaching(self._graph._name(name, "detach"), [[self._source]]))

    def join(self, *streams: Stream) -> Stream:
        """Let more streams lead into a loop (only for what ``Graph.loop`` returned)."""
        if not isinstance(self.operator, Merging):
            raise GraphError(
                f"'{self.operator.name}' is a {self.operator.kind}; join() is for graph.loop(), "
                "and graph.merge(a, b) makes one stream of two"
            )
        self._graph._own(streams)
        self.operator.sources[0].extend(s._source for s in streams)
        return self

    def __repr__(self) -> str:
        return f"<stream of '{self.operator.name}' port {self.port}>"

    @property
    def graph(self) -> Graph:
        """The graph that the stream belongs to."""
        return self._graph

    @property
    def _source(self) -> tuple[AbstractOperator, int]:
        return self.operator, self.port


@final
class Graph:
    """A static graph for dynamic control flow.

    Args:
        vertex: Columns with one entry a vertex, which every instance brings.
        edge: Columns with one entry an edge, besides ``source`` and ``target``; None: no edges.
        value: Columns with one entry an instance.
    """

    def __init__(
        self,
        *,
        vertex: Sequence[str] = (),
        edge: Sequence[str] | None = None,
        value: Sequence[str] = (),
    ) -> None:
        self.vertex, self.value = _names(vertex, "vertex"), _names(value, "value")
        self.edge = None if edge is None else _names(edge, "edge")
        taken = [*self.vertex, *(self.edge or ()), *self.value]
        reserved = {"vertex", "instance", "edge", "source", "target", "size", "payload", "lengths",
                    "in_degree", "out_degree"}  # fmt: skip
        for name in taken:
            if taken.count(name) > 1 or (name in reserved):
                raise GraphError(
                    f"column '{name}' is declared twice or reserved; reserved are "
                    f"{sorted(reserved)}"
                )
        self._columns = ["instance", "vertex"]
        self._operators: list[AbstractOperator] = []
        self._names: set[str] = set()

    def input(
        self,
        name: str,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        bundle: bool = False,
        alone: bool = False,
        **fields: int,
    ) -> Stream:
        """Where rows enter: instances bring them under this name.

        Args:
            name: The key in ``Instance.inputs``.
            shape, dtype: Of one row; learned from the first instance when not given.
            bundle: All rows of an instance travel as one message.
            alone: For bundles that are minibatches: instances are admitted one at a time, so that
                theirs may differ in shape from one to the next.
            fields: User columns and the constant that rows start with: ``step=0``.
        """
        if any(isinstance(o, Input) and o.name == name for o in self._operators):
            raise GraphError(f"input '{name}' is declared twice; use its stream twice instead")
        for column in fields:
            self._declare(column)
        inner = None if shape is None else tuple(shape)
        return self._add(Input(self._name(name, name), inner, dtype, bundle, fields, alone))

    def loop(self, *, name: str | None = None, run: Run | None = None) -> Stream:
        """A stream whose sources come later, by ``join`` (Phi).

        Args:
            name: In errors, traces and drawings; default: ``loop``.
            run: How the operators run that feed one another through this stream. ``steps``: each
                one fires for itself, with whatever rows have come. ``whole``: one firing takes
                instances through all turns; refused where that cannot be. ``auto``: whole where it
                can be. ``print(graph)`` says which, and why. Loops that share operators are one.
                Default: what the others of these say, else ``auto``, but by steps where a part in
                the loop counts rows or has a window: updates of rows would end with whole
                instances.
        """
        if run not in (None, "auto", "steps", "whole"):
            raise ValueError(f"loop(run={run!r}): give 'auto', 'steps' or 'whole'")
        return self._add(Merging(self._name(name, "loop"), [[]], run, loops=True))

    def merge(self, *streams: Stream, name: str | None = None) -> Stream:
        """One stream of several (Phi)."""
        if not streams:
            raise ValueError("merge() got no stream")
        self._own(streams)
        return self._add(Merging(self._name(name, "merge"), [[s._source for s in streams]]))

    def concat(
        self,
        *streams: Stream,
        on: str | Sequence[str] | None = None,
        how: Literal["features", "tuple"] = "features",
        name: str | None = None,
    ) -> Stream:
        """Wait for one row of every stream with an equal key, and put them side by side (Concat).

        Args:
            streams: Two or more; the state is that of the first.
            on: State columns of the key; default: all columns that the streams share.
            how: ``features`` concatenates the last dimension; ``tuple`` hands all payload tensors
                on, for a module of several arguments.
        """
        if len(streams) < 2:
            raise ValueError(f"concat() got {len(streams)} streams; two or more")
        self._own(streams)
        columns = (on,) if isinstance(on, str) else None if on is None else tuple(on)
        operator = Joining(self._name(name, "concat"), [s._source for s in streams], columns, how)
        return self._add(operator)

    @property
    def operators(self) -> Sequence[AbstractOperator]:
        return tuple(self._operators)

    def schema(self) -> Schema:
        return Schema(self._columns, self.vertex, self.edge, self.value)

    def throughs(self) -> Iterator[Through]:
        return (o for o in self._operators if isinstance(o, Through))

    def modules(self) -> list[nn.Module]:
        """The modules of the graph, each once."""
        found = [weights_of(o.function) for o in self.throughs()]
        return list(dict.fromkeys(module for module in found if module is not None))

    def copy_with_broadcasts(self) -> list[AbstractOperator]:
        """The operators, with a broadcast where a stream has several readers; ids from 1.

        Raises:
            GraphError: A stream is read by nobody, or a loop has no source.
        """
        return wiring.with_broadcasts(self._operators)

    def check(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
        like: Instance | None = None,
    ) -> None:
        """Find what cannot work, before anything moves.

        Functions run on meta tensors, and then on a few rows of random numbers: neither they nor
        any generator of random numbers is changed by it.

        Args:
            shapes: Input name to shape and dtype of one row, for inputs declared without.
            like: An instance of the data, whose columns and edges such rows shall have. Without it
                what reads columns is tried on the first real rows.

        Raises:
            GraphError: Unknown columns, unread streams, payloads that do not fit, weights that
                belong to no part, modules that mix rows, endless loops; names node and port, what
                came and what was expected.
        """
        checking.check(self, shapes or {}, like)

    def __str__(self) -> str:
        return drawing.text(self)

    def mermaid(self) -> str:
        """The graph as Mermaid flowchart source."""
        return drawing.mermaid(self)

    def dot(self) -> str:
        """The graph as Graphviz DOT source."""
        return drawing.dot(self)

    def _add(self, operator: AbstractOperator) -> Stream:
        self._operators.append(operator)
        return Stream(self, operator)

    def _name(self, given: str | None, default: str) -> str:
        if given is not None:
            if given in self._names:
                raise GraphError(
                    f"the name '{given}' is taken; inputs, nodes and outputs of a graph have names "
                    "of their own: choose another for one of them"
                )
            self._names.add(given)
            return given
        name, k = default, 2
        while name in self._names:
            name, k = f"{default}_{k}", k + 1
        self._names.add(name)
        return name

    def _declare(self, column: str) -> None:
        if column in ("instance",):
            raise GraphError("the column 'instance' cannot be changed: rows stay in their instance")
        if column in self.vertex or column in (self.edge or ()) or column in self.value:
            raise GraphError(
                f"'{column}' is a column of instances; a state column needs a name of its own"
            )
        if column not in self._columns:
            self._columns.append(column)

    def _first_of(self, part: PartLike | None) -> bool:
        """Whether no node of this part was written yet."""
        return part is None or all(t.part is not part for t in self.throughs())

    def _own(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            if stream._graph is not self:
                raise GraphError(f"{stream} belongs to another graph")


def _function_and_part(
    verb: str, module: Callable[..., Any] | PartLike, part: PartLike | None
) -> tuple[Callable[..., Any], PartLike | None]:
    """What a verb runs, and whose weights they are; a ``Part`` stands for its module."""
    if not callable(module) and isinstance(inner := getattr(module, "module", None), nn.Module):
        return inner, module
    if not callable(module) or isinstance(module, type):
        came = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"{verb}() takes a module, a function or a Part, not {came}")
    function = bound(module)
    weights = weights_of(function)
    if part is not None and weights is not None and next(weights.parameters(), None) is not None:
        if path_inside(part.module, weights) is None:
            raise GraphError(
                f"{verb}(): {type(weights).__name__} is not inside the module of its part, "
                f"{type(part.module).__name__}; a Part's module holds the modules of all nodes "
                "that name it"
            )
    return function, part


def _refuse_gear(verb: str, part: PartLike | None) -> None:
    if part is not None and part.gear is not None:
        raise ValueError(f"{verb}() got a part with {part.gear}; only through() has gears")


def _called(function: object) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else name.lower()


def _names(names: Sequence[str], kind: str) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"Graph({kind}={names!r}): give a tuple of names, ({names!r},)")
    return tuple(names)
