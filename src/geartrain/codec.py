"""Python values as JSON values that come back with their types.

    None, bool, int, float, str   themselves (NaN and infinity too)
    list                          a list
    tuple, dict, Counter          {"tuple": [...]}, {"dict": [[key, value], ...]}, {"counter": ..}
    numpy scalar                  {"numpy": "<f8", "value": 0.5}
    numpy array                   {"array": "<u4", "shape": [2, 3], "base64": "..."}
    tensor                        {"tensor": name} beside the JSON, or, of no dimensions and where
                                  there is no beside, {"scalar": "float32", "value": 0.5}

Anything else is refused by name. Nothing here can name a class or a function to call, so a
document from a stranger decodes to plain values or not at all.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from geartrain.errors import CheckpointError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_KNOWN = (
    "None, bool, int, float, str, list, tuple, dict, Counter, tensors, numpy numbers and numpy "
    "arrays of numbers"
)


def encode(value: object, place: str, tensors: dict[str, Tensor] | None = None) -> Json:
    """The JSON of a value; ``decode`` gives it back, types included, floats to the last bit.

    Args:
        value: Of the types in the module's table, nested at will.
        place: Its name: begins the error messages and the names in ``tensors``.
        tensors: Takes the tensors (as they are, not copied). Without it only a tensor of no
            dimensions is accepted, and its number goes into the JSON.

    Raises:
        CheckpointError: A type that is not in the table; the message names the place.
    """
    kind = type(value)
    if value is None or (isinstance(value, bool | int | float | str) and kind in _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value, place, tensors)
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
        return _encode_numpy(value, place)
    if isinstance(value, list | tuple) and kind in (list, tuple):
        items = [encode(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict) and kind in (dict, Counter):
        pairs = [[_key(k, place), encode(v, f"{place}.{k}", tensors)] for k, v in value.items()]
        return {"counter" if kind is Counter else "dict": pairs}
    raise CheckpointError(
        f"'{place}' is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; "
        f"expected {_KNOWN}. Replace it by one of these, or take it out of the state"
    )


def decode(
    value: Json,
    place: str,
    tensors: Mapping[str, Tensor] | None = None,
    kept: Collection[str] = (),
) -> object:
    """The value that ``encode`` was given; tensors are copies.

    Args:
        value: What ``encode`` returned, perhaps written to a file and read again.
        place: Begins the error messages.
        tensors: Those that ``encode`` set aside.
        kept: Names of those that are taken as they are, and not copied.

    Raises:
        CheckpointError: ``encode`` cannot have made this, or a tensor is missing.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, Mapping):
        return [decode(item, f"{place}.{i}", tensors, kept) for i, item in enumerate(value)]
    try:
        return _decode_tagged(value, place, tensors, kept)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"'{place}': the entry {_short(value)} cannot be decoded ({error!r}); expected what "
            f"geartrain itself writes. The document was edited or its tensors are missing: use "
            f"the checkpoint as it was written, or an older one"
        ) from error


def require_like(value: object, own: object, place: str) -> None:
    """Refuse a decoded value that cannot stand where ``own`` does.

    It is of the same type, a list as long, a dict with the same keys, a tensor or array of the same
    shape and dtype; text is the same. A number may be of any type that numbers have, and is finite
    unless ``own`` is not; where nothing was, it may be.

    Args:
        value: What ``decode`` gave.
        own: What ``encode`` would be given here.
        place: Begins the error message.

    Raises:
        CheckpointError: It is something else; names the place, both, and the remedy.
    """
    if isinstance(own, dict) and isinstance(value, dict) and type(own) is type(value):
        if isinstance(own, Counter):
            if all(type(n) is int for pair in value.items() for n in pair):
                return
        elif own.keys() == value.keys():
            for key, each in value.items():
                require_like(each, own[key], f"{place}.{key}")
            return
    elif isinstance(own, list | tuple) and type(own) is type(value):
        assert isinstance(value, list | tuple)
        if len(own) == len(value):
            for i, (each, mine) in enumerate(zip(value, own, strict=True)):
                require_like(each, mine, f"{place}.{i}")
            return
    elif _alike(value, own):
        return
    raise CheckpointError(
        f"'{place}' is {_described(value)}, expected {_described(own)} or one like it. The "
        "document was edited, or is that of something that was made otherwise: make it as it was"
    )


