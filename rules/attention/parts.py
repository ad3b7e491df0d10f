"""The captures, terms and conditions that all rules for decomposed attention share.

Shapes: q [*, L, E], kt [*, E, S] (the keys, transposed as the product of the scores reads them), v [*, S, D]; `*` is a
batch, or batch and heads. k and v may have size 1 there where q has more; they are expanded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx

from fxrewrite import Constraint, Literal, Match, Pattern, Rule, cap, chain, either, maybe, op, refuse, where
from fxrewrite.ops import named_operator, value
from fxrewrite.spmd import is_same_size
from rules.attention.operator import ATTEND

if TYPE_CHECKING:
    from fxrewrite.verify import Draw

# `Any`: torch functions of terms make terms, but torch's stubs say tensors
Q: Any = cap("q")
KT: Any = cap("kt")
V: Any = cap("v")
BIAS: Any = cap("bias")
MASK: Any = cap("mask")
SCALE: Any = cap("scale", Literal)
DIVISOR: Any = cap("divisor", Literal)
SAFE_SOFTMAX = "aten::_safe_softmax"
"""The softmax of torch's own attention: rows of -inf are zeros."""
_CAST_DTYPES = ("cast", "wide", "dtype")
"""Captures of the dtypes that scores are cast to before the softmax, or by it."""
_kept, _hidden, _fill = cap("kept"), cap("hidden"), cap("fill", Literal)


def scaled(scores: Any) -> Any:
    """Scores multiplied or divided by a number, or unscaled."""
    return either(scores * SCALE, scores / DIVISOR, scores)


def filled(scores: Any, *, is_first: bool = True) -> Any:
    """Scores, some of which are replaced by a number that hides them; `is_first` allows that it is named before them.

    `rules/canonical/operands.py` turns `where(hidden, fill, scores)` into a masked_fill.
    """
    first = [op("where", _hidden, _fill, scores)] if is_first else []
    return either(op("masked_fill", scores, _hidden, _fill), op("where", _kept, scores, _fill), *first)


def weights(scores: Any, *, by: str = "softmax") -> Any:
    """A softmax over the keys, in any precision, with an optional dropout, and one cast before or after that."""
    return cast_and_dropout(op(by, scores, -1, cap("dtype", Literal)))


def raw_weights(scores: Any) -> Any:
    """`weights` with all casts that rules/attention/spellings.py respells."""
    given = (maybe(op("to", scores, cap("wide", Literal))), -1, cap("dtype", Literal))
    return cast_and_dropout(op("softmax", *given), "type_as")


def cast_and_dropout(weighted: Any, *casts: str) -> Any:
    """A softmax with an optional dropout, and one cast before or after that, by `to` or one of these operators."""
    p, train = cap("p", Literal), cap("train", Literal)
    cast_back = chain(weighted, "to", *casts, most=1)  # to v's dtype, or the product would fail
    cast_last = chain(op("dropout", weighted, p, train), "to", *casts, least=1, most=1)
    return either(op("dropout", cast_back, p, train), cast_last, cast_back)


def softmax(match: Match, x: Any, dtype: torch.dtype | None, *, is_safe: bool) -> Any:
    """Calls the softmax over the last dimension; with `is_safe`, the one whose rows of -inf are zeros.

    Refuses the latter from float16 to float32, which has no backward in torch.
    """
    if not is_safe:
        return torch.softmax(x, -1, dtype=dtype)
    if value(match["x"]).dtype == torch.float16 and dtype == torch.float32:
        refuse("_safe_softmax from float16 to float32 has no backward in torch")
    return match.call(getattr(named_operator(SAFE_SOFTMAX), "default"), x, -1, dtype)  # noqa: B009  # an overload


