"""Patterns on tensor names, thousands of them against tens of thousands of names, without trying each on each.

    lm_head.weight            a name: looked up
    model.layers.3.*          a glob: tried on the names that begin like it
    *.bias                    tried on those that end like it
    *experts.[0-3].*          tried on those that hold its longest literal part
    re:layers\\.\\d+\\.mlp      a regular expression, searched in every name

Cost: about 30 us a glob and 0.5 us a name that it is tried on; a regular expression is tried on all. What it does not
do: say what a pattern is for (`select`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import translate
from itertools import islice, takewhile

from ckpt_tool.errors import UsageError, near_misses

LENGTH = 16_384  # characters of a pattern
_SPECIAL = re.compile(r"[*?\[]")
_WILD = re.compile(r"[*?]")


def matcher(pattern: str) -> Callable[[str], bool]:
    """A pattern as a test on names. Raises UsageError E0254 for a regular expression that does not compile, and for a
    pattern that is longer than any that a person writes: CPython takes the square of a glob's brackets."""
    regular = pattern.startswith("re:")
    if len(pattern) > LENGTH:
        raise UsageError(
            f"{pattern[:80]!r}... has {len(pattern)} characters, want at most {LENGTH}",
            code="E0254",
            hint="write several patterns, or a file of them: @FILE",
        )
    try:
        expression = re.compile(pattern[3:] if regular else translate(pattern))
    except (re.error, RecursionError, OverflowError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise UsageError(
            f"{pattern[:80]!r} is no {'regular expression' if regular else 'pattern'}: {reason}",
            code="E0254",
            hint="quote what is meant as it is with a backslash" if regular else "a glob knows *, ? and [abc]",
        ) from e
    fits = expression.search if regular else expression.match
    return lambda name: fits(name) is not None


class Names:
    """Names, ready to be matched by many patterns."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(dict.fromkeys(names))
        self._set = frozenset(self.names)
        self._tables: tuple[list[str], list[str], str, list[int]] | None = None

    def matched(self, patterns: Sequence[str]) -> tuple[set[str], list[str]]:
        """(the names that match any of the patterns, the patterns that match none). Raises UsageError E0254."""
        matched_names: set[str] = set()
        misses = []
        for pattern in dict.fromkeys(patterns):
            matches = set(self.matching(pattern))
            matched_names |= matches
            if not matches:
                misses.append(pattern)
        return matched_names, misses

    def matching(self, pattern: str) -> Iterator[str]:
        """The names that match the pattern, in no order."""
        if pattern.startswith("re:"):
            return filter(matcher(pattern), self.names)
        if _SPECIAL.search(pattern) is None:
            return iter((pattern,) if pattern in self._set else ())
        return filter(matcher(pattern), self._alike(pattern))

    def _alike(self, pattern: str) -> Iterable[str]:
        """The names that have a literal part of the glob where it must be: more than match, but few."""
        if self._tables is None:
            ordered = sorted(self.names)
            starts = []
            begin = 0
            for name in self.names:
                starts.append(begin)
                begin += len(name) + 1
            self._tables = ordered, sorted(name[::-1] for name in self.names), "\n".join(self.names), starts
        ordered, reversed_names, text, starts = self._tables
        parts = _WILD.split(pattern.partition("[")[0])  # (the part after a class is not used here)
        prefix = parts[0]
        reversed_suffix = "" if "[" in pattern else parts[-1][::-1]
        longest = max(parts, key=len)
        if len(prefix) == len(longest):
            return _beginning(ordered, prefix) if prefix else self.names
        if len(reversed_suffix) == len(longest):
            return (name[::-1] for name in _beginning(reversed_names, reversed_suffix))
        return self._holding(longest, text, starts)

    def _holding(self, part: str, text: str, starts: list[int]) -> list[str]:
        """The names that hold `part`, which has no line feed or is looked for in vain."""
        matches = []
        position = text.find(part)
        while position >= 0:
            number = bisect_right(starts, position) - 1
            matches.append(self.names[number])
            position = text.find(part, starts[number + 1]) if number + 1 < len(starts) else -1
        return matches


def _beginning(ordered: Sequence[str], front: str) -> Iterator[str]:
    """The texts of a sorted list that begin with `front`."""
    return takewhile(lambda text: text.startswith(front), islice(ordered, bisect_left(ordered, front), None))


def refuse_misses(misses: Sequence[str], names: Sequence[str], hint: str = "") -> None:
    """Raise UsageError E0255 for patterns that match none of the names, all at once. hint: what is shown in place of
    near misses of the first."""
    if misses:
        near = hint or near_names(misses[0], names)
        raise UsageError(
            f"the pattern {misses[0]!r} matches no tensor",
            code="E0255",
            hint=near or f"the checkpoint has {len(names)} names, such as {', '.join(names[:3])}",
            faults=[f"the pattern {miss!r} matches no tensor" for miss in misses[1:]],
        )


def near_names(pattern: str, names: Sequence[str]) -> str:
    """Names near a pattern that matched nothing: as a whole, else by one of their parts between dots."""
    bare = pattern.removeprefix("re:").strip("*.^$\\")
    whole = near_misses(bare, names)
    if whole:
        return whole
    parts = {part: name for name in reversed(names) for part in (*name.split("."), *name.replace("_", ".").split("."))}
    for word in sorted(re.split(r"[.*?\\\[\]^$]+", bare), key=len, reverse=True):
        from difflib import get_close_matches  # 1 ms of every start

        close = get_close_matches(word, parts, n=3, cutoff=0.6) if word else []
        if close:
            return f"did you mean {', '.join(dict.fromkeys(parts[part] for part in close))}?"
    return ""
