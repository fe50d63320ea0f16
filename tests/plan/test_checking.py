"""What makes no sense in a plan is found, kind by kind, and nothing is found in plans that are made."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.cli import run
from ckpt_tool.core.box import Box
from ckpt_tool.errors import CkptError
from ckpt_tool.plan.checking import box_of
from ckpt_tool.plan.copy import box_region
from ckpt_tool.plan.saved import read_plan
from ckpt_tool.plan.spans import Comb, Span, comb_of, first_clash, meets_itself

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCE = "dcp/fsdp2_dp4"
OPTIONS = ["--to", "sharded", "--tp", "2", "--dp", "3", "--on-indivisible", "pad"]
# of a move
NUMEL = 4
ITEM = 5
ITEM_OUT = 6
SOURCES = 7
OUTPUTS = 8
FILE, OFFSET, AT, EXTENTS, STRIDES, STEPS, REPLICA = range(7)  # of a region


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A plan with strided cuts, padding, checksummed records and digests, and a side file."""
    folder = tmp_path_factory.mktemp("plan")
    arguments = [
        "convert",
        str(FIXTURES / SOURCE),
        str(folder / "out"),
        *OPTIONS,
        "--plan",
        str(folder / "p.json"),
        "-q",
    ]
    assert run(arguments) == 0
    made: dict[str, Any] = json.loads((folder / "p.json").read_text())
    made["sources"].append([made["sources"][0][0], "README.md", [1, 2, 3, 4, 5]])
    made["outputs"].append(
        {"path": "README.md", "size": 3, "literals": [], "patches": [], "copy_of": "README.md", "arrays": []}
    )
    return made


def cut(d: Any) -> Any:
    """A move with several outputs, the first of which is strided."""
    return next(move for move in d["moves"] if len(move[OUTPUTS]) > 1 and len(move[OUTPUTS][0][EXTENTS]) > 1)


def whole(d: Any) -> Any:
    return next(move for move in d["moves"] if move[NUMEL] > 8)


def holed(d: Any) -> Any:
    return next(file for file in d["outputs"] if file["patches"])


def shift(region: list[Any], place: int, by: int) -> None:
    region[place] += by


