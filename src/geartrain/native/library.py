"""The compiled row kernels: found or made once, then held for the life of the process.

    current() ─► in memory? ─► build: in the cache, or compiled ─► loaded, checked ─► Library
                                            any of these fails ─► None: torch does it, and a warning

The first who asks waits for the compiler; a session asks when it is made, before any training is
timed. What is loaded is tried on known numbers before it is used.

    GEARTRAIN_NATIVE=0     do without, and say nothing

Kernels of a model lie beside it, and are no business of this folder: the model adds them as an
``Extension``, which is a library of its own.

``build`` says where compiled kernels are kept and which compiler makes them.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, final

import torch

from geartrain.native.build import COMPILE_SECONDS, Sources, shared_objects
from geartrain.native.compilers import Unavailable

log = logging.getLogger("geartrain.native")

SMALL: Final = 1 << 14
"""Entries up to which the interpreter lock is kept: handing it over costs more than the work."""
SMALL_WORK: Final = 1 << 17
"""The same in multiplications, where there are products."""
MUCH_WORK: Final = 1 << 22
"""Multiplications that a thread must have to do, for several to share a call."""

Function: TypeAlias = Callable[..., int]

Arguments: TypeAlias = tuple[type, ...]

WORD: Final = ctypes.c_int64
POINTER: Final = ctypes.c_void_p
BYTES: Final = ctypes.c_char_p
_N, _P, _R = WORD, POINTER, ctypes.c_double
_MOVE: Final = (BYTES, _N)
_TRANSPOSE: Final = (_N, _N, _P, _P)
_RELEASE: Final = (_N, _P, _N, *[_P] * 4)
_COLLECT: Final = (_P, _N, _P, _N, BYTES, _N, *[_P] * 4)
_PLAN: Final = (_P, _P, _N, _P, _N, _N, *[_P] * 5)
_COUNT: Final = (_N,)
_NOTE: Final = (_N, _P)
_RINGS: Final[Mapping[str, Arguments]] = {
    "ring_put": (*[_P, _N, _N, _N, _N], BYTES, _N),
    "ring_next": (_P, _N, _N, _N, _P),
    "ring_drop": (_P, _N, _N, _N, _P),
    "ring_doze": (_P, _N, _N, _N),
    "ring_awake": (_P, _N),
}
"""Arguments of what processes write to one another with; see rings.inc."""
_TYPED: Final[Mapping[str, Arguments]] = {
    "add_rows": (_P, _P, _N, _P, _P, _N, _N, _N),
    "sum_rows": (_P, _P, _P, _N, _P, _P, _N, _N, _N),
    "lstm_forward": (_N, _N, *[_P] * 4),
    "lstm_backward": (_N, _N, _N, *[_P] * 5, _N, *[_P] * 4),
    "gru_forward": (_N, _N, *[_P] * 5),
    "gru_backward": (_N, _N, _N, *[_P] * 4, _N, *[_P] * 3),
    "map_forward": (*[_N] * 3, *[_P] * 4),
    "map_backward": (*[_N] * 3, *[_P] * 6),
    "fused_run": (_N, _N, BYTES, _N, _N, BYTES, BYTES, _N),
    "fused_pack": (BYTES, _N),
    "calls_forward": (_N, _P, _P, _N, _N, _P),
    "calls_backward": (_N, _P, _P, _P, _N, _N, _P),
    "ragged_run": (_N, BYTES, _N, _N, BYTES, _N, BYTES, BYTES, BYTES, _N, BYTES, _N),
    "square_sum": (BYTES, _N, _P),
    "scale_all": (BYTES, _N, _R),
    "sum_gradients": (BYTES, _N, _P),
    "sum_by_id": (BYTES, _N, _N, _N, *[_P] * 4),
    "multiply_sums": (*[_N] * 7, *[_P] * 6),
    "adam": (BYTES, _N, BYTES, *[_R] * 5, _N),
    "adam_means": (BYTES, _N, BYTES, *[_R] * 4, _N, _P, _P),
    "adam_weights": (BYTES, _N, _P, BYTES, _R),
    "sgd": (BYTES, _N, BYTES, *[_R] * 4, _N, _N),
    "adagrad": (BYTES, _N, *[_R] * 4, _N),
    "attend_forward": (*[_N] * 3, _R, _P, _P, _N, *[_P] * 5),
    "attend_backward": (*[_N] * 3, _R, _P, _P, _N, *[_P] * 9),
    "tanh": (_N, _P, _P),
    "cross_entropy": (_N, _N, *[_P] * 4),
}
_NAMES: Final = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16"}
_NOT_SHORT: Final = frozenset(  # losses and weights are float32
    (
        *("map_forward", "map_backward", "attend_forward", "attend_backward"),
        *("fused_run", "fused_pack", "calls_forward", "calls_backward"),
        "ragged_run",
        *("cross_entropy", "square_sum", "scale_all"),
        *("sum_gradients", "sum_by_id", "multiply_sums"),
        *("adam", "adam_means", "adam_weights", "sgd", "adagrad"),
    )
)
_NOTHING: Final = frozenset({"transpose", "tanh"})
"""Functions that return nothing; the others return an int64."""
_PRECISE: Final = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}


@final
@dataclass(frozen=True, slots=True)
class Extension:
    """Functions of a model, in a library of their own that calls those of kernels.c.

    Args:
        sources: Beside the model; they include ``shared.inc``, ``float.inc`` and ``double.inc``.
        typed: Arguments of functions that there are for float and for double, by name.
        plain: Of those that know no type.

    ``add`` it when the model is imported. All are compiled together, once somebody asks.
    """

    sources: Sources
    typed: Mapping[str, Arguments]
    plain: Mapping[str, Arguments] = field(default_factory=dict)

    def functions(self, dtype: torch.dtype) -> Mapping[str, tuple[Function, ...]] | None:
        """Pairs ``(keeping, freeing)`` by name, or None where torch has to do."""
        native = current()
        typed = None if native is None else native.typed.get(dtype)
        return typed if typed is not None and next(iter(self.typed)) in typed else None

    def function(self, name: str) -> Function | None:
        """One that knows no type, which keeps the interpreter lock."""
        native = current()
        return None if native is None else native.plain.get(name)


@final
class Library:
    """The functions of kernels.c, each twice: ``keeping`` the interpreter lock, and ``freeing`` it.

    Args:
        paths: The shared object, and those of the extensions that were added, in that order.

    ``move``, ``transpose`` and ``typed[dtype][name]`` are pairs ``(keeping, freeing)``;
    ``release``, ``collect``, ``plan``, ``rings[name]`` and ``plain[name]`` keep. Those of
    extensions are among them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.typed: dict[torch.dtype, dict[str, tuple[Function, ...]]] = {d: {} for d in _NAMES}
        self.plain: dict[str, Function] = {}
        path = self.path
        try:
            both = _opened(path)
            kept, _ = both
            self.move = tuple(_declared(dll, "move_rows", _MOVE) for dll in both)
            self.transpose = tuple(_declared(dll, "transpose", _TRANSPOSE) for dll in both)
            self.release = _declared(kept, "release_rows", _RELEASE)
            self.collect = _declared(kept, "collect_members", _COLLECT)
            self.plan = _declared(kept, "plan_rows", _PLAN)
            use = _declared(kept, "use_threads", (_P,))
            use(_threads_of_torch())
            self.count = _declared(kept, "count_products", _COUNT)
            self.note = _declared(kept, "note_products", _NOTE)
            self.rings = {name: _declared(kept, name, of) for name, of in _RINGS.items()}
            self._declare(both, _TYPED, tuple(_NAMES))
            for extension, path in zip(_extensions, self.paths[1:], strict=False):
                both = _opened(path)
                self._declare(both, extension.typed, (torch.float32, torch.float64))
                for name, of in extension.plain.items():
                    self.plain[name] = _declared(both[0], name, of)
        except (OSError, AttributeError) as error:
            raise Unavailable(f"cannot load {path}: {error}") from error

    @property
    def path(self) -> Path:
        """The shared object of kernels.c."""
        return self.paths[0]

    def _declare(
        self,
        dlls: tuple[ctypes.CDLL, ...],
        functions: Mapping[str, Arguments],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        for dtype in dtypes:
            for name, of in functions.items():
                if dtype is not torch.bfloat16 or name not in _NOT_SHORT:
                    found = tuple(_declared(dll, f"{name}_{_NAMES[dtype]}", of) for dll in dlls)
                    self.typed[dtype][name] = found

    def check(self) -> None:
        """Raises:
        Unavailable: The kernels give other numbers than torch.
        """
        for dtype, functions in self.typed.items():
            x = torch.linspace(-20.0, 20.0, 83, dtype=dtype)
            x[0], x[1], x[2] = math.nan, math.inf, -math.inf
            y = torch.empty_like(x)
            functions["tanh"][0](x.numel(), x.data_ptr(), y.data_ptr())
            if not torch.allclose(y, x.tanh(), rtol=_PRECISE[dtype], atol=0, equal_nan=True):
                raise Unavailable(f"{self.path}: tanh of {dtype} is wrong")


def _opened(path: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The same library, keeping and freeing the interpreter lock."""
    return ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))


def _declared(dll: ctypes.CDLL, name: str, arguments: Arguments) -> Function:
    function = getattr(dll, name)
    function.argtypes = arguments
    function.restype = None if name.partition("_")[0] in _NOTHING else _N
    return function  # type: ignore[no-any-return]


def _threads_of_torch() -> int | None:
    """The address at which the OpenMP that torch has loaded is asked for threads, or None."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "omp" in line}
    for path in sorted(paths, key=lambda path: "torch" not in path):
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            ask = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            return ctypes.cast(ask, _P).value if ask else None
    return None


def threads_for(work: int) -> int:
    """As many threads as torch may use here, and as so many multiplications are worth."""
    return max(1, min(torch.get_num_threads(), work // MUCH_WORK))


def add(extension: Extension) -> Extension:
    """Have the functions of a model loaded with the others, next time somebody asks."""
    global _settled
    with _lock:
        _extensions.append(extension)
        _settled = _settled and _library is None  # without a compiler this will not have one either
    return extension


def current() -> Library | None:
    """The kernels, or None where torch has to do."""
    return _library if _settled else _settle()


def status() -> str:
    """Whether native kernels are used, and from where or why not, in one line."""
    current()
    return _status


def kind() -> Literal["native", "torch"]:
    """Who does the work of kernels in this process."""
    return "torch" if current() is None else "native"


_lock = threading.Lock()
_extensions: list[Extension] = []
_settled = False
_library: Library | None = None
_status = ""


def _settle() -> Library | None:
    global _settled, _library, _status
    with _lock:
        if not _settled:
            try:
                _library = load()
                _status = f"native kernels: {', '.join(map(str, _library.paths))}"
            except Unavailable as reason:
                _library = None
                _status = f"native kernels: none, torch does their work: {reason}"
                if _wanted():
                    log.warning(
                        "no native kernels, so torch does their work, with the same results but "
                        "slower (GEARTRAIN_NATIVE=0 says that this is meant): %s",
                        reason,
                    )
            _settled = True
        return _library


def load(seconds: float = COMPILE_SECONDS, *, again: bool = False) -> Library:
    """Find or compile the kernels, load and check them.

    Args:
        seconds, again: As for ``build.shared_objects``.

    Raises:
        Unavailable: Not wanted, no compiler, no private directory, or wrong numbers.
    """
    if not _wanted():
        raise Unavailable("GEARTRAIN_NATIVE=0")
    try:
        library = Library(shared_objects(_linked(), seconds, again=again))
    except (OSError, RuntimeError) as error:  # the last: no home
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    library.check()
    return library


def _linked() -> list[Sources]:
    """Those of extensions, which are linked with kernels.c as the loader of ELF does it."""
    elf = sys.platform not in ("darwin", "win32")
    return [extension.sources for extension in _extensions] if elf else []


def _wanted() -> bool:
    return os.environ.get("GEARTRAIN_NATIVE", "1") != "0"
