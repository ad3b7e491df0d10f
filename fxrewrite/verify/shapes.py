"""The shapes that operators take, by letters: equal letters are equal sizes, which guesses would seldom be."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fxrewrite.verify.draw import Draw

_SHAPES: Mapping[str, str] = {
    "aten::conv1d": "input: n c X, weight: o c x, bias: o",
    "aten::conv2d": "input: n c Y X, weight: o c y x, bias: o",
    "aten::conv3d": "input: n c Z Y X, weight: o c z y x, bias: o",
    "aten::conv_transpose1d": "input: n c X, weight: c o x, bias: o",
    "aten::conv_transpose2d": "input: n c Y X, weight: c o y x, bias: o",
    "aten::conv_transpose3d": "input: n c Z Y X, weight: c o z y x, bias: o",
    "aten::batch_norm": "input: n c ..., weight: c, bias: c, running_mean: c, running_var: c",
    "aten::instance_norm": "input: n c L ..., weight: c, bias: c, running_mean: c, running_var: c",
    "aten::group_norm": "input: n c ..., weight: c, bias: c",
    "aten::layer_norm": "normalized_shape: ..., weight: ..., bias: ...",
    "aten::rms_norm": "normalized_shape: ..., weight: ...",
    "aten::prelu": "self: n c ..., weight: c",
    "aten::linear": "input: ... i, weight: o i, bias: o",
    "aten::bmm": "self: b i k, mat2: b k j",
    "aten::baddbmm": "self: b i j, batch1: b i k, batch2: b k j",
    "aten::addmm": "self: j, mat1: i k, mat2: k j",
    "aten::bilinear": "input1: ... i, input2: ... j, weight: o i j, bias: o",
    "aten::scaled_dot_product_attention": "query: b h s d, key: b h t d, value: b h t e, attn_mask: b h s t",
    "aten::gru_cell": "input: b i, hx: b h, w_ih: 3h i, w_hh: 3h h, b_ih: 3h, b_hh: 3h",
    "aten::lstm_cell": "input: b i, hx: b h, w_ih: 4h i, w_hh: 4h h, b_ih: 4h, b_hh: 4h",
}
"""The arguments of an operator by name. `...` is any number of dimensions, `3h` three times a size; a capital is no
smaller than its small letter: what a window moves over."""
_AS_STATED = 0.9
"""How often an argument has the shape that the table says; what else an operator takes, such as no batch, is rare."""
_MANY = "..."
_Form: TypeAlias = list[tuple[int, str]]


def shape_of(key: str, name: str, given: Mapping[str, Sequence[int]], draw: Draw) -> tuple[int, ...] | None:
    """Draws a shape with which an operator takes an argument; None where another is to be guessed.

    Args:
        key: of the operator.
        name: of the argument.
        given: shapes of the other arguments so far, by name; a list of numbers is one too.
        draw: random choices.
    """
    forms = _forms(key)
    if name not in forms or not draw.flag(_AS_STATED):
        return None
    sizes: dict[str, list[int]] = {}
    for other, shape in given.items():
        if other in forms and not _bind(forms[other], shape, sizes):
            return None
    for _, letter in forms[name]:
        if letter not in sizes:
            sizes[letter] = list(draw.shape(draw.choice(0, 1, 1, 2))) if letter == _MANY else [draw.size()]
            other = sizes.get(letter.swapcase()) if letter != _MANY else None
            if other is not None:
                sizes[letter] = max(sizes[letter], other) if letter.isupper() else min(sizes[letter], other)
    return tuple(times * size for times, letter in forms[name] for size in sizes[letter])


def _bind(form: _Form, shape: Sequence[int], sizes: dict[str, list[int]]) -> bool:
    """Adds the sizes of the letters of an argument that has this shape; False if it has another form."""
    many = len(shape) - len(form) + 1
    if many < 0 or (many != 1 and all(letter != _MANY for _, letter in form)):
        return False
    at = 0
    for times, letter in form:
        until = at + (many if letter == _MANY else 1)
        found = [size // times for size in shape[at:until]]
        if sizes.setdefault(letter, found) != found:
            return False
        at = until
    return True


@functools.cache
def _forms(key: str) -> dict[str, _Form]:
    """The forms of an operator's arguments by name: for each dimension how many times the size of which letter."""
    stated = [argument.split(": ") for argument in _SHAPES.get(key, "").split(", ") if argument]
    return {
        name: [(1, word) if word == _MANY else (int(word[:-1] or 1), word[-1]) for word in form.split()]
        for name, form in stated
    }
