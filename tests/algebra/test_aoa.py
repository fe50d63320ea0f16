"""Any-to-any statements: random programs against NumPy, the way back, and what is refused in which words."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiling import check_tiling

from ckpt_tool.algebra.mapped import Mapped
from ckpt_tool.algebra.piece import apply
from ckpt_tool.errors import UsageError
from ckpt_tool.systems.paddle.aoa.program import AoaText, Shards, compile_aoa, read_aoa

Arrays = dict[str, np.ndarray]
MODEL = {
    "embed": (10, 4),
    "head": (10, 4),
    "norm": (4,),
    "scale": (),
    "none": (0, 4),
    **{f"layers.{i}.{x}": (4, 8 if x == "q" else 4) for i in range(3) for x in "qkv"},
    **{f"layers.{i}.mlp.{x}": (4, 6) for i in range(3) for x in ("gate", "up")},
    **{f"layers.{i}.experts.{e}.w": (4, 6) for i in (1, 2) for e in range(3)},
}


def numbered(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    out = {}
    tag = 1
    for name, shape in shapes.items():
        out[name] = np.arange(tag, tag + int(np.prod(shape, dtype=int))).reshape(shape)
        tag += 1000 + int(np.prod(shape, dtype=int))
    return out


def carried_out(mapped: Mapped, arrays: Arrays) -> Arrays:
    shapes = {made.name: made.shape for made in mapped.made}
    pieces = [piece for made in mapped.made for piece in made.pieces]
    check_tiling(pieces, shapes, "dst")
    return apply(pieces, arrays, shapes)


def names(mapped: Mapped) -> list[str]:
    return [made.name for made in mapped.made]


# -- random programs ---------------------------------------------------------------------------------------------------


class Program:
    """Statements over random tensors, and NumPy's own execution of them as they are made. `undoes`: no drops and equal
    concatenations alone, so that the reverse is the way back."""

    def __init__(self, seed: int, *, undoes: bool) -> None:
        self.rng = random.Random(seed)
        self.undoes = undoes
        rank = self.rng.choice([1, 2, 2, 3])
        self.dims = [self.rng.choice([1, 2, 4, 6]) for _ in range(rank)]
        shapes = {f"in.{i}": tuple(self.dims) for i in range(self.rng.randint(1, 4))}
        if not undoes:
            shapes |= {f"odd.{i}": (self.rng.randint(1, 5), *self.dims[1:]) for i in range(2)}
        self.source = numbered(shapes)
        self.now = dict(self.source)
        self.count = 0
        self.statements: list[str] = []
        acts: list[Callable[[], None]] = [
            self.split,
            self.join,
            self.turn,
            self.turn_all,
            self.move,
            self.fuse,
            self.part,
        ]
        for _ in range(self.rng.randint(1, 9)):
            self.rng.choice(acts)()
        if not undoes and len(self.now) > 1 and self.rng.random() < 0.5:
            self.statements.append(f"{self.take()[0]} -> _")

    def take(self) -> tuple[str, np.ndarray]:
        name = self.rng.choice(sorted(self.now))
        return name, self.now.pop(name)

    def put(self, array: np.ndarray, name: str = "") -> str:
        self.count += not name
        self.now[name or f"t.{self.count}"] = array
        return name or f"t.{self.count}"

    def say(self, left: str, right: str, *attributes: str) -> None:
        self.statements.append(", ".join([f"{left} -> {right}", *attributes]))

    def split(self) -> None:
        name, array = self.take()
        axis = self.rng.randrange(array.ndim)
        parts = self.rng.choice([n for n in range(1, 7) if array.shape[axis] % n == 0])
        if parts == 1:
            self.put(array, name)
            return
        made = [self.put(part) for part in np.split(array, parts, axis)]
        self.say(name, ", ".join(made), f"axis={axis}")

    def join(self) -> None:
        name, array = self.take()
        axis = self.rng.randrange(array.ndim)
        rest = [n for dim, n in enumerate(array.shape) if dim != axis]
        others = [
            n
            for n, a in self.now.items()
            if a.ndim == array.ndim
            and [k for dim, k in enumerate(a.shape) if dim != axis] == rest
            and (a.shape == array.shape or not self.undoes)
        ]
        chosen = self.rng.sample(others, self.rng.randint(0, min(3, len(others))))
        if not chosen:
            self.put(array, name)
            return
        joined = np.concatenate([array, *(self.now.pop(n) for n in chosen)], axis)
        self.say(", ".join([name, *chosen]), self.put(joined), f"axis={axis}")

    def turn(self) -> None:
        name, array = self.take()
        order = self.rng.sample(range(array.ndim), array.ndim)
        self.say(name, self.put(array.transpose(order), self.rng.choice(["", name])), f"permute='{order}'")

    def turn_all(self) -> None:
        name, array = self.take()
        target = self.put(array.T, self.rng.choice(["", name]))
        if self.rng.random() < 0.5:
            self.say(f"{name}^T", target)
        else:
            self.say(name, target, "permute='[]'")

    def move(self) -> None:
        name, array = self.take()
        self.say(name, self.put(array))

    def heads(self) -> tuple[int, int, int]:
        groups = self.rng.randint(1, 3)
        return groups, self.rng.randint(1, 3), self.rng.randint(1, 3)

    def fuse(self) -> None:
        """q, k, v of their own, by reshape and by the rank-wise order of the old layout."""
        groups, each, dim = self.heads()
        axis = self.rng.choice([0, 1])
        other = self.rng.randint(1, 3)
        tag = f"m{len(self.statements)}"
        sizes = (groups * each * dim, groups * dim, groups * dim)
        new = numbered({f"{tag}.{x}": (n, other)[:: 1 if axis == 0 else -1] for x, n in zip("qkv", sizes, strict=True)})
        new = {name: array + 100_000 * (1 + len(self.statements)) for name, array in new.items()}
        self.source |= new
        q, k, v = (np.moveaxis(array, axis, 0) for array in new.values())
        whole = np.concatenate(
            [q.reshape(groups, each * dim, other), k.reshape(groups, dim, other), v.reshape(groups, dim, other)], axis=1
        ).reshape(-1, other)
        self.say(
            ", ".join(new),
            self.put(np.moveaxis(whole, 0, axis)),
            "fused_qkv",
            f"num_heads={groups * each}",
            f"axis={axis}",
            f"num_key_value_groups={groups}",
        )

    def part(self) -> None:
        """And back apart."""
        groups, each, dim = self.heads()
        other = self.rng.randint(1, 3)
        tag = f"m{len(self.statements)}"
        new = numbered({f"{tag}.qkv": (other, groups * (each + 2) * dim)})
        self.source |= (new := {name: array + 100_000 * (1 + len(self.statements)) for name, array in new.items()})
        grid = new[f"{tag}.qkv"].reshape(other, groups, each + 2, dim)
        parts = grid[:, :, :each], grid[:, :, each], grid[:, :, each + 1]
        made = [self.put(x.reshape(other, -1), f"{tag}.{letter}") for x, letter in zip(parts, "qkv", strict=True)]
        self.say(
            f"{tag}.qkv", ", ".join(made), "fused_qkv", f"num_heads={groups * each}", f"num_key_value_groups={groups}"
        )


@given(st.integers(0, 10**9))
@settings(max_examples=250, deadline=None)
def test_programs_equal_numpy(seed: int) -> None:
    program = Program(seed, undoes=False)
    arrays = program.source
    shapes = {name: array.shape for name, array in program.source.items()}
    for wanted in (None, list(program.now)):
        mapped = compile_aoa(program.statements, shapes, wanted=wanted)
        got = carried_out(mapped, arrays)
        assert set(got) == set(program.now), program.statements
        for name, array in program.now.items():
            np.testing.assert_array_equal(got[name], array, err_msg=f"{name} of {program.statements}")


@given(st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_forth_and_back_is_nothing(seed: int) -> None:
    program = Program(seed, undoes=True)
    arrays = program.source
    shapes = {name: array.shape for name, array in program.source.items()}
    forth = compile_aoa(program.statements, shapes)
    there = carried_out(forth, arrays)
    back = compile_aoa(program.statements, {m.name: m.shape for m in forth.made}, reverse=True, wanted=shapes)
    again = carried_out(back, there)
    for name, array in arrays.items():
        np.testing.assert_array_equal(again[name], array, err_msg=str(program.statements))


@pytest.mark.parametrize("seed", range(60))
def test_fusions_by_shards_equal_the_order_of_ranks(seed: int) -> None:
    """`fused_ffn` and `fused_qkv_old`: NumPy concatenates what each rank holds. Forth, back, and from one cut to
    another."""
    rng = random.Random(seed)
    a = rng.choice([1, 2, 3, 4, 6])
    b = rng.choice([1, 2, 4])
    lowest = int(np.lcm(a, b))
    unit = rng.randint(1, 2)
    hidden = rng.randint(1, 3)
    axis = rng.choice([0, 1])
    old = seed % 2 == 1
    groups = lowest
    each = rng.randint(1, 2)
    sizes = (
        {"q": groups * each * unit, "k": groups * unit, "v": groups * unit}
        if old
        else {"g": lowest * unit, "u": lowest * unit}
    )
    parts = numbered({name: (n, hidden)[:: 1 if axis == 0 else -1] for name, n in sizes.items()})

    def fused(shards: int) -> np.ndarray:
        cut = [np.split(part, shards, axis) for part in parts.values()]
        return np.concatenate([part[rank] for rank in range(shards) for part in cut], axis)

    options = f"fused_qkv_old, num_heads={groups * each}, num_key_value_groups={groups}" if old else "fused_ffn"
    options += f", axis={axis}"
    names = ", ".join(parts)
    ways: list[tuple[str, Arrays, Shards, Arrays]] = [
        (f"{names} -> f, {options}", parts, Shards(destination={"f": b}), {"f": fused(b)}),
        (f"f -> {names}, {options}", {"f": fused(a)}, Shards({"f": a}), parts),
        (f"f -> h, {options}", {"f": fused(a)}, Shards({"f": a}, {"h": b}), {"h": fused(b)}),
        (f"f -> f, {options}", {"f": fused(a)}, Shards({"f": a}, {"f": b}), {"f": fused(b)}),
    ]
    for statement, source, shards, want in ways:
        for reverse in (False, True):
            have, goal = (want, source) if reverse else (source, want)
            counts = Shards(shards.destination, shards.source) if reverse else shards
            shapes = {name: array.shape for name, array in have.items()}
            got = carried_out(compile_aoa([statement], shapes, reverse=reverse, shards=counts), have)
            for name, array in goal.items():
                np.testing.assert_array_equal(got[name], array, err_msg=f"{statement} {shards} {reverse=}")


def test_shards_are_told_through_names_on_the_way() -> None:
    """The engine asks the tensor behind a name: one that it was renamed or transposed from, or will be."""
    striped = np.array([[0, 1, 4, 5, 2, 3, 6, 7]])
    for first, second in (
        ("f -> x", "x -> g, u, fused_ffn"),
        ("f^T -> x", "x^T -> g, u, fused_ffn"),
        ("f -> x", "x^T -> g, u, fused_ffn, axis=0"),
    ):
        mapped = compile_aoa([first, second], {"f": (1, 8)}, shards=Shards({"f": 2}))
        got = carried_out(mapped, {"f": striped})
        assert [got[x].ravel().tolist() for x in "gu"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    mapped = compile_aoa(
        ["g, u -> x, fused_ffn", "x -> f"], {"g": (1, 4), "u": (1, 4)}, shards=Shards(destination={"f": 2})
    )
    got = carried_out(mapped, {"g": np.arange(4)[None], "u": np.arange(4, 8)[None]})
    np.testing.assert_array_equal(got["f"], striped)


# -- what it comes to --------------------------------------------------------------------------------------------------


def test_what_no_statement_names_passes_in_the_order_of_the_source() -> None:
    mapped = compile_aoa(
        [
            "layers.$LAYER_ID.mlp.gate^T, layers.$LAYER_ID.mlp.up^T -> l.$LAYER_ID.gu, fused_ffn",
            "head -> _",
            "embed -> e",
        ],
        MODEL,
    )
    rest = [name for name in MODEL if "mlp" not in name and name not in ("embed", "head")]
    at = rest.index("layers.2.v") + 1
    assert names(mapped) == ["e", *rest[:at], "l.0.gu", "l.1.gu", "l.2.gu", *rest[at:]]
    assert mapped.dropped == ("head",)
    same = next(made for made in mapped.made if made.name == "norm")
    assert same.pieces[0].src.name == "norm" and same.pieces[0].numel == 4


def test_the_order_of_a_wanted_list_is_kept() -> None:
    wanted = ["z", "y", "x"]
    assert (
        names(compile_aoa(["a -> x", "b -> y", "c -> z"], {"a": (2,), "b": (2,), "c": (2,)}, wanted=wanted)) == wanted
    )


def test_regular_rows_are_one_piece() -> None:
    """Query heads of all groups step evenly; a stacked grid of experts is one box each."""
    shapes = {"q": (128, 7), "k": (32, 7), "v": (32, 7)}
    mapped = compile_aoa(["q^T, k^T, v^T -> qkv, fused_qkv, num_heads=32, num_key_value_groups=8"], shapes)
    assert len(mapped.made[0].pieces) == 3
    back = compile_aoa(["qkv -> q, k, v, fused_qkv, num_heads=32, num_key_value_groups=8"], {"qkv": (7, 192)})
    assert [len(made.pieces) for made in back.made] == [1, 1, 1]
    assert [
        len(made.pieces) for made in compile_aoa(["a -> b[0:6], axis=0", "b[0:6] -> c, axis=0"], {"a": (6, 2)}).made
    ] == [1]


def test_scalars_and_empty_tensors_pass() -> None:
    mapped = compile_aoa(["scale -> s", "none^T -> n"], {"scale": (), "none": (0, 4)})
    assert [(made.name, made.shape, made.pieces[0].src.name) for made in mapped.made] == [
        ("s", (), "scale"),
        ("n", (4, 0), "none"),
    ]


def test_tied_weights_may_be_read_twice() -> None:
    mapped = compile_aoa(["embed -> model.embed", "embed^T -> head"], {"embed": (3, 2)})
    got = carried_out(mapped, {"embed": np.arange(6).reshape(3, 2)})
    np.testing.assert_array_equal(got["head"], got["model.embed"].T)
    assert names(compile_aoa(["embed -> head"], {"embed": (3, 2)}, wanted=["embed", "head"])) == ["embed", "head"]
    assert names(compile_aoa(["embed -> embed", "embed -> head"], {"embed": (3, 2)})) == ["embed", "head"], (
        "said to stay"
    )
    assert names(compile_aoa(["embed -> x", "x -> embed", "embed -> y"], {"embed": (3, 2)})) == ["y"]


def test_casts_are_told() -> None:
    mapped = compile_aoa(
        ["a -> b, dtype='float32'", "b -> c, dtype='bfloat16'", "d -> e, src_dtype='float32', dst_dtype='float16'"],
        {"a": (2,), "d": (2,)},
    )
    assert {made.name: made.dtype.name for made in mapped.made if made.dtype} == {"c": "BF16", "e": "F16"}
    back = compile_aoa(["d -> e, src_dtype='float32', dst_dtype='float16'"], {"e": (2,)}, reverse=True)
    assert back.made[0].dtype is not None and back.made[0].dtype.name == "F32"


def test_parts_may_be_dropped_in_words() -> None:
    mapped = compile_aoa(["embed -> a, b, axis=0", "b -> _", "layers.*.q -> _", "layers.$LAYER_ID.k -> _"], MODEL)
    assert mapped.dropped == tuple(f"layers.{i}.{x}" for i in range(3) for x in "qk")
    assert compile_aoa(["a -> _", "b -> a", "a -> _", "c -> a"], {"a": (2,), "b": (2,), "c": (2,)}).dropped == (
        "a",
        "b",
    )
    assert "a" in names(mapped) and not {"b", "embed"} & set(names(mapped))


def test_stars_count_by_number_and_on_both_sides() -> None:
    shapes = {f"e.{i}.w": (1, 2) for i in (10, 9, 1)}
    got = carried_out(compile_aoa(["e.*.w -> x, axis=0"], shapes), numbered(shapes))
    assert got["x"][:, 0].tolist() == [numbered(shapes)[f"e.{i}.w"][0, 0] for i in (1, 9, 10)]
    whole = numbered({"x": (2, 3)})
    got = carried_out(compile_aoa(["x -> e.*.w, axis=1"], {"x": (2, 3)}, wanted=[f"e.{i}.w" for i in (2, 0, 1)]), whole)
    assert got["e.1.w"].tolist() == whole["x"][:, 1:2].tolist()
    back = compile_aoa(["e.*.w -> x, axis=0"], {"x": (6, 1)}, reverse=True, wanted=["e.0.w", "e.1.w"])
    assert [(made.name, made.shape) for made in back.made] == [("e.0.w", (3, 1)), ("e.1.w", (3, 1))]


def test_offsets_count_one_lower_on_the_right_in_both_directions() -> None:
    statement = ["a.$LAYER_ID_OFFSET.w^T -> b.$LAYER_ID_OFFSET.w"]
    assert names(compile_aoa(statement, {"a.1.w": (2, 3), "a.2.w": (2, 3)})) == ["b.0.w", "b.1.w"]
    assert names(compile_aoa(statement, {"b.0.w": (2, 3), "b.1.w": (2, 3)}, reverse=True)) == ["a.1.w", "a.2.w"]


def test_a_pattern_that_fits_nothing_may_be_skipped() -> None:
    statements = ["mtp.$LAYER_ID.w^T, mtp.$LAYER_ID.x^T -> m.$LAYER_ID.w, fused_ffn", "gone.*.w -> g, axis=0", "a -> b"]
    assert names(compile_aoa(statements, {"a": (2,)}, skip_unmatched=True)) == ["b"]
    with pytest.raises(UsageError) as e:  # half of it is there
        compile_aoa(statements, {"a": (2,), "mtp.0.w": (2, 2)}, skip_unmatched=True)
    assert e.value.code == "E1208"


def test_thousands_of_experts_cost_seconds_at_most() -> None:
    shapes = {
        f"layers.{i}.experts.{e}.{x}.w": (4, 6) for i in range(20) for e in range(128) for x in ("gate", "up", "down")
    }
    start = time.process_time()
    mapped = compile_aoa(
        [
            "layers.$LAYER_ID.experts.$EXPERT_ID.gate.w^T, layers.$LAYER_ID.experts.$EXPERT_ID.up.w^T"
            " -> l.$LAYER_ID.e.$EXPERT_ID.gu, fused_ffn",
            "layers.$LAYER_ID.experts.$EXPERT_ID.down.w^T -> l.$LAYER_ID.e.$EXPERT_ID.down",
        ],
        shapes,
    )
    assert len(mapped.made) == 2 * 20 * 128
    assert time.process_time() - start < 10


# -- what is refused ---------------------------------------------------------------------------------------------------

QKV = "fused_qkv, num_heads=2, num_key_value_groups=1"
REFUSED = {
    "embed": ("E1200", "0 arrows", "NAME -> NAME"),
    "embed -> a head -> b": ("E1200", "2 arrows", "comma missing"),
    "embed -> a-b": ("E1200", "`-` has no meaning at column 11", "own names"),
    "embed -> ": ("E1200", "want a name at column 9", ""),
    "embed, -> a": ("E1200", "want a name at column 8, found `->`", ""),
    "embed -> a[1]": ("E1200", "START:END", ""),
    "embed -> a, axis=": ("E1200", "wants a number", ""),
    "axis=0 -> a": ("E1200", "before the arrow", ""),
    "embed -> a, b, axs=0": ("E1203", "axs is no attribute", "axis"),
    "embed -> a, b": ("E1203", "a split wants axis=N", "axis"),
    "embed -> a, fused_fnn": ("E1203", "a split wants axis=N", "fused_ffn"),
    "embed, head -> a, axis=0, dtype='float16'": ("E1203", "found axis, dtype", ""),
    "embed -> a, permute='[]', dtype='float16'": ("E1203", "dtype, permute", ""),
    "embed -> a, axis=0, b": ("E1203", "after the attributes", ""),
    "embed -> a, fused_ffn, num_heads=2": ("E1203", "fused_ffn takes no num_heads", "axis"),
    "embed -> a, fused_ffn, fused_qkv": ("E1203", "in one statement", ""),
    "embed -> a, axis='0'": ("E1204", "without quotes", ""),
    "embed -> a, dtype='float8'": ("E1204", "no cast of the language", "float16"),
    "embed -> a, permute='0,1'": ("E1204", "want dims as", ""),
    "embed -> a, b, axis=0, axis=1": ("E1204", "appears twice", ""),
    f"embed -> a, b, c, {QKV}, num_heads=2": ("E1204", "appears twice", ""),
    "embed, head -> a, b, axis=0": ("E1205", "2 names -> 2 names", "two statements"),
    "layers.*.k -> a, b, axis=0": ("E1205", "3 names -> 2 names", ""),
    "layers.$LAYER.q -> a.$LAYER": ("E1206", "`$LAYER` in `layers.$LAYER.q`", "$LAYER_ID"),
    "layers.*.*.q -> a, axis=0": ("E1206", "no name", ""),
    "embed -> a[3:3]": ("E1206", "0 names", ""),
    "embed -> a[0:99999999999]": ("E1206", "names", ""),
    "_ -> _": ("E1206", "is alone", ""),
    "embed, _ -> a, axis=0": ("E1206", "is alone", ""),
    "embed -> a^T": ("E1207", "can't be assigned", "A^T -> a"),
    "layers.$LAYER_ID.qq -> a.$LAYER_ID": ("E1208", "no name of the source fits `layers.$LAYER_ID.qq`", "layers.0.q"),
    "layer.*.q -> a, axis=0": ("E1208", "no name of the source fits", "layers.0.q"),
    "layers.$LAYER_ID.q -> a": ("E1209", "unlike placeholders", ""),
    "layers.$LAYER_ID.experts.$EXPERT_ID.w -> a.$LAYER_ID.w": ("E1209", "unlike placeholders", ""),
    "embed -> layers.*.x, axis=0": ("E1210", "not known", "NAME[START:END]"),
    "layers.$LAYER_ID_OFFSET.q -> a.$LAYER_ID_OFFSET.q": ("E1210", "layer 0 has none below it", ""),
    f"embed -> a, b, {QKV}": ("E1211", "fused_qkv of 1 -> 2 names", "q, k, v -> fused"),
    f"embed, head, embed -> a, {QKV}": ("E1211", "q, k and v are one name", ""),
    "layers.0.q, layers.0.k, layers.0.v -> a, fused_qkv, num_heads=2": ("E1212", "wants num_key_value_groups", ""),
    "layers.0.q, layers.0.k, layers.0.v -> a, fused_qkv, num_heads=3, num_key_value_groups=2": (
        "E1212",
        "no multiple",
        "key-value",
    ),
    "embed -> a, b, c, axis=0": ("E1215", "`embed` is 10 long along axis 0, which 3 parts don't divide", "[10, 4]"),
    "layers.0.q, layers.0.k, layers.0.v -> a, fused_qkv, num_heads=3, num_key_value_groups=1": (
        "E1215",
        "3 parts don't divide (3 heads)",
        "",
    ),
    "norm -> a, b, axis=1": ("E1216", "no axis 1", ""),
    "embed, norm -> a, axis=0": ("E1216", "can't be joined", "other dims"),
    "layers.0.q, layers.0.k -> a, fused_ffn": ("E1216", "can't be joined", "parts of one size"),
    "embed -> a, permute='[0]'": ("E1216", "permute='[0]'", "2 dims"),
    "embed -> a, permute='[0, 0]'": ("E1216", "permute='[0, 0]'", ""),
    "embedd -> a": ("E1218", "`embedd` is read, but nothing has made it", "embed"),
    "embed -> head": ("E1219", "`head` is overwritten before anything reads it", "head -> _"),
    "_ -> head": ("E1221", "the source has it", ""),
}


@pytest.mark.parametrize("statement", REFUSED)
def test_refused_in_words(statement: str) -> None:
    code, message, hint = REFUSED[statement]
    with pytest.raises(UsageError) as e:
        compile_aoa(["norm -> norm", statement], MODEL)
    assert e.value.code == code, e.value
    assert message in e.value.message
    assert hint in (e.value.hint or "")
    assert e.value.place == f"statement 2 `{' '.join(statement.split())}`"


PROGRAMS = [
    ("E1217", ["embed -> a, dtype='float16'", "a -> b, dtype='bfloat16'"], {}, "`a` is cast to F16 and then to BF16"),
    ("E1217", ["embed -> a, dtype='float16'", "a, head -> b, axis=0"], {}, "`a` is cast to F16 and `head` to nothing"),
    ("E1218", ["embed -> _", "embed -> a"], {}, "`embed` is read, but nothing has made it"),
    ("E1219", ["embed -> a", "head -> a"], {}, "`a` is made again, and nothing has read what statement 1 made"),
    (
        "E1219",
        ["embed -> _"],
        {"wanted": [n for n in MODEL if n not in ("embed", "norm")]},
        "`norm` is read by no statement",
    ),
    ("E1220", [], {"wanted": [*MODEL, "heat"]}, "`heat` is made of nothing"),
    ("E1221", ["embed -> a", "embed -> _"], {}, "`embed` is dropped, but statement 1 reads it"),
    ("E1221", ["_ -> a", "embed -> a"], {}, "statement 1 says that `a` has no source, but statement 2 makes it"),
    ("E1222", ["embed -> emb"], {"wanted": list(MODEL)}, "`emb` is made, but nothing reads it"),
    ("E1222", ["_ -> heat"], {"wanted": list(MODEL)}, "the destination has none of that name"),
    ("E1223", ["embed -> a, b, axis=0", "embed -> c"], {}, "elements of the source's `embed` are read twice"),
    (
        "E1223",
        ["embed -> a, b, axis=0", "embed, head -> c, axis=0"],
        {},
        "elements of the source's `embed` are read twice",
    ),
    (
        "E1224",
        ["head -> head"],
        {"wanted": {**MODEL, "head": (4, 10)}},
        "`head` comes out as [10, 4], the destination has [4, 10]",
    ),
    ("E1214", ["embed -> a, dtype='float16'"], {"reverse": True}, "dtype= can't be run in reverse"),
    (
        "E1213",
        ["embed, head -> a, axis=1", "a -> g, u, fused_ffn"],
        {"shards": Shards({"embed": 2})},
        "tensors of 1, 2 shards",
    ),
    (
        "E1212",
        ["layers.0.k -> x, fused_qkv_old, num_heads=2, num_key_value_groups=1"],
        {"shards": Shards({"layers.0.k": 2})},
        "2 and 1 heads don't divide into 2 shards",
    ),
    ("E1210", ["_ -> a.$LAYER_ID.x"], {}, "not known"),
    (
        "E1219",
        ["embed -> a", "head -> b"],
        {"reverse": True, "shapes": {"a": (2,), "b": (2,), "embed": (2,)}},
        "overwritten",
    ),
]


@pytest.mark.parametrize(("code", "statements", "options", "message"), PROGRAMS)
def test_programs_that_lose_or_double(
    code: str, statements: list[str], options: dict[str, object], message: str
) -> None:
    shapes = options.pop("shapes", MODEL) if "shapes" in options else MODEL
    with pytest.raises(UsageError) as e:
        compile_aoa(statements, shapes, **options)  # type: ignore[arg-type]
    assert e.value.code == code, (e.value, e.value.faults)
    assert message in e.value.message


def test_all_faults_come_at_once_with_their_statements() -> None:
    with pytest.raises(UsageError) as e:
        compile_aoa(
            [
                "embed -> a, b, c, axis=0",
                "hed -> z",
                "head -> x, axs=1",
                "layers.$LAYER_ID.zz -> y.$LAYER_ID",
                "layers.$LAYER_ID.q -> l.$LAYER_ID.a, l.$LAYER_ID.b, l.$LAYER_ID.c, axis=1",
                "norm -> n^T",
                "a, b -> ab, axis=0",
            ],
            MODEL,
        )
    assert e.value.place == "statement 1 `embed -> a, b, c, axis=0`"
    told = "\n".join(e.value.faults)
    for number, code in ((3, "E1203"), (4, "E1208"), (5, "E1215"), (6, "E1207")):
        assert f"statement {number}: " in told and f"[{code}]" in told
    assert "statement 7" not in told, "what follows from another fault is no fault of its own"


def test_faults_of_every_layer_are_counted() -> None:
    shapes = {f"layers.{i}.q": (3, 4) for i in range(40)}
    with pytest.raises(UsageError) as e:
        compile_aoa(["layers.$LAYER_ID.q -> l.$LAYER_ID.a, l.$LAYER_ID.b, axis=0"], shapes)
    assert len(e.value.faults) == 3 and e.value.faults[-1] == "statement 1: 37 more like these [E1215]"


def test_a_partner_that_lacks_in_one_layer_shows() -> None:
    shapes = {name: shape for name, shape in MODEL.items() if name != "layers.1.mlp.gate"}
    with pytest.raises(UsageError) as e:
        compile_aoa(["layers.$LAYER_ID.mlp.gate, layers.$LAYER_ID.mlp.up -> l.$LAYER_ID.gu, fused_ffn"], shapes)
    assert e.value.code == "E1218" and "layers.1.mlp.gate" in e.value.message


# -- files -------------------------------------------------------------------------------------------------------------


def test_reads_json_and_plain_text() -> None:
    config = {"aoa_statements": ["a -> b", "c -> _"], "aoa_config_reverse": True, "enable_traceback": False}
    assert read_aoa(json.dumps(config)) == AoaText(["a -> b", "c -> _"], True)
    assert read_aoa(' ["a -> b"]') == AoaText(["a -> b"], False)
    assert read_aoa("# names\n\n a -> b   # the one\nc -> _\n") == AoaText(["a -> b", "c -> _"], False)


BAD_FILES = {
    "# nothing\n": "E1201",
    "{": "E1201",
    '{"aoa_statements": ["a -> b"], "aoa_statements": []}': "E1202",
    '{"aoa_statement": ["a -> b"]}': "E1202",
    '{"aoa_statements": "a -> b"}': "E1202",
    '{"aoa_statements": [1]}': "E1202",
    '{"aoa_statements": [], "aoa_config_reverse": 1}': "E1202",
    '["a -> b", [1]]': "E1202",
    "[" * 100_000: "E1201",
}


@pytest.mark.parametrize("text", BAD_FILES, ids=lambda text: text[:30])
def test_bad_files(text: str) -> None:
    with pytest.raises(UsageError) as e:
        read_aoa(text)
    assert e.value.code == BAD_FILES[text]


@given(st.text(alphabet="abT^_$*.,->=[]:0123 '\"axis\n", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_program_or_an_error_of_ours(text: str) -> None:
    for reverse in (False, True):
        try:
            compile_aoa([text], {"a": (2, 2), "a.0": (2, 2), "b": (2,)}, reverse=reverse)
        except UsageError as e:
            assert e.code.startswith("E12")
