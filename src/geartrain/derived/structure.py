"""What a trace of a function depends on besides its inputs, and whether that has changed.

    module ─► settings   the numbers, strings and flags that its code finds, compared at each call
           ─► key        the same, with types, code, shapes and what is tied: equal structures are
                         traced once in a process

Looked at are attributes of the modules, of their classes and of plain objects in them, and what the
code of their classes reads of closures and globals; torch's own code is taken as it is. What lies
elsewhere (a file, an object in C) closes nothing in: such a structure has no key. The mode of a
module is a setting where any of that code, torch's too, has its name: what is traced in training
holds in evaluations else.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from functools import cache, partial
from logging import Logger
from operator import itemgetter
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, final

import torch
from torch import Tensor, nn

_NUMBERS: Final = (bool, int, float, complex, str, bytes, type(None), type(...))
_PLAIN: Final = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format, Enum)
_CONTAINERS: Final = (tuple, list, dict, set, frozenset, OrderedDict, deque, torch.Size)
_MODE: Final = "training"
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_OF_RECURRENT: Final = _OF_MODULES | {"_flat_weights", "_flat_weight_refs"}
"""They have their weights once more, and renew these whenever others stand in their place."""
_LIBRARIES: Final = frozenset({"torch", "geartrain", "numpy"})
_MOST: Final = 10_000
"""Things that are looked at in one structure; who has more has no key."""

_LONG: Final = 64
"""Entries of a container of settings that is compared at each call."""


@final
class Structure:
    """What a function looks like to a tracer.

    Args:
        function: A module, or any function.

    Attributes:
        key: Equal for functions whose traces are the same; None: nobody can tell.
        settings: As they were when this was made.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        walk = _Walk(function)
        self.key: Hashable | None = walk.key if walk.closed else None
        names: dict[int, dict[str, None]] = {}
        owners: dict[int, Mapping[str, Any]] = {}
        for owner, name in walk.slots:
            owners[id(owner)] = owner
            names.setdefault(id(owner), {})[name] = None
        # Of one name the getter would give no tuple.
        self._slots = [
            (owner, tuple(names[k]), itemgetter(*names[k], next(iter(names[k]))))
            for k, owner in owners.items()
        ]
        self._containers, self._cells = walk.containers, walk.cells
        self._parents = [m._modules for m in modules_of(function) if m._modules]
        self.settings = self.now()

    def now(self) -> Hashable:
        """The settings of now: another value than before means that a trace may be stale."""
        values: list[Any] = []
        for owner, names, get in self._slots:
            try:
                values += get(owner)
            except KeyError:
                values += [owner.get(name) for name in names]
                values.append(names)
        found: tuple[Hashable, ...] = (tuple(values), tuple(map(type, values)))
        found += tuple([tuple(inner.values()) for inner in self._parents])
        if self._containers:
            found += tuple([_frozen(owner.get(name)) for owner, name in self._containers])
        if self._cells:
            found += tuple([_frozen(_content(cell)) for cell in self._cells])
        return found


@final
class Same:
    """Stands for an object in a key, by its identity, and lets it go."""

    __slots__ = ("_hash", "_kept", "_reference")

    def __init__(self, thing: object) -> None:
        self._hash = id(thing)
        self._reference: Any = None
        self._kept: object = None
        try:
            self._reference = weakref.ref(thing)
        except TypeError:
            self._kept = thing

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        mine = self._thing()
        return self is other or (mine is not None and mine is other._thing())

    def _thing(self) -> object:
        return self._kept if self._reference is None else self._reference()


