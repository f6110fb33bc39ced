"""Your own modules: columns as arguments, own optimisers, checkpoints, plain inference.

    point (x, kind) ─► Encoder(x, kind) ─► sum over the set ─► Judge ─► loss
                       SGD with momentum                       the session's Adam

    python examples/own_module.py

Each instance is a set of any number of points. The encoder runs on the points of many sets at once.
After training the modules are ordinary modules: the last lines use them without geartrain.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import geartrain as gt

KINDS, CLASSES, WIDTH = 3, 2, 32


class Encoder(nn.Module):
    """Any module that treats each row on its own: no batch statistics, no fresh randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Embedding(KINDS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(2 + WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        """x float (n, 2) is the payload, kind int64 (n,) the column named in ``read``."""
        return self.layers(torch.cat([x, self.kind(kind)], 1))


class Judge(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def build(encoder: Encoder, judge: Judge) -> gt.Graph:
    slow = gt.Part(  # what a part does not name comes from the session's rules
        encoder,
        name="encoder",
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        update_every=gt.Rows(200),
        clip=gt.Clip(norm=1.0),
        keep="inputs",  # keep x and kind, run the module again for its gradient
    )
    graph = gt.Graph(vertex=("kind",), value=("label",))
    points = graph.input("x").through(slow, read="kind")
    sets = points.group(by="instance", size=lambda m: m.size, how="sum", name="sum")
    # Linear and Tanh have row kernels, so "auto" keeps activations here and runs nothing twice.
    sets.through(judge, name="judge", keep="auto").loss(
        nn.functional.cross_entropy, target="label", metrics={"accuracy": gt.accuracy}
    )
    return graph


def generate(n: int, seed: int) -> list[gt.Instance]:
    """Kind 0 pulls right, kind 1 left, kind 2 not at all; which way does the whole set go?"""
    random = torch.Generator().manual_seed(seed)
    instances = []
    for key in range(n):
        size = int(torch.randint(1, 8, (), generator=random))
        x = torch.randn(size, 2, generator=random)
        kind = torch.randint(KINDS, (size,), generator=random)
        pull = torch.tensor([1.0, -1.0, 0.0])[kind] @ x[:, 0]
        frame = {"kind": kind.numpy()}
        instances.append(gt.Instance({"x": x}, frame, value={"label": int(pull > 0)}, key=key))
    return instances


def main(argv: list[str] | None = None) -> float:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--sets", type=int, default=2000)
    arguments.add_argument("--epochs", type=int, default=6)
    options = arguments.parse_args(argv)
    train, test = generate(options.sets, seed=1), generate(300, seed=2)

    torch.manual_seed(0)
    encoder, judge = Encoder(), Judge()
    rules = gt.Rules(optimizer=partial(torch.optim.Adam, lr=3e-3), update_every=50)
    runtime = gt.Threads(1, kernel_threads=1)  # small matrices: more threads only wait
    session = gt.Session(build(encoder, judge), rules=rules, runtime=runtime)
    session.fit(train, epochs=options.epochs, valid=test)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sets.safetensors")
        session.save(path)  # weights, optimisers, place in the data, random state
        other_encoder, other_judge = Encoder(), Judge()
        restored = gt.Session(build(other_encoder, other_judge), rules=rules, runtime=runtime)
        restored.load(path)
    accuracy = restored.evaluate(test).metrics["accuracy"]
    print(f"accuracy {accuracy:.3f} on {len(test)} new sets, from the checkpoint")

    predicted = torch.cat(session.predict(test))  # one tensor (1, CLASSES) for each set, in order
    with torch.no_grad():  # the same modules, plain PyTorch
        plain = torch.stack(
            [
                other_judge(other_encoder(i.inputs["x"], torch.tensor(i.vertex["kind"])).sum(0))
                for i in test
            ]
        )
    torch.testing.assert_close(predicted, plain, rtol=1e-4, atol=1e-4)
    print("predict() and plain PyTorch agree")
    return accuracy


if __name__ == "__main__":
    main()
