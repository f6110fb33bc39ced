"""The compiled row kernels: found or made once, then held for the life of the process.

    current() ─► in memory? ─► build: in the cache, or compiled ─► loaded, checked ─► Library
                                            any of these fails ─► None: torch does it, and a warning

The first who asks waits for the compiler; a session asks when it is made, before any training is
timed. What is loaded is tried on known numbers before it is used.

    GEARTRAIN_NATIVE=0     do without, and say nothing

``build`` says where compiled kernels are kept and which compiler makes them.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TypeAlias, final

import torch

from geartrain.native.build import COMPILE_SECONDS, Unavailable, shared_object

log = logging.getLogger("geartrain.native")

SMALL: Final = 1 << 14
"""Entries up to which the interpreter lock is kept: handing it over costs more than the work."""
SMALL_WORK: Final = 1 << 17
"""The same in multiplications, where there are products."""
MUCH_WORK: Final = 1 << 22
"""Multiplications that a thread must have to do, for several to share a call."""

Function: TypeAlias = Callable[..., int]

_N, _P, _R = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_MOVE: Final = (ctypes.c_char_p, _N)
_TRANSPOSE: Final = (_N, _N, _P, _P)
_RELEASE: Final = (_N, _P, _N, *[_P] * 4)
_FOREST: Final = (_N, _P, _N, *[_P] * 6)
_COUNT: Final = (_N,)
_NOTE: Final = (_N, _P)
_TYPED: Final = {
    "add_rows": (_P, _P, _N, _P, _P, _N, _N, _N),
    "sum_rows": (_P, _P, _P, _N, _P, _P, _N, _N, _N),
    "tree_forward": (_N, _N, _N, _P, _N, _P, _P, _P, _P),
    "tree_backward": (*[_N] * 4, *[_P] * 5, _N, *[_P] * 4),
    "lstm_forward": (_N, _N, *[_P] * 4),
    "lstm_backward": (_N, _N, _N, *[_P] * 5, _N, *[_P] * 4),
    "gru_forward": (_N, _N, *[_P] * 5),
    "gru_backward": (_N, _N, _N, *[_P] * 4, _N, *[_P] * 3),
    "gated_forward": (*[_N] * 5, *[_P] * 10, *[_N] * 2, *[_P] * 2),
    "gated_backward": (*[_N] * 5, *[_P] * 6, _N, *[_P] * 3, *[_N] * 3, *[_P] * 5),
    "forest_forward": (ctypes.c_char_p, *[_N] * 6, *[_P] * 4),
    "forest_backward": (ctypes.c_char_p, *[_N] * 6, *[_P] * 3),
    "choice_forward": (*[_N] * 3, *[_P] * 7),
    "choice_backward": (*[_N] * 3, *[_P] * 4, _N, *[_P] * 4),
    "sum_forward": (*[_N] * 5, *[_P] * 9),
    "sum_backward": (*[_N] * 5, *[_P] * 5, _N, *[_P] * 7),
    "lists_forward": (*[_N] * 3, *[_P] * 2, _N, *[_P] * 2, _N, *[_P] * 2, _N),
    "lists_backward": (*[_N] * 3, *[_P] * 2, _N, *[_P] * 2, _N, _P, *[_N] * 2, *[_P] * 3, _N),
    "map_forward": (*[_N] * 3, *[_P] * 4),
    "map_backward": (*[_N] * 3, *[_P] * 6),
    "square_sum": (ctypes.c_char_p, _N, _P),
    "scale_all": (ctypes.c_char_p, _N, _R),
    "adam": (ctypes.c_char_p, _N, *[_R] * 5, _N),
    "adagrad": (ctypes.c_char_p, _N, *[_R] * 4, _N),
    "tanh": (_N, _P, _P),
    "cross_entropy": (_N, _N, *[_P] * 4),
}
_NAMES: Final = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16"}
_NOT_SHORT: Final = frozenset(  # losses are float32, and bundle kernels work in it
    f"{name}_{way}"
    for name in ("gated", "forest", "choice", "sum", "lists", "map")
    for way in ("forward", "backward")
) | {"cross_entropy", "square_sum", "scale_all", "adam", "adagrad"}
_NOTHING: Final = frozenset({"transpose", "tanh"})
"""Functions that return nothing; the others return an int64."""
_PRECISE: Final = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}


@final
class Library:
    """The functions of kernels.c, each twice: ``keeping`` the interpreter lock, and ``freeing`` it.

    Args:
        path: The shared object.

    ``move``, ``transpose`` and ``typed[dtype][name]`` are pairs ``(keeping, freeing)``; ``release``
    keeps.
    """

    def __init__(self, path: Path) -> None:
        try:
            kept, free = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
            self.move = tuple(_declared(dll, "move_rows", _MOVE) for dll in (kept, free))
            self.transpose = tuple(_declared(dll, "transpose", _TRANSPOSE) for dll in (kept, free))
            self.release = _declared(kept, "release_rows", _RELEASE)
            use = _declared(kept, "use_crew", (_P,))
            use(_threads_of_torch())
            self.count = _declared(kept, "count_products", _COUNT)
            self.note = _declared(kept, "note_products", _NOTE)
            self.forest = _declared(kept, "forest", _FOREST)
            self.typed: dict[torch.dtype, dict[str, tuple[Function, ...]]] = {
                dtype: {
                    name: tuple(_declared(dll, f"{name}_{c}", of) for dll in (kept, free))
                    for name, of in _TYPED.items()
                    if dtype is not torch.bfloat16 or name not in _NOT_SHORT
                }
                for dtype, c in _NAMES.items()
            }
        except (OSError, AttributeError) as error:
            raise Unavailable(f"cannot load {path}: {error}") from error
        self.path = path

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


def _declared(dll: ctypes.CDLL, name: str, arguments: tuple[type, ...]) -> Function:
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
_settled = False
_library: Library | None = None
_status = ""


def _settle() -> Library | None:
    global _settled, _library, _status
    with _lock:
        if not _settled:
            try:
                _library = load()
                _status = f"native kernels: {_library.path}"
            except Unavailable as reason:
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
        seconds, again: As for ``build.shared_object``.

    Raises:
        Unavailable: Not wanted, no compiler, no private directory, or wrong numbers.
    """
    if not _wanted():
        raise Unavailable("GEARTRAIN_NATIVE=0")
    try:
        library = Library(shared_object(seconds, again=again))
    except (OSError, RuntimeError) as error:  # the last: no home
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    library.check()
    return library


def _wanted() -> bool:
    return os.environ.get("GEARTRAIN_NATIVE", "1") != "0"
