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
    if is_causal and attn_mask is not None:
        return None
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if enable_gqa:
        key, value = _for_all_heads(query, key, value)
    share = _shares(_scores(query, key, scale), attn_mask, keeps=True, dead=False)
    return (functional.dropout(share, dropout_p) if dropout_p else share) @ value


def _for_all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of groups of heads, for each head."""
    times = query.shape[-3] // key.shape[-3], query.shape[-3] // value.shape[-3]
    return key.repeat_interleave(times[0], -3), value.repeat_interleave(times[1], -3)


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
    unusual = bias_k is not None or add_zero_attn or query.ndim != 3
    unusual = unusual or static_k is not None or static_v is not None
    unusual = unusual or (attn_mask is None and is_causal)  # else the mask says so
    if not within:
        unusual = unusual or use_separate_proj_weight
    if unusual:
        return None
    width, heads = embed_dim_to_check, num_heads
    if use_separate_proj_weight:
        weights = q_proj_weight, k_proj_weight, v_proj_weight
        q, k, v = _by_their_own((query, key, value), weights, in_proj_bias)
    elif in_proj_weight is not None:
        q, k, v = _by_one((query, key, value), in_proj_weight, in_proj_bias)
    else:
        return None

    def apart(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], heads, width // heads).transpose(1, 2)

    score = (apart(q) / math.sqrt(width // heads)) @ apart(k).transpose(-2, -1)
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None]
    if attn_mask is not None and attn_mask.ndim == 3:  # of each head of each row
        attn_mask = attn_mask.view(score.shape)
    if within:
        share = _shares(score, attn_mask, padding, dead=not need_weights)
    else:
        share = _shares(score, attn_mask, padding, dead=False)
    if training and dropout_p:
        share = functional.dropout(share, dropout_p)
    found = (share @ apart(v)).transpose(1, 2).reshape(q.shape[0], q.shape[1], width)
    found = functional.linear(found, out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return found, None
    return found, share.mean(1) if average_attn_weights else share


def _by_one(given: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """What one weight makes of each: a third of that, another of each.

    All of the weight meets each, as rows of several kinds meet no part of one.
    """
    width, found, known = weight.shape[0] // 3, [], list[tuple[Tensor, Tensor]]()
    for number, x in enumerate(given):
        own = next((y for z, y in known if z is x), None)
        if own is None:
            own = functional.linear(x.transpose(0, 1), weight, bias)
            known.append((x, own))
        found.append(own[..., number * width : (number + 1) * width])
    return found


def _by_their_own(
    given: Sequence[Tensor], weights: Sequence[Tensor | None], bias: Tensor | None
) -> list[Tensor]:
    biases: Sequence[Tensor | None] = [None] * 3 if bias is None else bias.chunk(3)
    found = []
    for x, weight, own in zip(given, weights, biases, strict=True):
        assert weight is not None
        found.append(functional.linear(x.transpose(0, 1), weight, own))
    return found


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
    if (is_causal and attn_mask is not None) or not query.is_cpu or scores > _FEW:
        return None
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if enable_gqa:
        key, value = _for_all_heads(query, key, value)
    share = _shares(_scores(query, key, scale), attn_mask, keeps=True)
    return (functional.dropout(share, dropout_p) if dropout_p else share) @ value


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


def _norm_of_rows(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    """Of several axes, or with a scale alone: the norm of one, and what comes then."""
    axes, plain = len(normalized_shape), (weight is None) == (bias is None)
    if (axes == 1 and plain) or x.ndim <= axes or x.shape[x.ndim - axes :] != normalized_shape:
        return None
    rows = x.reshape(*x.shape[: x.ndim - axes], math.prod(normalized_shape))
    found = functional.layer_norm(rows, rows.shape[-1:], eps=eps).reshape(x.shape)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _settled_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Of what has been seen before, a number for each channel."""
    if training or running_mean is None or running_var is None or x.ndim < 2:
        return None
    channels = -1, *[1] * (x.ndim - 2)
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale
    shift = shift if bias is None else shift + bias
    return x * scale.view(channels) + shift.view(channels)


def _sum_of_embeddings(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """Of as many in each row."""
    plain = offsets is None and max_norm is None and padding_idx is None and not scale_grad_by_freq
    if not plain or input.ndim != 2 or not input.shape[1]:
        return None
    found = functional.embedding(input, weight)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(2)
    return found.max(1).values if mode == "max" else getattr(found, mode)(1)


def _loss_of_class(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor | None:
    """What one of the first axis of a row says, less than nothing; of those ignored nothing."""
    plain = reduction == "none" and size_average is None and reduce is None
    if not plain or input.ndim < 2 or target.shape != (*input.shape[:1], *input.shape[2:]):
        return None
    ignored = target == ignore_index
    own = target.masked_fill(ignored, 0)
    found = -input.gather(1, own.unsqueeze(1)).squeeze(1)
    if weight is not None:
        found = found * functional.embedding(own, weight.unsqueeze(1)).squeeze(-1)
    return found.masked_fill(ignored, 0)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if target.is_floating_point() or input.ndim < 2:
        return None
    said = input.log_softmax(1)
    found = _loss_of_class(said, target, weight, size_average, ignore_index, reduce, reduction)
    if found is None or not label_smoothing:
        return found
    every = said if weight is None else said * weight.view(-1, *[1] * (said.ndim - 2))
    smooth = (-every.sum(1)).masked_fill(target == ignore_index, 0) / said.shape[1]
    return (1 - label_smoothing) * found + label_smoothing * smooth


def _entries_of_rows(x: Tensor, index: Any) -> Tensor | None:
    """``x[rows, entries]``: of some rows an entry each, by one number for both."""
    if not isinstance(index, tuple) or len(index) != 2 or x.ndim < 2:
        return None
    if not all(isinstance(k, Tensor) and k.dtype is torch.int64 and k.ndim == 1 for k in index):
        return None
    rows, entries = index
    many = x.shape[1]
    entries = torch.arange(many, device=x.device)[entries]  # as torch counts: -1 is the last
    return x.flatten(0, 1).index_select(0, rows * many + entries)


WITHIN_ROWS: Final[dict[Any, Callable[..., Any]]] = {
    functional.scaled_dot_product_attention: _attention_within,
    functional.multi_head_attention_forward: _of_heads_within,
    functional.layer_norm: _norm_of_rows,
    functional.batch_norm: _settled_norm,
    functional.embedding_bag: _sum_of_embeddings,
    functional.nll_loss: _loss_of_class,
    functional.cross_entropy: _cross_entropy,
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
    Tensor.__getitem__: _entries_of_rows,
}
"""What gives the same as a function of torch; None, and it is that function's."""
