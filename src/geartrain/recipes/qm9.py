"""Molecules: a gated graph network that reads the norm of the dipole moment off bonds and atoms.

    elements ─► one-hot ─► cell: pass along the bonds, GRU, some steps ─► readout ─► loss

An instance is a molecule, whose atoms travel as one bundle; the bundles of many molecules are one
batch, and take all their steps in one firing. The readout is a gated sum over the atoms. The
network learns the norm in units of the training set's standard deviation, around its mean; both are
kept in the run's folder. Every number of the recipe stands at the top.

Source: gated graph networks, Li et al. 2016, arXiv:1511.05493; hidden 100 and four steps as of
Gaunt et al. 2017, arXiv:1705.09786; the molecules are those of Ramakrishnan et al. 2014.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.data.qm9 import BONDS, ELEMENTS, FILE, Molecules, load_qm9, split_indices
from geartrain.engine.controller import Ramp
from geartrain.errors import DataError
from geartrain.frames.columns import Columns
from geartrain.graph.graph import Graph
from geartrain.parts.optimizers import FusedAdam
from geartrain.parts.rules import Clip, Instances, Rules
from geartrain.recipes.recipe import (
    AVERAGE_EVERY,
    LoadSplit,
    Option,
    Recipe,
    Setting,
    Task,
)
from geartrain.whole.graph.cell import GatedGraphCell
from geartrain.whole.graph.gated_sum import GatedSum

RATE: Final = 7e-4  # Adam's; a little less than without staleness
CLIP_NORM: Final = 1.0  # per part
RAMP: Final = Ramp(start=4, over=1500)
VALIDATION: Final = 0.1  # share of the molecules
SPLIT_SEED: Final = 0  # one split for every seed of a run
CLOSE: Final = 0.1  # Debye; the error ratio is to this
_UNITS: Final = "units.json"
_SPLITS: Final = ("train", "valid")


def build(setting: Setting) -> Task:
    """The task; reads the molecules for the mean and spread of their moments; see ``Recipe.build``.

    Raises:
        DataError: The molecules are missing or refused, or the kept units are no units.
        ValueError: ``distances`` is neither 0 nor 1, or too few molecules to split.
    """
    options = setting.options
    if options["distances"] not in (0, 1):
        raise ValueError(f"option distances={options['distances']}: expected 0 or 1")
    limit, distances = int(options["limit"]) or None, bool(options["distances"])
    read: dict[str, Columns] = {}

    def split(name: str) -> LoadSplit:
        def load() -> Columns:
            if not read:
                molecules = load_qm9(setting.data, limit=limit)
                sides = split_indices(len(molecules), validation=VALIDATION, seed=SPLIT_SEED)
                for side, chosen in zip(_SPLITS, sides, strict=True):
                    read[side] = columns_of(molecules.select(chosen), distances=distances)
            return read[name]

        return load

    splits = {name: split(name) for name in _SPLITS}
    if _UNITS in setting.files:
        units = Units.from_json(setting.files[_UNITS])
    else:
        train = splits["train"]()
        assert isinstance(train, Columns)
        units = Units.of(train.value["mu"])
    return Task(
        graph=make_graph(
            int(options["hidden"]),
            int(options["steps"]),
            units,
            distances=distances,
        ),
        rules=Rules(
            optimizer=partial(FusedAdam, lr=float(options["learning_rate"])),
            update_every=Instances(setting.update_every),
            average="instances",
            clip=Clip(norm=CLIP_NORM),
        ),
        splits=splits,
        validation="valid",
        ramp=RAMP,
        sharing=setting.copies_of("cell"),
        files={_UNITS: units.to_json()},
    )


@final
@dataclass(frozen=True, slots=True)
class Units:
    """What the network's numbers mean: 0 is the mean of the training moments, 1 their spread.

    Args:
        mean: Debye.
        std: Debye, above 0.
    """

    mean: float = 0.0
    std: float = 1.0

    @staticmethod
    def of(mu: NDArray[np.float32]) -> Units:
        """Of moments ``(M,)`` in Debye; where all are equal, the spread counts as 1."""
        wide = mu.astype(np.float64)
        return Units(float(wide.mean()), float(wide.std()) or 1.0)

    @staticmethod
    def from_json(text: str) -> Units:
        """What ``to_json`` wrote.

        Raises:
            DataError: It is something else.
        """
        try:
            found = json.loads(text)
            units = Units(float(found["mean"]), float(found["std"]))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{text[:80]!r} gives no mean and std of dipole moments ({error}); take the run's "
                "folder as it was written",
                path=_UNITS,
            ) from error
        if not (np.isfinite(units.mean) and 0 < units.std < np.inf):
            raise DataError(
                f"mean {units.mean} and std {units.std} of dipole moments; expected finite numbers "
                "and a positive std: take the run's folder as it was written",
                path=_UNITS,
            )
        return units

    def to_json(self) -> str:
        """Text for the run's folder."""
        return json.dumps({"mean": self.mean, "std": self.std})

    def error(self, prediction: Tensor, mu: Tensor) -> Tensor:
        """Absolute error in Debye, ``(n,)``."""
        return (prediction[:, 0] - self.scaled(mu)).abs() * self.std

    def error_ratio(self, prediction: Tensor, mu: Tensor) -> Tensor:
        """Absolute error in tenths of a Debye, ``(n,)``."""
        return self.error(prediction, mu) / CLOSE

    def scaled(self, mu: Tensor) -> Tensor:
        """Moments in Debye in these units."""
        return (mu - self.mean) / self.std


