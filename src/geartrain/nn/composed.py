"""What torch computes by a kernel of its own, composed of operators that there are steps for.

For a trace alone: attention over what is padded or within a row, and functions of entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if dropout_p or is_causal or enable_gqa:
        return None
    return _shares(_scores(query, key, scale), attn_mask, keeps=True, dead=False) @ value


def _scores(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return (query * scale) @ key.transpose(-2, -1)


def _of_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    within: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    unusual = bias_k is not None or add_zero_attn or use_separate_proj_weight
    unusual = unusual or static_k is not None or static_v is not None
    if within:  # that it is causal, the mask says
        unusual = unusual or (attn_mask is None and is_causal)
        unusual = unusual or (attn_mask is not None and attn_mask.ndim != 2)
    else:
        unusual = unusual or is_causal or attn_mask is not None
    if unusual or (training and dropout_p) or query.ndim != 3 or in_proj_weight is None:
        return None
    width, heads = embed_dim_to_check, num_heads

    def made_of(x: Tensor) -> Tensor:
        return functional.linear(x.transpose(0, 1), in_proj_weight, in_proj_bias)

    def apart(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], heads, width // heads).transpose(1, 2)

    # All of the weight meets each, as rows of several kinds meet no part of one.
    own = made_of(query)
    theirs = own if key is query else made_of(key)
    q, k = own[..., :width], theirs[..., width : 2 * width]
    v = (theirs if value is key else made_of(value))[..., 2 * width :]
    score = (apart(q) / math.sqrt(width // heads)) @ apart(k).transpose(-2, -1)
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None]
    if within:
        share = _shares(score, attn_mask, padding, dead=not need_weights)
    else:
        share = _shares(score, padding, dead=False)
    found = (share @ apart(v)).transpose(1, 2).reshape(own.shape[0], own.shape[1], width)
    found = functional.linear(found, out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return found, None
    return found, share.mean(1) if average_attn_weights else share


_FEW: Final = 4096
"""Scores of a row that are worth more steps: of more, torch's kernel need keep none."""


def _shares(score: Tensor, *masks: Tensor | None, keeps: bool = False, dead: bool = True) -> Tensor:
    """Softmax of scores along the last axis, where masks let them.

    Args:
        masks: True where there is no score, or numbers that are added.
        keeps: True says instead that there is one.
        dead: Whether what has no score at all gets shares of nothing, as of torch's attention; else
            they are no numbers.
    """
    without = []
    for mask in masks:
        if mask is None:
            continue
        if mask.dtype is torch.bool:
            without.append(~mask if keeps else mask)
            continue
        score = score + mask
        if dead:
            without.append(score == -math.inf)
    lowest = torch.finfo(score.dtype).min if dead else -math.inf
    for none in without:
        score = score.masked_fill(none, lowest)
    share = score.softmax(-1)
    for none in without if dead else ():
        share = share.masked_fill(none, 0)
    return share


def _attention_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    scores = math.prod(query.shape[1:-1]) * key.shape[-2]
    unusual = dropout_p or enable_gqa or (is_causal and attn_mask is not None)
    if unusual or not query.is_cpu or scores > _FEW:
        return None
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    return _shares(_scores(query, key, scale), attn_mask, keeps=True) @ value


def _of_heads_within(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *more: Any, **how: Any
) -> tuple[Tensor, Tensor | None] | None:
    scores = query.shape[0] * key.shape[0] * heads
    if not query.is_cpu or scores > _FEW:
        return None
    return _of_heads(query, key, value, width, heads, *more, **how, within=True)


def _of_mean_none(x: Tensor, eps: float) -> Tensor:
    """With a mean of none, and a deviation of one, along the last axis."""
    away = x - x.mean(-1, keepdim=True)
    return away * ((away * away).mean(-1, keepdim=True) + eps).rsqrt()


def _mish(x: Tensor, inplace: bool = False) -> Tensor:
    return x * torch.tanh(functional.softplus(x))


def _hardswish(x: Tensor, inplace: bool = False) -> Tensor:
    return x * functional.relu6(x + 3) / 6


def _celu(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return functional.elu(x / alpha) * alpha


def _selu(x: Tensor, inplace: bool = False) -> Tensor:
    return functional.elu(x, 1.6732632423543772) * 1.0507009873554805


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * torch.sigmoid(gate)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor | None:
    if approximate != "tanh":
        return None
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if len(normalized_shape) != 1 or (weight is not None and bias is not None):
        return None
    found = _of_mean_none(x, eps)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


WITHIN_ROWS: Final[dict[Any, Callable[..., Any]]] = {
    functional.scaled_dot_product_attention: _attention_within,
    functional.multi_head_attention_forward: _of_heads_within,
}
"""As ``COMPOSED``, of what is within a row."""
COMPOSED: Final[Mapping[Any, Callable[..., Any]]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _of_heads,
    functional.mish: _mish,
    functional.hardswish: _hardswish,
    functional.celu: _celu,
    functional.selu: _selu,
    functional.glu: _glu,
    functional.gelu: _gelu,
    functional.layer_norm: _layer_norm,
}
"""What gives the same as a function of torch; None, and it is that function's."""