@final
class _Walk:
    """One look at all that a function can reach."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.slots: list[tuple[Mapping[str, Any], str]] = []
        self.containers: list[tuple[Mapping[str, Any], str]] = []
        self.cells: list[CellType] = []
        self.closed = True
        self._budget = _MOST
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []  # or another object could come by an id
        self._classes: set[type] = set()
        self._modules = {id(m): k for k, m in enumerate(modules_of(function))}
        self._operands: dict[int, int] = {}
        self._looks_at_mode = False
        self.key: Hashable
        if isinstance(function, nn.Module):
            found = [self._module(m) for m in function.modules()]
            if self._looks_at_mode:
                found += [self._named(vars(m), _MODE, m.training) for m in function.modules()]
            self.key = tuple(found)
        else:
            self.key = self._of(function)

    def _module(self, module: nn.Module) -> Hashable:
        found: list[Hashable] = [Same(type(module))]
        for owner in (module._parameters, module._buffers):
            found += [(name, self._operand(x)) for name, x in owner.items()]
        for name, inner in module._modules.items():
            found.append((name, None if inner is None else self._modules[id(inner)]))
        for name, x in list(vars(module).items()):
            if name not in (_OF_RECURRENT if isinstance(module, nn.RNNBase) else _OF_MODULES):
                found.append((name, self._named(vars(module), name, x)))
        self._looks_at_mode = self._looks_at_mode or any(map(_looks_at_mode, type(module).__mro__))
        return (*found, *self._class(type(module), {"forward"}))

    def _operand(self, x: Tensor | None) -> Hashable:
        if x is None:
            return None
        number = self._operands.setdefault(id(x), len(self._operands))
        return number, x.dtype, tuple(x.shape), x.device, isinstance(x, nn.Parameter), x.layout

    def _class(self, kind: type, names: set[str]) -> list[Hashable]:
        """What instances find in their class by these names, and by those that its code says."""
        found: list[Hashable] = []
        spaces = [vars(each) for each in kind.__mro__ if not _library(each.__module__)]
        if kind in self._classes or not spaces:
            return found
        self._classes.add(kind)
        done: set[str] = set()
        while waiting := sorted(names - done):
            done |= names
            for name, space in ((n, space) for n in waiting for space in spaces if n in space):
                value = space[name]
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                elif isinstance(value, property):
                    value = value.fget
                if isinstance(value, FunctionType):
                    names |= _names(value.__code__)
                found.append((name, self._named(space, name, value)))
        self._looks_at_mode = self._looks_at_mode or _MODE in names
        return found

    def _named(self, owner: Mapping[str, Any], name: str, value: object) -> Hashable:
        """A value that code finds under a name."""
        if isinstance(value, _PLAIN):
            self.slots.append((owner, name))
        elif type(value) in _CONTAINERS:
            self.containers.append((owner, name))
        return self._of(value)

    def _of(self, value: object) -> Hashable:
        self._budget -= 1
        if self._budget < 0:
            self.closed = False
            return None
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, Tensor) and id(value) in self._operands:
            return "operand", self._operands[id(value)]
        if isinstance(value, nn.Module) and id(value) in self._modules:
            return "module", self._modules[id(value)]
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._alive)
        self._alive.append(value)
        return self._container(value) if type(value) in _CONTAINERS else self._thing(value)

    def _thing(self, value: object) -> Hashable:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return self._of(value.__func__), self._of(value.__self__)
        if isinstance(value, partial):
            return self._of(value.func), self._of(value.args), self._of(value.keywords)
        if isinstance(value, type):
            return Same(value), *self._class(value, {"__init__", "__new__", "__call__"})
        if isinstance(value, _BY_IDENTITY):
            return Same(value)
        own = None if isinstance(value, nn.Module) else _attributes(value)
        if own is None:
            self.closed = False
            return None
        inner = [(name, self._named(own, name, x)) for name, x in list(own.items())]
        names = {name for name in dir(type(value)) if not name.startswith("__")} | {"__call__"}
        return Same(type(value)), *inner, *self._class(type(value), names)

    def _container(self, value: Any) -> Hashable:
        if isinstance(value, dict):
            return type(value), tuple([(self._of(key), self._of(x)) for key, x in value.items()])
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset([self._of(x) for x in value])
        return type(value), tuple([self._of(x) for x in value])

    def _function(self, function: FunctionType) -> Hashable:
        found: list[Hashable] = [Same(function)]
        if _library(function.__module__):
            return tuple(found)
        found += [Same(function.__code__), self._of(function.__defaults__)]
        found.append(self._of(function.__kwdefaults__))
        for cell in function.__closure__ or ():
            content = _content(cell)
            if isinstance(content, _PLAIN) or type(content) in _CONTAINERS:
                self.cells.append(cell)
            found.append(self._of(content))
        names = _names(function.__code__)
        self._looks_at_mode = self._looks_at_mode or _MODE in names
        return (*found, *self._read(function.__globals__, names, 3))

    def _read(self, space: dict[str, Any], names: set[str], depth: int) -> list[Hashable]:
        """What code reads of a namespace, and of the modules of Python that it finds there."""
        found: list[Hashable] = []
        for name in sorted(names & space.keys()):
            value = space[name]
            if not isinstance(value, ModuleType):
                found.append((name, self._named(space, name, value)))
            elif depth and not _library(value.__name__):
                found += self._read(vars(value), names, depth - 1)
        return found


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """A module and all inside it; of another function none."""
    return list(function.modules()) if isinstance(function, nn.Module) else []


_BY_IDENTITY: Final = (
    Tensor,
    ModuleType,
    BuiltinFunctionType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    Logger,
)


def _attributes(value: object) -> dict[str, Any] | None:
    """All that an object of a class in Python holds; None: it may hold more."""
    own: dict[str, Any] = getattr(value, "__dict__", None) or {}
    for each in type(value).__mro__[:-1]:
        slots = vars(each).get("__slots__", ())
        if _library(each.__module__) and each is not SimpleNamespace:
            return None
        if slots:
            own = own | {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return own


def _library(module: str | None) -> bool:
    """Whether code is torch's, ours or Python's own, which is as it is."""
    root = (module or "builtins").partition(".")[0]
    return root in _LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes in code, and in code inside of it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
        elif constant == _MODE:  # for getattr
            found.add(_MODE)
    return found


@cache
def _looks_at_mode(kind: type) -> bool:
    """Whether code of a library's class, but for that of all modules, may look at their mode."""
    if kind is nn.Module or not _library(kind.__module__):
        return False
    code = [getattr(x, "__func__", getattr(x, "fget", x)) for x in vars(kind).values()]
    return any(_MODE in _names(f.__code__) for f in code if isinstance(f, FunctionType))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _frozen(value: object) -> Hashable:
    """A container of settings as a value; what is not a setting, or is large, by identity."""
    if type(value) in _CONTAINERS:
        inner: Any = value
        if len(inner) > _LONG:
            return type(value), len(inner), id(value)
        if isinstance(inner, dict):
            inner = [each for pair in inner.items() for each in pair]
        return type(value), tuple([_frozen(x) for x in inner])
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)