@final
@dataclass(frozen=True, slots=True)
class HalfSquaredError:
    """Half the squared error in some units, ``(n,)``, of ``(n, 1)`` and Debye ``(n,)``.

    Args:
        units: Those of the prediction.
    """

    units: Units

    def __call__(self, prediction: Tensor, mu: Tensor) -> Tensor:
        return self.with_gradient(prediction, mu)[0]

    def with_gradient(self, prediction: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        """The errors, and their gradient at the prediction."""
        off = prediction - self.units.scaled(mu)[:, None]
        return 0.5 * off[:, 0].square(), off


def make_graph(hidden: int, steps: int, units: Units, *, distances: bool) -> Graph:
    """The network and its loss.

    Args:
        hidden: Width of an atom's state, at least the number of elements.
        steps: How often messages pass.
        units: Of the target.
        distances: Whether messages know how long their bond is.

    Raises:
        ValueError: ``hidden`` has no room for the elements.
    """
    if hidden < len(ELEMENTS):
        raise ValueError(f"hidden={hidden}: give {len(ELEMENTS)} or more, one for every element")
    columns = ("type", "distance") if distances else ("type",)
    graph = Graph(vertex=("element",), edge=columns, value=("mu",))
    elements = graph.input("elements", shape=(), dtype=torch.int64, bundle=True)
    atoms = elements.through(partial(one_hot, hidden=hidden), name="one-hot")
    length = "distance" if distances else None
    cell = GatedGraphCell(hidden, len(BONDS), length=length, steps=steps)
    last = atoms.through(cell, name="cell", inside=True)
    readout = GatedSum(hidden, len(ELEMENTS))
    moment = last.through(readout, name="readout", read="element", inside=True, pool=True)
    metrics = {"mae": units.error, "error_ratio": units.error_ratio}
    moment.loss(HalfSquaredError(units), "mu", metrics=metrics)
    return graph


def one_hot(elements: Tensor, hidden: int) -> Tensor:
    """First states ``(n, hidden)`` of elements int64 ``(n,)``: a one, and zeros after it."""
    states = torch.zeros(elements.shape[0], hidden, device=elements.device)
    return states.scatter_(1, elements[:, None], 1.0)


def columns_of(molecules: Molecules, *, distances: bool) -> Columns:
    """Molecules as instances: atoms are vertices, bonds edges both ways.

    Args:
        molecules: All of them.
        distances: Whether bonds bring their length, in Angstrom.
    """
    element = molecules.element()
    return Columns(
        np.diff(molecules.offsets),
        {"elements": torch.from_numpy(element)},
        vertex={"element": element},
        value={"mu": molecules.mu},
        edge={
            "source": molecules.source,
            "target": molecules.target,
            "type": molecules.type,
            **({"distance": molecules.distance} if distances else {}),
        },
        edge_lengths=np.diff(molecules.edge_offsets),
        called=lambda i: f"molecule with id {molecules.id[i]}",
    )


QM9: Final = Recipe(
    name="qm9",
    summary="read the dipole moment of small molecules off their atoms and bonds",
    paper="Gaunt et al. 2017, arXiv:1705.09786; Ramakrishnan et al. 2014",
    metrics=("mae", "error_ratio"),
    target="mae<=0.75",
    max_active=40,
    update_every=20,
    unit="instances",
    epochs=10,
    make=build,
    draw=lambda: make_graph(hidden=100, steps=4, units=Units(), distances=False),
    needs=(FILE,),
    options=(
        Option("hidden", 100, len(ELEMENTS), "width of an atom's state"),
        Option("steps", 4, 1, "how often messages pass along the bonds"),
        Option("limit", 0, 0, "read the first so many molecules; 0 reads all"),
        Option("distances", 0, 0, "1: messages know the length of their bond; 0: only its type"),
        Option("learning_rate", RATE, 0.0, "Adam's rate"),
        Option(AVERAGE_EVERY, 2000, 0, "instances between meetings of copies; 0: once an epoch"),
    ),
    bottleneck="cell",
    workers=1,
    why="one worker: two that share the weights are 1.5 times as fast, and want three epochs for "
    "the error that one has after two; its kernels have all cores without staleness",
)
