"""Ctrl-C and SIGTERM, as real signals to a program of its own, whatever it is doing just then."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geartrain.train.checkpoint import read_checkpoint
from tests.rigs.products import halved
from tests.rigs.programs import Nursery, Program

RUNTIMES = ("simulated", "threads 2")
SOON_S = 30.0
"""Who waits for what does not come waits for a minute, or for ever."""

PRELUDE = """
import logging, os, signal, sys, threading, time
from functools import partial
import torch
import geartrain as gt
from torch import nn

logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="log: %(message)s")
torch.set_num_threads(1)
torch.manual_seed(0)
makers = {"simulated": lambda: gt.Simulated(2)}
makers |= {f"threads {n}": lambda n=n: gt.Threads(n, kernel_threads=1) for n in (1, 2)}
runtime, folder = makers[sys.argv[1]](), sys.argv[2]
never = threading.Event()

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: a log is written meanwhile
    sys.stdout.flush()

def make(n):
    drawn = torch.Generator().manual_seed(0)
    return [gt.Instance({"x": torch.randn(2, 3, generator=drawn)}, key=i) for i in range(n)]

def session(*between, **more):
    graph = gt.Graph()
    x = graph.input("x").through(nn.Linear(3, 4), name="first")
    for k, module in enumerate(between):
        x = x.through(module, name=f"between {k}")
    x.through(nn.Linear(4, 2), name="last").loss(lambda y: y.square().sum(1))
    options = {"runtime": runtime, "max_active": 4, "reading": gt.Reading(shuffle=False)} | more
    rules = gt.Rules(optimizer=partial(torch.optim.SGD, lr=0.01), update_every=4)
    return gt.Session(graph, rules=rules, **options)

class Blocks:
    \"\"\"Gives some instances, and then nothing at all.\"\"\"
    def __init__(self, rows, after):
        self.rows, self.after, self.begun = rows, after, False
    def __iter__(self):
        for i, row in enumerate(self.rows):
            if i == self.after and trained.is_set():
                say("blocks")
                never.wait()
            yield row

trained = threading.Event()
trained.set()
"""


Start = Callable[..., Program]


@pytest.fixture
def program(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """Start a program of this prelude, a script, a runtime's name, and more words."""
    running: list[Program] = []

    def start(script: str, runtime: str, *words: object) -> Program:
        whole, folders = PRELUDE + textwrap.dedent(script), (tmp_path / "here", tmp_path / "run")
        running.append(Program(nursery, folders[0], whole, runtime, folders[1], *words))
        return running[-1]

    yield start
    for each in running:
        each.close()


BLOCKED_DATA = """
    mine = session()
    rows = make(40)
    data = Blocks(rows, after=int(sys.argv[3]))
    trained.clear()
    mine.evaluate(rows)  # looks at the first instance, and checks the graph
    trained.set()
    try:
        mine.fit(data, epochs=1, folder=folder)
    except KeyboardInterrupt as error:
        say("ended:", error)
    say("trained", mine.statistics()["trained"])
    trained.clear()
    say("then", mine.fit(rows, epochs=1, folder=folder).instances)
"""


@halved(runtime=[*RUNTIMES, "threads 1"], after=[0, 6])
def test_one_ctrl_c_ends_a_run_whose_data_do_not_come(program, runtime, after, tmp_path):
    """In the first admission, and with instances in flight: these finish, and fit goes on there."""
    run = program(BLOCKED_DATA, runtime, after)
    run.until("blocks")
    run.send(signal.SIGINT, asleep=True)
    run.until("ended:")
    assert run.seconds < SOON_S
    assert "interrupted; everything that was in flight has finished" in run.lines[-1]
    assert run.end() == (0, "")
    done = int(next(line for line in run.lines if line.startswith("trained")).split()[1])
    assert after - 4 < done <= after
    assert run.lines[-1] == f"then {40 - done}"
    if runtime != "simulated":
        assert any("data have not answered" in x and "left behind" in x for x in run.lines)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_position_after_blocked_data_is_in_the_checkpoint(program, runtime, tmp_path):
    run = program(BLOCKED_DATA.replace("then", "not").split('say("not')[0], runtime, 6)
    run.until("blocks")
    run.send(signal.SIGINT, asleep=True)
    run.until("trained")
    position = read_checkpoint(tmp_path / "run" / "latest.safetensors").document["position"]
    assert run.lines[-1] == f"trained {position['trained']}"
    assert position["taken"] == position["trained"] in (4, 6)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_data_that_wake_up_after_they_were_left_behind_change_nothing(program, runtime):
    run = program(
        """
        mine = session()
        rows = make(40)
        mine.evaluate(rows)
        try:
            mine.fit(Blocks(rows, 6), epochs=1)
        except KeyboardInterrupt as error:
            say("ended")
        before = [p.detach().clone() for p in mine.parts["first"].module.parameters()]
        taken = mine.state.position.taken
        never.set()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(60)
        assert threading.active_count() == 1
        assert taken == mine.state.position.taken == mine.statistics()["trained"]
        after = mine.parts["first"].module.parameters()
        assert all(a.equal(b) for a, b in zip(before, after))
        say("then", taken + mine.fit(rows, epochs=1).instances)
        """,
        runtime,
    )
    run.until("blocks")
    run.send(signal.SIGINT, asleep=True)
    run.until("ended")
    assert run.end() == (0, "")
    assert run.lines[-1] == "then 40"


