"""A node's function is tried on a few rows before anything moves.

    messages 0 1 2 ─► f ─► y         which weights are in it, and does it take this dtype?
    messages 2 1   ─► f ─► y'        is y' what y has for them?

What is found by it, where a run would look healthy:

    weights that are not the node's     a closure, a module in a list: they would never learn
    another dtype                       integers where floats are wanted, float64 into float32
    rows that see each other            ``x - x.mean(0)``: they come back in other company, so the
                                        gradient would be another function's
    input that is written over          ``x += 1``: others read it, and so does the way back
    results that are not repeated       a state kept between calls, numpy's random numbers: where it
                                        runs again for its gradient, that is of another call (told)

The rows are random numbers in an example's frame (``sample_rows``), on the host, and so are copies
of the weights. A function that cannot run on such rows is tried on the first real ones.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.errors import GraphError
from geartrain.frames.message import INSTANCE, IntArray, Payload
from geartrain.frames.precision import widened
from geartrain.graph.operator import Keep, describe
from geartrain.graph.sample_rows import MESSAGES, MOST_ROWS, Sample
from geartrain.nodes.call import Call
from geartrain.nodes.chance import Evened, Watched, generators_kept
from geartrain.nodes.inside import Inside, look_inside
from geartrain.nodes.leaves import described, foreign_story, leaves_of, names_of, that_stay
from geartrain.nodes.node import Place
from geartrain.nodes.stand_in import StandIn, plain

log = logging.getLogger("geartrain.graph")


@final
class DryRun:
    """What is known of a node's function by trying it; the copies of the node share it.

    Args:
        name: The node.
        detail: Its function, for messages.
        mixes: Whether rows that are together may see each other, as they are never apart.
        judges: Whether it is the criterion of a loss, which has no weights that learn.
        keep: Of the node; ``inputs`` also where ``auto`` would run it again whatever it draws.

    Attributes:
        settled: Whether nothing is left to be found out.
        draws: Whether it was seen to draw random numbers in training.
        clings: Whether it reaches its own weights in a way that a copy of it would share.
        severed: Whether it has weights that want a gradient, and what it makes has none of them.
        weights: What the weights of all nodes are called, by ``id``.
    """

    def __init__(
        self, name: str, detail: str, *, mixes: bool, judges: bool = False, keep: Keep = "auto"
    ) -> None:
        self._name, self._detail, self.mixes, self._judges = name, detail, mixes, judges
        self._keep = keep
        self.settled = self.clings = self.draws = self._looks = self._told = False
        self._repeats, self.severed = True, False
        self.weights: Mapping[int, str] = {}

    def again(self) -> DryRun:
        """One that knows nothing, for a copy of the function."""
        return DryRun(
            self._name, self._detail, mixes=self.mixes, judges=self._judges, keep=self._keep
        )

    def imagine(self, call: Call, samples: Sequence[Sample]) -> None:
        """Try it on rows that were made up; on the first of the samples that it can run on.

        Args:
            call: How the node calls it.
            samples: The last one has zeros.

        Raises:
            GraphError: It uses weights that are not its own, does not take the dtype, writes over
                its input, or mixes.
        """
        if not samples:
            return
        with warnings.catch_warnings(), generators_kept(None):
            warnings.simplefilter("ignore")
            if not any(self._judge(call, sample, mixing=not self.mixes) for sample in samples):
                self._refuse_dtype(call, samples[-1])

    def look(
        self,
        call: Call,
        place: Place,
        inputs: Payload,
        state: IntArray,
        lengths: IntArray | None,
        device: torch.device | None,
    ) -> None:
        """Try it on real rows, if there are enough of them.

        Args:
            call: How the node calls it.
            place: Of the node.
            inputs: The arguments of a call, but for the ``Inside``.
            state, lengths: Of the messages.
            device: Where the node computes; None: on the host.

        Raises:
            GraphError: As for ``imagine``; off the host mixing is not looked for.
        """
        if not call.inside:
            lengths = None
        n = min(MESSAGES, state.shape[1] if call.inside else inputs[0].shape[0])
        if n < 2:
            return
        rows = n if lengths is None else int(lengths[:n].sum())
        if rows > MOST_ROWS:
            self.settled = True
            return

        def inside(messages: IntArray) -> Inside:
            sizes = None if lengths is None else lengths[messages]
            return look_inside(place, state[INSTANCE, messages], sizes, device)

        sample = Sample(
            tuple(widened(x[:rows]) for x in inputs),
            n,
            None if lengths is None else lengths[:n],
            inside if call.inside else None,
        )
        there = any(not x.is_cpu for x in inputs)  # a look at numbers would wait for the device
        with generators_kept(device):
            if not self._judge(call, sample.apart(), mixing=not (self.mixes or there)):
                self._refuse_dtype(call, sample)
        self.settled = True  # one look: rows of another time would tell no more

    def _judge(self, call: Call, sample: Sample, *, mixing: bool) -> bool:
        """Whether it could be run on these; with ``mixing`` it is looked for.

        Raises:
            GraphError: It uses weights that are not its own, writes over its input, or mixes.
        """
        function = plain(call.function)
        first = np.arange(1 if self._one_only(sample) else sample.n)
        inputs, inside = sample.arguments(first)
        try:
            stand_in = StandIn(function, owns=not self._judges)
            outputs = stand_in.play(inputs, inside)
            alike = len({x.dtype for x in inputs if x.is_floating_point()}) < 2
            if self._judges and not (alike or hasattr(function, "with_gradient")):
                _go_back(stand_in, inputs, inside, len(call.read))
        except Exception:  # noqa: BLE001 - it wants other rows, or is broken: a real run will tell
            return False
        self._refuse_foreign(function, outputs, lambda: stand_in.play(*sample.arguments(first)))
        others = sample.arguments(first)[0]
        self._watch(stand_in, (others, inside), sample.arguments(first))
        if not self.mixes and not self._judges:
            self._refuse_writing(call, inputs, others)
            self._tell()
        if mixing:
            with Evened() if self.draws else nullcontext():
                self._refuse_mixing(call, stand_in, sample)
        if isinstance(function, nn.Module) and not self._judges:
            self.severed = _severed(stand_in, function, sample.arguments(first))
        self.settled = True
        return True

    def _one_only(self, sample: Sample) -> bool:
        """Whether the function may want each bundle by itself."""
        return self.mixes and sample.inside is not None

    def _refuse_foreign(
        self, function: Callable[..., Any], outputs: Payload, again: Callable[[], Payload]
    ) -> None:
        own: Iterable[Tensor] = ()
        if isinstance(function, nn.Module) and not self._judges:
            own = function.parameters()
        known = {id(p) for p in own}
        found = leaves_of(outputs)
        self.clings = any(id(x) in known for x in found)
        foreign = that_stay([x for x in found if id(x) not in known], again)
        if foreign:
            names = names_of(foreign, function) | {
                id(x): self.weights[id(x)] for x in foreign if id(x) in self.weights
            }
            weights = described(foreign, names)
            if self._judges:
                raise GraphError(
                    f"'{self._name}': {self._detail} computes with weights, and those of a "
                    f"criterion would never learn: {weights}; run what holds them as a node before "
                    "the loss: through(module). What shall not learn wants requires_grad_(False), "
                    "or torch.no_grad() around it"
                )
            raise GraphError(foreign_story(self._name, self._detail, weights))

    def _watch(
        self,
        stand_in: StandIn,
        once: tuple[Payload, Inside | None],
        again: tuple[Payload, Inside | None],
    ) -> None:
        """See whether it draws, looks at numbers, and gives the same for the same in training."""
        chance, train = Watched(), stand_in.modes[-1]
        with chance:
            runs = _runs(stand_in, (once,), False, train)
        self.draws = self.draws or chance.drew
        self._looks = chance.looked
        if runs is not None:
            self._repeats = not _by_chance(_runs(stand_in, (again,), False, train), runs[0])

    def _refuse_writing(self, call: Call, *calls: Payload) -> None:
        """Unless what is traced computes for it, and writes to copies.

        Args:
            call: How it is called.
            calls: Fresh tensors that it was called with.
        """
        if self._keep == "activations" or (self._keep == "auto" and self.draws):
            return
        for inputs in calls:
            for i, x in enumerate(inputs[: len(inputs) - len(call.read)]):
                if x._version:
                    raise GraphError(
                        f"'{self._name}': {self._detail} writes over its input (payload {i}), "
                        "which others may read, and which it wants again for its gradient; begin "
                        "with an operation that is not in place (x = x + 1 for x += 1, "
                        "inplace=False)"
                    )

    def _tell(self) -> None:
        """Say once that a gradient will be another call's."""
        kept = self.draws and self._keep != "inputs"
        if self._repeats or kept or self._told:
            return
        self._told = True
        why = (
            "it draws random numbers, and others when it runs again for its gradient; "
            "keep='activations' keeps what is drawn for rows, keep='graph' for bundles"
            if self.draws
            else "it keeps something between calls, or draws random numbers that are not torch's; "
            "its gradient may be that of another call: bring such things as payload or as a column"
        )
        log.warning(
            "'%s': %s gave another result for the same rows: %s", self._name, self._detail, why
        )

    def _refuse_mixing(self, call: Call, stand_in: StandIn, sample: Sample) -> None:
        """In evaluation and in training mode, in float64 if that can be."""
        every = np.arange(sample.n)
        few = every[:0:-1].copy()
        together, alone = sample.arguments(every), sample.arguments(few)
        for train in stand_in.modes:
            for double in (True, False) if stand_in.may_double else (False,):
                runs = _runs(stand_in, (together, alone), double, train)
                if runs is None:
                    continue
                y, part = runs
                off = _mixed(call, sample, y, part, few)
                if off and not _by_chance(_runs(stand_in, (together,), double, train), y):
                    raise GraphError(self._mixing_story(call, sample, off))
                break
        if self._looks and self._repeats:
            self._refuse_deciding(call, stand_in, sample)

    def _refuse_deciding(self, call: Call, stand_in: StandIn, sample: Sample) -> None:
        """Python looks at a number: does that of one row decide for the others?"""
        for k in range(sample.n):
            for factor in (8.0, -8.0):
                one = _with_one_scaled(sample, k, factor)
                every = np.arange(one.n)
                y = _runs(stand_in, (one.arguments(every),), False, False)
                for few in every[:, None]:
                    part = _runs(stand_in, (one.arguments(few),), False, False)
                    off = _mixed(call, one, y[0], part[0], few) if y and part else 0.0
                    if off:
                        raise GraphError(self._mixing_story(call, one, off))

    def _mixing_story(self, call: Call, sample: Sample, off: float) -> str:
        if self._judges:
            return (
                f"'{self._name}': {self._detail} mixes rows of different instances: the loss of a "
                f"row changes with the rows beside it (by {off:.2g} of its size), so its gradient "
                "would be another in any other company; give each row a loss of its own "
                "(reduction='none', sums over dimensions from 1 on), or send whole minibatches as "
                f"bundles, with loss(..., alone=True){_broadcast_story(sample.inputs)}"
            )
        if call.inside:
            return (
                f"'{self._name}': {self._detail} mixes bundles: what it makes of a bundle changes "
                f"with those beside it (by {off:.2g} of its size), and those are of other "
                "instances, and others on the way back; keep each to itself by inside.segment and "
                "inside.lengths, or send whole minibatches as bundles with keep='graph'"
            )
        return (
            f"'{self._name}': {self._detail} mixes rows of different instances: what it makes of a "
            f"row changes with the rows beside it (by {off:.2g} of its size), and those are others "
            "on the way back, so its gradient would be wrong; reduce over dimensions from 1 on, "
            "use LayerNorm or GroupNorm, or send whole minibatches as bundles with keep='graph', "
            "or rows that belong together as bundles with inside=True"
        )

    def _refuse_dtype(self, call: Call, sample: Sample) -> None:
        function = plain(call.function)
        every = np.arange(1 if self._one_only(sample) else sample.n)

        def run(inputs: Payload) -> None:
            changed = Sample(inputs, sample.n, sample.lengths, sample.inside).arguments(every)
            stand_in = StandIn(function, owns=not self._judges)
            stand_in.play(*changed)
            if self._judges and not _go_back(stand_in, *changed, len(call.read)):
                raise TypeError("nothing that it is given has a gradient")

        refuse_dtype(self._name, self._detail, call, sample.inputs, run)


