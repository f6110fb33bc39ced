"""Training in lock step by tcp while strangers attack its ports, and the same without them.

    PYTHONPATH=src python -m benchmarks.cluster.strangers --attacks 10000

Two processes train two parts of a network, one minibatch at a time, with what worker processes say
to one another. Strangers (`hostile.py`) connect to both ports in all ways they know. Claims: no
process ends or fails, memory and descriptors do not grow, and the weights are those of a run of as
many steps without strangers, to the bit.

    open   a third process is expected and never comes, so both doors stay open all the time
    shut   all are inside, as in a run that trains: the kernel keeps strangers out
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cluster.hostile import Attack, Relay
from benchmarks.peers.figures import Document, machine
from geartrain.frames.message import Backward, Forward
from geartrain.transport.batches import ANSWERS, Accepted, to_delivery_parts, to_record
from geartrain.transport.keys import Keys
from geartrain.transport.link import Transport
from geartrain.transport.record import Record

ROWS: Final = 64
WIDTH: Final = 64
COLUMNS: Final = 3
ACCEPTED: Final = Accepted(frozenset({0, 1}), COLUMNS)
END: Final = 20
WARM_STEPS: Final = 300
LOOK_EVERY: Final = 20
MOST_GROWTH_MIB: Final = 16.0
MOST_FDS: Final = 8


def rss_mib() -> float:
    """Memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def fds() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@final
class Member:
    """One of the two processes; ``number`` 0 has the data, 1 the loss."""

    def __init__(self, number: int, n: int) -> None:
        self.number, self.keys = number, Keys.make()
        self.transport = Transport(number, n, "tcp://127.0.0.1:*", keys=self.keys)
        draw = torch.Generator().manual_seed(number)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        with torch.no_grad():
            for each in self.layers.parameters():
                each.copy_(torch.randn(each.shape, generator=draw) / 8)
        self.optimiser = torch.optim.Adam(self.layers.parameters())
        self.draw = torch.Generator().manual_seed(7)
        self.steps = 0
        self.looks: list[tuple[float, int]] = []

    def hear(self) -> Record:
        """The one record that is on its way."""
        while not (found := self.transport.poll(1.0)):
            pass
        assert len(found) == 1, f"{len(found)} records came in lock step"
        return found[0][1]

    def lead(self) -> None:
        """A step of process 0."""
        out = self.layers(torch.randn(ROWS, WIDTH, generator=self.draw))
        state, origin = np.zeros((COLUMNS, ROWS), np.int64), np.arange(ROWS)
        self.transport.send(1, to_record(1, 0, Forward((out.detach(),), state, origin)))
        _, _, answer = to_delivery_parts(self.hear(), ACCEPTED)
        assert isinstance(answer, Backward) and answer.gradient is not None
        self._learn(out, answer.gradient[0])

    def follow(self) -> bool:
        """A step of process 1; False: there are no more."""
        record = self.hear()
        if record.kind == END:
            return False
        _, port, batch = to_delivery_parts(record, ACCEPTED)
        assert isinstance(batch, Forward) and port == 0
        x = batch.payload[0].requires_grad_()
        loss = (self.layers(x) - x.detach().roll(1, 1)).square().mean()
        self._learn(loss, None)
        answer = Backward(batch.origin, (x.grad,))
        self.transport.send(0, to_record(0, ANSWERS, answer))
        return True

    def _learn(self, out: Tensor, gradient: Tensor | None) -> None:
        self.optimiser.zero_grad()
        out.backward(gradient)
        self.optimiser.step()
        self.steps += 1
        if self.steps > WARM_STEPS and self.steps % LOOK_EVERY == 0:
            self.looks.append((rss_mib(), fds()))

    def told(self) -> Document:
        """What became of it."""
        said = hashlib.sha256()
        for each in self.layers.parameters():
            said.update(each.detach().numpy().tobytes())
        first = self.looks[0] if self.looks else (rss_mib(), fds())
        looks = [*self.looks, (rss_mib(), fds())]
        return {
            "weights": said.hexdigest(),
            "steps": self.steps,
            "rss_mib": [first[0], max(look[0] for look in looks), looks[-1][0]],
            "fds": [first[1], max(look[1] for look in looks), looks[-1][1]],
            "refused": self.transport.monitor().refused,
        }


def member(number: int, n: int) -> None:
    """A process: says where it is, hears where others are, trains until it is told to end."""
    torch.set_num_threads(1)
    me = Member(number, n)
    say(me.transport.address, me.keys.public.decode())
    addresses, public = (dict(enumerate(each)) for each in hear(sys.stdin))
    me.transport.connect(addresses, {k: key.encode() for k, key in public.items()})
    if number:
        while me.follow():
            pass
    else:
        (steps,) = hear(sys.stdin)
        ended = threading.Event()
        if not steps:
            asked = threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()))
            asked.start()
        while me.steps < steps if steps else not ended.is_set():
            me.lead()
        me.transport.send(1, Record(END))
    say(me.told())
    hear(sys.stdin)
    me.transport.close(5.0)


def say(*what: Any, to: IO[str] = sys.stdout) -> None:
    print(json.dumps(what), file=to, flush=True)


