"""Instances from what other libraries hold: networkx, PyTorch Geometric, nested trees.

    from_networkx(graph)   nodes in the graph's order are vertices 0..V-1, attributes are columns
    from_pyg(data)         x is the input, edge_index the edges, edge_attr a column, y the target
    from_nested(tree)      leaves are the input, parent, slot, siblings and label are columns

None of those libraries is imported: an object of the right shape will do. Whatever does not fit is
refused with the node, the edge or the leaf by its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geartrain.errors import DataError
from geartrain.frames.instance import Instance

Numbering: TypeAlias = Mapping[Any, int] | Callable[[Any], int]
"""From a label to its number: a dict, or a function such as ``int``."""
Isolated: TypeAlias = Literal["keep", "raise"]


def from_networkx(
    graph: Any,
    *,
    inputs: str | Sequence[str] = (),
    vertex_columns: str | Sequence[str] = (),
    edge_columns: str | Sequence[str] = (),
    values: str | Sequence[str] = (),
    classes: Mapping[str, Numbering] | None = None,
    isolated: Isolated = "keep",
    key: object = None,
) -> Instance:
    """A networkx graph of any kind as an instance; attributes keep their names.

    A directed graph keeps its edges as they are. Each edge of an undirected one becomes two, one
    each way with equal columns; those from a node to itself stay single. Parallel edges all count.

    Args:
        graph: ``Graph``, ``DiGraph`` or a multigraph; V nodes become vertices in their order.
        inputs: Node attributes that enter as rows, one at each vertex: tensors ``(V, ...)``, int64
            for integers and classes, else of torch's default float.
        vertex_columns: Node attributes that steer or are targets.
        edge_columns: Edge attributes, besides ``source`` and ``target``.
        values: Attributes of the graph itself.
        classes: Attribute to the numbers of its labels: ``{"element": {"C": 0, "O": 1}}``.
        isolated: What to do with a node without any edge: ``keep`` it (it hears nothing, and a
            ``group`` over incoming edges would wait for it for ever), or ``raise``.
        key: What errors call the instance; default: the graph's name, if it has one.

    Raises:
        DataError: No node; an attribute is missing, is no number and has no class, or is of another
            shape than that of other nodes; an isolated node with ``isolated="raise"``.
    """
    called = _called("graph", key := key if key is not None else graph.graph.get("name") or None)
    nodes, found = list(graph.nodes(data=True)), list(graph.edges(data=True))
    if not nodes:
        raise DataError(f"{called} has no node; an instance has one or more. Leave it out")
    number = {node: v for v, (node, _) in enumerate(nodes)}
    ends = np.array([(number[u], number[v]) for u, v, _ in found], np.int64).reshape(-1, 2)
    _refuse_isolated(ends, [repr(node) for node, _ in nodes], called, isolated)

    def read(names: str | Sequence[str], owners: Iterable[tuple[str, Any]]) -> dict[str, _Column]:
        listed = [(f"{called}: {owner}", attributes) for owner, attributes in owners]
        return {name: _attribute(name, listed, classes or {}) for name in _names(names)}

    owners = [(f"node {node!r}", attributes) for node, attributes in nodes]
    edge = read(edge_columns, [(f"edge {u!r} to {v!r}", each) for u, v, each in found])
    edge = {"source": ends[:, 0], "target": ends[:, 1]} | edge
    if not graph.is_directed():
        edge = _both_ways(edge)
    value = read(values, [("the graph", graph.graph)])
    return Instance(
        {name: _tensor(column) for name, column in read(inputs, owners).items()},
        read(vertex_columns, owners),
        edge,
        {name: column[0] for name, column in value.items()},
        key,
    )


def from_pyg(
    data: Any,
    *,
    input: str = "x",
    edge_column: str = "type",
    target: str = "y",
    target_of: Literal["graph", "vertex"] | None = None,
    isolated: Isolated = "keep",
    key: object = None,
) -> Instance:
    """A PyTorch Geometric ``Data``, or anything with ``x``, ``edge_index``, ``edge_attr``, ``y``.

    Edges are taken as they are: PyTorch Geometric lists an undirected edge twice, once each way.

    Args:
        data: ``x`` ``(V, ...)``; ``edge_index`` integers ``(2, E)``; optional ``y`` and
            ``edge_attr``, ``(E,)`` or ``(E, k)``.
        input: Name of the input that gets ``x``, one row a vertex.
        edge_column: Name of the edge column that gets ``edge_attr``; ``(E, 1)`` becomes ``(E,)``.
        target: Name of the column that gets ``y``.
        target_of: Whether ``y`` belongs to the ``graph`` (one entry) or to each ``vertex`` (V of
            them). Default: by its length; one entry is the graph's.
        isolated: As for ``from_networkx``.
        key: What errors call the instance.

    Raises:
        DataError: ``x`` or ``edge_index`` is missing, of another shape or type, or points to no
            vertex; ``edge_attr`` or ``y`` is of another length; several graphs in one batch; an
            isolated vertex with ``isolated="raise"``.
    """
    called = _called("data", key)
    if getattr(data, "batch", None) is not None or getattr(data, "ptr", None) is not None:
        raise DataError(
            f"{called} is a batch of several graphs; geartrain batches by itself. Give one by one "
            "what to_data_list() returns"
        )
    x = getattr(data, "x", None)
    if not isinstance(x, Tensor) or x.ndim == 0 or not len(x):
        raise DataError(
            f"{called} has x {_shown(x)}; expected a tensor with one row for each vertex, at least "
            "one. Give vertices without features a column of ones"
        )
    ends = _ends(getattr(data, "edge_index", None), len(x), called)
    _refuse_isolated(ends, [str(v) for v in range(len(x))], called, isolated)
    edge = {"source": ends[:, 0], "target": ends[:, 1]}
    if (attr := getattr(data, "edge_attr", None)) is not None:
        column = _rows(attr, len(ends), f"{called}: edge_attr", "edge")
        edge[edge_column] = column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column
    vertex, value = {}, {}
    if (y := getattr(data, "y", None)) is not None:
        of_graph = np.ndim(y) == 0 or len(y) == 1 if target_of is None else target_of == "graph"
        if not of_graph:
            vertex[target] = _rows(y, len(x), f"{called}: y", "vertex")
        else:
            value[target] = _rows(np.atleast_1d(_numpy(y)), 1, f"{called}: y", "graph")[0]
    return Instance({input: x.detach().cpu()}, vertex, edge, value, key)


def from_nested(
    tree: Any,
    *,
    words: Numbering,
    labels: Numbering | None = None,
    children: int | None = None,
    input: str = "word",
    key: object = None,
) -> Instance:
    """A tree of nested lists or tuples, or of ``nltk.Tree``, as an instance for ``nn.Tree``.

        ("good", ("not", "bad"))                          labels=None: every item is a child
        ("3", ("4", "good"), ("3", ("1", "not"), ...))    labels given: the first item is the label
        Tree("3", [Tree("4", ["good"]), ...])             has label(): every item is a child

    A vertex whose only child is a word is that leaf. Vertices stand in post-order, the root last.

    Args:
        tree: Its words may be anything that ``words`` takes, but no list or tuple.
        words: From a word to its number, as a dict or function: ``lambda w: ids.get(w, 0)``.
        labels: From a label to its number, such as ``int``; None: no label column.
        children: How many each inner vertex must have; None: any number, one or more.
        input: Name of the input that gets the words, int64, at their leaves.
        key: What errors call the instance.

    Returns:
        An instance with vertex columns ``parent`` (-1 at the root), ``slot`` (place among its
        siblings), ``siblings`` (their number, itself included; 1 at the root) and ``label``.

    Raises:
        DataError: A word or label without a number, a leaf without label, an inner vertex with no
            child or another number of them than ``children``.
    """
    planted = _Planted(_called("tree", key), words, labels, children)
    planted.grow(tree)
    columns = {"parent": planted.parent, "slot": planted.slot, "siblings": planted.siblings}
    if labels is not None:
        columns["label"] = planted.label
    return Instance(
        {input: (torch.tensor(planted.word, dtype=torch.int64), np.array(planted.leaf, np.int64))},
        {name: np.array(column, np.int64) for name, column in columns.items()},
        key=key,
    )


_Column: TypeAlias = NDArray[Any]


@final
@dataclass(slots=True)
class _OpenVertex:
    """An inner vertex some of whose children have been numbered."""

    label: object
    items: Sequence[Any]
    numbered: list[int] = field(default_factory=list)


@final
class _Planted:
    """A tree that is being numbered, without recursion: some trees are thousands deep."""

    def __init__(
        self, called: str, words: Numbering, labels: Numbering | None, children: int | None
    ) -> None:
        self._called, self._words = called, words
        self._labels, self._children = labels, children
        self.word: list[int] = []
        self.leaf: list[int] = []
        self.parent: list[int] = []
        self.slot: list[int] = []
        self.siblings: list[int] = []
        self.label: list[int] = []

    def grow(self, tree: Any) -> None:
        top = _OpenVertex(None, (tree,))
        stack = [top]
        while not top.numbered:
            at = stack[-1]
            if len(at.numbered) == len(at.items):
                stack.pop()
                stack[-1].numbered.append(self._close(at))
                continue
            item = at.items[len(at.numbered)]
            if not isinstance(item, list | tuple) and not _has_label(item):
                at.numbered.append(self._add_leaf(item, None, labelled=False))
                continue
            inner = self._open(item)
            if len(inner.items) == 1 and not isinstance(inner.items[0], list | tuple):
                if not _has_label(inner.items[0]):
                    leaf = self._add_leaf(inner.items[0], inner.label, labelled=True)
                    at.numbered.append(leaf)
                    continue
            stack.append(inner)

    def _open(self, item: Any) -> _OpenVertex:
        if _has_label(item):
            inner = _OpenVertex(item.label(), list(item))
        elif self._labels is None:
            inner = _OpenVertex(None, item)
        else:
            inner = _OpenVertex(item[0] if item else None, item[1:])
        if not inner.items:
            raise DataError(
                f"{self._called}: vertex {item!r} has no child; expected words or inner vertices "
                f"{'behind the label' if self._labels is not None else 'in it'}. Remove it"
            )
        return inner

    def _close(self, at: _OpenVertex) -> int:
        n = len(at.items)
        if self._children is not None and n != self._children:
            raise DataError(
                f"{self._called}: an inner vertex has {n} children, {_short(at.items)}; expected "
                f"{self._children}. Binarise the tree, or give children=None and let "
                "Tree(children='siblings') sum them"
            )
        vertex = self._add_vertex(at.label)
        for slot, child in enumerate(at.numbered):
            self.parent[child], self.slot[child], self.siblings[child] = vertex, slot, n
        return vertex

    def _add_leaf(self, word: Any, label: object, *, labelled: bool) -> int:
        if self._labels is not None and not labelled:
            raise DataError(
                f"{self._called}: leaf {word!r} has no label; write (label, {word!r}), or give "
                "labels=None for a tree without labels"
            )
        vertex = self._add_vertex(label)
        self.word.append(_number(word, self._words, f"{self._called}: word", "words"))
        self.leaf.append(vertex)
        return vertex

    def _add_vertex(self, label: object) -> int:
        if self._labels is not None:
            self.label.append(_number(label, self._labels, f"{self._called}: label", "labels"))
        self.parent.append(-1)
        self.slot.append(0)
        self.siblings.append(1)
        return len(self.parent) - 1


def _has_label(item: Any) -> bool:
    return callable(getattr(item, "label", None))


def _attribute(
    name: str, owners: Sequence[tuple[str, Mapping[str, Any]]], classes: Mapping[str, Numbering]
) -> _Column:
    """One attribute of all nodes or edges, as a column."""
    found: list[Any] = []
    for owner, attributes in owners:
        if name not in attributes:
            has = ", ".join(map(str, attributes)) or "none"
            raise DataError(f"{owner} has no attribute '{name}'; it has {has}")
        value = attributes[name]
        if name in classes:
            value = _number(value, classes[name], f"{owner}: '{name}'", f"classes['{name}']")
        elif not _is_number(value):
            raise DataError(
                f"{owner}: '{name}' is {value!r}, not a number; give "
                f"classes={{'{name}': {{{value!r}: 0, ...}}}}"
            )
        found.append(_numpy(value))
        if found[-1].shape != found[0].shape:
            raise DataError(
                f"{owner}: '{name}' has shape {found[-1].shape}, that of {owners[0][0]} is "
                f"{found[0].shape}; use one shape throughout"
            )
    return _numbers(np.stack(found)) if found else np.zeros(0, np.int64)


def _is_number(value: Any) -> bool:
    try:
        return _numpy(value).dtype.kind in "biuf"
    except ValueError:  # lists of unequal length
        return False


def _number(label: Any, numbering: Numbering, what: str, where: str) -> int:
    """The number of a label."""
    remedy = f"add it to {where}, or give a function that takes it"
    try:
        number = numbering(label) if callable(numbering) else numbering[label]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{what} {label!r} has no number; {remedy}") from error
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise DataError(f"{what} {label!r} has number {number!r}; expected an integer in {where}")
    return int(number)


def _numpy(value: Any) -> _Column:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _numbers(column: _Column) -> _Column:
    return column.astype(np.int64) if column.dtype.kind in "biu" else column


def _tensor(column: _Column) -> Tensor:
    tensor = torch.from_numpy(column)
    return tensor if column.dtype == np.int64 else tensor.to(torch.get_default_dtype())


def _ends(edge_index: Any, vertices: int, called: str) -> NDArray[np.int64]:
    """Source and target of each edge, ``(E, 2)``."""
    if not hasattr(edge_index, "shape") or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise DataError(
            f"{called} has edge_index {_shown(edge_index)}; expected integers (2, E), sources "
            "above targets; without edges an empty (2, 0)"
        )
    ends = _numpy(edge_index)
    if ends.dtype.kind not in "iu" and ends.size:
        raise DataError(f"{called}: edge_index holds {ends.dtype}; vertices are integers")
    bad = np.argwhere((ends < 0) | (ends >= vertices))
    if len(bad):
        row, edge = bad[0].tolist()
        raise DataError(
            f"{called}: edge {edge} has {('source', 'target')[row]} {int(ends[row, edge])}, but x "
            f"has vertices 0..{vertices - 1}"
        )
    return ends.T.astype(np.int64)


def _rows(value: Any, n: int, what: str, each: str) -> _Column:
    column = _numpy(value)
    if column.ndim == 0 or len(column) != n or column.dtype.kind not in "biuf":
        raise DataError(
            f"{what} is {column.dtype} {column.shape}; expected {n} numbers or rows of numbers, "
            f"one for each {each}"
        )
    return _numbers(column)


def _both_ways(edge: Mapping[str, _Column]) -> dict[str, _Column]:
    """Every edge, then every edge reversed but for those from a vertex to itself."""
    back = edge["source"] != edge["target"]
    turned = dict(edge) | {"source": edge["target"], "target": edge["source"]}
    return {name: np.concatenate([column, turned[name][back]]) for name, column in edge.items()}


def _refuse_isolated(
    ends: NDArray[np.int64], names: Sequence[str], called: str, isolated: Isolated
) -> None:
    if isolated not in ("keep", "raise"):
        raise ValueError(f"isolated={isolated!r}: give 'keep' or 'raise'")
    if isolated == "keep":
        return
    met = np.bincount(ends.ravel(), minlength=len(names))
    if alone := [names[v] for v in np.flatnonzero(met == 0).tolist()]:
        raise DataError(
            f"{called}: {len(alone)} of {len(names)} vertices have no edge, first {alone[0]}; "
            "remove them, give each an edge to itself, or use isolated='keep'"
        )


def _names(names: str | Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names


def _called(what: str, key: object) -> str:
    return what if key is None else f"{what} {key}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {tuple(value.shape)}"
    return repr(value)


def _short(items: Sequence[Any]) -> str:
    text = repr(tuple(items))
    return text if len(text) < 80 else f"{text[:77]}..."