def refuse_dtype(
    name: str, detail: str, call: Call, inputs: Payload, run: Callable[[Payload], object]
) -> None:
    """Find out whether a function would take its arguments in another dtype.

    Args:
        name, detail: The node and its function.
        call: How it is called.
        inputs: Its arguments: payload, then columns.
        run: Calls it with some.

    Raises:
        GraphError: It does not take these, and would take others.
    """
    try:
        run(inputs)
    except Exception as error:  # whatever it is: does another dtype help?
        for change in _changes(call.function, inputs):
            try:
                run(tuple(x.to(change.get(i, x.dtype)) for i, x in enumerate(inputs)))
            except Exception:  # noqa: BLE001 - this one does not
                continue
            story = _dtype_story(name, detail, call, inputs, change, error)
            raise GraphError(story) from error


def _changes(
    function: Callable[..., Any], inputs: Sequence[Tensor]
) -> list[dict[int, torch.dtype]]:
    """Other dtypes by number of the argument: the weights' or int64 for one, then for several."""
    function = plain(function)
    weights = function.parameters() if isinstance(function, nn.Module) else ()
    like = next((p.dtype for p in weights if p.is_floating_point()), torch.float32)
    every = [
        *({i: dtype} for i in range(len(inputs)) for dtype in (like, torch.int64)),
        {i: like for i, x in enumerate(inputs) if x.is_floating_point()},
        dict.fromkeys(range(len(inputs)), like),
    ]
    real = [{i: d for i, d in each.items() if inputs[i].dtype is not d} for each in every]
    return [each for each in real if each]


