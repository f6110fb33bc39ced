"""Which runtime, how many workers and what way to share weights would be best, as measured.

    what the first instances cost one worker ─┐
    how parts can be placed, what is refused ─┼─► expected times of one worker ─► Advice, and why
    the machine ──────────────────────────────┘

Each way is reckoned by the worker with most to do, by the program that admits instances, and by all
cores together, whichever is slowest; see docs/how-to/workers.md for the rules in words. Nothing is
timed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, final

from geartrain.engine.costs import MESSAGE_S

Way: TypeAlias = Literal["spread", "each", "all", "copies"]

WORTH_IT: Final = 1.15
"""Times as fast as one worker that several have to be: gradients grow older with them."""
SPREAD_WORTH_IT: Final = 1.05
"""Times as fast as one worker with all cores in its kernels that parts have to be which are placed:
these take no more cores, and as many instances are in flight."""
MAX_STALENESS: Final = 2.0
"""Updates that may pass while a row is on its way, where workers share the weights; half as many
where each worker has as many instances in flight as were asked for.

Whole trainings with more took longer to the same accuracy than they gained in speed.
"""
START_S: Final = 5.0
"""Seconds of training that they have to save: worker processes take some until they begin."""
LONG_S: Final = 4e-3
"""A firing of so many seconds is mostly arithmetic, in which threads do not wait for each other."""

# What is left of a worker beside another, by whole runs: cores share caches and memory, workers
# wait now and then.
_SPREAD: Final = 0.97
_EMPTY: Final = 0.5  # instances that each further worker of a pipeline waits for, on the mean
_TOLD: Final = 4  # messages between the program and each worker for what is admitted together
_SHARED: Final = 0.85
_COPIES: Final = 0.75
_EMPTIER: Final = 0.85  # where the same instances are shared out, and firings are less full
_HALVED: Final = 0.75  # copies of a part whose firings gather instances: each has a share of these
_BYTE_S: Final = 1e-10  # of weights that are copied from common memory, by who steps and by others


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to compute with.

    Args:
        cores: That this program may use.
        processes: Why there can be no worker processes; None: there can.
    """

    cores: int
    processes: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What instances have cost one worker with one kernel thread.

    Args:
        instances: How many.
        seconds: All of it.
        firing_s: Of them in firings.
        fed_s: That the bytes which are fed would cost the program, if workers were processes.
        long_s: Seconds of a firing, on the mean over time.
        gathered: Instances in a firing forward of the node that costs most.
        kernels: How many times as fast it was with a kernel thread for each core.
        shares: Parts that live together, and seconds of their firings.
        updates: Steps of parts.
        update_bytes: Of the weights that these have stepped, all steps together.
        updates_each: Steps of the part that has most, by instance.
        max_active: Most instances in flight.
        left: Instances that are still to be trained; None: nobody knows.
    """

    instances: int
    seconds: float
    firing_s: float
    long_s: float
    kernels: float
    gathered: float
    shares: Mapping[tuple[str, ...], float]
    updates: int
    update_bytes: float
    max_active: int
    updates_each: float = 0.0
    fed_s: float = 0.0
    left: int | None = None

    def staleness(self, in_flight: int) -> float:
        """Updates that pass while a row is on its way, where so many instances are in flight.

        They go in step, so of k updates' instances a row waits for (k - 1) / 2 on the mean.
        """
        return max(0.0, (self.updates_each * in_flight - 1) / 2)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How the work could be shared out.

    Args:
        spread: Number of workers to seconds of each, batches between them among these, where parts
            are placed; or why they cannot be.
        shared: Why workers cannot share weights; None: they can.
        each: Whether workers that share weights may have ``max_active`` instances each.
        in_all: Whether they may have as many together.
        copied: The part that a worker each may have a copy of, or why there is none.
    """

    spread: Mapping[int, Sequence[float]] | str
    shared: str | None
    each: bool = True
    in_all: bool = True
    copied: tuple[str, ...] | str = "no part has most of the work"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What is to be done.

    Args:
        runtime: Its name.
        workers, kernel_threads: Of it.
        way: How workers share weights; ``each`` and ``all`` as ``SharedWeights`` has them.
        part: The part that has copies, where ``way`` is ``copies``.
        speedup: Expected times of one worker with one kernel thread.
        why: A line.
        expected: The same of the best of each kind that was looked at, this one among them, by what
            it is called.
    """

    runtime: Literal["threads", "processes"]
    workers: int
    kernel_threads: int
    way: Way = "spread"
    part: str = ""
    speedup: float = field(default=1.0, compare=False)
    why: str = field(default="", compare=False)
    expected: Mapping[str, float] = field(default_factory=dict, compare=False)


def advise(
    seen: Sampled,
    machine: Machine,
    ways: Ways,
    most: int | None = None,
    max_staleness: float = MAX_STALENESS,
) -> Advice:
    """The best way that pays.

    Args:
        seen: What was measured.
        machine: Its cores.
        ways: What is possible.
        most: Workers, at most; None: as many as there are cores.
        max_staleness: Updates that may pass, on the mean, while a row is on its way, where weights
            are shared; half as many where each worker has ``max_active`` instances.
    """
    cores = machine.cores
    one = _one_worker(seen, cores)
    least = min(cores, cores if most is None else most)
    if least < 2:
        said = "the machine has one core" if cores < 2 else "no more are wanted"
        return _told(one, f"{_called(one)}, as {said}")
    # A worker more has to bring something.
    found = sorted(
        _candidates(seen, machine, ways, least, max_staleness),
        key=lambda plan: -plan.speedup * 0.98**plan.workers,
    )
    expected = _expected([*found, one, replace(one, kernel_threads=1, speedup=1.0)])
    return replace(_best(seen, machine, ways, one, found), expected=expected)


def _best(
    seen: Sampled, machine: Machine, ways: Ways, one: Advice, found: Sequence[Advice]
) -> Advice:
    """One worker, or the first of what was found if that pays."""
    cores, shares = machine.cores, _shares(seen)
    if not found:
        return _told(one, f"{_called(one)}: {_why_none(seen, machine, ways)}; {shares}")
    best = found[0]
    saved = _saved_s(seen, one, best)
    expected = f"{_called(best)} are expected to train {best.speedup:.2f} times as fast as one"
    worth = SPREAD_WORTH_IT if best.way == "spread" else WORTH_IT
    if best.speedup < max(WORTH_IT, worth * one.speedup):
        that = f", which has {one.speedup:.2f} with {cores} kernel threads" * (one.speedup > 1)
        return _told(one, f"{_called(one)}: {shares}; {expected}{that}: too little for it")
    if saved is not None and saved < START_S:
        return _told(
            one,
            f"{_called(one)}: {expected}, and would save {max(saved, 0.0):.1f} s of what is left, "
            f"less than the {START_S:g} s that they take to begin",
        )
    that = f" ({one.speedup:.2f} with {cores} kernel threads)" if one.speedup > 1 else ""
    return _told(
        best, f"{_called(best)}: {shares}; expected {best.speedup:.2f} times one worker{that}"
    )


def _candidates(
    seen: Sampled, machine: Machine, ways: Ways, most: int, max_staleness: float
) -> Iterator[Advice]:
    cores = machine.cores
    parent_s = max(0.0, seen.seconds - seen.firing_s)
    processes = machine.processes is None
    # Of a worker; the program has as much of each.
    told_s = seen.instances / max(1.0, seen.gathered) * _TOLD * MESSAGE_S / 2
    if not isinstance(ways.spread, str) and (processes or seen.long_s >= LONG_S):
        for workers, loads in ways.spread.items():
            if 2 <= workers <= most:
                # So many work at a time as there are instances, whatever the placement.
                longest = max(*loads, sum(loads) / min(seen.max_active, workers)) + told_s
                program_s = parent_s + told_s * workers + seen.fed_s
                work_s = sum(loads) + told_s * workers + program_s
                slowest = max(longest, program_s, work_s / cores)
                full = seen.max_active / (seen.max_active + _EMPTY * (workers - 1))
                yield _plan(seen, machine, workers, "spread", slowest / _SPREAD / full)
    # A step under a lock costs about a message more than one of a part that nobody shares.
    shared_s = seen.updates * MESSAGE_S + seen.update_bytes * _BYTE_S
    for workers in range(2, most + 1):
        way = None if ways.shared else _in_flight(seen, ways, workers, max_staleness)
        if way is not None and processes:
            # Each worker is given its instances, which costs it what it costs the program.
            work_s = seen.firing_s + shared_s * (workers - 1) + parent_s
            slowest = max(work_s / workers, parent_s, (work_s + parent_s) / cores)
            fuller = 1.0 if way == "each" else _EMPTIER
            yield _plan(seen, machine, workers, way, slowest / _SHARED / fuller)
        if way is not None and seen.long_s >= LONG_S:
            slowest = max(seen.seconds / workers, parent_s)
            yield _plan(seen, machine, workers, way, slowest / _SHARED, threads=True)
        if not isinstance(ways.copied, str) and processes:
            copied_s = seen.shares[ways.copied]
            # Rows go to copies on other workers, as they do where parts are placed.
            loads = () if isinstance(ways.spread, str) else ways.spread.get(workers, ())
            carried_s = max(0.0, sum(loads) - seen.firing_s) + told_s * workers
            program_s = parent_s + told_s * workers + seen.fed_s
            work_s = seen.firing_s + seen.updates * MESSAGE_S + carried_s
            slowest = max(work_s, copied_s) / workers
            slowest = max(slowest, program_s, (work_s + program_s) / cores)
            slowest /= _COPIES * (_HALVED if seen.gathered > 1 else 1.0)
            yield _plan(seen, machine, workers, "copies", slowest, part=ways.copied[0])


def _in_flight(
    seen: Sampled, ways: Ways, workers: int, max_staleness: float
) -> Literal["each", "all"] | None:
    """What ``max_active`` may count where weights are shared; None: rows would grow too old."""
    # More in flight than was asked for has to be harmless.
    if ways.each and seen.staleness(seen.max_active * workers) <= max_staleness / 2:
        return "each"
    if ways.in_all and seen.staleness(seen.max_active) <= max_staleness:
        return "all"
    return None


def _plan(
    seen: Sampled,
    machine: Machine,
    workers: int,
    way: Way,
    seconds: float,
    *,
    part: str = "",
    threads: bool = False,
) -> Advice:
    return Advice(
        runtime="threads" if threads or machine.processes is not None else "processes",
        workers=workers,
        kernel_threads=max(1, machine.cores // workers),
        way=way,
        part=part,
        speedup=seen.seconds / seconds if seconds > 0 else 1.0,
    )


def _one_worker(seen: Sampled, cores: int) -> Advice:
    """With all cores in its kernels, if that was faster."""
    if cores > 1 and seen.kernels > 1.05:
        return Advice(runtime="threads", workers=1, kernel_threads=cores, speedup=seen.kernels)
    return Advice(runtime="threads", workers=1, kernel_threads=1)


def _saved_s(seen: Sampled, one: Advice, best: Advice) -> float | None:
    """Seconds of training that the better plan saves; None: nobody knows how much is left."""
    if seen.left is None or best.runtime != "processes":
        return None
    return seen.left * seen.seconds / seen.instances * (1 / one.speedup - 1 / best.speedup)


def _why_none(seen: Sampled, machine: Machine, ways: Ways) -> str:
    said = [x for x in (machine.processes, ways.spread, ways.shared) if isinstance(x, str)]
    if ways.shared is None and not said:
        stale = seen.staleness(seen.max_active)
        said = [f"with shared weights {stale:.1f} updates would pass while a row is on its way"]
    return "; ".join(said)


def _shares(seen: Sampled) -> str:
    """What parts take of the firings, the largest first."""
    total = sum(seen.shares.values())
    if not total:
        return "no part has any work"
    sizes = sorted(seen.shares.items(), key=lambda each: (-each[1], each[0]))
    told = [f"'{' and '.join(names)}' {100 * s / total:.0f} %" for names, s in sizes[:_NAMED]]
    more = f" and {len(sizes) - _NAMED} more" if len(sizes) > _NAMED else ""
    each_ms = 1e3 * seen.seconds / seen.instances
    return f"of {each_ms:.3g} ms an instance parts take {', '.join(told)}{more}"


_NAMED: Final = 4


def _called(plan: Advice) -> str:
    if plan.workers == 1:
        kernels = f" with {plan.kernel_threads} kernel threads" if plan.kernel_threads > 1 else ""
        return f"one worker{kernels}"
    number = _NUMBERS.get(plan.workers, str(plan.workers))
    kind = "worker processes" if plan.runtime == "processes" else "workers as threads"
    how = {
        "spread": "",
        "each": " that share all weights",
        "all": " that share all weights and the instances in flight",
        "copies": f" with copies of '{plan.part}'",
    }[plan.way]
    return f"{number} {kind}{how}"


_NUMBERS: Final = {2: "two", 3: "three", 4: "four"}


def _told(plan: Advice, why: str) -> Advice:
    return replace(plan, why=why)


def _expected(plans: Sequence[Advice]) -> dict[str, float]:
    """What is expected of each kind of plan; of several with one name, the first."""
    found: dict[str, float] = {}
    for plan in plans:
        found.setdefault(_called(plan), plan.speedup)
    return found
