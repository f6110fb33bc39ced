"""What may be done with rows on their way: the verbs of a stream, each with what it refuses.

A stream is an output port of an operator. A verb writes the operator behind it, and gives the
stream behind that. Verbs that run nothing are those of ``AbstractRows``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from geartrain.bounds import require_whole
from geartrain.errors import GraphError
from geartrain.graph.arguments import (
    called,
    function_and_part,
    refuse_gear,
    require_arguments,
    works_as,
)
from geartrain.graph.ends import Losing, Outputting
from geartrain.graph.gear import Gear, Geared
from geartrain.graph.memory import Holding
from geartrain.graph.operator import Keep, PartLike
from geartrain.graph.operators import Replaying
from geartrain.graph.overlap import Overlapped, OverlapRule
from geartrain.graph.rows import AbstractRows
from geartrain.graph.synthetic import Synthesizing
from geartrain.graph.through import Through
from geartrain.graph.use import AbstractUse
from geartrain.nodes.loss import Metric, Target
from geartrain.nodes.replay import REPLAY, Draw, Replays


class AbstractStream(AbstractRows):
    """Rows on their way from one operator to the next; every verb gives the stream behind it."""

    __slots__ = ()

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
    ) -> Self:
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
                ``(n,)``; on a GPU they are there, unless the module has ``reads_on_host = True``.
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
        require_arguments("through", part=part, gear=gear)
        function, part = function_and_part("through", module, part)
        gear = gear if gear is not None else part.gear if part is not None else None
        stream = self
        if gear is not None and gear.replays and self._draft.first_of(part):
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

    def hold(self, *, name: str | None = None) -> Self:
        """Hold each bundle, so that rows behind may read it by reference (``attend``).

        The bundle itself goes on: what is made of it, pooled to a row or ungrouped, knows where it
        is held, and so does all that follows, round loops and through routes. It is held once,
        until all behind it has been answered; the gradients of all that has read it are added up
        where it is, and leave once.

        Args:
            name: In errors, traces and drawings.
        """
        operator = Holding(self._draft.name(name, "memory"), self._source)
        self._draft.columns.append(operator.column)
        return self._add(operator)

    def attend(
        self,
        to: AbstractStream,
        module: Callable[..., Any] | PartLike,
        *,
        name: str | None = None,
        part: PartLike | None = None,
        keep: Keep | None = None,
        read: str | Sequence[str] = (),
        take: int | Sequence[int] | None = None,
    ) -> Self:
        """Run a module on rows, each with the bundle that is held for it.

        Args:
            to: What ``hold`` gave; the rows have come from there, by whatever way.
            module: Gets the payload ``(n, ...)``; the tensors of the memory ``(n, longest, ...)``,
                zeros behind the end of each; a mask ``(n, longest)``, True up to the end, all False
                for an empty bundle; and the columns of ``read``. Gives one or several ``(n,
                ...)``, each row on its own, whatever the longest is. ``nn.DotAttention``, which
                has a kernel, and ``nn.AdditiveAttention`` are such modules.
            name, part, read, take: As for ``through``. Of bundles each row reads.
            keep: ``auto`` (a memory kernel where the module has one, else inputs) or ``inputs``
                (the module runs again).

        Source: Bahdanau et al. 2015, arXiv:1409.0473.
        """
        self._require_one_graph((to,))
        if not isinstance(to.operator, Holding):
            raise GraphError(
                f"attend() reads what hold() gave, not '{to.operator.name}' ({to.operator.kind}); "
                "hold its bundles first: held = stream.hold()"
            )
        require_arguments("attend", part=part)
        function, part = function_and_part("attend", module, part)
        refuse_gear("attend", part)
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
    ) -> tuple[Self, Self]:
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
        require_arguments("overlap", part=part)
        function, part = function_and_part("overlap", module, part)
        refuse_gear("overlap", part)
        up = self._run("overlap", function, part, name, "graph", take, use=Overlapped(rule))
        return up, self._at(up.operator, 1)

    def synthesize(
        self,
        module: Callable[..., Any] | PartLike,
        *,
        name: str | None = None,
        part: PartLike | None = None,
        take: int | Sequence[int] | None = None,
    ) -> Self:
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
        require_arguments("synthesize", part=part)
        function, part = function_and_part("synthesize", module, part)
        refuse_gear("synthesize", part)
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
    ) -> Self:
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
        require_arguments("replay", fresh=fresh)
        return self._replay(Replays(times, buffer, draw, max_age, fresh, seed), name)

    def _replay(self, rule: Replays, name: str | None) -> Self:
        self._draft.declare(REPLAY)
        return self._add(Replaying(self._draft.name(name, "replay"), self._source, rule))

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
    ) -> Self:
        require_arguments(verb, keep=keep, take=take, read=read, inside=inside, pool=pool)
        require_arguments(verb, alone=alone)
        taken = (take,) if isinstance(take, int) else None if take is None else tuple(take)
        if taken is not None and (not taken or min(taken) < 0 or len(set(taken)) < len(taken)):
            raise ValueError(f"{verb}(take={take}): give numbers of payload tensors, each once")
        default = part.name if part is not None and part.name else called(function)
        chosen = keep or (part.keep if part is not None else "auto")
        if use is not None and chosen == "auto":
            chosen = "graph"
        columns = (read,) if isinstance(read, str) else tuple(read)
        operator = Through(
            self._draft.name(name, default),
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
        works = works_as(function)
        alike = (o for o in self._draft.throughs() if works_as(o.function) is works)
        if (other := next(alike, None)) is not None:
            operator.experience.done = other.experience.done
        return self._add(operator)

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
                Where none is called ``loss``, that is the mean of all that have labels. None: it
                trains, and is not reported.
            alone: Judge one message at a time: for bundles that are minibatches.
        """
        require_arguments("loss", criterion=criterion, target=target, weight=weight, label=label)
        require_arguments("loss", metrics=metrics, alone=alone)
        named = {
            key: m if isinstance(m, Metric) else Metric(m) for key, m in (metrics or {}).items()
        }
        operator = Losing(
            self._draft.name(name, "loss"),
            self._source,
            criterion,
            target,
            named,
            weight,
            label,
            alone,
        )
        self._add(operator)

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
    ) -> Self:
        """Put a local loss beside the stream; its gradient joins the stream's.

        Args:
            module, name, part, keep: As for ``through``.
            criterion, target, metrics: As for ``loss``.

        Returns:
            This stream. Detach it behind the head and only the local loss trains what is before.
        """
        require_arguments("head", criterion=criterion, target=target, metrics=metrics)
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
        require_arguments("output", alone=alone)
        if take is not None:
            require_whole(f"output(take={take!r:.80})", take, 0, "a payload tensor's, or None")
        operator = Outputting(self._draft.name(name, "output"), self._source, take, alone)
        self._add(operator)