def _dtype_story(
    name: str,
    detail: str,
    call: Call,
    inputs: Payload,
    change: Mapping[int, torch.dtype],
    error: Exception,
) -> str:
    taken = len(inputs) - len(call.read)
    numbers = call.taken(taken)
    told = [
        f"{f'payload {numbers[i]}' if i < taken else f'column {call.read[i - taken]!r}'} comes as "
        f"{describe([inputs[i]])}, expected {_short(dtype)}"
        for i, dtype in change.items()
    ]
    first, dtype = next(iter(change.items()))
    remedy = f"bring it so, or cast it in a node before: through(lambda x: x.to({dtype}))"
    if first >= taken:
        remedy = f"bring it so: np.asarray(..., np.{_short(dtype)})"
    elif dtype.is_floating_point and inputs[first].is_floating_point():
        remedy += f"; or convert the module: module.to({inputs[first].dtype})"
    reason = str(error).strip().split("\n")[0]
    return f"'{name}': {detail} is given a wrong dtype: {'; '.join(told)} ({reason}); {remedy}"


def _runs(
    stand_in: StandIn,
    calls: Sequence[tuple[Payload, Inside | None]],
    double: bool,
    train: bool,
) -> list[Payload] | None:
    """What some calls give; None: they cannot be made in this dtype, or in this mode."""
    try:
        return [stand_in.play(*each, double=double, train=train) for each in calls]
    except Exception:  # noqa: BLE001 - code of anybody is run, in a way that it may not know
        return None


