"""Functions of torch told by others in every trace: these look at no values, or have steps in C.

einsum("ni,kij,nj->nk", x, W, y)  ─►  x meets W, laid out as one map (k j, i); that meets y
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from geartrain.errors import GraphError

_MODE: Final = "use_mm_for_euclid_dist_if_necessary"
_MEMBERS: Final = 25
"""So many members, or fewer: torch takes no products for their distances, in that mode."""


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise GraphError("one_hot without num_classes looks for the largest class; say how many")
    unit = torch.eye(num_classes, dtype=torch.int64, device=tensor.device)
    return torch.nn.functional.embedding(tensor, unit)


def _counted(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each number comes, of so many as are asked for."""
    if weights is not None or not minlength:
        return torch.bincount(input, weights, minlength)
    none = torch.zeros(minlength, dtype=torch.int64, device=input.device)
    return none.index_add(0, input, torch.ones_like(input))


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product with a weight, and one with the rows of the other input."""
    out, one, other = weight.shape
    flat = weight.permute(1, 2, 0).reshape(one, other * out)
    met = (input1 @ flat).view(*input1.shape[:-1], other, out)
    y = (input2.unsqueeze(-2) @ met).squeeze(-2)
    return y if bias is None else y + bias


def _einsum(equation: Any, *operands: Any) -> Tensor:
    """Products of rows and weights by maps; else torch's own."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if isinstance(equation, str):
        equation = _spelled_out(equation, operands)
    plain = isinstance(equation, str) and equation.count("->") == 1 and "." not in equation
    if not plain or len(operands) < 2:
        return torch.einsum(equation, *operands)
    left, out = equation.replace(" ", "").split("->")
    a, b, *others = left.split(",")
    if len(others) + 2 != len(operands) or not out:
        return torch.einsum(equation, *operands)
    if not others:
        found = _by_map(a, b, out, *operands) or _by_map(b, a, out, *operands[::-1])
        found = found or _by_entries(a, b, out, *operands)
        found = found or _by_entries(b, a, out, *operands[::-1])
        return torch.einsum(equation, *operands) if found is None else found[0]
    rest = set("".join([*others, out]))
    between = "".join([x for x in dict.fromkeys(out[0] + a + b) if x in rest and x in a + b])
    first = _einsum(f"{a},{b}->{between}", *operands[:2])
    return _einsum(f"{','.join([between, *others])}->{out}", first, *operands[2:])


def _spelled_out(equation: str, operands: Sequence[Tensor]) -> str:
    """With letters for dots, where they stand for as many axes of each."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." not in left or not arrow or len(terms) != len(operands):
        return equation
    pairs = zip(terms, operands, strict=True)
    many = {x.ndim - len(term) + 3 for term, x in pairs if "..." in term}
    free = [x for x in _LETTERS if x not in equation]
    if len(many) != 1 or not 0 <= min(many) <= len(free):
        return equation
    dots = "".join(free[: min(many)])
    return f"{left.replace('...', dots)}->{out.replace('...', dots)}"


_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _by_map(a: str, b: str, out: str, rows: Tensor, weight: Tensor) -> tuple[Tensor] | None:
    """A product of what has rows, by its first letter, and what has none; None: it is no such."""
    both = set(a) & set(b)
    single = len(set(a)) == len(a) and len(set(b)) == len(b)
    if not single or a[:1] != out[0] or out[0] in b or both & set(out):
        return None
    if (set(a) | set(b)) - both != set(out) or not both:
        return None
    met = [x for x in b if x in both]
    mine, its = [x for x in a if x not in both], [x for x in b if x not in both]
    sizes = dict(zip(a, rows.shape, strict=True)) | dict(zip(b, weight.shape, strict=True))
    x = rows.permute([a.index(k) for k in (*mine, *met)])
    x = x.reshape(*[sizes[k] for k in mine], -1)
    flat = weight.permute([b.index(k) for k in (*its, *met)]).reshape(-1, x.shape[-1])
    y = torch.nn.functional.linear(x, flat).view([sizes[k] for k in (*mine, *its)])
    return (y.permute([(mine + its).index(k) for k in out]),)


def _by_entries(a: str, b: str, out: str, one: Tensor, other: Tensor) -> tuple[Tensor] | None:
    """A product entry by entry, some axes of which are added up: of what has the same axes, or of
    rows and what has some of theirs, for all rows the same. None: it is no such."""
    single = all(len(set(x)) == len(x) for x in (a, b, out)) and a[:1] == out[0]
    same = set(a) == set(b) or (out[0] not in b and set(b) < set(a))
    if not single or not same or not set(a) & set(b) & set(out):
        return None
    sizes = dict(zip(b, other.shape, strict=True))
    y = one * _in_order(other, b, a).reshape([sizes.get(k, 1) for k in a])
    gone = [k for k, letter in enumerate(a) if letter not in out]
    return (_in_order(y.sum(gone) if gone else y, [x for x in a if x in out], out),)


def _in_order(x: Tensor, axes: Sequence[str], every: Sequence[str]) -> Tensor:
    """With the axes that it has in the order of all."""
    order = [axes.index(k) for k in every if k in axes]
    return x if order == sorted(order) else x.permute(order)


def _product(x: Tensor, dim: Any = None, keepdim: bool = False, **how: Any) -> Tensor:
    """Along a short axis of rows by halves, whose gradient is exact where there are zeros."""
    few = isinstance(dim, int) and x.ndim > 1 and dim % x.ndim and x.is_floating_point()
    if not few or how or not 0 < x.shape[dim] <= _FEW:
        given = () if dim is None else (dim, keepdim)
        return torch.prod(x, *given, **how)
    while (many := x.shape[dim]) > 1:
        half = many // 2
        both = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = torch.cat([both, x.narrow(dim, 2 * half, 1)], dim) if many % 2 else both
    return x if keepdim else x.squeeze(dim)


def _distances(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = _MODE) -> Tensor:
    """Of members of rows, or of rows and others, where torch does not go by products, which are
    less exact."""
    ranks = x1.ndim == x2.ndim == 3 and max(x1.shape[1], x2.shape[1]) <= _MEMBERS
    ranks = ranks or (x1.ndim == x2.ndim == 2 and x2.shape[0] <= _MEMBERS)
    if not ranks or p != 2 or compute_mode != _MODE or not x1.numel() * x2.numel():
        return torch.cdist(x1, x2, p, compute_mode)
    square = ((x1.unsqueeze(-2) - x2.unsqueeze(-3)) ** 2).sum(-1)
    none = square == 0  # there its root has no slope, and the distance one of nothing
    return square.masked_fill(none, 1).sqrt().masked_fill(none, 0)


def _product_so_far(x: Tensor, dim: int, **how: Any) -> Tensor:
    """Products of ever longer pieces, whose gradient is exact where there are zeros."""
    few = x.ndim > 1 and dim % x.ndim and x.is_floating_point() and not how
    if not few or not 0 < x.shape[dim] <= _FEW:
        return torch.cumprod(x, dim, **how)
    by, many = 1, x.shape[dim]
    while by < many:
        later = x.narrow(dim, by, many - by) * x.narrow(dim, 0, many - by)
        x, by = torch.cat([x.narrow(dim, 0, by), later], dim), 2 * by
    return x


_FEW: Final = 64
"""Entries of an axis whose product is made of several."""


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """A product with a vector, entry by entry; else torch's own."""
    alone = other.ndim == 1 and input.ndim > 1
    return (input * other).sum(-1) if alone else torch.matmul(input, other)


