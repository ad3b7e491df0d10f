"""What benchmarks keep is read again, the last of what was measured twice, and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.figures import Figures, Measured, append, read


def _measured(way: str, length: int, *, ranks: int = 2, alone: bool = False, peak: int | None = None) -> Measured:
    model: dict[str, Any] = {"layers": 2, "hidden": 8, "vocab": 16, "length": length, "ranks": ranks, "alone": alone}
    if peak is None:
        return Measured(table="longest", way=way, budget=128 << 20, machine="torch", **model)
    found = Figures(seconds=length / 1000, peak=peak, saved=1, sent=1, compile=1.0, transform=0.1)
    return Measured(table="lengths", way=way, figures=found, machine="torch", **model)


def test_of_what_was_measured_twice_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    first, again = _measured("a", 64, peak=1), _measured("a", 64, peak=2)
    others = [_measured("a", 128, peak=3), _measured("b", 64, peak=4), _measured("a", 64, ranks=4, peak=5)]
    for measured in (first, *others, again, _measured("a", 300), _measured("a", 310)):
        append(path, measured)
    append(None, first)
    assert sorted(read(path), key=lambda m: m.length) == sorted(
        [again, *others, _measured("a", 310)], key=lambda m: m.length
    )


def test_equal_figures_are_drawn_alike(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need pip install '.[bench]'")
    from tests.bench.plots import draw

    measured = [_measured(way, length, peak=length << 20) for way in ("hand", "ours") for length in (64, 128)]
    measured += [_measured("ours", 128, ranks=ranks, alone=True, peak=1 << 30) for ranks in (2, 4)]
    measured += [_measured("hand", 300), _measured("ours", 900)]
    drawn = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in drawn:
        draw(measured, path)
    text = drawn[0].read_text()
    assert text == drawn[1].read_text()
    assert all(word in text for word in ("A training step, 2 ranks", "Peak of a step, 128 tokens", "128 MiB", "> 900<"))
