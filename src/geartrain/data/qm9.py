"""Molecules: geometries and dipole moments of QM9, with bonds found from distances.

    atoms    Z (A,)  R (A, 3)            molecule m owns rows offsets[m] .. offsets[m + 1]
    edges    source, target, type,       molecule m owns rows edge_offsets[m] .. [m + 1];
             distance (E,)               each bond twice, once in each direction
    target   mu (M,)                     norm of the dipole moment, Debye

The file ``qm9/qm9_3d_dipole.npz`` holds ``id`` (M,), ``n_atoms`` (M,), ``Z`` (A,), ``R`` (A, 3) in
Angstrom and ``mu`` (M,) in Debye, the atoms of all molecules one after the other.

**Which atoms are bonded.** Those nearer than 1.3 times the sum of their covalent radii; a carbon
and another heavy atom nearer than 1.15 times (H 0.31, C 0.76, N 0.71, O 0.66, F 0.57 Angstrom;
Cordero et al., Dalton Trans. 2008, 2832). Across small rings and cages carbons come as near as 1.16
without a bond, while C-H and N-O bonds reach 1.17 and 1.28. So every hydrogen of the file has one
bond, every molecule is connected, and 14,170 of them have as many heavy bonds as their SMILES.

**Which type.** The bond order is read off the distance, linearly between the sums of the radii for
single (H 0.32, C 0.75, N 0.71, O 0.63, F 0.64), double (C 0.67, N 0.60, O 0.57) and triple bonds
(C 0.60, N 0.54; Pyykkoe and Atsumi, Chem. Eur. J. 15, 2009, 186 and 12770; Pyykkoe, Riedel and
Patzschke, Chem. Eur. J. 11, 2005, 3511), and cut at 1.25, 1.75 and 2.5:

    0 single     1 conjugated (aromatic rings, amides)     2 double     3 triple

Hydrogen and fluorine bond singly, oxygen at most doubly. The type is an estimate from geometry, not
the bond of a structural formula; the factors and cuts are our choice.

Source: Ramakrishnan, Dral, Rupp, von Lilienfeld, Sci. Data 1, 140022 (2014).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from geartrain.data.folder import find_data
from geartrain.data.npz import read_npz
from geartrain.data.policy import Policy, Refusals
from geartrain.errors import DataError

FILE = "qm9/qm9_3d_dipole.npz"
SYMBOLS = {1: "H", 6: "C", 7: "N", 8: "O", 9: "F"}
ELEMENTS = np.array(sorted(SYMBOLS), dtype=np.int64)
BONDS = ("single", "conjugated", "double", "triple")
REACH, REACH_OF_CARBON = 1.3, 1.15  # times the sum of the covalent radii
MOST_ATOMS = 1000  # of a molecule, whose atoms are compared pair by pair; QM9 has up to 29
NEAREST = 0.4  # Angstrom; no two nuclei are nearer, H2 has 0.74
ORDER_CUTS = (1.25, 1.75, 2.5)

# In the order of ELEMENTS: H, C, N, O, F.
_COVALENT = np.array([0.31, 0.76, 0.71, 0.66, 0.57], dtype=np.float32)
_SINGLE = np.array([0.32, 0.75, 0.71, 0.63, 0.64], dtype=np.float32)
_DOUBLE = np.array([np.nan, 0.67, 0.60, 0.57, np.nan], dtype=np.float32)
_TRIPLE = np.array([np.nan, 0.60, 0.54, np.nan, np.nan], dtype=np.float32)
_PAIRS_AT_ONCE = 1 << 20  # bounds the memory of the distance tables to some tens of MiB


@final
class Bonds(NamedTuple):
    """The edges of M molecules; the arrays are those of ``Molecules``."""

    edge_offsets: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    type: NDArray[np.int64]
    distance: NDArray[np.float32]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Molecules:
    """M molecules of A atoms and E directed edges in all.

    Args:
        id: int64 ``(M,)``, number in the GDB-9 list.
        Z: int64 ``(A,)``, atomic numbers: 1, 6, 7, 8 or 9.
        R: float32 ``(A, 3)``, positions in Angstrom.
        offsets: int64 ``(M + 1,)``, first atom of each molecule.
        mu: float32 ``(M,)``, norm of the dipole moment in Debye.
        edge_offsets: int64 ``(M + 1,)``, first edge of each molecule.
        source: int64 ``(E,)``, atom within the molecule, from 0; rising within a molecule.
        target: int64 ``(E,)``, atom within the molecule.
        type: int64 ``(E,)``, index into ``BONDS``.
        distance: float32 ``(E,)``, Angstrom.
        skipped: Records that were left out; 0 under the policy ``"raise"``.
    """

    id: NDArray[np.int64]
    Z: NDArray[np.int64]
    R: NDArray[np.float32]
    offsets: NDArray[np.int64]
    mu: NDArray[np.float32]
    edge_offsets: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    type: NDArray[np.int64]
    distance: NDArray[np.float32]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.id)

    def element(self) -> NDArray[np.int64]:
        """Return int64 ``(A,)``, 0..4 for H, C, N, O, F: rows of an embedding or a one-hot."""
        return np.searchsorted(ELEMENTS, self.Z).astype(np.int64)

    def select(self, molecules: NDArray[np.int64]) -> Molecules:
        """Return the given molecules, in the given order; indices into ``0..M-1``."""
        atoms, offsets = _ranges(self.offsets, molecules)
        edges, edge_offsets = _ranges(self.edge_offsets, molecules)
        return Molecules(
            self.id[molecules],
            self.Z[atoms],
            self.R[atoms],
            offsets,
            self.mu[molecules],
            edge_offsets,
            self.source[edges],
            self.target[edges],
            self.type[edges],
            self.distance[edges],
        )


def load_qm9(
    folder: Path | None = None, *, limit: int | None = None, policy: Policy = "raise"
) -> Molecules:
    """Read the molecules and find their bonds; all 88,533 take a few seconds.

    Args:
        folder: The data folder, which holds ``qm9/``; None takes ``$GEARTRAIN_DATA``.
        limit: Read only this many records, from the first; None reads all.
        policy: ``"raise"`` on the first bad molecule, or ``"skip"`` and count. A file whose arrays
            do not fit each other always raises.

    Raises:
        DataError: The file is missing, no npz, or lacks an array; or a molecule without atoms,
            with an element other than H, C, N, O, F, with a coordinate or dipole moment that is
            not finite, a negative dipole moment, or two atoms at one place. ``line`` of the error
            is the record, counted from 1.
        ValueError: A limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1, or None for all")
    path = find_data(folder, FILE) / FILE
    arrays = read_npz(path, _SHAPES, "geartrain.data.qm9")
    _check_shapes(arrays, path)
    records = len(arrays["id"]) if limit is None else min(limit, len(arrays["id"]))
    offsets = np.concatenate(([0], np.cumsum(arrays["n_atoms"][:records], dtype=np.int64)))
    refusals = Refusals(policy, path)
    good = np.flatnonzero(_refuse_arrays(arrays, offsets, refusals))
    atoms, offsets = _ranges(offsets, good)
    Z, R = arrays["Z"][atoms].astype(np.int64), arrays["R"][atoms].astype(np.float32)
    molecules = Molecules(
        arrays["id"][good].astype(np.int64),
        Z,
        R,
        offsets,
        arrays["mu"][good].astype(np.float32),
        *find_bonds(Z, R, offsets),
    )
    molecules = _refuse_crowded(molecules, good, refusals)
    return replace(molecules, skipped=refusals.close(len(molecules)))


