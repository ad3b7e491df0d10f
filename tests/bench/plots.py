"""Draws what `long_context.py --out` kept: time and peak by length, peak by ranks, and the longest sequence.

    python -m tests.bench.plots docs/figures/long-context.jsonl docs/figures/long-context.svg

Needs matplotlib: pip install '.[bench]'.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.figures import Measured, read

_MIB = 2**20
_STYLE = {
    "svg.hashsalt": "fxrewrite",  # equal figures give equal files
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "font.size": 9,
}


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Writes one SVG with four panels; a way has one colour in all of them."""
    from matplotlib import pyplot as plt  # of the extra `bench`, which tests do without

    ways = list(dict.fromkeys(m.way for m in measured))
    colours = {way: plt.get_cmap("tab10")(i % 10) for i, way in enumerate(ways)}
    by_length = [m for m in measured if m.table == "lengths" and not m.alone]
    alone = [m for m in measured if m.table == "lengths" and m.alone]
    longest_length = max((m.length for m in alone), default=0)
    by_ranks = [m for m in alone if m.length == longest_length]
    with plt.rc_context(_STYLE):
        figure, panels = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
        ranks = ", ".join(f"{n} ranks" for n in sorted({m.ranks for m in by_length}))
        _lines(panels[0, 0], by_length, lambda m: m.length, _seconds, colours)
        panels[0, 0].set(title=f"A training step, {ranks}", xlabel="tokens", ylabel="seconds")
        _lines(panels[0, 1], by_length, lambda m: m.length, _peak, colours)
        panels[0, 1].set(title=f"Peak of a step, {ranks}", xlabel="tokens", ylabel="MiB a rank")
        panels[1, 0].set_visible(bool(by_ranks))
        _lines(panels[1, 0], by_ranks, lambda m: m.ranks, _peak, colours)
        panels[1, 0].set(title=f"Peak of a step, {longest_length:,} tokens", xlabel="ranks", ylabel="MiB a rank")
        _bars(panels[1, 1], [m for m in measured if m.table == "longest"], colours)
        figure.legend(*_legend(panels, ways), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(f"Llama, CPU, gloo, float32; {measured[-1].machine}", fontsize=9)
        figure.savefig(path, metadata={"Date": None})


def _seconds(measured: Measured) -> float:
    assert measured.figures is not None
    return measured.figures.seconds


def _peak(measured: Measured) -> float:
    assert measured.figures is not None
    return measured.figures.peak / _MIB


def _lines(
    panel: Any,
    measured: Sequence[Measured],
    x: Callable[[Measured], float],
    y: Callable[[Measured], float],
    colours: dict[str, Any],
) -> None:
    """A line for each way, on logarithmic axes: a slope of 1 is proportional."""
    for way, colour in colours.items():
        points = sorted((x(m), y(m)) for m in measured if m.way == way)
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=way)
    at = sorted({x(m) for m in measured})
    panel.set(xscale="log", yscale="log")
    panel.set_xticks(at, [f"{n:,}" for n in at])
    panel.minorticks_off()
    low, high = panel.get_ylim()
    ticks = [n for power in range(-3, 7) for n in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if low <= n <= high]
    panel.set_yticks(ticks, [f"{n:g}" for n in ticks])


def _bars(panel: Any, measured: Sequence[Measured], colours: dict[str, Any]) -> None:
    """The longest sequence of each way, the shortest at the top."""
    found = sorted(measured, key=lambda m: m.length, reverse=True)
    bars = panel.barh([m.way for m in found], [m.length for m in found], color=[colours[m.way] for m in found])
    panel.bar_label(bars, [f" {m.length:,}" for m in found])
    panel.grid(visible=False)
    panel.tick_params(left=False, bottom=False, labelbottom=False)
    panel.spines[:].set_visible(False)
    panel.margins(x=0.12)  # for the labels
    budget = {m.budget for m in found if m.budget}
    panel.set(title=f"The longest sequence within {', '.join(f'{n // _MIB} MiB' for n in sorted(budget))} a rank")


def _legend(panels: Any, ways: Sequence[str]) -> tuple[list[Any], list[str]]:
    lines = {
        label: line for panel in panels.flat for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    known = [way for way in ways if way in lines]
    return [lines[way] for way in known], known


if __name__ == "__main__":
    draw(read(Path(sys.argv[1])), Path(sys.argv[2]))
