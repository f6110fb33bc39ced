"""Of what kind arguments are that a user gives, besides numbers (``geartrain.bounds``).

    require_kind("Part", Gear | None, "a gear, such as Gear(period=4), or None", gear=gear)
    require_truth("Ray", plain=plain, token=token)
    require_word("Compute", ("full", "bf16"), precision=precision)
    require_each("Host", str, "words: ('ssh', 'b.example')", command=command)
    require_entries("Costs", str, object, "names with numbers", nodes=nodes)

What is no such thing is a ``TypeError`` that names owner, argument, value, and what to give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

Kinds: TypeAlias = Any
"""What ``isinstance`` takes: a class, several, or a union such as ``Gear | None``."""


def require_kind(owner: str, kinds: Kinds, wanted: str, /, **given: object) -> None:
    """Refuse arguments of another kind.

    Args:
        owner: Who takes them, such as ``Part``.
        kinds: Any of them will do.
        wanted: What to give, in words.
        given: Arguments by name.

    Raises:
        TypeError: One is of another kind.
    """
    for name, value in given.items():
        if not isinstance(value, kinds):
            raise TypeError(_refusal(owner, name, value, wanted))


def require_truth(owner: str, /, **given: object) -> None:
    """Refuse what is neither True nor False; NumPy's are some, numbers are none.

    Raises:
        TypeError: One is neither.
    """
    require_kind(owner, (bool, np.bool_), "True or False", **given)


def require_word(owner: str, words: Sequence[str], /, **given: object) -> None:
    """Refuse what is none of some words.

    Raises:
        ValueError: One is another word.
        TypeError: One is no word.
    """
    *first, last = [repr(word) for word in words]
    wanted = f"{', '.join(first)} or {last}"
    require_kind(owner, str, wanted, **given)
    for name, value in given.items():
        if value not in words:
            raise ValueError(_refusal(owner, name, value, wanted))


def require_each(owner: str, kinds: Kinds, wanted: str, /, **given: object) -> None:
    """Refuse what is no row of things of a kind; text is none, nor what can be read only once.

    Raises:
        TypeError: One is none, or holds something else.
    """
    for name, value in given.items():
        if not _is_row(value) or not all(isinstance(each, kinds) for each in value):  # type: ignore[attr-defined]
            raise TypeError(_refusal(owner, name, value, wanted))


def require_entries(
    owner: str, keys: Kinds, values: Kinds, wanted: str, /, **given: object
) -> None:
    """Refuse what is no mapping from things of one kind to those of another.

    Raises:
        TypeError: One is none, or holds something else.
    """
    for name, value in given.items():
        fits = isinstance(value, Mapping) and all(
            isinstance(k, keys) and isinstance(v, values) for k, v in value.items()
        )
        if not fits:
            raise TypeError(_refusal(owner, name, value, wanted))


def require_class(owner: str, kind: object) -> None:
    """Refuse what is no class of modules.

    Raises:
        TypeError: It is something else, such as a module.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(
            _refusal(owner, "kind", kind, "a class of modules, such as torch.nn.Linear")
        )


def _is_row(value: object) -> bool:
    if isinstance(value, str | bytes | Mapping | Iterator | Tensor | type):
        return False
    return hasattr(value, "__iter__") and hasattr(value, "__len__")


def _refusal(owner: str, name: str, value: object, wanted: str) -> str:
    shown = " ".join(repr(value).split())
    return f"{owner}({name}={shown:.80}): give {wanted}"
