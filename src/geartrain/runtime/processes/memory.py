"""Tensors in memory that several processes have, and pickles that refer to them.

    weights, buffers, optimisers' state ─► a region (an anonymous file in memory) ◄─ mapped by each
    graph and parts ─► pickle with references ─► the same objects, on the same memory

A region has no name: it is gone with the last process that has it, whatever ends that one. The
tensors stay the objects that they are; their data move. So a step in a worker is in the modules of
the user as it is taken. When the last tensor in a region is gone, so is the region: here at once,
and in the workers with the next pass.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle  # noqa: TID251 - between a parent and the children that it made, and nobody else
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NoReturn, final

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import type_before_parametrizations

from geartrain.nodes.hooks import carry_hooks, hooks_of
from geartrain.transport.common import Common, may_lie_in_common

BEGINNING: Final = -1
BETWEEN: Final = 0
"""What a worker notes in region 0, for the parent to see: twice the node that it fires, and one
more, and one more if backward; or these."""
NOTE_BYTES: Final = 64  # of a worker; a cache line
COMMON: Final = 1
"""Number of the region where processes leave tensors for one another."""
RINGS: Final = 2
"""Number of the region of rings for small messages (``transport.rings``)."""
_APART: Final = -1  # in place of the number of a region: that of the first tensor that goes apart
_HEAD: Final = 8  # bytes, before what goes apart
_ALIGNED: Final = 64  # bytes; a cache line: neighbours of two workers do not share one


@final
class SharedRegion:
    """Memory that processes share.

    Args:
        fd: An open file of this size; it is closed here.
        size: Bytes, 1 or more.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size, self.fd = size, fd
        mapped = mmap.mmap(fd, size)
        self._mapped = weakref.ref(mapped)  # its tensors keep it
        self._bytes: Tensor | None = torch.frombuffer(mapped, dtype=torch.uint8)
        self.start = self._bytes.data_ptr()

    @classmethod
    def make(cls, size: int) -> SharedRegion:
        """Fresh memory, all zeros."""
        fd = os.memfd_create("geartrain", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @property
    def bytes(self) -> Tensor:
        """All of it, until it is let go."""
        assert self._bytes is not None
        return self._bytes

    @property
    def in_use(self) -> bool:
        """Whether there is a tensor in it."""
        return self._mapped() is not None

    def let_go(self) -> None:
        """Leave it to the tensors in it: it is there for as long as one of them."""
        self._bytes = None

    def tensor(
        self, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        """A tensor that begins at this byte of the region.

        It is no view of another one: what is written to it counts for autograd as of it alone.

        Args:
            offset: In bytes from the start; a multiple of the size of an element.
            dtype, shape, stride: Of the tensor.
        """
        x = torch.empty(0, dtype=dtype)
        return x.set_(self.bytes.untyped_storage(), offset // dtype.itemsize, shape, stride)

    def __contains__(self, x: Tensor) -> bool:
        return self.start <= x.data_ptr() < self.start + self.size and self.in_use

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def common_of(memory: Tensor, me: int, n: int) -> Common:
    """One process's view of the memory for messages of a pass.

    The last process is the parent: it borrows nothing, as what it has been sent may be the user's
    when the next pass writes there.
    """
    return Common(memory.numpy(), me, n, range(n - 1))


@final
class SharedTensors:
    """The regions of one runtime by number, and which tensors lie in them."""

    def __init__(self) -> None:
        self.regions: dict[int, SharedRegion] = {}
        self._made = 0

    def add(self, size: int) -> SharedRegion:
        """A fresh region of so many bytes."""
        region = self.regions[self._made] = SharedRegion.make(size)
        self._made += 1
        return region

    def drop_unused(self) -> None:
        """Close the regions that no tensor is in any more."""
        self.regions = {k: region for k, region in self.regions.items() if region.in_use}

    def place(self, tensor: Tensor) -> tuple[int, int] | None:
        """SharedRegion and byte where a tensor's elements begin; None: it is not shared."""
        if not may_lie_in_common(tensor):
            return None
        for k, region in self.regions.items():
            if tensor in region:
                return k, tensor.data_ptr() - region.start
        return None

    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move the data of these into shared memory; tensors of one storage stay of one.

        Args:
            tensors: On the host; what is there already, or has no elements, stays.
        """
        self.drop_unused()
        storages: dict[int, list[Tensor]] = {}
        for x in tensors:
            if may_lie_in_common(x) and self.place(x) is None:
                storages.setdefault(x.untyped_storage().data_ptr(), []).append(x)
        if not storages:
            return
        sizes = {at: xs[0].untyped_storage().nbytes() for at, xs in storages.items()}
        total = sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes.values())
        region = self.add(total)
        start = 0
        for at, xs in storages.items():
            whole = torch.empty(0, dtype=torch.uint8).set_(xs[0].untyped_storage())
            region.bytes[start : start + sizes[at]].copy_(whole)
            for x in xs:
                offset = start + int(x.storage_offset()) * x.element_size()
                x.data = region.tensor(offset, x.dtype, x.shape, x.stride())
            start += -(-sizes[at] // _ALIGNED) * _ALIGNED
        region.let_go()


@final
class Apart:
    """Memory of tensors that goes by itself, to the processes that want it.

    What several processes are to have is then written once, with references; one that a process
    does not get arrives as zeros of its shape that take no memory, and may not be written to.

    Args:
        tensors: On the host; several may be of one storage.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = {x.untyped_storage().data_ptr(): x for x in tensors if may_lie_in_common(x)}
        self._numbers = {at: k for k, at in enumerate(self._tensors)}

    def place(self, tensor: Tensor) -> tuple[int, int] | None:
        """As in a region, by a number of its own; None: it goes with what it is in."""
        if not may_lie_in_common(tensor):
            return None
        at = tensor.untyped_storage().data_ptr()
        if at not in self._numbers:
            return None
        return _APART - self._numbers[at], tensor.data_ptr() - at

    def content(self, tensors: Iterable[Tensor]) -> bytes:
        """Of these the memory, for one process."""
        found: dict[int, bytes] = {}
        for x in tensors:
            place = self.place(x)
            if place is not None and place[0] not in found:
                whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                found[place[0]] = whole.numpy().tobytes()
        head = json.dumps([(k, len(memory)) for k, memory in found.items()]).encode()
        return b"".join([len(head).to_bytes(_HEAD, "little"), head, *found.values()])

    @staticmethod
    def of(content: bytes) -> dict[int, Tensor]:
        """What ``content`` wrote: uint8, by number, aligned as fresh memory is."""
        if not content:
            return {}
        at = _HEAD + int.from_bytes(content[:_HEAD], "little")
        found = {}
        for k, size in json.loads(content[_HEAD:at]):
            found[k] = torch.empty(size, dtype=torch.uint8)
            found[k].numpy()[:] = np.frombuffer(content, np.uint8, size, at)
            at += size
        return found


@final
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # without annotations
    """Writes references in place of tensors that are shared.

    By what a tensor is reduced to, and not by ``persistent_id``, which is asked of every number and
    string as well: they are most of a pickle, and workers wait for it.
    """

    def __init__(
        self,
        file: io.BytesIO,
        place: Callable[[Tensor], tuple[int, int] | None],
    ) -> None:
        super().__init__(file)
        self._place = place

    def reducer_override(self, thing: object) -> Any:
        """A module with parametrizations, such as ``weight_norm``, goes as what it was made of:
        its class is made for it alone, and refuses to be pickled."""
        if type(thing) in (Tensor, nn.Parameter):
            return self._reduced(thing)  # type: ignore[arg-type]
        if isinstance(thing, nn.Module) and type_before_parametrizations(thing) is not type(thing):
            kind = type_before_parametrizations(thing)
            names = list(thing.parametrizations)  # type: ignore[arg-type]
            return _parametrized, (kind, names), dict(vars(thing))
        return super().reducer_override(thing)

    def _reduced(self, thing: Tensor) -> Any:
        leaf = thing.is_leaf or not thing.requires_grad
        hooks, more = hooks_of(thing), dict(vars(thing))
        if leaf and (place := self._place(thing)) is not None:
            kind = isinstance(thing, nn.Parameter), thing.requires_grad
            said = *place, thing.dtype, tuple(thing.shape), thing.stride(), *kind
            return _placed, (*said, more, hooks) if more or hooks else said
        if isinstance(thing, nn.Parameter) and hooks:
            return _with_hooks, (thing.data, thing.requires_grad, hooks, more)
        return super().reducer_override(thing)


def _placed(*_: object) -> NoReturn:
    """What is pickled in place of a tensor; an ``_Unpickler`` has its own in place of this."""
    raise RuntimeError("a pickle of tensors in shared memory is read by `loads`")


def _with_hooks(
    data: Tensor, wants_gradient: bool, hooks: tuple[Any, ...], more: dict[str, Any]
) -> nn.Parameter:
    """A parameter that is in no memory that both have."""
    parameter = nn.Parameter(data, wants_gradient)
    vars(parameter).update(more)
    carry_hooks(hooks, parameter)
    return parameter


def _parametrized(kind: type[nn.Module], names: list[str]) -> nn.Module:
    """A module without anything in it, of a class of its own that makes these tensors."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


@final
class _Unpickler(pickle.Unpickler):
    """Reads what a ``_Pickler`` wrote: one object for each that there was."""

    def __init__(
        self,
        file: io.BytesIO,
        regions: Mapping[int, SharedRegion],
        apart: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        super().__init__(file)
        self._regions, self._apart = regions, apart

    def find_class(self, module: str, name: str) -> Any:
        if name == _placed.__name__ and module == __name__:
            return self._tensor
        return super().find_class(module, name)

    def _tensor(
        self,
        region: int,
        offset: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        is_parameter: bool,
        wants_gradient: bool,
        more: Mapping[str, Any] = MappingProxyType({}),
        hooks: tuple[Any, ...] = (),
    ) -> Tensor:
        """The tensor that was ``_placed`` so."""
        if region in self._apart:
            storage = self._apart[region].untyped_storage()
            x = torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, stride)
        elif region <= _APART:
            x = torch.zeros((), dtype=dtype).expand(shape)
        else:
            x = self._regions[region].tensor(offset, dtype, shape, stride)
        x = nn.Parameter(x, wants_gradient) if is_parameter else x.requires_grad_(wants_gradient)
        if more or hooks:
            vars(x).update(more)
            carry_hooks(hooks, x)
        return x


def dumps(thing: object, shared: SharedTensors, apart: Apart | None = None) -> bytes:
    """A pickle, functions and classes of scripts in it; for a process that we have started.

    Args:
        thing: What is pickled.
        shared: What goes as a reference into memory that the process has, too.
        apart: What goes as a reference to what comes beside this.

    Raises:
        Exception: What says that something cannot be pickled, of whatever type.
    """
    file = io.BytesIO()
    place = shared.place if apart is None else lambda x: apart.place(x) or shared.place(x)
    _Pickler(file, place).dump(thing)
    return file.getvalue()


def why_not_carried(thing: object) -> str | None:
    """What speaks against handing something to a worker process; None: nothing.

    Nothing is moved, and tensors that would be shared are not copied.
    """
    try:
        _Pickler(io.BytesIO(), lambda x: (0, 0) if may_lie_in_common(x) else None).dump(thing)
    except Exception as error:  # noqa: BLE001 - of whatever type: it is told, and not gone on with
        return f"the graph cannot be handed to worker processes: {type(error).__name__}: {error}"
    return None


def loads(pickled: bytes, regions: Mapping[int, SharedRegion], apart: bytes = b"") -> Any:
    """What ``dumps`` wrote, in the process that was given the regions, and what went apart."""
    return _Unpickler(io.BytesIO(pickled), regions, Apart.of(apart)).load()
