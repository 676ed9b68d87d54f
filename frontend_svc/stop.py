"""Finds stop strings in a growing text and says how much of its end could still become one.

Each stop string is followed by a Knuth-Morris-Pratt automaton over the new characters only. Its state is the length of
the longest end of the text that begins the stop string, which is exactly what must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class _Matcher:
    """One stop string. The failure table grows only as far as matches got."""

    __slots__ = ("_failure", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._failure = [0]

    def _fallback(self, length: int) -> int:
        """Length of the longest proper border of the pattern's first `length` characters."""
        table, pattern = self._failure, self.pattern
        while len(table) < length:
            position, border = len(table), table[-1]
            while border and pattern[position] != pattern[border]:
                border = table[border - 1]
            table.append(border + 1 if pattern[position] == pattern[border] else border)
        return table[length - 1]

    def advance(self, text: str, first_end: int) -> int:
        """Reads new text; returns where in it the first match that ends at or after `first_end` ends, or 0."""
        pattern, size, state = self.pattern, len(self.pattern), self.state
        for i, character in enumerate(text):
            while state and pattern[state] != character:
                state = self._fallback(state)
            if pattern[state] == character:
                state += 1
                if state == size:
                    if i + 1 >= first_end:
                        self.state = 0
                        return i + 1
                    state = self._fallback(size)
        self.state = state
        return 0


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found: where it starts and ends, counted from the start of the new text."""

    stop: str
    start: int
    """Negative where the match began in earlier text."""
    end: int


class StopChecker:
    """Watches one completion's text.

    Of several matches the one that ends first wins; of those that end together, the first in the list.
    """

    __slots__ = ("_first_characters", "_matchers", "num_held")

    def __init__(self, stop: Sequence[str]) -> None:
        self._matchers = [_Matcher(s) for s in stop]
        self._first_characters = frozenset(s[0] for s in stop)
        self.num_held = 0
        """Characters at the end of the text that could still become a stop string."""

    def check(self, text: str, *, counts: bool = True) -> StopMatch | None:
        """Reads new text and returns the match that ends in it.

        Args:
            text: the new characters.
            counts: False before min_tokens: matches that end here do not stop, ones that end later may begin here.
        """
        if not self.num_held and self._first_characters.isdisjoint(text):
            return None
        first_end = 1 if counts else len(text) + 1
        best: StopMatch | None = None
        for matcher in self._matchers:
            end = matcher.advance(text, first_end)
            if end and (best is None or end < best.end):
                best = StopMatch(matcher.pattern, end - len(matcher.pattern), end)
        self.num_held = max(matcher.state for matcher in self._matchers)
        return best
