"""Patterns against a brute-force reading of the same text: every element of a tensor, named one by one."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest

from ckpt_tool.algebra.pattern import Band, Part, indices_of, pattern, size_of
from ckpt_tool.errors import UsageError

Sizes = dict[str, int]


def brute(text: str, sizes: Sizes) -> list[list[tuple[tuple[int, ...], dict[str, int]]]]:
    """Each dim as its list of coordinates: (which summands were chosen, axis values), in storage order.

    Another road than `pattern`: it rewrites the text to Python lists, one entry an element, without strides.
    """

    def words(source: str) -> list[str]:
        for mark in "()+@":
            source = source.replace(mark, f" {mark} ")
        return source.split()

    tokens = words(text)

    def axis(name: str) -> list[tuple[tuple[int, ...], dict[str, int]]]:
        if name == "1":
            return [((), {})]
        return [((), {name: k}) for k in range(int(name) if name.isdigit() else sizes[name])]

    def times(
        items: list[list[tuple[tuple[int, ...], dict[str, int]]]],
    ) -> list[tuple[tuple[int, ...], dict[str, int]]]:
        out = []
        for row in product(*items):
            out.append((sum((path for path, _ in row), ()), {k: v for _, values in row for k, v in values.items()}))
        return out

    def group() -> list[tuple[tuple[int, ...], dict[str, int]]]:
        summands = []
        items = []
        places = list[int]()
        while (token := tokens.pop(0)) != ")":
            if token == "(":
                items.append(group())
            elif token == "+":
                summands.append(times(items))
                items = []
            elif token == "@":
                while tokens[0] != ")":
                    places.append(int(tokens.pop(0)))
            else:
                items.append(axis(token))
        summands.append(times(items))
        if len(summands) == 1:
            return summands[0]
        stored = sorted(enumerate(summands), key=lambda each: places[each[0]] if places else each[0])
        return [((k, *path), values) for k, summand in stored for path, values in summand]

    dims = []
    while tokens:
        token = tokens.pop(0)
        dims.append(group() if token == "(" else axis(token))
    return dims


def random_pattern(rng: random.Random, sizes: Sizes) -> str:
    """A pattern over fresh axes; `sizes` is filled in."""

    def fresh() -> str:
        name = f"a{len(sizes)}"
        sizes[name] = rng.choice([0, 1, 1, 2, 2, 3, 3, 4])
        return name

    def item(depth: int) -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.55:
            return rng.choice(["1", fresh(), fresh()])
        if kind < 0.8:
            return "(" + " ".join(item(depth - 1) for _ in range(rng.randint(1, 3))) + ")"
        count = rng.randint(2, 3)
        summands = " + ".join(" ".join(item(depth - 1) for _ in range(rng.randint(1, 2))) for _ in range(count))
        places = [str(place + 1) for place in rng.sample(range(count), count)]
        return f"({summands} @ {' '.join(places)})" if rng.random() < 0.3 else f"({summands})"

    return " ".join(item(2) for _ in range(rng.randint(0, 3)))


@pytest.mark.share(6)
@pytest.mark.parametrize("seed", range(300))
def test_parts_name_every_element_once(seed: int) -> None:
    rng = random.Random(seed)
    sizes: Sizes = {}
    text = random_pattern(rng, sizes)
    dims = brute(text, sizes)
    made = pattern(text)
    assert made.shape(sizes) == tuple(len(dim) for dim in dims), text
    wanted = [
        (sum((path for path, _ in row), ()), {k: v for _, d in row for k, v in d.items()}) for row in product(*dims)
    ]
    parts = made.parts(sizes)
    assert [tuple(part.strides) for part in parts] == list(made.kinds)
    # every part, enumerated in row-major order of its own axes, must hit the elements of one choice of summands
    paths = sorted({path for path, _ in wanted})
    found: dict[int, dict[str, int]] = {}
    for part in parts:
        for values in product(*(range(sizes[axis]) for axis in part.strides)):
            at = part.offset + sum(v * s for v, s in zip(values, part.strides.values(), strict=True))
            assert at not in found, f"{text}: element {at} twice"
            found[at] = dict(zip(part.strides, values, strict=True))
    assert len(found) == len(wanted) == prod(made.shape(sizes))
    for at, (_, values) in enumerate(wanted):
        assert found[at] == values, f"{text} at {at}"
    # and parts come in row-major order of the choices
    filled = [part for part in parts if all(sizes[axis] for axis in part.strides)]
    assert len(filled) >= len(paths)


def test_the_fused_qkv() -> None:
    sizes = {"g": 2, "r": 3, "d": 4, "h": 10}
    made = pattern("(g (r + 1 + 1) d) h")
    assert made.shape(sizes) == (40, 10)
    assert made.axes == ("g", "r", "d", "h")
    assert made.parts(sizes) == [
        Part(0, {"g": 200, "r": 40, "d": 10, "h": 1}),
        Part(120, {"g": 200, "d": 10, "h": 1}),
        Part(160, {"g": 200, "d": 10, "h": 1}),
    ]


def test_scalars_units_and_literals() -> None:
    assert pattern("").shape({}) == ()
    assert pattern("").parts({}) == [Part(0, {})]
    assert pattern("1 () h").shape({"h": 3}) == (1, 1, 3)
    assert pattern("(2 h)").parts({"h": 3}) == [Part(0, {"2": 3, "h": 1})]
    assert pattern("(a b + c)").kinds == (("a", "b"), ("c",))
    assert pattern("(a b + c @ 2 1)").parts({"a": 2, "b": 3, "c": 4}) == [Part(4, {"a": 3, "b": 1}), Part(0, {"c": 1})]
    assert pattern("e").shape({"e": (4, 6, 8)}) == (3,)  # type: ignore[dict-item]


@pytest.mark.parametrize("seed", range(100))
def test_bands_hold_an_axis_and_nothing_else(seed: int) -> None:
    rng = random.Random(1000 + seed)
    sizes: Sizes = {}
    text = random_pattern(rng, sizes)
    made = pattern(text)
    dims = brute(text, sizes)
    for axis in made.axes:
        held: set[tuple[int, int]] = set()
        for band in made.bands(axis, sizes):
            for k in range(sizes[axis]):
                for at in range(band.start + k * band.granule, band.start + (k + 1) * band.granule):
                    assert dims[band.dim][at][1][axis] == k
                    held.add((band.dim, at))
        want = {(d, at) for d, dim in enumerate(dims) for at, (_, values) in enumerate(dim) if axis in values}
        assert held == want, f"{text}, {axis}"


def test_bands_of_the_usual_fusions() -> None:
    sizes = {"g": 2, "r": 3, "d": 4, "h": 10, "f": 8, "t": 2, "u": 4}
    assert pattern("((1 + 1) f) h").bands("f", sizes) == [Band(0, 0, 1), Band(0, 8, 1)]
    assert pattern("(g (r + 1 + 1) d) h").bands("g", sizes) == [Band(0, 0, 20)]
    assert pattern("h f").bands("f", sizes) == [Band(1, 0, 1)]
    assert pattern("(t (1 + 1) u) h").bands("t", sizes) == [Band(0, 0, 8)]
    assert pattern("v h").bands("f", {**sizes, "v": 1}) == []


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("(a b", "E0220", "not closed"),
        ("a b)", "E0220", "closes nothing"),
        ("a + b", "E0220", "inside parentheses"),
        ("(a + )", "E0220", "both sides"),
        ("a @ 1", "E0220", "inside parentheses"),
        ("(a + b @ 1 1)", "E0220", "places of 2 summands"),
        ("(a + b @ 1 3)", "E0220", "places of 2 summands"),
        ("(a @ 1)", "E0220", "places of 1 summands"),
        ("(a + b @ 2 1 + c)", "E0220", "not closed"),
        ("(+ a)", "E0220", "both sides"),
        ("a, b", "E0220", "no meaning"),
        ("a * b", "E0220", "no meaning"),
        ("0 h", "E0220", "no extent"),
        ("01 h", "E0220", "no extent"),
        ("٣ h", "E0220", "no meaning"),
        ("(a b a)", "E0227", "twice"),
        ("a (b + a)", "E0227", "twice"),
        ("2 2", "E0227", "twice"),
        ("(" * 30 + "a" + ")" * 30, "E0233", "levels"),
        ("a " * 300, "E0233", "characters"),
        ("(1+1) " * 14, "E0233", "parts"),
    ],
)
def test_refuses(text: str, code: str, word: str) -> None:
    with pytest.raises(UsageError) as error:
        pattern(text)
    assert error.value.code == code
    assert word in error.value.message


@pytest.mark.parametrize(
    ("size", "code"),
    [(None, "E0230"), (-1, "E0231"), (1.0, "E0231"), (True, "E0231"), ("3", "E0231"), ((1, 1), "E0231")],
)
def test_bad_sizes(size: object, code: str) -> None:
    sizes = {} if size is None else {"heads": size}
    with pytest.raises(UsageError) as error:
        size_of("heads", sizes)  # type: ignore[arg-type]
    assert error.value.code == code


def test_an_unknown_axis_tells_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        size_of("head", {"heads": 2, "dim": 3})
    assert "heads" in str(error.value.hint)


def test_indices() -> None:
    assert list(indices_of("i", {"i": 3})) == [0, 1, 2]
    assert list(indices_of("i", {"i": range(3, 6)})) == [3, 4, 5]
    assert list(indices_of("i", {"i": (5, 1)})) == [5, 1]
