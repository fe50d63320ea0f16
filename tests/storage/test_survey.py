"""Every pickle and every name is found by the survey, whatever it lies in and however broken it is; and it never
raises."""

from __future__ import annotations

import importlib.util
import io
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.storage.pickles.survey import survey, unsafe_names
from ckpt_tool.storage.source import Tree

ROOT = Path(__file__).resolve().parents[1]


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"survey_{name}", ROOT / "hostile" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[spec.name] = module  # type: ignore[union-attr]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


PICKLES = _load("pickle_cases")
CALL = PICKLES.called("posix", "system", PICKLES.text("true"))
EVIL = b"\x80\x02" + PICKLES.beside(CALL)[2:]


def zipped(method: int = zipfile.ZIP_STORED, name: str = "data.pkl", data: bytes = EVIL) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as packed:
        packed.writestr(zipfile.ZipInfo(f"model/{name}"), data, method)
        packed.writestr(zipfile.ZipInfo("model/data/0"), bytes(24))
    return out.getvalue()


def tarred(data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as packed:
        for name, value in (("config.yaml", b"a: 1"), ("weights.ckpt", data)):
            info = tarfile.TarInfo(name)
            info.size = len(value)
            packed.addfile(info, io.BytesIO(value))
    return out.getvalue()


def objects() -> bytes:
    """A NumPy file of objects whose pickle is ours."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return out.getvalue() + EVIL


HARMLESS = PICKLES.zipped(PICKLES.state(w=PICKLES.tensor()))
SAFE = (2).to_bytes(8, "little") + b"{}"
FILES = {
    "bare": EVIL,
    "protocol 0": b"cposix\nsystem\n(Vtrue\ntR.",
    "a second stream": b"\x80\x02}." + EVIL,
    "behind a broken opcode": b"\x80\x02]K\x01K\x02s" + CALL + b".",  # SETITEM on a list
    "behind an object of a class that is refused": b"\x80\x02"
    + PICKLES.name("torchao.optim", "Q")
    + b")\x81}b0"
    + CALL
    + b".",
    "by STACK_GLOBAL behind a break": b"\x80\x04]K\x01K\x02s"
    + PICKLES.text("posix")
    + PICKLES.text("system")
    + b"\x93.",
    "by the memo behind a break": b"\x80\x04"
    + PICKLES.text("posix")
    + b"q\x00"
    + PICKLES.text("system")
    + b"q\x01]K\x01K\x02s"
    + b"h\x00h\x01\x93.",
    "behind a large string": b"\x80\x02]K\x01K\x02sB" + (9000).to_bytes(4, "little") + bytes(9000) + CALL + b".",
    "a zip": zipped(),
    "a zip cut short": zipped()[:-60],
    "a zip behind other bytes": b"\0" * 300 + zipped(),
    "a zip behind safetensors": SAFE + zipped(),
    "a zip with another pickle": zipped(name="extra/constants.pkl"),
    "back to back, the last": HARMLESS + zipped(),
    "back to back, the first": zipped() + HARMLESS + HARMLESS,
    "in a tar": tarred(zipped()),
    "a NumPy file": objects(),
    "in an npz": zipped(name="w.npy", data=objects()),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_name_is_found(kind: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(FILES[kind])
    (tmp_path / "y.json").write_text("{}")
    tree = Tree(tmp_path)
    found = list(survey(tree))
    assert {one.path for one in found} == {"x.bin"}
    assert any(str(use) == "posix.system" for one in found for use in one.uses), found
    assert len(unsafe_names(tree, ["x.bin"])) >= 1


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (zipped(zipfile.ZIP_DEFLATED), "compressed"),
        (zipped(name="other")[:18] + bytes(8) + zipped(name="other")[26:-60], "no directory"),
        (EVIL[:-1], "broken at byte"),
        (b"\x80\x02\xff" + EVIL, "broken at byte 3"),
    ],
)
def test_what_can_not_be_looked_into_is_said(data: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(data)
    assert any(word in one.unseen for one in survey(Tree(tmp_path))), list(survey(Tree(tmp_path)))


@pytest.mark.parametrize(
    "data", [b"", b"{}", SAFE, b"class Foo\nbar\n(x", b"(this is text)\n", b"}]}]" * 100, b"PK\x05\x06" + bytes(18)]
)
def test_what_is_no_pickle_is_not_listed(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(data)
    assert not list(survey(Tree(tmp_path)))


@pytest.mark.share(3)
@pytest.mark.parametrize("case", [pytest.param(case, id=case[0]) for case in PICKLES.CASES])
def test_no_hostile_pickle_ends_the_survey(case: Any, tmp_path: Path) -> None:
    source = case[1](tmp_path)
    tree = Tree(source)
    found = list(survey(tree))
    if (
        case[2] == PICKLES.SHOWN and case[3] and not case[0].startswith("D14")
    ):  # (a class of the frameworks', with a tensor)
        assert any(str(use) for one in found for use in one.uses if use.tier == 3), case[0]
    assert not (tmp_path / "canary").exists()


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(FILES)),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=4)), max_size=4),
)
def test_damage_never_ends_it(tmp_path_factory: Any, kind: str, edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(FILES[kind])
    for at, value in edits:
        data[at % len(data) : at % len(data) + len(value)] = value
    path = tmp_path_factory.mktemp("damage") / "x.bin"
    path.write_bytes(bytes(data))
    list(survey(Tree(path)))