EDITS: dict[str, Callable[[Any], Any]] = {
    "a move is lost": lambda d: d["moves"].pop(3),
    "a move comes twice": lambda d: d["moves"].append(d["moves"][3]),
    "two tensors at one place": lambda d: cut(d)[OUTPUTS].__setitem__(
        0, next(m for m in d["moves"] if m is not cut(d))[OUTPUTS][0]
    ),
    "an output region is lost": lambda d: cut(d)[OUTPUTS].pop(),
    "a source region is lost": lambda d: whole(d)[SOURCES].pop(),
    "a source region twice": lambda d: whole(d)[SOURCES].append(whole(d)[SOURCES][0]),
    "the only copy is called a replica": lambda d: shift(whole(d)[SOURCES][0], REPLICA, 1),
    "an output steps nowhere in its file": lambda d: cut(d)[OUTPUTS][0][STRIDES].__setitem__(0, 0),
    "an output steps on itself": lambda d: cut(d)[OUTPUTS][0][STRIDES].__setitem__(0, cut(d)[ITEM_OUT]),
    "a step of nothing along the line": lambda d: cut(d)[OUTPUTS][0][STEPS].__setitem__(0, 0),
    "another place in the line": lambda d: shift(cut(d)[OUTPUTS][0], AT, 1),
    "beyond the line": lambda d: shift(whole(d)[SOURCES][0], AT, whole(d)[NUMEL]),
    "an output moved by a byte": lambda d: shift(cut(d)[OUTPUTS][0], OFFSET, 1),
    "an output outside its file": lambda d: shift(cut(d)[OUTPUTS][0], OFFSET, 1 << 40),
    "a source outside its file": lambda d: shift(whole(d)[SOURCES][0], OFFSET, 1 << 40),
    "a source of parts of elements": lambda d: whole(d)[SOURCES][0][STRIDES].__setitem__(-1, 1),
    "no such output file": lambda d: cut(d)[OUTPUTS][0].__setitem__(FILE, 999),
    "no such source file": lambda d: whole(d)[SOURCES][0].__setitem__(FILE, 999),
    "an extent of nothing": lambda d: cut(d)[OUTPUTS][0][EXTENTS].__setitem__(0, 0),
    "a dim too many": lambda d: cut(d)[OUTPUTS][0][EXTENTS].append(1),
    "another number of elements": lambda d: whole(d).__setitem__(NUMEL, whole(d)[NUMEL] - 1),
    "another size of element": lambda d: whole(d).__setitem__(ITEM, 2),
    "another size of element written": lambda d: whole(d).__setitem__(ITEM_OUT, 2),
    "another shape": lambda d: whole(d)[1].append(2),
    "another dtype": lambda d: whole(d).__setitem__(2, "F64"),
    "a dtype that nothing becomes": lambda d: whole(d).__setitem__(3, "C64"),
    "no dtype": lambda d: whole(d).__setitem__(2, "F33"),
    "a truth for a number": lambda d: whole(d).__setitem__(NUMEL, True),
    "a fraction for a number": lambda d: whole(d).__setitem__(NUMEL, float(whole(d)[NUMEL])),
    "a number of 400 digits": lambda d: shift(whole(d)[SOURCES][0], OFFSET, 10**399),
    "an array is lost": lambda d: next(f for f in d["outputs"] if f["arrays"])["arrays"].pop(),
    "an array of another tensor": lambda d: next(f for f in d["outputs"] if f["arrays"])["arrays"][0].__setitem__(
        2, 0xBAD
    ),
    "a smaller file": lambda d: d["outputs"][0].__setitem__("size", d["outputs"][0]["size"] - 1),
    "a literal over an array": lambda d: d["outputs"][0]["literals"][0].__setitem__(0, 64),
    "a literal twice": lambda d: d["outputs"][0]["literals"].append(d["outputs"][0]["literals"][0]),
    "a literal outside": lambda d: d["outputs"][0]["literals"].append([1 << 40, "AAAA"]),
    "no base64": lambda d: d["outputs"][0]["literals"].append([0, "*"]),
    "a hole outside": lambda d: holed(d)["patches"][0].__setitem__(0, holed(d)["size"] - 3),
    "two holes in one place": lambda d: holed(d)["patches"][0].__setitem__(0, holed(d)["patches"][1][0]),
    "a hole over values": lambda d: d["outputs"][0]["patches"].append([d["outputs"][0]["size"] - 32, "digest", 0]),
    "a hole of no tensor": lambda d: holed(d)["patches"][0].__setitem__(2, len(d["moves"])),
    "a hole of no kind": lambda d: holed(d)["patches"][0].__setitem__(1, "md5"),
    "hashes of each other": lambda d: [f["patches"].append([0, "sha256", 0]) for f in d["outputs"][:2]],
    "a copy of nothing": lambda d: d["outputs"][-1].__setitem__("copy_of", "LICENSE"),
    "a copy of another size": lambda d: d["outputs"][-1].__setitem__("size", 4),
    "a copy with a head": lambda d: d["outputs"][-1]["literals"].append([0, "AAAA"]),
    "a file outside": lambda d: d["outputs"][0].__setitem__("path", "../x"),
    "two files of one name": lambda d: d["outputs"][0].__setitem__("path", d["outputs"][1]["path"]),
    "one file of two": lambda d: d.__setitem__("single", d["outputs"][0]["path"]),
    "a source outside": lambda d: d["sources"][0].__setitem__(1, "../x"),
    "a source without size": lambda d: d["sources"][0][2].pop(),
    "a record outside": lambda d: d["records"].append([0, 1 << 40, 4, 0]),
    "a record of no file": lambda d: d["records"].append([999, 0, 4, 0]),
    "a relative destination": lambda d: d.__setitem__("destination", "out"),
    "no destination": lambda d: d.__setitem__("destination", "/"),
    "options of another type": lambda d: d["options"].__setitem__("unlisted", [["w"]]),
    "an unlisted tensor that is none": lambda d: d["options"].__setitem__("unlisted", [["w", "step"]]),
    "another version": lambda d: d.__setitem__("plan_version", 1),
}


def test_the_plan_as_it_was_made_is_sound(document: dict[str, Any]) -> None:
    assert json.dumps(read_plan(document, "p.json").to_json()["moves"]) == json.dumps(document["moves"])


@pytest.mark.parametrize("what", list(EDITS))
def test_what_makes_no_sense_is_found(document: dict[str, Any], what: str) -> None:
    edited = copy.deepcopy(document)
    EDITS[what](edited)
    assert json.dumps(edited) != json.dumps(document)
    with pytest.raises(CkptError) as caught:
        read_plan(edited, "p.json")
    assert (caught.value.exit_code, caught.value.code) in ((6, "E0610"), (4, "E1600")), caught.value
    assert caught.value.path == "p.json" and caught.value.hint


