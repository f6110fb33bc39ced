"""Matrices that say how much of each neighbour's weights a copy takes.

    x_i' = Σ_j W[i][j] x_j        rows: who takes; columns: whose

Doubly stochastic: nothing is below zero, rows sum to 1 (equal copies stay equal) and columns sum to
1 (the mean stays). Column-stochastic: columns alone, for push-sum, which carries a weight along.

Gradients that are sent instead mix by I + A, which need not bring copies together: ``least_pull``.

Sources: Metropolis weights, Xiao and Boyd 2004, "Fast linear iterations for distributed averaging";
use in training, Lian et al. 2017, arXiv:1705.09056.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

import torch

from geartrain.sharing.topology import senders_of

Matrix: TypeAlias = Sequence[Sequence[float]]

_CLOSE: Final = 1e-6  # a matrix may have been made in float32
_NOTHING: Final = 1e-12  # rounding


def metropolis(neighbours: Sequence[Sequence[int]]) -> Matrix:
    """W[i][j] = 1 / (1 + the larger number of neighbours of the two), the rest on the diagonal.

    Symmetric, so doubly stochastic on every graph whose neighbours are mutual; on a ring, 1/3.

    Raises:
        ValueError: Somebody sends to one who does not send back.
    """
    n = len(neighbours)
    matrix = [[0.0] * n for _ in range(n)]
    for i, mine in enumerate(neighbours):
        for j in mine:
            if i not in neighbours[j]:
                raise ValueError(
                    f"Metropolis weights: copy {i} sends to copy {j}, which does not send back; "
                    "give an undirected topology, weights='uniform', or a matrix"
                )
            matrix[i][j] = 1.0 / (1 + max(len(mine), len(neighbours[j])))
        matrix[i][i] = 1.0 - sum(matrix[i])
    return matrix


def uniform(neighbours: Sequence[Sequence[int]]) -> Matrix:
    """W[i][j] = 1 / (1 + number of senders of i) for itself and each of them.

    Rows sum to 1; columns too where all copies have equally many neighbours.
    """
    n = len(neighbours)
    matrix = [[0.0] * n for _ in range(n)]
    for i, senders in enumerate(senders_of(neighbours)):
        for j in (i, *senders):
            matrix[i][j] = 1.0 / (1 + len(senders))
    return matrix


def shares(neighbours: Sequence[Sequence[int]]) -> Matrix:
    """P[i][j] = 1 / (1 + number of neighbours of j): each keeps and sends equal shares.

    Column-stochastic on every graph.
    """
    n = len(neighbours)
    matrix = [[0.0] * n for _ in range(n)]
    for j, receivers in enumerate(neighbours):
        for i in (j, *receivers):
            matrix[i][j] = 1.0 / (1 + len(receivers))
    return matrix


def censored(matrix: Matrix, present: Collection[int]) -> Matrix:
    """What a matrix is among some copies: weights that go by way of absent ones go on to others.

    With P the rows and columns of those present and Q of those absent, W_PP + W_PQ (1 - W_QQ)⁻¹
    W_QP: the stochastic complement, the chain as it is seen while it is among those present. It is
    doubly stochastic, or column-stochastic, as the matrix is, and joins those who were joined.
    Absent copies keep what they have.

    Args:
        matrix: Doubly or column-stochastic.
        present: Copies that are there.

    Source: Meyer 1989, "Stochastic complementation, uncoupling Markov chains, and the theory of
    nearly reducible systems", SIAM Review 31(2).
    """
    n = len(matrix)
    if len(present) in (0, n):
        return matrix
    w = torch.tensor(matrix, dtype=torch.float64)
    here = torch.tensor(sorted(present), dtype=torch.int64)
    gone = torch.tensor([k for k in range(n) if k not in present], dtype=torch.int64)
    inside = torch.eye(len(gone), dtype=torch.float64) - w[gone][:, gone]
    onward = torch.linalg.lstsq(inside, w[gone][:, here], driver="gelsd").solution
    found = torch.eye(n, dtype=torch.float64)
    found[here[:, None], here] = (w[here][:, here] + w[here][:, gone] @ onward).clamp(min=0)
    found[found < _NOTHING] = 0.0
    made: list[list[float]] = found.tolist()
    return made


def least_pull(neighbours: Sequence[Sequence[int]], share: float = 1.0) -> float:
    """The least real part among the eigenvalues of I + share · A, A[i][j] = 1 where j sends to i.

    Copies that step with their own gradients and with ``share`` of those of their senders move by
    it: on a quadratic with curvature h and steps of rate η, a difference between copies along an
    eigenvector with eigenvalue μ is multiplied by 1 - η h μ in each round. Below 0 it grows at any
    rate, at 0 it stays. With share 1 the least is below 0 on every undirected graph but the full
    one, where it is 0: some path of three copies has I + A with eigenvalue 1 - √2, and interlacing
    puts the whole graph's no higher.

    Args:
        neighbours: For each copy those that it sends to.
        share: Of a neighbour's gradient in a step for each of the own ones.
    """
    n = len(neighbours)
    matrix = torch.eye(n, dtype=torch.float64)
    for j, receivers in enumerate(neighbours):
        for i in receivers:
            matrix[i, j] += share
    if torch.equal(matrix, matrix.T):
        return float(torch.linalg.eigvalsh(matrix)[0])
    return float(torch.linalg.eigvals(matrix).real.min())


def slowest(matrix: Matrix) -> float:
    """What a round leaves of the difference that it mixes worst: 1, none is mixed.

    The second largest absolute value among the eigenvalues of a stochastic matrix.
    """
    values = torch.linalg.eigvals(torch.tensor(matrix, dtype=torch.float64)).abs()
    return float(values.sort().values[-2]) if len(matrix) > 1 else 0.0


def advice_on_matrix(name: str, matrix: Matrix) -> str | None:
    """Why copies that mix by this matrix do not come together, and what to do; None: they do.

    Args:
        name: Where the matrix was given.
        matrix: Stochastic.
    """
    if slowest(matrix) < 1 - _CLOSE:
        return None
    return (
        f"{name}: a second eigenvalue of the matrix has absolute value 1, so some difference "
        "between copies is never mixed away; give each a share of its own above 0 and a path to "
        "every other, as Metropolis weights do"
    )


def check_doubly_stochastic(matrix: Matrix, neighbours: Sequence[Sequence[int]]) -> None:
    """Raises:
    ValueError: It is not, has another size, or has an entry where nothing is sent.
    """
    _check_columns("a doubly stochastic", matrix, neighbours)
    for i, row in enumerate(matrix):
        if abs(sum(row) - 1) > _CLOSE:
            raise ValueError(
                f"mixing matrix: row {i} sums to {sum(row):.6g}, where 1 was expected (a doubly "
                "stochastic matrix), as equal copies would not stay equal; Metropolis weights are "
                "so on every undirected topology"
            )


def check_column_stochastic(matrix: Matrix, neighbours: Sequence[Sequence[int]]) -> None:
    """Raises:
    ValueError: It is not, has another size, or has an entry where nothing is sent.
    """
    _check_columns("a column-stochastic", matrix, neighbours)


def _check_columns(what: str, matrix: Matrix, neighbours: Sequence[Sequence[int]]) -> None:
    n = len(neighbours)
    _check_entries(matrix, neighbours)
    for j in range(n):
        total = sum(row[j] for row in matrix)
        if abs(total - 1) > _CLOSE:
            remedy = "Metropolis weights are so on every undirected topology"
            if what == "a column-stochastic":
                remedy = "divide the column by its sum"
            raise ValueError(
                f"mixing matrix: column {j} sums to {total:.6g}, where 1 was expected ({what} "
                f"matrix), as the mean of the copies would drift; {remedy}"
            )


def _check_entries(matrix: Matrix, neighbours: Sequence[Sequence[int]]) -> None:
    n = len(neighbours)
    if len(matrix) != n or any(len(row) != n for row in matrix):
        sizes = sorted({len(row) for row in matrix})
        raise ValueError(
            f"mixing matrix: {len(matrix)} rows of {sizes} entries, where {n} rows of {n} were "
            f"expected, as there are {n} copies; give a matrix of that size"
        )
    for i, row in enumerate(matrix):
        for j, entry in enumerate(row):
            if not math.isfinite(entry) or entry < 0:
                raise ValueError(f"mixing matrix: entry [{i}][{j}] is {entry}; give 0 or more")
            if entry and i != j and i not in neighbours[j]:
                raise ValueError(
                    f"mixing matrix: entry [{i}][{j}] is {entry:.6g}, but copy {j} does not send "
                    f"to copy {i}; make it 0, or add the edge ({j}, {i}) to the topology"
                )
