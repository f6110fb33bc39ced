"""The networks of ``geartrain_baselines.pyg`` as forms; the extra is imported when asked for."""

from __future__ import annotations

from functools import partial

from torch import nn

from geartrain_baselines.graphs import Collates, Form, Graphs, Method


def _build_pyg(
    hidden: int, types: int, steps: int, *, method: Method, lengths: bool = False
) -> nn.Module:
    from geartrain_baselines.pyg import TypedGatedGraphConv  # an extra

    return TypedGatedGraphConv(hidden, types, steps, method=method, lengths=lengths)


def _collate_pyg(graphs: Graphs, types: int) -> Collates:
    from geartrain_baselines.pyg import DataList  # an extra

    return DataList(graphs)


def pyg_form(method: Method, *, batches: bool = False) -> Form:
    """The network of ``geartrain_baselines.pyg``.

    Args:
        method: ``dense`` or ``sparse``.
        batches: Whether graphs are collated by PyTorch Geometric as well.
    """
    build = partial(_build_pyg, method=method)
    return Form(build, _collate_pyg) if batches else Form(build)