@halved(runtime=RUNTIMES, shards=["static", "pull"])
def test_copies_of_the_model_do_not_wait_for_data_either(program, runtime, shards):
    run = program(
        """
        class Stubborn:
            def __init__(self, rows):
                self.rows = rows
            def __len__(self):
                return len(self.rows)
            def __getitem__(self, i):
                if i == 9 and trained.is_set():
                    say("blocks")
                    never.wait()
                return self.rows[i]

        mine = session(sharing=gt.Neighbours(copies=2, shards=sys.argv[3]))
        data = Stubborn(make(40))
        try:
            mine.fit(data, epochs=1, folder=folder)
        except KeyboardInterrupt as error:
            say("ended:", error)
        done = mine.statistics()["trained"]
        trained.clear()
        say("then", done + mine.fit(data, epochs=1).instances)
        """,
        runtime,
        shards,
    )
    run.until("blocks")
    run.send(signal.SIGINT, asleep=True)
    run.until("ended:")
    assert run.seconds < SOON_S
    assert run.end() == (0, "")
    assert run.lines[-1] == "then 40"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_two_ctrl_c_end_a_run_whose_data_do_not_come_at_once(program, runtime):
    run = program(BLOCKED_DATA, runtime, 6)
    run.until("blocks")
    run.send(signal.SIGINT, asleep=True)
    run.send(signal.SIGINT)
    run.until("ended:")
    assert run.seconds < SOON_S
    assert run.end()[0] == 0
    assert run.lines[-1].startswith("then ")


@halved(runtime=RUNTIMES, what=["module", "predicate", "instrument"])
def test_two_ctrl_c_end_a_run_in_which_the_user_s_code_blocks(program, runtime, what):
    run = program(
        """
        class Stuck(nn.Module):
            def forward(self, x):
                if trained.is_set() and x.device.type != "meta" and sys.argv[3] == "module":
                    say("blocks")
                    never.wait()
                return x

        def predicate(m):
            if trained.is_set() and isinstance(m, gt.View) and sys.argv[3] == "predicate":
                say("blocks")
                never.wait()
            return m.vertex >= 0

        class Watching(gt.AbstractInstrument):
            def on_updated(self, event):
                if sys.argv[3] == "instrument":
                    say("blocks")
                    never.wait()

        mine = session(Stuck(), instruments=[Watching()])
        stream = mine.graph.input("more")
        yes, no = stream.where(predicate)
        yes.loss(lambda x: x.square().sum(1))
        no.stop()
        mine = gt.Session(mine.graph, runtime=runtime, instruments=[Watching()], max_active=4)
        rows = [gt.Instance(i.inputs | {"more": torch.ones(2, 3)}) for i in make(40)]
        trained.clear()
        mine.evaluate(rows)
        trained.set()
        try:
            mine.fit(rows, epochs=1)
        except KeyboardInterrupt as error:
            say("ended:", error)
        """,
        runtime,
        what,
    )
    run.until("blocks")
    run.send(signal.SIGINT, asleep=True)
    run.until("log: interrupted")
    run.send(signal.SIGINT, asleep=True)
    run.until("ended:")
    assert run.seconds < SOON_S
    assert "abandoned" in run.lines[-1]
    assert run.end() == (0, "")