def is_number(value: object) -> bool:
    """Whether it is one real number, of whatever type."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype not in _NO_NUMBERS
    if isinstance(value, np.generic):
        return value.dtype.kind in "iuf"
    return type(value) in (int, float)


_TORCH_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
}
_NO_NUMBERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)


def is_finite(number: object) -> bool:
    """Whether a number is neither NaN nor beyond what a float can hold."""
    try:
        return math.isfinite(number)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _alike(value: object, own: object) -> bool:
    if own is None or is_number(own):
        if value is None:
            return own is None
        return is_number(value) and (is_finite(value) or not (own is None or is_finite(own)))
    if isinstance(own, Tensor):
        return isinstance(value, Tensor) and (value.shape, value.dtype) == (own.shape, own.dtype)
    if isinstance(own, np.ndarray):
        return isinstance(value, np.ndarray) and (value.shape, value.dtype) == (
            own.shape,
            own.dtype,
        )
    if isinstance(own, str):
        return value == own
    return type(value) is type(own)


def _described(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray) and not is_number(value):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        return f"a {kind} of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, dict):
        return f"a {type(value).__name__} with {_short(list(value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return _short(value)


_PLAIN = (bool, int, float, str)  # a subclass would come back as its base


def _encode_tensor(value: Tensor, place: str, tensors: dict[str, Tensor] | None) -> Json:
    if tensors is not None:
        tensors[place] = value.detach()
        return {"tensor": place}
    if value.dim() == 0 and not value.is_complex():
        return {"scalar": str(value.dtype).removeprefix("torch."), "value": value.item()}
    raise CheckpointError(
        f"'{place}' is a tensor of shape {tuple(value.shape)} and dtype {value.dtype}; expected "
        f"a real tensor of no dimensions here, as only its number fits into JSON"
    )


def _encode_numpy(value: np.generic | np.ndarray, place: str) -> Json:
    if value.dtype.itemsize > 8:
        raise CheckpointError(
            f"'{place}' has the numpy dtype {value.dtype}, which differs between machines; "
            f"expected at most 64 bits. Convert it to float64"
        )
    little = value.dtype.newbyteorder("<")
    if isinstance(value, np.generic):
        return {"numpy": little.str, "value": value.item()}
    text = base64.b64encode(value.astype(little).tobytes()).decode("ascii")
    return {"array": little.str, "shape": list(value.shape), "base64": text}


def _key(key: object, place: str) -> Json:
    if key is None or type(key) in (bool, int, float, str):
        return key  # type: ignore[return-value]  # one of the four, or None
    raise CheckpointError(
        f"'{place}' has the key {key!r} of type {type(key).__name__}; expected None, bool, int, "
        f"float or str. Use such keys"
    )


def _decode_tagged(
    value: Mapping[str, Json],
    place: str,
    tensors: Mapping[str, Tensor] | None,
    kept: Collection[str],
) -> object:
    match dict(value):
        case {"tensor": str(name), **rest} if not rest and tensors is not None:
            return tensors[name] if name in kept else tensors[name].detach().clone()
        case {"scalar": str(name), "value": bool() | int() | float() as number, **rest} if not rest:
            return torch.tensor(number, dtype=_torch_dtype(name))
        case {"numpy": str(name), "value": bool() | int() | float() as number, **rest} if not rest:
            return _numpy_dtype(name).type(number)
        case {"array": str(name), "shape": [*shape], "base64": str(text), **rest} if not rest:
            return _decode_array(_numpy_dtype(name), shape, text)
        case {"tuple": [*items], **rest} if not rest:
            return tuple(decode(x, f"{place}.{i}", tensors, kept) for i, x in enumerate(items))
        case {"dict": [*pairs], **rest} if not rest:
            return dict(_decode_pairs(pairs, place, tensors, kept))
        case {"counter": [*pairs], **rest} if not rest:
            return Counter(dict(_decode_pairs(pairs, place, tensors, kept)))
    raise ValueError(f"no known tag among {sorted(value)}")


def _decode_pairs(
    pairs: Sequence[Json],
    place: str,
    tensors: Mapping[str, Tensor] | None,
    kept: Collection[str],
) -> list[tuple[Json, object]]:
    decoded = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"{_short(pair)} is no pair of key and value")
        decoded.append((pair[0], decode(pair[1], f"{place}.{pair[0]}", tensors, kept)))
    return decoded


def _decode_array(dtype: np.dtype[np.generic], shape: Sequence[Json], text: str) -> np.ndarray:
    sizes = [size for size in shape if type(size) is int and size >= 0]
    data = base64.b64decode(text, validate=True)
    if len(sizes) != len(shape) or math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no {dtype} array of shape {list(shape)}")
    return np.frombuffer(data, dtype).reshape(sizes).astype(dtype.newbyteorder("="))


def _torch_dtype(name: str) -> torch.dtype:
    if name not in _TORCH_DTYPES:
        raise ValueError(f"{name} is no torch dtype of numbers")
    return _TORCH_DTYPES[name]


def _numpy_dtype(name: str) -> np.dtype[np.generic]:
    if not re.fullmatch(r"[<|][biuf][1248]", name):  # numpy parses whole languages of them
        raise ValueError(f"{name} is no dtype of numbers")
    return np.dtype(name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