def fusion(name: str, weights: Any, *conditions: Constraint, is_scaled_last: bool = False) -> Rule:
    """Returns the rule that makes the product of weights and V one operator.

    A fill only hides scores that are far above it, so rules with `filled` scores hold for scores of moderate size.

    Args:
        name: of the rule, in the family `attention`.
        weights: of the values; what they capture of all that `_attended` reads is what the operator gets.
        conditions: beyond those of operands, scales and casts.
        is_scaled_last: whether a scale is that of all that is added to the scores before it, not of scores alone.
    """
    product: Any = torch.matmul(weights, V)
    captured = {capture.name for capture in Pattern((product,)).captures}
    casts = no_narrower("q", *(name for name in _CAST_DTYPES if name in captured))
    pattern = Pattern((product,), (*_OPERANDS, *_SCALES, *casts, *conditions))
    domain = "moderate" if hides in conditions else "finite"
    made = fused(Rule(f"attention.{name}", pattern, numerics="reassociates", domain=domain, optional=True))

    @made.replacement
    def _(match: Match, q: Any, kt: Any, v: Any) -> Any:
        """attention(q, k, v, mask, sinks, scale, softcap); a row that keeps no key reads what it did"""
        return _attended(match, q, kt, v, is_scaled_last=is_scaled_last)

    return made


def fused(rule: Rule) -> Rule:
    """Adds a sampler of attention's operands to the rule, and returns it."""
    captured = {capture.name for capture in rule.pattern.captures}

    @rule.sampler
    def _(draw: Draw) -> dict[str, Any]:
        found = _sample(draw, draw.flag())
        if draw.wide:
            found |= draw.beyond(*(one for one in _refused(draw, found) if captured.intersection(one)))
        return {name: value for name, value in found.items() if name in captured}

    return rule


def _sample(draw: Draw, is_flat: bool) -> dict[str, Any]:
    """Samples operands that fit and masks that broadcast, for every capture of any attention rule.

    With a fill of -inf the masks keep a key in every row: the original would be NaN without.
    """
    length, num_keys, depth, width = draw.shape(4)
    heads = draw.shape(2)
    batch = (math.prod(heads),) if is_flat else heads
    repeated = 0.0 if is_flat else 0.3
    k_batch, v_batch = ([1 if draw.flag(repeated) else size for size in batch] for _ in range(2))

    def like_scores(batch: tuple[int, ...] = batch) -> list[int]:
        return [draw.choice(size, size, 1) for size in (*batch, length, num_keys)[draw.integer(0, len(batch)) :]]

    added = draw.choice(draw.dtype, draw.dtype, draw.dtype, torch.float32)
    fill = draw.choice(-math.inf, -65504.0)  # a lower fill would dominate the scale of errors
    kept, hidden = draw.mask(*like_scores()), draw.mask(*like_scores())
    if fill == -math.inf:
        kept[..., 0], hidden[..., 0] = True, False
    found: dict[str, Any] = {
        "q": draw.tensor(*batch, length, depth),
        "kt": draw.tensor(*k_batch, depth, num_keys),
        "v": draw.tensor(*v_batch, num_keys, width),
        "bias": draw.tensor(*like_scores(), dtype=added),
        "mask": draw.tensor(*like_scores(draw.choice(batch, heads)), dtype=added),
        "kept": kept,
        "hidden": hidden,
        "fill": fill,
        "scale": draw.choice(0.125, -0.5, 1, 2),
        "divisor": draw.choice(8.0, -2.0, 1, 3),
        "factor": draw.choice(0.5, -0.25, 1),
        "part": draw.choice(2.0, -4.0, 1),
        "softcap": draw.choice(2.0, -1.5, 3),
        "sinks": draw.tensor(*batch, length, 1),
        "cast": draw.choice(draw.dtype, torch.float32),
        "wide": draw.choice(draw.dtype, torch.float32, torch.float64),
        "dtype": draw.choice(None, draw.dtype, torch.float32, torch.float64),
        "end": draw.choice(-1, num_keys, num_keys + 1),
        "length": num_keys,
        "p": draw.choice(0.0, 0.0, 0.1),
        "train": draw.flag(),
    }
    return found


