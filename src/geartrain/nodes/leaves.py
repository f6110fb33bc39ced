"""Which weights are in what a function has made, and what they are called.

y ─► autograd's graph ─► its leaves that require a gradient
function ─► closure, globals, attributes, ... ─► the name that leads to a tensor
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

_SOUGHT: Final = 20_000
"""Python objects that are looked through for names."""


def leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of autograd's graph that require a gradient."""
    found: dict[int, Tensor] = {id(y): y for y in outputs if y.requires_grad and y.is_leaf}
    stack = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                stack.append(after)
    return list(found.values())


def that_stay(leaves: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """Without those that a call makes for itself, as ``x.detach().requires_grad_()`` does.

    Args:
        leaves: Of what a call has made.
        again: Calls once more; what is in its graph again was there before. Weights stay in any
            case: those that a call makes would never learn.
    """
    if all(isinstance(x, nn.Parameter) for x in leaves):
        return list(leaves)
    there = {id(x) for x in leaves_of(again())}
    return [x for x in leaves if isinstance(x, nn.Parameter) or id(x) in there]


def names_of(wanted: Sequence[Tensor], function: Callable[..., Any]) -> dict[int, str]:
    """Tensors' names by their ``id``, as far as they are found: ``model.head.weight``."""
    ids = {id(x) for x in wanted}
    found: dict[int, str] = {}
    queue: deque[tuple[str, Any]] = deque([("", function)])
    seen: set[int] = set()
    while queue and len(seen) < _SOUGHT and len(found) < len(ids):
        path, thing = queue.popleft()
        if id(thing) in ids:
            found.setdefault(id(thing), path)
        if id(thing) not in seen and not isinstance(thing, _NO_NAMES):
            seen.add(id(thing))
            queue.extend(_inside(path, thing))
    return found


_NO_NAMES = (Tensor, str, bytes, int, float, type, ModuleType)


def _inside(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """What hangs on a Python object, and how one gets there."""
    before = f"{path}." if path else ""
    if isinstance(thing, nn.Module):
        yield from ((before + name, p) for name, p in thing.named_parameters())
        own = {k: v for k, v in vars(thing).items() if k not in ("_parameters", "_modules")}
        yield from ((before + name, value) for name, value in own.items())
        yield from ((before + name, inner) for name, inner in thing.named_children())
    elif isinstance(thing, MethodType):
        yield from ((path, thing.__self__), (path, thing.__func__))
    elif isinstance(thing, partial):
        yield from ((path, value) for value in (thing.func, *thing.args))
        yield from thing.keywords.items()
    elif isinstance(thing, FunctionType):
        yield from _inside_function(path, thing)
    elif isinstance(thing, Mapping):
        yield from ((f"{path}[{key!r}]", value) for key, value in list(thing.items()))
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(thing))
    elif hasattr(thing, "__dict__"):
        yield from ((before + name, value) for name, value in vars(thing).items())


def _inside_function(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing has been put into it yet
            continue
    known, used = function.__globals__, function.__code__.co_names
    yield from ((name, known[name]) for name in used if name in known)
    yield from ((path, value) for value in function.__defaults__ or ())


def described(leaves: Sequence[Tensor], names: Mapping[int, str]) -> str:
    """``lin.weight (3, 4), lin.bias (3,)``, and how many more.

    Args:
        leaves: One or more.
        names: By ``id``, of some of them.
    """
    told = [f"{names.get(id(x), 'a tensor')} {tuple(x.shape)}" for x in leaves[:4]]
    more = f" and {len(leaves) - 4} more" if len(leaves) > 4 else ""
    return ", ".join(told) + more


def foreign(
    outputs: Sequence[Tensor],
    own: Sequence[Tensor],
    function: Callable[..., Any],
    again: Callable[[], Sequence[Tensor]],
) -> str | None:
    """The leaves of a graph that are not among these, for a message; None: there are none.

    Args:
        outputs: What the graph is of.
        own: Leaves that are known.
        function: Made the outputs; is looked through for names.
        again: Makes them once more.
    """
    known = {id(x) for x in own}
    found = that_stay([x for x in leaves_of(outputs) if id(x) not in known], again)
    return described(found, names_of(found, function)) if found else None


__all__ = ["described", "foreign", "leaves_of", "names_of", "that_stay"]


def foreign_story(name: str, detail: str, weights: str) -> str:
    """The message for weights that are not a node's own."""
    return (
        f"'{name}': {detail} computes with weights that are not its own, so they would never learn "
        f"here: {weights}; give through() the module that holds them, or a method of it "
        "(through(model.encode), and part=Part(model) where nodes share a model). What shall not "
        "learn wants requires_grad_(False), or torch.no_grad() around it"
    )