def hear(source: IO[str]) -> list[Any]:
    line = source.readline()
    if not line:
        raise SystemExit("the other side has ended")
    found: list[Any] = json.loads(line)
    return found


@final
class Pair:
    """Both processes, and where they are; ``n`` of 3 leaves a place free."""

    def __init__(self, n: int, steps: int) -> None:
        words = [sys.executable, "-m", "benchmarks.cluster.strangers", "--of", str(n), "--member"]
        self._members = [
            subprocess.Popen(
                [*words, str(k)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for k in range(2)
        ]
        told = [hear(self._out(k)) for k in range(2)]
        self.targets = [(address, key.encode()) for address, key in told]
        # What 1 says to 0 goes by way of somebody who keeps the beginning of it.
        self.relay = Relay(told[0][0])
        spare = [("tcp://127.0.0.1:1", Keys.make().public.decode())] * (n - 2)
        for k in range(2):
            whole = [*told, *spare]
            if k:
                whole[0] = (self.relay.address, whole[0][1])
            addresses, public = zip(*whole, strict=True)
            say(list(addresses), list(public), to=self._in(k))
        say(steps, to=self._in(0))

    def _in(self, k: int) -> IO[str]:
        found = self._members[k].stdin
        assert found is not None
        return found

    def _out(self, k: int) -> IO[str]:
        found = self._members[k].stdout
        assert found is not None
        return found

    def stop(self) -> None:
        """Have process 0 end after its step."""
        self._in(0).write("\n")
        self._in(0).flush()

    def end(self) -> list[Document]:
        """What became of both."""
        found = [hear(self._out(k))[0] for k in range(2)]
        for k in range(2):
            say(to=self._in(k))
        codes = [each.wait(20.0) for each in self._members]
        assert codes == [0, 0], codes
        return found

    def close(self) -> None:
        """End both, whatever they do."""
        for each in self._members:
            each.kill()
            each.wait()
            for pipe in (each.stdin, each.stdout):
                assert pipe is not None
                pipe.close()
        self.relay.close()


def siege(n: int, attacks: int, threads: int, seed: int = 0) -> Document:
    """A run that is attacked, and one of as many steps that is not."""
    pair = Pair(n, 0)
    try:
        while not pair.relay.said or len(pair.relay.said[0]) < 20_000:
            time.sleep(0.05)
        time.sleep(2.0)
        attack = Attack(pair.targets, n, [bytes(pair.relay.said[0][:20_000])], seed)
        start = time.perf_counter()
        attack.run(attacks, threads)
        seconds = time.perf_counter() - start
        time.sleep(6.0)  # for the handshakes that are half done
        pair.stop()
        attacked = pair.end()
    finally:
        pair.close()
    calm = Pair(n, attacked[0]["steps"])
    try:
        undisturbed = calm.end()
    finally:
        calm.close()
    return {
        "attacks": dict(attack.done),
        "kept_out": attack.kept_out,
        "seconds": seconds,
        "attacked": attacked,
        "undisturbed": undisturbed,
    }


def failures(found: Document) -> Iterator[str]:
    """Claims that do not hold."""
    for k, (one, other) in enumerate(zip(found["attacked"], found["undisturbed"], strict=True)):
        if (one["weights"], one["steps"]) != (other["weights"], other["steps"]):
            yield f"process {k}: the weights are others"
        if one["rss_mib"][2] - one["rss_mib"][0] > MOST_GROWTH_MIB:
            yield f"process {k}: memory grew, {one['rss_mib']} MiB"
        if one["fds"][2] - one["fds"][0] > MOST_FDS:
            yield f"process {k}: descriptors grew, {one['fds']}"


def markdown(document: Document) -> Iterator[str]:
    """The table."""
    heads = ("doors", "attacks", "of them kept out by the kernel", "s", "refused")
    heads += ("steps", "memory, MiB: before, most, after", "descriptors", "weights")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name, found in document["sieges"].items():
        for k, one in enumerate(found["attacked"]):
            same = one["weights"] == found["undisturbed"][k]["weights"]
            memory = ", ".join(f"{x:.1f}" for x in one["rss_mib"])
            yield (
                f"| {name}, process {k} | {sum(found['attacks'].values()):,} | "
                f"{found['kept_out']:,} | {found['seconds']:.0f} | {one['refused']:,} | "
                f"{one['steps']:,} | {memory} | {', '.join(map(str, one['fds']))} | "
                f"{'equal to the bit' if same else 'OTHERS'} |"
            )
    told = [
        f"{name}: {each}" for name, found in document["sieges"].items() for each in failures(found)
    ]
    yield from ("", "; ".join(told) if told else "all claims hold")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--attacks", type=int, default=10_000, help="with open doors; shut: a tenth"
    )
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, default=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member is not None:
        member(given.member, given.of)
        return
    sieges = {
        "open": siege(3, given.attacks, given.threads),
        "shut": siege(2, given.attacks // 10, given.threads),
    }
    document = {"machine": machine(), "sieges": sieges}
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(markdown(document)))


if __name__ == "__main__":
    main()
