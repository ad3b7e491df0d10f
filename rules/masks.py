"""Dense attention masks become what they mean.

    sdpa(q, k, v, mask)  ->  sdpa(q, k, v, is_causal=True)        where mask[..., i, j] is j <= i
    sdpa(q, k, v, mask)  ->  sdpa(q, k, v)                        where mask hides nothing

Matches a mask that depends on sizes alone, as Hugging Face models build for every decoder: bool, or added, with 0 and
the least number of a dtype. A dense mask takes S * S bytes (16 GiB at 128K), and a float copy of it is kept for the
backward. The claim is found out by computing the mask: whole up to 4,096 tokens, else 96 of its rows over all columns,
spread from the first to the last; where the length is a symbol, at four lengths up to 262,144, beyond every sliding
window. Operators between row and column values are computed on these rows alone.
Refuses a mask that depends on data (padding, documents), and any that means something else.
Shapes: q [B, H, S, E], k [B, H, S, E], v [B, H, S, D], mask broadcasts to [B, H, S, S].
Numerics: reassociates; a kernel without a mask may sum in another order.
Source: PyTorch, torch/nn/functional.py (scaled_dot_product_attention says what is_causal means).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite import Match, Pattern, Rule, RuleSet, cap, where
from fxrewrite.graph import ClosedValues, OpenValueError, expression, symbols_of
from fxrewrite.ops import fake_value
from fxrewrite.spmd import is_same_size
from rules.attention_parts import attention_call
from rules.mask_expressions import parse_mask
from rules.mask_reading import read_mask

__all__ = ["MASKS"]

aten = torch.ops.aten

_WHOLE = 4096
"""Up to this length a mask is computed whole."""
_BEYOND = 1 << 18
"""A length beyond every window and chunk that a model has."""


def _allows(mask: fx.Node, closed: ClosedValues, rows: torch.Tensor) -> torch.Tensor:
    """Which keys `rows` of the mask allow, [..., rows, keys], at the lengths of `closed`."""
    read = read_mask(mask)
    if isinstance(read, str):
        found = _cut(closed(mask), rows)
    else:
        leaves = [_cut(read.value(number, closed), rows) for number in range(len(read.places))]
        num_keys = closed.size(fake_value(mask).shape[-1])
        found = parse_mask(read.text).part(leaves, (0, len(rows)), (0, num_keys))
    if found.dtype == torch.bool:
        return found
    hides = found <= torch.finfo(found.dtype).min / 2
    if not bool((hides | (found == 0)).all()):
        raise OpenValueError("its values are not those of a mask alone")
    return ~hides


def _cut(found: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return found if found.dim() < 2 or found.shape[-2] == 1 else found.index_select(-2, rows)


def _rows(length: int) -> torch.Tensor:
    if length <= _WHOLE:
        return torch.arange(length)
    ends, inner = (16, 64) if length < _BEYOND else (2, 4)  # 96 rows of all columns, and 8 of very many
    spread = torch.linspace(ends, length - ends - 1, inner, dtype=torch.float64).long()
    return torch.cat([torch.arange(ends), spread, torch.arange(length - ends, length)])


_CAUSAL, _NOTHING_HIDDEN = "causal", "nothing hidden"
_found: dict[str, str] = {}
"""What masks mean, by what they compute: all layers of a model read one."""


def _meaning(mask: fx.Node) -> str:
    """What the mask means at every length that was looked at, or why it means neither.

    Raises OpenValueError where it depends on more than sizes.
    """
    text = expression(mask)
    if text not in _found:
        _found[text] = _look(mask)
    return _found[text]


def _look(mask: fx.Node) -> str:
    shape = fake_value(mask).shape
    if len(shape) < 2 or not is_same_size(shape[-2], shape[-1]):
        return "its rows and columns are not as many"
    left = {_CAUSAL, _NOTHING_HIDDEN}
    # lengths, and what other symbols are, such as the batch; None: as at hand
    todo: list[tuple[int, int | None]] = [(2, None), (7, None), (331, None), (_BEYOND, 2)]
    if isinstance(shape[-1], int):
        todo = [(shape[-1], None)]
    for length, other in todo:
        closed = ClosedValues({symbol: length for size in shape[-2:] for symbol in symbols_of(size)}, other)
        rows, columns = _rows(length)[:, None], torch.arange(length)
        allowed = _allows(mask, closed, rows[:, 0])
        if not bool(allowed.all()):
            left.discard(_NOTHING_HIDDEN)
        if not bool((allowed == (columns <= rows)).all()):
            left.discard(_CAUSAL)
        if not left:
            return f"it is neither causal nor open at length {length}"
        if other is None and closed.others and (length, 3) not in todo:
            todo.append((length, 3))
    return min(left)  # both, where the sequence is one token


def _read(meaning: str) -> Rule:
    @where.predicate("mask", text=f"means[{meaning}]")
    def means(mask: fx.Node) -> bool | str:
        try:
            found = _meaning(mask)
        except OpenValueError as error:
            return str(error)
        return found == meaning or found

    attention = attention_call(attn_mask=cap("mask"), is_causal=False)
    name = f"masks.{meaning.replace(' ', '_')}"
    made = Rule(name, Pattern((attention,), (means,)), numerics="reassociates", domain="finite", optional=True)

    @made.replacement
    def _(match: Match, q: Any, k: Any, v: Any, dropout_p: float, scale: Any, enable_gqa: bool) -> Any:
        """scaled_dot_product_attention without a mask"""
        attend = aten.scaled_dot_product_attention
        is_causal = meaning == _CAUSAL
        return attend(q, k, v, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return made


MASKS = RuleSet("masks", _read(_CAUSAL), _read(_NOTHING_HIDDEN))