def _refused(draw: Draw, found: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns operands and numbers of a sample as one condition or another refuses them."""
    other = draw.choice(*(dtype for dtype in (torch.float32, torch.bfloat16, torch.float64) if dtype != draw.dtype))
    return (
        {"kt": found["kt"][..., :1]},  # the mask makes as many columns as v has rows
        {"v": found["v"].to(other), "cast": other},
        {"bias": found["bias"] > 0},  # which adds 1, and does not hide
        {"mask": found["mask"] > 0},
        {"mask": found["mask"].double(), "cast": draw.dtype},
        {"bias": found["bias"].double(), "cast": draw.dtype},
        {"sinks": found["sinks"].to(other)},
        {"fill": draw.choice(0.0, -8.0, True)},  # which does not hide
        {"divisor": 0.0, "scale": math.inf},  # no reading has both
        {"part": 0.0},
        {"softcap": 0.0},
        {"factor": math.inf},
    )


def _attended(match: Match, q: Any, kt: Any, v: Any, *, is_scaled_last: bool) -> Any:
    """Calls attention with what the match has of: bias, mask, kept or hidden with fill, sinks, softcap, dropout."""
    k = torch.transpose(kt, -2, -1)
    bias, mask, kept, hidden, sinks = (_given(match, name) for name in ("bias", "mask", "kept", "hidden", "sinks"))
    scale, fill, softcap = scale_of(match), match.captures.get("fill"), float(match.captures.get("softcap") or 0.0)
    if is_scaled_last and bias is not None:
        bias = bias * match["scale"] if match["divisor"] is None else bias / match["divisor"]
    if is_scaled_last and fill is not None:
        low = fill * scale
        fill = low if low >= torch.finfo(value(match["q"]).dtype).min else -math.inf  # no score is as low as that
    call = partial(_attend, match, sinks=sinks, scale=scale * (softcap or 1.0), softcap=abs(softcap))
    if fill is None:
        return call(q, k, v, _sum(bias, mask))
    kept = torch.logical_not(hidden) if kept is None else kept
    return _attend_to_kept(call, q, k, v, bias, mask, kept, fill if sinks is None else -math.inf, draws=_draws(match))


def _given(match: Match, name: str) -> Any:
    """Returns the proxy of a captured node; None if the pattern or the taken alternative has none of that name."""
    node = match.captures.get(name)
    return None if node is None else match.proxy(node)


def _attend(match: Match, q: Any, k: Any, v: Any, mask: Any, *, sinks: Any, scale: float, softcap: float) -> Any:
    """Calls scaled_dot_product_attention with the dropout of the match; or the operator of `rules.attention.operator`
    if there are sinks or a softcap, for which the former has no argument.

    Operands of three dimensions get a batch of size 1, because no fused kernel takes three dimensions.
    """
    k, v = _expanded(k, q), _expanded(v, q)
    if mask is not None and mask.dtype != q.dtype and torch.promote_types(mask.dtype, q.dtype) == q.dtype:
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    is_flat = q.ndim == 3
    if is_flat:
        q, k, v = (torch.unsqueeze(x, 0) for x in (q, k, v))
        mask, sinks = (torch.unsqueeze(x, 0) if x is not None and x.ndim == 3 else x for x in (mask, sinks))
    if softcap or sinks is not None:
        options = {"softcap": softcap} if softcap else {}
        operands = (q, k, v, mask) if sinks is None else (q, k, v, mask, sinks)
        attended = match.call(ATTEND, *operands, scale=scale, **options)  # rules refuse a dropout here
    else:
        dropout_p = float(match["p"]) if _draws(match) else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)
    return torch.select(attended, 0, 0) if is_flat else attended


def _attend_to_kept(
    call: Callable[..., Any], q: Any, k: Any, v: Any, bias: Any, mask: Any, kept: Any, fill: float, *, draws: bool
) -> Any:
    """Calls attention where scores that are not `kept` are filled, and `mask` is added to all.

    A row that keeps no key reads all values, by softmax(fill + mask), and gives q and k no gradient. That is their mean
    if there is no mask. With a mask, or a dropout, which draws for each of these values, q is 0 in such rows, and so
    are their scores; the fill is subtracted again, since exp(fill - logsumexp) has no digits left for so large a fill.
    """
    given = _sum(bias, mask)
    if fill == -math.inf or (mask is None and not draws):
        attended = call(q, k, v, kept if given is None else _filled(kept, given, fill))
        has_no_keys = is_same_size(value(v.node).shape[-2], 0)  # then results are zeros, and v has no mean
        if fill == -math.inf or has_no_keys:
            return attended
        return torch.where(torch.any(kept, -1, True), attended, torch.mean(v, -2, True))
    keeps_any = torch.any(kept, -1, True)
    q = _filled(keeps_any, q, 0.0)
    if given is None:
        return call(q, k, v, torch.logical_or(kept, torch.logical_not(keeps_any)))
    if mask is None:
        return call(q, k, v, torch.where(keeps_any, _filled(kept, given, fill), torch.zeros_like(given)))
    wide = torch.promote_types(mask.dtype, q.dtype)  # as the original adds it to the scores
    low = (mask if mask.dtype == wide else mask.to(wide)) + fill
    return call(q, k, v, torch.where(kept, given, torch.where(keeps_any, low, low - fill)))


@where.predicate("p", "train", text="draws_nothing")
def draws_nothing(p: float | None, train: bool | None) -> bool | str:
    """The match has no dropout that draws."""
    return not (p and train) or f"a dropout of {p} draws"


def _draws(match: Match) -> bool:
    """Whether the match has a dropout that draws."""
    return bool(match["p"] and match["train"])


def _filled(kept: Any, x: Any, fill: float) -> Any:
    return torch.ops.aten.where.ScalarOther(kept, x, fill)


def _sum(bias: Any, mask: Any) -> Any:
    """Returns the sum, or the one that is not None, or None."""
    return mask if bias is None else bias if mask is None else bias + mask


def scale_of(match: Match) -> float:
    """Returns the factor of the scores in the match."""
    if match["divisor"] is not None:
        return 1.0 / match["divisor"]
    return 1.0 if match["scale"] is None else float(match["scale"])


def _expanded(x: Any, q: Any) -> Any:
    """Returns `x` expanded to the batch and heads of q, because the fused kernels do not broadcast."""
    pairs = zip(value(x.node).shape[:-2], value(q.node).shape[:-2], strict=True)
    fits = [is_same_size(a, b) for a, b in pairs]
    return x if all(fits) else x.expand(*(-1 if same else q.shape[dim] for dim, same in enumerate(fits)), -1, -1)


def is_mask(name: str, *dtypes: torch.dtype) -> tuple[Constraint, ...]:
    """The capture has at least two dimensions and broadcasts to the scores; its dtype is one of `dtypes`, or q's."""
    is_dtype = where.dtype(name, *dtypes) if dtypes else where.same_dtype("q", name)
    return is_dtype, where.predicate(name, "q", "kt", text="broadcasts_to_scores")(_broadcasts_to_scores)


def is_added(name: str) -> tuple[Constraint, ...]:
    """The capture broadcasts to the scores, and is added to them without being rounded: see `_attend`."""
    return (
        where.predicate(name, "q", text="is_taken")(is_taken),
        where.predicate(name, "q", "kt", text="broadcasts_to_scores")(_broadcasts_to_scores),
    )


def is_taken(mask: fx.Node, q: fx.Node) -> bool | str:
    """q's dtype has every number of the mask's, or the kernels take a float32 mask beside narrower operands."""
    of_mask, of_q = value(mask), value(q)
    if of_mask.dtype == of_q.dtype:
        return True
    is_real = of_mask.dtype.is_floating_point and torch.promote_types(of_mask.dtype, of_q.dtype) == of_q.dtype
    is_wide = of_mask.dtype == torch.float32 and of_q.device.type == "cpu"  # elsewhere kernels refuse it
    return is_real or is_wide or f"the mask is in {of_mask.dtype}, the operands in {of_q.dtype}"


def _broadcasts_to_scores(mask: fx.Node, q: fx.Node, kt: fx.Node) -> bool | str:
    found = tuple(value(mask).shape)
    scores = (*value(q).shape[:-1], value(kt).shape[-1])
    if not 2 <= len(found) <= len(scores):
        return f"the mask has rank {len(found)}, the scores have {len(scores)}"
    pairs = zip(reversed(found), reversed(scores), strict=False)
    fits = all(is_same_size(a, 1) or is_same_size(a, b) for a, b in pairs)
    return fits or f"the mask has shape {found}, the scores have {scores}"


@where.predicate("fill", text="hides")
def hides(fill: Any) -> bool | str:
    """exp(fill - score) is 0 in every dtype for any realistic score; -65504 is the lowest float16."""
    is_real = isinstance(fill, (int, float)) and not isinstance(fill, bool)
    return (is_real and fill <= -65504.0) or f"a score may be as low as {fill!r}"


@where.predicate("fill", "scale", text="hides_times_scale")
def hides_times_scale(fill: Any, scale: Any) -> bool | str:
    """What `hides` says, of a fill that is multiplied with the scores."""
    return fill * scale <= -65504.0 or f"a score may be as low as {fill * scale!r}"


@where.predicate("fill", "divisor", text="hides_by_divisor")
def hides_by_divisor(fill: Any, divisor: Any) -> bool | str:
    """What `hides` says, of a fill that is divided with the scores."""
    return fill / divisor <= -65504.0 or f"a score may be as low as {fill / divisor!r}"


@where.predicate("q", "kt", "v", text="fit")
def _fit(q: fx.Node, kt: fx.Node, v: fx.Node) -> bool | str:
    """k and v broadcast to the batch of q. The converse (q would be repeated) is refused; no model writes it."""
    shapes = [tuple(value(node).shape) for node in (q, kt, v)]
    ranks = [len(shape) for shape in shapes]
    if ranks not in ([3] * 3, [4] * 3):
        return f"the ranks are {', '.join(map(str, ranks))}"
    batch, *others = (shape[:-2] for shape in shapes)
    for name, other in zip(("k", "v"), others, strict=True):
        if not all(is_same_size(a, 1) or is_same_size(a, b) for a, b in zip(other, batch, strict=True)):
            return f"batch and heads of {name} are {other}, of q {batch}"
    return True


def _is_no_narrower(q: fx.Node, dtype: Any) -> bool | str:
    """The softmax is in q's dtype or wider: in a narrower one the original rounds, and the replacement would not."""
    own = value(q).dtype
    if dtype is None:
        return True
    is_wider = isinstance(dtype, torch.dtype) and torch.promote_types(own, dtype) == dtype
    return is_wider or f"the softmax is in {dtype}, the operands in {own}"


def is_number(name: str) -> Constraint:
    """The capture is a finite real number."""
    return where.predicate(name, text="is_number")(_is_number)


def divides(name: str) -> Constraint:
    """The capture is a finite real number other than 0."""
    return where.predicate(name, text="divides")(_divides)


def _is_number(number: Any) -> bool | str:
    is_real = isinstance(number, (int, float)) and not isinstance(number, bool)
    return (is_real and math.isfinite(number)) or f"{number!r} is not a finite number"


def _divides(number: Any) -> bool | str:
    return "a division by 0" if number == 0 else _is_number(number)


KEPT = (*is_mask("kept", torch.bool), *is_mask("hidden", torch.bool), hides)
"""What holds of `filled` scores."""
_OPERANDS = (
    where.dtype("q", torch.float16, torch.bfloat16, torch.float32, torch.float64),
    where.same_dtype("q", "kt", "v"),
    _fit,
)
_SCALES = (is_number("scale"), divides("divisor"))


def no_narrower(x: str, *names: str) -> tuple[Constraint, ...]:
    """The softmax is in the dtype of the captured value or a wider one, by each of these captures of a dtype."""
    return tuple(where.predicate(x, name, text="is_no_narrower")(_is_no_narrower) for name in names)