def _severed(stand_in: StandIn, function: nn.Module, given: tuple[Payload, Inside | None]) -> bool:
    """Whether no gradient of what a module makes would come to its weights."""
    if not any(p.requires_grad for p in function.parameters()):
        return False
    with suppress(Exception):  # code of anybody is run, and ran before
        y = stand_in.play(*given, train=stand_in.modes[-1], learns=True)
        return not any(x.requires_grad for x in y)
    return False


def _go_back(stand_in: StandIn, inputs: Payload, inside: Inside | None, read: int) -> bool:
    """Differentiate a criterion, whose last arguments are so many columns; False: by nothing.

    Where dtypes differ, some of torch's have a loss, and raise when their gradient is asked for.
    """
    at = len(inputs) - read
    wanted = [x.detach().requires_grad_() for x in inputs[:at] if x.is_floating_point()]
    given = iter(wanted)
    own = [next(given) if x.is_floating_point() else x for x in inputs[:at]]
    with torch.enable_grad():
        losses = stand_in.play((*own, *inputs[at:]), inside)[0]
        if losses.requires_grad:
            torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
    return bool(wanted)


def _by_chance(again: Sequence[Payload] | None, y: Payload) -> bool:
    """Whether the same call gave something else: then nothing can be told from other calls."""
    return again is None or any(how_far_apart(a, b) for a, b in zip(again[0], y, strict=True))


