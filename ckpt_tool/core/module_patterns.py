"""Module patterns of a config: regular expressions by a stranger, matched in bounded time.

PEFT puts the keys of `rank_pattern` and `alpha_pattern` into `re.match(rf"(.*\\.)?({key})$", module)`, GPTQModel those
of `dynamic` into `re.match(key, module)`. Python's engine backtracks, so a key such as `(a+)+b` can block any reader of
the file forever. Here a pattern is a function from the set of places where it may begin to the set of places where it
may end, so nothing is tried twice:

    >>> matches("layers.[01].self_attn.(q|k)_proj", "model.layers.1.self_attn.q_proj")
    True
    >>> matches("q_proj", "model.layers.1.self_attn.qq_proj"), first_at_the_front(["k", "q_p"], "q_proj")
    (False, 1)

Understood: literals, `.`, classes, `\\d \\w \\s` and their opposites, groups, `|`, `* + ? {m,n}` (lazy ones too: only
whether it matches is asked for), `^` and `$`. Look-around, back-references, flags and possessive repeats are an error.
Sources: PEFT 0.21.2 `utils/other.py` get_pattern_key, GPTQModel 7.7.0 `quantization/config.py`. Cost: some microseconds
a plain name, at most `STEPS` steps a module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

LENGTH = 1024
DEPTH = 16
COUNT = 1000
STEPS = 200_000
STEPS_EACH = 64
Places = frozenset[int]
Step = Callable[["_Run", Places], Places]
_PLAIN = re.compile(r"[\w.\-]*")
_ESCAPE = r"\\(?:[dDwWsS]|[\W_])"
_ATOM = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:{_ESCAPE}|[^\]\\\[])*\]|[^()\[\\|*+?]")  # one character of a name
_DOT = re.compile(".").match
_SET_OPERATION = re.compile(r"--|&&|~~|\|\|")  # in classes, where Python warns that it will read them otherwise
_REPEAT = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")


class NotUnderstood(Exception):
    """A pattern that is not used, and why."""

    def __init__(self, pattern: str, why: str) -> None:
        super().__init__(f"{pattern[:80]!r} is not used: {why}")


class _Run:
    """One name being matched, and what it may still cost: `STEPS`, and `STEPS_EACH` for each pattern."""

    def __init__(self, name: str, patterns: int = 1) -> None:
        self.name = name
        self.pattern = ""
        self._left = STEPS + patterns * STEPS_EACH
        self.begins = frozenset((0, *(i + 1 for i, char in enumerate(name) if char == ".")))

    def spend(self, steps: int) -> None:
        """Count steps of the match. Raises NotUnderstood when there were too many, alone or with those before."""
        self._left -= steps
        if self._left < 0:
            raise NotUnderstood(self.pattern, "it takes too many steps to match, alone or with those before it")


def first_match(patterns: Iterable[str], module: str) -> str | None:
    """The first of `patterns` that fits the module, as PEFT picks it. Raises NotUnderstood."""
    patterns = tuple(patterns)
    run = _Run(module, len(patterns))
    return next((pattern for pattern in patterns if _matches(pattern, run)), None)


def matches(pattern: str, module: str) -> bool:
    """Does the pattern match all of `module`, or all that follows one of its dots? Raises NotUnderstood."""
    return _matches(pattern, _Run(module))


def first_at_the_front(patterns: Sequence[str], module: str) -> int | None:
    """The number of the first of `patterns` that the module's name begins with, as `re.match` has it. Raises
    NotUnderstood."""
    run = _Run(module, len(patterns))
    for number, run.pattern in enumerate(patterns):
        if _compile_step(run.pattern)(run, frozenset((0,))):
            return number
    return None


def _matches(pattern: str, run: _Run) -> bool:
    run.pattern = pattern
    return len(run.name) in _compile_step(pattern)(run, run.begins)


@lru_cache(maxsize=4096)
def _compile_step(pattern: str) -> Step:
    if len(pattern) > LENGTH:
        raise NotUnderstood(pattern, f"more than {LENGTH} characters")
    if _PLAIN.fullmatch(pattern):
        return _all([_char(_DOT if char == "." else char.__eq__) for char in pattern])
    step, end = _PatternParser(pattern).alternatives(0, 0)
    if end != len(pattern):
        raise NotUnderstood(pattern, "unbalanced parenthesis")
    return step


# -- steps -------------------------------------------------------------------------------------------------------------


def _char(fits: Callable[[str], object]) -> Step:
    def step(run: _Run, begins: Places) -> Places:
        run.spend(len(begins))
        return frozenset(i + 1 for i in begins if i < len(run.name) and fits(run.name[i]))

    return step


def _make_step(fits: Callable[[int, str], bool]) -> Step:
    def step(run: _Run, begins: Places) -> Places:
        run.spend(len(begins) + 1)
        return frozenset(i for i in begins if fits(i, run.name))

    return step


def _all(steps: list[Step]) -> Step:
    def step(run: _Run, begins: Places) -> Places:
        for inner_step in steps:
            if not begins:
                break
            begins = inner_step(run, begins)
        return begins

    return step


def _any(steps: list[Step]) -> Step:
    if len(steps) == 1:
        return steps[0]

    def step(run: _Run, begins: Places) -> Places:
        run.spend(len(steps) * (len(begins) + 1))
        return frozenset().union(*(inner_step(run, begins) for inner_step in steps))

    return step


def _times(inner: Step, least: int, most: int | None) -> Step:
    def step(run: _Run, begins: Places) -> Places:
        for _ in range(least):
            run.spend(1)
            begins = inner(run, begins)
        reached = frontier = begins
        done = least
        while frontier and (most is None or done < most):
            frontier = inner(run, frontier) - reached
            reached |= frontier
            done += 1
            run.spend(1)
        return reached

    return step


# -- reading -----------------------------------------------------------------------------------------------------------


class _PatternParser:
    """Each method takes the place where its part begins, and gives the step and the place behind it."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern

    def alternatives(self, position: int, depth: int) -> tuple[Step, int]:
        if depth > DEPTH:
            raise self._refuse("its groups are nested too deeply")
        branches: list[Step] = []
        steps: list[Step] = []
        while position < len(self._text) and self._text[position] != ")":
            if self._text[position] == "|":
                branches.append(_all(steps))
                steps = []
                position = position + 1
                continue
            step, position = self._parse_repetition(position, depth)
            steps.append(step)
        return _any([*branches, _all(steps)]), position

    def _parse_repetition(self, position: int, depth: int) -> tuple[Step, int]:
        step, position = self._atom(position, depth)
        repeats = 0
        while position < len(self._text):
            match = _REPEAT.match(self._text, position)
            if self._text[position] in "*+?":
                least, maximum = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._text[position]]
                position += 1
            elif match and (match[1] or match[3]):
                least = int(match[1] or 0)
                maximum = (int(match[3]) if match[3] else None) if match[2] else least
                position = match.end()
            else:
                break
            repeats += 1
            if repeats > 1 or max(least, maximum or 0) > COUNT or (maximum is not None and maximum < least):
                raise self._refuse("a repeat that is not understood")
            step = _times(step, least, maximum)
            if self._text[position : position + 1] == "?":  # lazy: the same names match
                position += 1
        return step, position

    def _atom(self, position: int, depth: int) -> tuple[Step, int]:
        char = self._text[position]
        if char == "(":
            inner = position + 1
            if self._text[inner : inner + 1] == "?":
                if self._text[inner : inner + 2] != "?:":
                    raise self._refuse("look-around, flags and named groups are not understood")
                inner += 2
            step, position = self.alternatives(inner, depth + 1)
            if self._text[position : position + 1] != ")":
                raise self._refuse("unbalanced parenthesis")
            return step, position + 1
        if char == "^":
            return _make_step(lambda i, name: i == 0), position + 1
        if char == "$":
            return _make_step(lambda i, name: i == len(name)), position + 1
        match = _ATOM.match(self._text, position)
        if match is None or (len(match[0]) > 1 and _SET_OPERATION.search(match[0])):
            raise self._refuse(f"{self._text[position : position + 20]!r} is not understood")
        try:
            return _char(char.__eq__ if len(match[0]) == 1 and char != "." else re.compile(match[0]).match), match.end()
        except re.error as e:
            raise self._refuse(str(e)) from e

    def _refuse(self, why: str) -> NotUnderstood:
        return NotUnderstood(self._text, why)
