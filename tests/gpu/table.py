"""The figures as a table: what failed, then what is not so, what was left out, and the rest. It imports no torch."""

from __future__ import annotations

from typing import Any

_ORDER = ("failed", "not so", "left out", "ok")
_SHOWN = ("seconds", "peak", "saved", "largest", "mfu", "longest", "worst", "passed", "compile")


def status_of(figure: dict[str, Any]) -> str:
    """Whether a figure has an error, found that what it checks does not hold, or neither."""
    return "failed" if "error" in figure else "ok" if figure.get("holds", True) else "not so"


def table(found: dict[str, Any]) -> list[str]:
    """The lines of a Markdown table of all figures."""
    rows: list[tuple[str, str, str, str]] = []
    for name, section in found["sections"].items():
        if "error" in section:
            rows.append(("failed", name, "", _line(section["error"])))
        rows += [(status_of(one), name, which, _summary(one)) for which, one in section["figures"].items()]
        rows += [("left out", name, which, "") for which in section["left_out"]]
    rows += [("left out", name, "", "") for name in found["sections_left_out"]]
    rows.sort(key=lambda row: _ORDER.index(row[0]))
    counts = ", ".join(f"{sum(row[0] == status for row in rows)} {status}" for status in _ORDER)
    head = ["", counts, "", "| | section | figure | |", "|---|---|---|---|"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)]


def choose_mask_kernel(attention: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the default of `mask_kernel` should be by the figures of attention.

    It is "auto" if flex attention is right for every mask that was measured both ways, holds nothing of S x S, and
    takes at most 1.05 x the time and the peak of blocks of rows; else "rows"; None if nothing was measured both ways.
    """
    loses: list[str] = []
    compared = 0
    for name, rows in attention.items():
        flex = attention.get(name.replace(", rows,", ", flex,"))
        if ", rows," not in name or flex is None or "error" in rows:
            continue
        compared += 1
        if status_of(flex) != "ok":
            loses.append(f"{name.partition(',')[0]}: {status_of(flex)}")
            continue
        ratios = {what: flex[what] / max(rows[what], 1e-9) for what in ("seconds", "peak")}
        loses += [
            f"{name.partition(',')[0]}: {ratio:.2f} x the {what}" for what, ratio in ratios.items() if ratio > 1.05
        ]
    return {"mask_kernel": ("rows" if loses else "auto") if compared else None, "compared": compared, "loses": loses}


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:160]


def _summary(figure: dict[str, Any]) -> str:
    if "error" in figure:
        return _line(figure["error"])
    shown = [f"{name} {_short(figure[name])}" for name in _SHOWN if figure.get(name) is not None]
    kernels = list(figure.get("kernels") or {})
    return _line(", ".join([*shown, *(f"`{name[:60]}`" for name in kernels[:1])]))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
