"""Folding names: nothing is lost or made up, equal subtrees share a line, one that differs stands alone."""

from __future__ import annotations

import itertools
import re
import time

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.report.folding import Folding
from ckpt_tool.report.tree import FoldedTree, Line

SEGMENT = st.sampled_from(["0", "1", "2", "3", "10", "a", "b", "weight", "01", "", "٣"])
NAMES = st.lists(st.lists(SEGMENT, min_size=1, max_size=5).map(".".join), unique=True, max_size=60)


def leaves(lines: list[Line]) -> int:
    return sum(line.copies for line in lines if line.what is not None)


@given(NAMES, st.integers(0, 2))
def test_every_tensor_is_on_one_line(names: list[str], kinds: int) -> None:
    tensors = [(name, len(name) % (kinds + 1), len(name) + 1) for name in names]
    lines = FoldedTree(tensors).lines(depth=99)
    assert leaves(lines) == len(names)
    top = [line for line in lines if line.level == 0]
    assert sum(line.tensors for line in top) == len(names)
    assert sum(line.nbytes for line in top) == sum(nbytes for _, _, nbytes in tensors)


@given(NAMES)
def test_the_names_can_be_read_back(names: list[str]) -> None:
    """Another road: unfold every label of the printed tree and compare with the names (numbers without gaps)."""
    trail: list[str] = []
    found: set[str] = set()
    for line in FoldedTree((name, 0, 1) for name in names).lines(depth=99):
        del trail[line.level :]
        if line.label == "(itself)":
            found |= expanded(".".join(trail))
            continue
        trail.append(line.label)
        if line.what is not None:
            found |= expanded(".".join(trail))
    assert found == set(names)


def expanded(label: str) -> set[str]:
    parts = re.split(r"\[([^\]]*)\]", label)
    choices: list[list[str]] = []
    for number, part in enumerate(parts):
        choices.append([part] if number % 2 == 0 else numbers(part))
    return {"".join(choice) for choice in itertools.product(*choices)}


def numbers(text: str) -> list[str]:
    if " step " in text:
        span, _, step = text.partition(" step ")
        low, high = map(int, span.split("-"))
        return [str(n) for n in range(low, high + 1, int(step))]
    found = []
    for run in text.split(","):
        low, _, high = run.partition("-")
        found += [str(n) for n in range(int(low), int(high or low) + 1)]
    return found


def llama(layers: int, *, odd: int | None = None) -> list[tuple[str, str, int]]:
    names = ["embed.weight"]
    for layer in range(layers):
        names += [f"layers.{layer}.{name}.weight" for name in ("norm", "mlp.up", "mlp.down", "attn.q", "attn.k")]
    return [(name, "F32" if odd is not None and f".{odd}." in name else "BF16", 2) for name in names]


def test_layers_share_a_line() -> None:
    lines = FoldedTree(llama(32)).lines()
    assert [(line.level, line.label) for line in lines] == [
        (0, "embed.weight"),
        (0, "layers.[0-31]"),
        (1, "norm.weight"),
        (1, "mlp"),
        (2, "up.weight"),
        (2, "down.weight"),
        (1, "attn"),
        (2, "q.weight"),
        (2, "k.weight"),
    ]
    assert lines[1].tensors == 160 and lines[1].nbytes == 320 and lines[3].copies == 32


def test_a_layer_of_another_dtype_stands_alone() -> None:
    labels = [line.label for line in FoldedTree(llama(32, odd=7)).lines() if line.level == 0]
    assert labels == ["embed.weight", "layers.[0-6,8-31]", "layers.7"]


def test_a_layer_with_a_missing_tensor_stands_alone() -> None:
    tensors = [row for row in llama(4) if row[0] != "layers.2.attn.k.weight"]
    assert [line.label for line in FoldedTree(tensors).lines(depth=1)] == ["embed.weight", "layers.[0-1,3]", "layers.2"]


def test_a_repeated_subtree_names_its_twin() -> None:
    tensors = [(f"{side}.{layer}.{name}", "F32", 4) for side in ("enc", "dec") for layer in range(3) for name in "abc"]
    lines = FoldedTree(tensors).lines(most=6)
    assert [(line.label, line.twin) for line in lines] == [
        ("enc.[0-2]", ""),
        ("a", ""),
        ("b", ""),
        ("c", ""),
        ("dec.[0-2]", "enc.[0-2]"),
    ]
    assert not any(line.twin for line in FoldedTree(tensors).lines(depth=9)), "an asked-for depth shows everything"


def test_ninety_thousand_names_are_a_screenful_in_a_second() -> None:
    tensors = [("model.embed.weight", "BF16", 100)]
    for layer, expert in itertools.product(range(60), range(256)):
        for name in ("gate.weight", "up.weight", "down.weight"):
            tensors.append((f"model.layers.{layer}.mlp.experts.{expert}.{name}", "BF16", 6))
            tensors.append((f"model.layers.{layer}.mlp.experts.{expert}.{name}_scale", "F32", 1))
    began = time.process_time()
    lines = FoldedTree(tensors).lines()
    assert time.process_time() - began < 3.0  # about 0.2 s alone; the bound is for a busy machine
    assert len(tensors) > 90_000 and len(lines) < 50
    assert lines[0].tensors == len(tensors)


def test_a_hostile_name_makes_no_deep_tree() -> None:
    name = ".".join("a" * 200_000)
    (line,) = FoldedTree([(name, 0, 1)]).lines()
    assert line.tensors == 1 and line.level == 0


def test_numbers_that_are_none_stay_names() -> None:
    labels = {line.label for line in FoldedTree((f"x.{n}.w", 0, 1) for n in ("01", "1", "٣", "9" * 30)).lines(depth=9)}
    assert labels == {"x", "01.w", "1.w", "٣.w", "9" * 30 + ".w"}


def test_the_order_of_a_layers_tensors_makes_no_difference() -> None:
    """Files are cut anywhere and sort by dtype first, so equal layers come in different orders."""
    rows = llama(3)
    tensors = [*rows[:6], *reversed(rows[6:11]), *rows[11:]]
    assert [line.label for line in FoldedTree(tensors).lines(depth=1)] == ["embed.weight", "layers.[0-2]"]


def test_columns_fold_as_rows_do() -> None:
    rows = [*llama(12), ("7.head", "F32", 4), (".", "F32", 4), ("", "F32", 4), ("a\nb.3", "F32", 4)]
    folding = Folding()
    for part in (rows[:20], rows[20:]):
        folding.add([name.encode() for name, _, _ in part], [folding.leaf(what, size) for _, what, size in part])
    assert FoldedTree(folding).lines(depth=9) == FoldedTree(rows).lines(depth=9)