def _mixed(call: Call, sample: Sample, y: Payload, part: Payload, few: IntArray) -> float:
    """How far some messages alone are from themselves in company; 0: not at all."""
    n = sample.n if call.pool else len(sample.rows(np.arange(sample.n)))
    if len(y) != len(part) or any(x.shape[:1] != (n,) for x in y):
        return 0.0  # a row for each it does not make: the node says so
    rows = torch.from_numpy(few if call.pool else sample.rows(few))
    return max(
        how_far_apart(a.index_select(0, rows.to(a.device)), b) for a, b in zip(y, part, strict=True)
    )


def _with_one_scaled(sample: Sample, k: int, factor: float) -> Sample:
    """The same, and in floats message k is so many times as large."""
    rows = torch.from_numpy(sample.rows(np.array([k])))
    inputs = [x.clone() if x.is_floating_point() else x for x in sample.inputs]
    for x in inputs:
        if x.is_floating_point():
            x[rows.to(x.device)] *= factor
    return Sample(tuple(inputs), sample.n, sample.lengths, sample.inside)


def how_far_apart(a: Tensor, b: Tensor) -> float:
    """The largest difference by the size of the numbers; 0: none beyond rounding."""
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return 1.0
    if a.is_complex() and b.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return float(not torch.equal(a, b))
    near, size = torch.finfo(a.dtype).eps ** 0.5, _size(a)
    if torch.allclose(a, b, rtol=near, atol=near * size, equal_nan=True):
        return 0.0
    return _size(a - b) / size if size else 1.0


def _size(x: Tensor) -> float:
    """The largest of the finite ones."""
    return float(x.abs().nan_to_num(posinf=0.0).max()) if x.numel() else 0.0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _broadcast_story(inputs: Payload) -> str:
    """What to look at first where predictions (n, 1) meet targets (n,)."""
    if {x.ndim for x in inputs} != {1, 2} or any(x.ndim == 2 and x.shape[1] != 1 for x in inputs):
        return ""
    shapes = " and ".join(f"(n{''.join(f', {d}' for d in x.shape[1:]) or ','})" for x in inputs)
    return (
        f". It is given the shapes {shapes}, which together make (n, n): have a module give "
        "y.squeeze(1), or let the criterion do it"
    )