def test_a_step_is_taken_whole_though_the_user_is_impatient(program):
    """Two Ctrl-C in the middle of an optimiser's step, which is no user's code that may block."""
    run = program(
        """
        class Halting(torch.optim.SGD):
            def step(self, closure=None):
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                for group in self.param_groups:
                    for p in group["params"]:
                        p.data.fill_(7.0)
                say("stepped")

        mine = session()
        rules = gt.Rules(optimizer=partial(Halting, lr=0.1), update_every=4)
        mine = gt.Session(mine.graph, rules=rules, runtime=runtime)
        try:
            mine.fit(make(40), epochs=1)
        except KeyboardInterrupt as error:
            say("ended:", error)
        assert all(p.eq(7).all() for p in mine.parts["last"].module.parameters())
        """,
        "simulated",
    )
    run.until("ended:")
    assert run.end() == (0, "")
    assert run.lines.count("stepped") == 1


@halved(runtime=RUNTIMES, number=[signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_all_is_well_ends_with_a_checkpoint(program, runtime, number, tmp_path):
    run = program(
        """
        from geartrain.runtime.interrupt import Terminated

        class Telling(gt.AbstractInstrument):
            def on_updated(self, event):
                if event.part == "last" and event.version == 3:
                    say("trains")

        class Endless:
            def __iter__(self):
                while True:
                    yield from rows

        rows = make(40)
        before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        mine = session(instruments=[Telling()])
        try:
            mine.fit(Endless(), epochs=1, folder=folder)
        except KeyboardInterrupt as error:
            say("ended:", type(error).__name__, error)
        assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        say("trained", mine.statistics()["trained"])
        """,
        runtime,
    )
    run.until("trains")
    run.send(number)
    run.until("ended:")
    kind, word = {
        signal.SIGINT: ("KeyboardInterrupt", "interrupted"),
        signal.SIGTERM: ("Terminated", "terminated"),
    }[number]
    assert f"ended: {kind} {word}; everything that was in flight has finished" in run.lines[-1]
    assert run.end() == (0, "")
    position = read_checkpoint(tmp_path / "run" / "latest.safetensors").document["position"]
    assert run.lines[-1] == f"trained {position['taken']}"


def test_any_number_of_sigterms_is_one_and_abandons_nothing(program):
    run = program(
        """
        class Often(gt.AbstractInstrument):
            def on_updated(self, event):
                for _ in range(3):
                    signal.raise_signal(signal.SIGTERM)

        mine = session(instruments=[Often()])
        try:
            mine.fit(make(40), epochs=1, folder=folder)
        except KeyboardInterrupt as error:
            say("ended:", error)
        """,
        "simulated",
    )
    run.until("ended:")
    assert run.lines[-1] == "ended: terminated; everything that was in flight has finished"
    assert run.end() == (0, "")


def test_a_signal_in_the_middle_of_a_line_is_told_after_it(program):
    """A stream takes nothing more from a thread that writes to it, as who prints may be stopped."""
    run = program(
        """
        import io

        class Raw(io.RawIOBase):
            armed = False
            def writable(self):
                return True
            def write(self, data):
                if Raw.armed:
                    Raw.armed = False
                    signal.raise_signal(signal.SIGINT)
                return os.write(1, data)

        class Prints(gt.AbstractInstrument):
            def on_updated(self, event):
                Raw.armed = not asked
                asked.append(event)
                say("whole")

        sys.stdout = io.TextIOWrapper(io.BufferedWriter(Raw()))
        shape = "log: %(message)s"
        logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format=shape, force=True)
        asked = []
        mine = session(instruments=[Prints()])
        try:
            mine.fit(make(40), epochs=1, folder=folder)
        except KeyboardInterrupt as error:
            say("ended:", error)
        """,
        "simulated",
    )
    run.until("ended:")
    assert run.end() == (0, "")
    told = "log: interrupted: finishing what is in flight; once more abandons it"
    assert run.lines[0] == "whole" and run.lines.count(told) == 1


def test_a_program_s_own_handler_of_sigterm_stays_in_charge(program):
    run = program(
        """
        def mine(number, frame):
            say("mine")

        class Telling(gt.AbstractInstrument):
            def on_epoch_ended(self, event):
                signal.raise_signal(signal.SIGTERM)
            def on_updated(self, event):
                assert signal.getsignal(signal.SIGTERM) is mine

        signal.signal(signal.SIGTERM, mine)
        say("trained", session(instruments=[Telling()]).fit(make(8), epochs=1).instances)
        """,
        "simulated",
    )
    run.until("trained 8")
    assert run.end() == (0, "") and "mine" in run.lines


@halved(runtime=RUNTIMES, number=[signal.SIGINT, signal.SIGTERM])
def test_processes_that_the_data_fork_die_of_their_signals(program, runtime, number):
    """They have our handler too, and nobody in them would hear what it notes down."""
    run = program(
        """
        number = signal.Signals(int(sys.argv[3]))

        class Forking:
            def __iter__(self):
                for i, row in enumerate(make(8)):
                    if i == 6 and trained.is_set():
                        ready, says_so = os.pipe()
                        child = os.fork()
                        if child == 0:
                            try:
                                os.write(says_so, b".")
                                while True:  # an event that is interrupted may raise otherwise
                                    time.sleep(0.01)
                            except KeyboardInterrupt:
                                os._exit(77)
                        os.read(ready, 1)
                        os.kill(child, number)
                        _, status = os.waitpid(child, 0)
                        say("child", os.waitstatus_to_exitcode(status))
                    yield row

        mine = session()
        mine.evaluate(make(8))
        say("trained", mine.fit(Forking(), epochs=1).instances)
        """,
        runtime,
        int(number),
    )
    run.until("trained 8")
    expected = 77 if number == signal.SIGINT else -signal.SIGTERM
    if runtime == "simulated" or number == signal.SIGTERM:
        assert f"child {expected}" in run.lines
    assert run.end() == (0, "")


BETWEEN_PASSES = """
    from geartrain.train.checkpoint import read_checkpoint

    place, number = sys.argv[3], int(sys.argv[4])

    class Telling(gt.AbstractInstrument):
        def on_run_started(self, event):
            if place == "run started":
                signal.raise_signal(number)
        def on_epoch_ended(self, event):
            if place == "epoch ended":
                signal.raise_signal(number)

    class Halting(torch.optim.SGD):
        halts = True
        def step(self, closure=None):
            if Halting.halts and mine.state.position.taken == 10 and place == "flush":
                Halting.halts = False
                signal.raise_signal(number)
            return super().step(closure)

    mine = session()
    rules = gt.Rules(optimizer=partial(Halting, lr=0.1), update_every=64)
    mine = gt.Session(mine.graph, rules=rules, runtime=runtime, instruments=[Telling()])
    try:
        mine.fit(make(10), epochs=3, valid=make(3), folder=folder)
    except KeyboardInterrupt as error:
        say("ended:", type(error).__name__)
    place = "none"
    said = read_checkpoint(folder + "/latest.safetensors").document
    versions = {p["version"] for p in said["parts"].values()}
    say("at", said["position"]["epoch"], said["position"]["taken"], *versions)
    say("then", *(e.instances for e in mine.fit(make(10), epochs=3, valid=make(3)).history))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("place", "at"),
    [("run started", "1 0 0"), ("flush", "1 10 1"), ("epoch ended", "2 0 1")],
)
def test_between_passes_a_signal_waits_until_what_was_begun_is_done(program, place, at, number):
    """No step is half taken, no copy half met: the checkpoint is of a moment that there was."""
    run = program(BETWEEN_PASSES, "simulated", place, int(number))
    run.until("ended:")
    assert run.lines[-1].endswith("KeyboardInterrupt" if number == signal.SIGINT else "Terminated")
    assert run.end() == (0, "")
    assert run.lines[-2:] == [f"at {at}", "then 10 10 10"]


@halved(runtime=RUNTIMES, where=["iter", "valid", "first"])
def test_ctrl_c_is_heard_where_data_block_before_they_give_anything(program, runtime, where):
    run = program(
        """
        where = sys.argv[3]

        class Late:
            def __init__(self):
                self.passes = 0
            def __iter__(self):
                self.passes += 1
                if self.passes == (1 if where in ("first", "valid") else 2):
                    say("blocks")
                    never.wait()
                return iter(make(8))

        mine = session()
        given = (make(8), Late()) if where == "valid" else (Late(), make(8))
        try:
            mine.fit(given[0], epochs=1, valid=given[1], folder=folder)
        except KeyboardInterrupt as error:
            say("ended:", error)
        """,
        runtime,
        where,
    )
    run.until("blocks")
    run.send(signal.SIGINT, asleep=True)
    run.until("ended:")
    assert run.seconds < SOON_S
    assert run.end() == (0, "")