def _added_to(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """A product and what is added, apart."""
    found = mat1 @ mat2
    found = found if alpha == 1 else found * alpha
    return found if beta == 0 else (input if beta == 1 else input * beta) + found


def _add_product(
    input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1, **how: Any
) -> Tensor:
    """Whose gradient does not begin with a weight and a number."""
    if how:
        return torch.addcmul(input, tensor1, tensor2, value=value, **how)
    product = tensor1 * tensor2
    return input + (product if value == 1 else product * value)


def _add_quotient(
    input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1, **how: Any
) -> Tensor:
    """Likewise."""
    if how:
        return torch.addcdiv(input, tensor1, tensor2, value=value, **how)
    quotient = tensor1 / tensor2
    return input + (quotient if value == 1 else quotient * value)


def dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout as torch has it, but that nothing is divided where it lies: what writes in place is
    carried out without data first, for which torch imports its library for symbols."""
    if not training or inplace or not 0 < p < 1:
        return torch.nn.functional.dropout(input, p, training, inplace)
    kept = torch.empty_like(input).bernoulli_(1 - p)
    weights: Tensor = torch.ops.aten.div.Scalar(kept, 1 - p)
    return input * weights


def _power(x: Any, exponent: Any) -> Any:
    """By an exponent for each entry, where there is one for several: what its gradient asks of
    exponents is asked of rows."""
    both = isinstance(x, Tensor) and isinstance(exponent, Tensor)
    if both and x.ndim > 1 and exponent.ndim <= x.ndim:
        pairs = zip(exponent.shape[::-1], x.shape[::-1], strict=False)
        if all(own in (1, many) for own, many in pairs):
            exponent = exponent.expand_as(x)
    return torch.pow(x, exponent)


OTHERWISE: Final[Mapping[Any, Callable[..., Tensor]]] = {
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.mv: lambda input, vec: _matmul(input, vec),
    torch.Tensor.mv: lambda input, vec: _matmul(input, vec),
    torch.bincount: _counted,
    Tensor.bincount: _counted,
    torch.nn.functional.one_hot: _one_hot,
    torch.nn.functional.bilinear: _bilinear,
    torch.einsum: _einsum,
    torch.pow: _power,
    Tensor.pow: _power,
    Tensor.__pow__: _power,
    torch.cdist: _distances,
    torch.prod: _product,
    Tensor.prod: _product,
    torch.cumprod: _product_so_far,
    Tensor.cumprod: _product_so_far,
    torch.addmm: _added_to,
    Tensor.addmm: _added_to,
    torch.addcmul: _add_product,
    Tensor.addcmul: _add_product,
    torch.addcdiv: _add_quotient,
    Tensor.addcdiv: _add_quotient,
}
