"""The Tree-LSTM of sentiment trees in DyNet: vertex by vertex, batched by DyNet itself.

    python -m benchmarks.peers.dynet_trees  the request on stdin, the reply on stdout; see protocol

An update's trees are written as one expression, a vertex at a time, and DyNet's automatic batching
(Neubig et al. 2017, arXiv:1705.07860) finds what may be computed together. Nothing but DyNet and
numpy is needed; the trees come with the request. DyNet's own CPU code is for one thread.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from typing import Any

import dynet_config

dynet_config.set(mem=1024, random_seed=1, autobatch=1)

import dynet as dy  # noqa: E402 - configured before it is imported
import numpy as np  # noqa: E402

from benchmarks.peers.protocol import Checked, Request, Training, serve  # noqa: E402

CLASSES = 5


class TreeLstm:
    """The cell of ``geartrain_baselines.sentiment``, an expression for every vertex.

    Args:
        words: Size of the vocabulary.
        hidden: Width of the state and of the word vectors.
    """

    def __init__(self, words: int, hidden: int) -> None:
        self.hidden = hidden
        self.model = dy.ParameterCollection()
        self.words = self.model.add_lookup_parameters(
            (words, hidden), init=dy.NormalInitializer(0, 0.03**2)
        )
        self.parameters = [
            self.model.add_parameters(shape)
            for rows, columns in ((3, 1), (5, 2))
            for shape in ((rows * hidden, columns * hidden), (rows * hidden,))
        ]
        self.parameters += [
            self.model.add_parameters((CLASSES, hidden)),
            self.model.add_parameters((CLASSES,)),
        ]

    def loss(self, trees: list[dict[str, list[int]]]) -> Any:
        """Cross entropy, summed over all vertices of the trees."""
        dy.renew_cg()
        return dy.esum([loss for tree in trees for loss in self._losses(tree)])

    def _losses(self, tree: dict[str, list[int]]) -> Iterator[Any]:
        words = dict(zip(tree["leaf"], tree["word"], strict=True))
        stack: list[tuple[Any, Any]] = []
        for vertex, label in enumerate(tree["label"]):  # children stand before their parent
            if vertex in words:
                h, c = self._leaf(words[vertex])
            else:
                right, left = stack.pop(), stack.pop()
                h, c = self._branch(left, right)
            stack.append((h, c))
            weight, bias = self.parameters[4:]
            yield dy.pickneglogsoftmax(dy.affine_transform([bias, weight, h]), label)

    def _leaf(self, word: int) -> tuple[Any, Any]:
        weight, bias = self.parameters[:2]
        gates = dy.affine_transform([bias, weight, self.words[word]])
        i, o = (dy.logistic(self._gate(gates, k)) for k in (0, 1))
        c = dy.cmult(i, dy.tanh(self._gate(gates, 2)))
        return dy.cmult(o, dy.tanh(c)), c

    def _branch(self, left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
        weight, bias = self.parameters[2:4]
        both = dy.concatenate([left[0], right[0]])
        gates = dy.affine_transform([bias, weight, both])
        i, f_left, f_right, o = (dy.logistic(self._gate(gates, k)) for k in range(4))
        kept = dy.cmult(f_left, left[1]) + dy.cmult(f_right, right[1])
        c = dy.cmult(i, dy.tanh(self._gate(gates, 4))) + kept
        return dy.cmult(o, dy.tanh(c)), c

    def _gate(self, gates: Any, k: int) -> Any:
        return dy.pick_range(gates, k * self.hidden, (k + 1) * self.hidden)


def answer(request: Request) -> Training | Checked:
    """Make the system that is asked for."""
    net, trees = TreeLstm(request["words"], request["options"]["hidden"]), request["trees"]
    if "check" in request:
        return check(net, trees)
    trainer = dy.AdagradTrainer(net.model, learning_rate=0.05)
    trainer.set_clip_threshold(0)
    random, batch = np.random.default_rng(request["seed"]), request["system"]["batch"]
    updates = 0

    def passes() -> Iterator[float]:
        nonlocal updates
        while True:
            begin = time.perf_counter()
            order = random.permutation(len(trees)).tolist()
            for first in range(0, len(trees), batch):
                loss = net.loss([trees[i] for i in order[first : first + batch]])
                loss.value()
                loss.backward()
                trainer.update()
                updates += 1
            yield time.perf_counter() - begin

    versions = {"python": platform.python_version(), "dynet": str(dy.__version__)}
    return Training(len(trees), passes(), versions, lambda: {"batching": updates})


def check(net: TreeLstm, trees: list[dict[str, list[int]]]) -> Checked:
    """The loss at the agreed weights; see ``benchmarks.peers.child.check``."""

    def agreed(shape: tuple[int, ...]) -> Any:
        return 0.1 * np.sin(np.arange(np.prod(shape), dtype=np.float64)).reshape(shape)

    net.words.init_from_array(agreed(net.words.shape()))
    for parameter in net.parameters:
        parameter.set_value(agreed(parameter.shape()))
    return Checked(float(net.loss(trees).value()))


if __name__ == "__main__":
    serve(answer)