@pytest.mark.parametrize("what", ["sound", "no dims", "a dim twice", "too many", "digest"])
def test_the_order_of_a_line_is_held_against_its_tensor(what: str, tmp_path: Path) -> None:
    """A file in Hugging Face's layout as a file in Hugging Face's layout, by way of tensors in Paddle's."""
    source = FIXTURES / "paddle-unified/llama_tied_hf"
    order = -1
    plan = ["--plan", str(tmp_path / "p.json"), "-q"]
    assert run(["convert", str(source), str(tmp_path / "out"), "--to", "paddle-unified", *plan]) == 0
    made = json.loads((tmp_path / "p.json").read_text())
    number, move = next((i, move) for i, move in enumerate(made["moves"]) if len(move) > 9)
    move[order] = {"no dims": [2, 3], "a dim twice": [0, 0], "too many": [1, 0, 2]}.get(what, [1, 0])
    if what == "digest":
        made["outputs"][0]["patches"].append([8, "digest", number])
    if what == "sound":
        assert json.dumps(read_plan(made, "p.json").to_json()["moves"]) == json.dumps(made["moves"])
        return
    with pytest.raises(CkptError) as caught:
        read_plan(made, "p.json")
    assert caught.value.code == "E0610"


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.randoms(use_true_random=False))
def test_a_region_is_a_box_when_it_is_one(shape: tuple[int, ...], rng: random.Random) -> None:
    """Against a region's elements, written out: made regions give their box back, any other gives None or what it
    holds."""
    low = [rng.randrange(n) for n in shape]
    box = Box(tuple(low), tuple(rng.randint(1, n - o) for n, o in zip(shape, low, strict=True)))
    made = box_region(shape, box, 4, 0, 0)
    assert box_of(shape, made.at, made.extents, made.steps) == box
    numbers = [rng.randint(0, 3) for _ in made.extents]
    other = [max(2, n + d - 1) for n, d in zip(made.extents, numbers, strict=True)]
    steps = [max(0, s + rng.choice([0, 0, 1, -1])) for s in made.steps]
    at = max(0, made.at + rng.choice([0, 0, 1]))
    found = box_of(shape, at, other, steps)
    if found is not None:
        strides = [1] * len(shape)
        for d in range(len(shape) - 2, -1, -1):
            strides[d] = strides[d + 1] * shape[d + 1]
        lines = {sum(i * s for i, s in zip(index, steps, strict=True)) + at for index in product(*map(range, other))}
        cells = product(*(range(o, o + n) for o, n in zip(found.offset, found.shape, strict=True)))
        assert lines == {sum(i * s for i, s in zip(cell, strides, strict=True)) for cell in cells}
        assert found.inside(shape)


@given(st.randoms(use_true_random=False))
def test_spans_that_are_passed_share_no_byte(rng: random.Random) -> None:
    """Against sets of bytes; what our own arrays look like (nested strides, one pitch) is passed when it is
    disjoint."""
    spans = []
    sets = []
    alike = True
    pitch = rng.choice([8, 12, 16])
    for _ in range(rng.randint(1, 5)):
        rows = rng.randint(1, 4)
        width = rng.randint(1, 4)
        start = rng.randrange(40)
        step = pitch if rng.random() < 0.8 else rng.choice([4, 6, 10])
        extents = (rows, width)
        strides = (step, 1)
        held = [start + i * step + j for i in range(rows) for j in range(width)]
        assert meets_itself(extents, strides, 1) == (len(set(held)) < len(held)) or step < width * 2
        if meets_itself(extents, strides, 1):
            continue
        spans.append(Span(start, max(held) + 1, comb_of(start, extents, strides, 1)))
        sets.append(set(held))
        alike = alike and (step == pitch and rows > 1 and width < pitch)
    disjoint = sum(map(len, sets)) == len(set().union(*sets))
    clash = first_clash(spans)
    if clash is None:
        assert disjoint
    elif alike and disjoint:  # teeth go on to the end of a span, whether the last row is full or not
        ends = [(span.start, span.stop) for span in spans]
        assert any(a < d and c < b for i, (a, b) in enumerate(ends) for c, d in ends[:i])
        assert any((x - y) % pitch == 0 for i, s in enumerate(sets) for t in sets[:i] for x in s for y in t)


def test_many_combs_are_parted_quickly() -> None:
    """A hundred thousand columns of one matrix: n log n, not every pair."""
    count = 100_000
    spans = [Span(2 * i, 2 * i + 9 * 2 * count + 2, Comb(2 * i, 2 * count, 2)) for i in range(count)]
    random.Random(0).shuffle(spans)
    assert first_clash(spans) is None
    assert first_clash([*spans, Span(7, 9 * 2 * count, Comb(7, 2 * count, 1))]) is not None