def find_bonds(Z: NDArray[np.int64], R: NDArray[np.float32], offsets: NDArray[np.int64]) -> Bonds:
    """Find the bonds of M molecules by the rules of the module docstring.

    Args:
        Z: int64 ``(A,)``, atomic numbers, each one of ``ELEMENTS``.
        R: float32 ``(A, 3)``, Angstrom, finite.
        offsets: int64 ``(M + 1,)``, rising from 0 to A.

    Molecules of one size are worked on together, so the time goes with the pairs of atoms.
    """
    element = np.searchsorted(ELEMENTS, Z)
    size = np.diff(offsets)
    owner, source, target, distance = [], [], [], []
    for molecules, n in _blocks(size):
        rows = offsets[molecules, None] + np.arange(n)
        m, i, j, d = _near(element[rows], R[rows])
        owner.append(molecules[m])
        source.append(i)
        target.append(j)
        distance.append(d)
    who = np.concatenate([np.empty(0, np.int64), *owner])
    # Within a block the edges already rise by molecule, source and target.
    order = np.argsort(who, kind="stable")
    who = who[order]
    i = np.concatenate([np.empty(0, np.int64), *source])[order]
    j = np.concatenate([np.empty(0, np.int64), *target])[order]
    d = np.concatenate([np.empty(0, np.float32), *distance])[order]
    first = offsets[who]
    kind = _bond_type(element[first + i], element[first + j], d)
    return Bonds(_offsets(np.bincount(who, minlength=len(size))), i, j, kind, d)


