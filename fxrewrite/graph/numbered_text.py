"""A text whose equal substrings have equal numbers, from which follows where it repeats itself.

Source: Karp, Miller and Rosenberg 1972.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence


class NumberedText:
    """Letters in order, which may be any values; equal substrings have equal names."""

    def __init__(self, letters: Sequence[Hashable]) -> None:
        self._levels = [_numbered(letters)]
        width = 1
        while 4 * width <= len(letters):  # a repeat without overlap is at most half as long as the text
            last = self._levels[-1]
            self._levels.append(_numbered([(last[i], last[i + width]) for i in range(len(last) - width)]))
            width *= 2
        self._places: dict[int, dict[int, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._levels[0])

    def name(self, start: int, end: int) -> Hashable:
        """Equal for equal substrings."""
        level = min((end - start).bit_length(), len(self._levels)) - 1
        names, width = self._levels[level], 1 << level
        return (end - start, *(names[i] for i in range(start, end - width, width)), names[end - width])

    def occurrences(self, start: int, end: int) -> Iterator[int]:
        """Yields where substrings equal to this one begin, in order; they may overlap."""
        level = min((end - start).bit_length(), len(self._levels)) - 1
        if level not in self._places:
            places = self._places.setdefault(level, {})
            for i, name in enumerate(self._levels[level]):
                places.setdefault(name, []).append(i)
        name, length = self.name(start, end), end - start
        for i in self._places[level][self._levels[level][start]]:
            if i + length <= len(self) and self.name(i, i + length) == name:
                yield i

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yields (a, b) where equal substrings begin, b next after a, and what is before them differs."""
        letters = self._levels[0]
        for names in self._levels[2:] or self._levels[-1:]:
            last: dict[int, int] = {}
            for i, name in enumerate(names):
                a = last.get(name, -1)
                last[name] = i
                if a == 0 or (a > 0 and letters[a - 1] != letters[i - 1]):
                    yield a, i

    def common(self, a: int, b: int) -> int:
        """How many letters from `a` and from `b` on are equal."""
        found = 0
        for level in reversed(range(len(self._levels))):
            names, width = self._levels[level], 1 << level
            while b + found < len(names) and names[a + found] == names[b + found]:
                found += width
        return found


def _numbered(items: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(item, len(numbers)) for item in items]
