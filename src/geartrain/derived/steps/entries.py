"""Operators on entries that have a step in C, one by one: what they read, and their number.

ONE       of one tensor                     TWO        of two
NUMBERS   of a tensor and a number          NUMBERED   of tensors and numbers, as they say
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from geartrain.derived.steps.places import Refused
from geartrain.native.fused import Elementary, Op

aten = torch.ops.aten

ONE: Final[Mapping[Any, Op]] = {
    aten.neg.default: Op.NEG,
    aten.exp.default: Op.EXP,
    aten.sigmoid.default: Op.SIGMOID,
    aten.tanh.default: Op.TANH,
    aten.relu.default: Op.RELU,
    aten.gelu.default: Op.GELU,
    aten.silu.default: Op.SILU,
    aten.abs.default: Op.ABS,
    aten.sgn.default: Op.SIGN,
    aten.sign.default: Op.SIGN,
    aten.sqrt.default: Op.SQRT,
    aten.log.default: Op.LOG,
    aten.sin.default: Op.SINE,
    aten.cos.default: Op.COSINE,
    aten.erf.default: Op.ERF,
    aten.trunc.default: Op.TRUNCATE,
}
NUMBERS: Final[Mapping[Any, Callable[[float], tuple[Op, float]]]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), lambda v: (Op.ADD_NUMBER, v)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), lambda v: (Op.ADD_NUMBER, -v)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), lambda v: (Op.TIMES_NUMBER, v)),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), lambda v: (Op.TIMES_NUMBER, 1 / v)),
    aten.rsub.Scalar: lambda v: (Op.NUMBER_LESS, v),
    aten.lt.Scalar: lambda v: (Op.BELOW, v),
    aten.le.Scalar: lambda v: (Op.UP_TO, v),
    aten.eq.Scalar: lambda v: (Op.SAME_AS, v),
    aten.ne.Scalar: lambda v: (Op.OTHER_THAN, v),
}
TWO: Final[Mapping[Any, Op]] = {
    aten.add.Tensor: Op.ADD,
    aten.sub.Tensor: Op.SUB,
    aten.mul.Tensor: Op.MUL,
    aten.div.Tensor: Op.DIV,
    aten.tanh_backward.default: Op.TANH_BACK,
    aten.sigmoid_backward.default: Op.SIGMOID_BACK,
    aten.gelu_backward.default: Op.GELU_BACK,
    aten.silu_backward.default: Op.SILU_BACK,
    **dict.fromkeys((aten.minimum.default, aten.clamp_max.Tensor), Op.MINIMUM),
    aten.maximum.default: Op.MAXIMUM,
    aten.eq.Tensor: Op.EQUAL,
    aten.lt.Tensor: Op.LESS,
    aten.gt.Tensor: Op.GREATER,
    aten.ne.Tensor: Op.UNEQUAL,
    aten.le.Tensor: Op.NOT_ABOVE,
    aten.ge.Tensor: Op.NOT_BELOW,
    # Of what is one or nothing.
    aten.logical_and.default: Op.MUL,
    aten.bitwise_and.Tensor: Op.MUL,
    aten.logical_or.default: Op.MAXIMUM,
    aten.bitwise_or.Tensor: Op.MAXIMUM,
    aten.logical_xor.default: Op.UNEQUAL,
    aten.bitwise_xor.Tensor: Op.UNEQUAL,
}
TRUTHS: Final = {
    aten.logical_and.default,
    aten.bitwise_and.Tensor,
    aten.logical_or.default,
    aten.bitwise_or.Tensor,
    aten.logical_xor.default,
    aten.bitwise_xor.Tensor,
    aten.bitwise_not.default,
}
"""Have a step of what is one or nothing."""


Numbered = tuple[Op, list[Any], float]


def _power(x: Any, number: Any) -> Numbered:
    if not isinstance(number, (int, float)):
        raise Refused
    return (Op.SQUARE, [x], 0.0) if number == 2 else (Op.POWER, [x], float(number))


def _clamp(x: Any, least: Any = None, most: Any = None) -> Numbered:
    if (least is None) == (most is None):
        raise Refused
    return (Op.AT_MOST, [x], float(most)) if least is None else (Op.AT_LEAST, [x], float(least))


def _leaky_back(g: Any, x: Any, slope: float, of_result: bool) -> Numbered:
    if of_result:
        raise Refused
    return Op.LEAKY_BACK, [g, x], float(slope)


def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, inner: float = 1.0) -> Numbered:
    if scale != 1 or inner != 1:
        raise Refused
    return Op.ELU, [x], float(alpha)


def _elu_back(
    g: Any, alpha: float, scale: float, inner: float, of_result: bool, x: Any
) -> Numbered:
    if scale != 1 or inner != 1 or of_result:
        raise Refused
    return Op.ELU_BACK, [g, x], float(alpha)


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Numbered:
    if beta != 1 or threshold != 20:
        raise Refused
    return Op.SOFTPLUS, [x], 0.0


def _softplus_back(g: Any, x: Any, beta: float, threshold: float) -> Numbered:
    if beta != 1 or threshold != 20:
        raise Refused
    return Op.SOFTPLUS_BACK, [g, x], 0.0


_KNOWN: Final[Mapping[Any, Elementary]] = {
    aten.asin.default: Elementary.ARC_SINE,
    aten.acos.default: Elementary.ARC_COSINE,
    aten.atan.default: Elementary.ARC_TANGENT,
    aten.sinh.default: Elementary.SINH,
    aten.cosh.default: Elementary.COSH,
    aten.tan.default: Elementary.TANGENT,
    aten.asinh.default: Elementary.AREA_SINH,
    aten.acosh.default: Elementary.AREA_COSH,
    aten.atanh.default: Elementary.AREA_TANH,
    aten.round.default: Elementary.NEAREST,
    aten.floor.default: Elementary.DOWNWARDS,
    aten.ceil.default: Elementary.UPWARDS,
    aten.log1p.default: Elementary.LOG_OF_MORE,
    aten.expm1.default: Elementary.LESS_ONE,
    aten.log2.default: Elementary.BASE_TWO,
    aten.log10.default: Elementary.BASE_TEN,
    aten.exp2.default: Elementary.TWO_TO,
    aten.erfc.default: Elementary.ERF_REST,
}
_KNOWN_OF_TWO: Final[Mapping[Any, Elementary]] = {
    aten.atan2.default: Elementary.ANGLE,
    aten.hypot.default: Elementary.DIAGONAL,
    aten.fmod.Tensor: Elementary.LEFT_OVER,
    aten.remainder.Tensor: Elementary.MODULO,
    aten.floor_divide.default: Elementary.WHOLE_TIMES,
    aten.pow.Tensor_Tensor: Elementary.RAISED,
    aten.copysign.Tensor: Elementary.SIGNED,
}


def _of_one(which: Elementary) -> Callable[..., Numbered]:
    return lambda x: (Op.FUNCTION, [x], float(which))


def _of_both(which: Elementary) -> Callable[..., Numbered]:
    return lambda x, y: (Op.FUNCTION_OF_TWO, [x, y], float(which))


NUMBERED: Final[Mapping[Any, Callable[..., Numbered]]] = {
    aten.pow.Tensor_Scalar: _power,
    aten.reciprocal.default: lambda x: (Op.POWER, [x], -1.0),
    aten.rsqrt.default: lambda x: (Op.POWER, [x], -0.5),
    aten.clamp.default: _clamp,
    aten.clamp_min.default: lambda x, least: _clamp(x, least),
    aten.clamp_max.default: lambda x, most: _clamp(x, None, most),
    aten.gt.Scalar: lambda x, number: (Op.ABOVE, [x], float(number)),
    aten.ge.Scalar: lambda x, number: (Op.FROM, [x], float(number)),
    aten.logical_not.default: lambda x: (Op.SAME_AS, [x], 0.0),
    aten.bitwise_not.default: lambda x: (Op.NUMBER_LESS, [x], 1.0),
    aten.leaky_relu.default: lambda x, slope=0.01: (Op.LEAKY, [x], float(slope)),
    aten.leaky_relu_backward.default: _leaky_back,
    aten.elu.default: _elu,
    aten.elu_backward.default: _elu_back,
    aten.softplus.default: _softplus,
    aten.softplus_backward.default: _softplus_back,
    **{target: _of_one(which) for target, which in _KNOWN.items()},
    **{target: _of_both(which) for target, which in _KNOWN_OF_TWO.items()},
}
"""The step of an operator with these arguments, what it reads, and its number."""