def split_indices(
    molecules: int, *, validation: float = 0.1, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices to train and to validate on: disjoint, complete, each rising.

    Equal arguments give equal splits on every numpy release, as the generator behind it is frozen.

    Args:
        molecules: How many there are.
        validation: Share to validate on, above 0 and below 1; rounded to whole molecules.
        seed: 0..2**32 - 1.

    Raises:
        ValueError: A share out of range, or one that leaves a side empty.
    """
    held = round(molecules * validation)
    if not 0 < validation < 1 or not 0 < held < molecules:
        raise ValueError(
            f"validation is {validation} of {molecules} molecules; it must lie between 0 and 1 and "
            "leave at least one molecule on either side"
        )
    order = np.random.RandomState(seed).permutation(molecules).astype(np.int64)
    return np.sort(order[held:]), np.sort(order[:held])


def _blocks(size: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], int]]:
    for n in np.unique(size).tolist():
        molecules = np.flatnonzero(size == n)
        step = max(1, _PAIRS_AT_ONCE // max(1, n * n))
        for start in range(0, len(molecules), step):
            yield molecules[start : start + step], n


def _near(
    element: NDArray[np.int64], R: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    # Axis by axis: half the memory of one (m, n, n, 3) array, and faster.
    square = np.zeros((*element.shape, element.shape[1]), np.float32)
    for x in np.moveaxis(R, 2, 0):
        square += (x[:, :, None] - x[:, None, :]) ** 2
    radius, heavy, carbon = _COVALENT[element], element > 0, element == 1
    across = heavy[:, :, None] & heavy[:, None, :] & (carbon[:, :, None] | carbon[:, None, :])
    factor = np.where(across, REACH_OF_CARBON, REACH)
    reach = factor.astype(np.float32) * (radius[:, :, None] + radius[:, None, :])
    near = square < reach * reach
    near[:, np.arange(element.shape[1]), np.arange(element.shape[1])] = False
    m, i, j = np.nonzero(near)
    return m, i, j, np.sqrt(square[m, i, j])


def _bond_type(
    a: NDArray[np.int64], b: NDArray[np.int64], distance: NDArray[np.float32]
) -> NDArray[np.int64]:
    single, double, triple = (r[a] + r[b] for r in (_SINGLE, _DOUBLE, _TRIPLE))
    # Beyond double the line is another one. An absent radius is NaN: not above any cut, so the
    # bond stays single, or double where only the triple radius is absent.
    below = 1 + (single - distance) / (single - double)
    above = 2 + (double - distance) / (double - triple)
    kind = (below >= ORDER_CUTS[0]).astype(np.int64)
    kind += below >= ORDER_CUTS[1]
    kind += (below >= ORDER_CUTS[1]) & (above >= ORDER_CUTS[2])
    return kind


_SHAPES = ("id", "n_atoms", "Z", "R", "mu")


def _check_shapes(arrays: dict[str, NDArray[Any]], path: Path) -> None:
    if wrong := [name for name in ("id", "n_atoms", "Z") if arrays[name].dtype.kind not in "iu"]:
        raise DataError(
            f"{wrong[0]} has dtype {arrays[wrong[0]].dtype}; expected integers. Convert it",
            path=path,
        )
    if wrong := [name for name in ("R", "mu") if arrays[name].dtype.kind != "f"]:
        raise DataError(
            f"{wrong[0]} has dtype {arrays[wrong[0]].dtype}; expected floats. Convert it", path=path
        )
    m, a = len(np.atleast_1d(arrays["id"])), len(np.atleast_1d(arrays["Z"]))
    expected = {"id": (m,), "n_atoms": (m,), "Z": (a,), "R": (a, 3), "mu": (m,)}
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise DataError(
                f"{name} has shape {arrays[name].shape}; expected {shape}, as id gives {m} "
                f"molecules and Z {a} atoms. Write the arrays from one list of molecules",
                path=path,
            )
    for record in (arrays["n_atoms"].argmin(), arrays["n_atoms"].argmax()) if m else ():
        if not 0 <= arrays["n_atoms"][record] <= a:
            raise DataError(
                f"n_atoms is {arrays['n_atoms'][record]}; expected at least 1 for every molecule, "
                f"and at most the {a} of Z. Write the arrays from one list of molecules",
                path=path,
                line=int(record) + 1,
            )
    counted = int(arrays["n_atoms"].sum(dtype=np.int64))
    if counted != a or not m:
        raise DataError(
            f"n_atoms of {m} molecules add up to {counted} atoms, and Z holds {a}; expected equal "
            "numbers and at least one molecule. Write the arrays from one list of molecules",
            path=path,
        )


def _refuse_arrays(
    arrays: dict[str, NDArray[Any]], offsets: NDArray[np.int64], refusals: Refusals
) -> NDArray[np.bool_]:
    records, atoms = len(offsets) - 1, int(offsets[-1])
    owner = np.repeat(np.arange(records), np.diff(offsets))
    Z = arrays["Z"][:atoms]
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused below
        R = arrays["R"][:atoms].astype(np.float32)
        mu = arrays["mu"][:records].astype(np.float32)
    strange = np.bincount(owner[~np.isin(Z, ELEMENTS)], minlength=records)
    unplaced = np.bincount(owner[~np.isfinite(R).all(1)], minlength=records)
    empty = (np.diff(offsets) <= 0) | (np.diff(offsets) > MOST_ATOMS)
    unmeasured = ~(np.isfinite(mu) & (mu >= 0))
    bad = empty | (strange > 0) | (unplaced > 0) | unmeasured
    for record in np.flatnonzero(bad).tolist():
        here = slice(int(offsets[record]), int(offsets[record + 1]))
        if empty[record]:
            n = arrays["n_atoms"][record]
            fault = f"has {n} atoms; expected at least one, and at most {MOST_ATOMS}"
        elif strange[record]:
            first = int(np.flatnonzero(~np.isin(Z[here], ELEMENTS))[0])
            known = ", ".join(f"{number} {name}" for number, name in SYMBOLS.items())
            fault = f"atom {first} has atomic number {Z[here][first]}; expected one of {known}"
        elif unplaced[record]:
            first = int(np.flatnonzero(~np.isfinite(R[here]).all(1))[0])
            fault = f"atom {first} lies at {R[here][first].tolist()}; expected finite coordinates"
        else:
            fault = f"mu is {mu[record]}; expected a finite dipole moment of at least 0 Debye"
        refusals.refuse(_refusal(fault, int(arrays["id"][record]), record, refusals.path))
    good: NDArray[np.bool_] = ~bad
    return good


def _refuse_crowded(
    molecules: Molecules, records: NDArray[np.int64], refusals: Refusals
) -> Molecules:
    owner = np.repeat(np.arange(len(molecules)), np.diff(molecules.edge_offsets))
    tight = molecules.distance < NEAREST
    if not tight.any():
        return molecules
    wrong, edges = np.unique(owner[tight], return_index=True)
    for m, edge in zip(wrong.tolist(), np.flatnonzero(tight)[edges].tolist(), strict=True):
        fault = (
            f"atoms {molecules.source[edge]} and {molecules.target[edge]} are "
            f"{molecules.distance[edge]:.3g} Angstrom apart; expected at least {NEAREST}. Are the "
            "coordinates in Angstrom?"
        )
        number = int(molecules.id[m])
        refusals.refuse(_refusal(fault, number, int(records[m]), refusals.path))
    return molecules.select(np.setdiff1d(np.arange(len(molecules)), wrong))


def _refusal(fault: str, number: int, record: int, path: Path | str | None) -> DataError:
    return DataError(
        f'molecule with id {number}: {fault}. Mend the record, or read the file with policy="skip"',
        path=path,
        line=record + 1,
    )


def _ranges(
    offsets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the chosen ranges one after the other, and the offsets of the ranges among them."""
    size = offsets[chosen + 1] - offsets[chosen]
    new = _offsets(size)
    return np.arange(new[-1]) + np.repeat(offsets[chosen] - new[:-1], size), new


def _offsets(size: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(size))).astype(np.int64)
