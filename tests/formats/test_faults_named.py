"""A fault names the file that has it, in every format: of several broken files each, of a gap the one that lacks the
part."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.core.catalog import Catalog, mark_replicas
from ckpt_tool.core.faults import both, read_each
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, UnsafeInput
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).parents[2] / "fixtures"
TELLING = {  # many tensors lie alike there
    "torch/ranks_tp2_dp2",
    "sharded/llama_tp4_pp2",
    "megatron/moe_tp2ep2etp1",
    "deepspeed/z3_bf16_dp4",
    "paddle/llama_bf16_legacy_tp2",
    "paddle-unified/ernie_nm_tp2",
    "meta/llama2_tp2",
    "meta/llama3_tp4",
}
NOT_DATA = re.compile(r"saved_signal_\d+|.*\.(json|txt|md|py|jinja)|latest.*|RNG.*")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    noise = random.Random(7).randbytes(96)
    data[: len(noise)] = noise[: len(data)]
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {"cut": cut, "overwrite": overwrite}


def alike(folder: Path) -> Iterator[list[Path]]:
    """Data files of one kind: their names differ in numbers alone."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not NOT_DATA.fullmatch(path.name):
            name = path.relative_to(folder).as_posix()
            groups.setdefault(re.sub(r"\d+", "#", name), []).append(path.relative_to(folder))
    yield from (group for group in groups.values() if len(group) > 1)


def cases() -> Iterator[Any]:
    for name in registry.NAMES:
        for folder in sorted((FIXTURES / name).glob("*")):
            if folder.is_dir():
                for group in alike(folder):
                    yield pytest.param(name, folder, group, id=f"{name}-{folder.name}-{group[0].as_posix()}")


def test_every_format_of_several_files_is_here() -> None:
    assert len({param.values[0] for param in cases()}) >= 11


@pytest.mark.share(36)
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(("name", "folder", "group"), list(cases()))
def test_every_broken_file_is_named_at_once(
    name: str, folder: Path, group: list[Path], how: str, tmp_path: Path
) -> None:
    source = tmp_path / "c"
    shutil.copytree(folder, source)
    broken = [group[0], group[len(group) // 2], group[-1]]
    try:
        whole = open_source(str(source), Reading(from_format=name))
    except CkptError:
        pytest.skip("a fixture that is read otherwise")
    used = {(whole.tree.root / path).relative_to(source.resolve()) for path in whole.catalog.files}
    felt = [path for path in dict.fromkeys(broken) if path in used and breaks(source, path, name, how)]
    if len(felt) < 2:
        pytest.skip("files that this reading has no use for")
    for path in felt:
        DAMAGES[how](source / path)
    with pytest.raises(CkptError) as caught:
        open_source(str(source), Reading(from_format=name)).catalog.check()
    lines = [f"{caught.value.message} {caught.value.where()}", *caught.value.faults]
    unnamed = [path for path in felt if not any(path.as_posix() in line for line in lines)]
    assert not unnamed or (len(lines) >= len(felt) and all(path.name in " ".join(lines) for path in unnamed)), lines


def breaks(source: Path, path: Path, name: str, how: str) -> bool:
    """Does reading fail where this file alone is broken? Then it is the file that is named."""
    kept = (source / path).read_bytes()
    DAMAGES[how](source / path)
    try:
        open_source(str(source), Reading(from_format=name)).catalog.check()
    except CkptError as error:
        assert path.name in f"{error.message} {error.where()}", (str(path), error.message, error.where())
        return True
    finally:
        (source / path).write_bytes(kept)
    return False


# -- gaps --------------------------------------------------------------------------------------------------------------


def parted() -> Iterator[Any]:
    for name in registry.NAMES:
        for folder in sorted((FIXTURES / name).glob("*")):
            if folder.is_dir():
                yield pytest.param(name, folder, id=f"{name}-{folder.name}")


def without(catalog: Catalog, tensor: LogicalTensor, number: int) -> tuple[Catalog, set[str]]:
    """(the catalog without one box of the tensor and its replicas, the files that hold no part of it any more)."""
    gone = tensor.chunks[number].box
    kept = mark_replicas([chunk for chunk in tensor.chunks if (chunk.box & gone) is None])
    lost = {chunk.array.path for chunk in tensor.chunks} - {chunk.array.path for chunk in kept}
    short = tensor._replace(chunks=kept)
    return replace(catalog, tensors={**dict(catalog.tensors.items()), tensor.key: short}), lost


@pytest.mark.share(3)
@pytest.mark.parametrize(("name", "folder"), list(parted()))
def test_a_gap_is_never_laid_to_a_file_that_is_whole(name: str, folder: Path) -> None:
    """Every placement of the fixtures, and of each some tensors without one of their boxes."""
    try:
        catalog = open_source(str(folder), Reading(from_format=name)).catalog
    except CkptError:
        pytest.skip("a fixture that is read otherwise")
    named = 0
    many = [tensor for tensor in catalog.tensors.values() if len({chunk.array.path for chunk in tensor.chunks}) > 1]
    for tensor in many[:: max(1, len(many) // 12)]:
        for number in range(0, len(tensor.chunks), max(1, len(tensor.chunks) // 3)):
            if not tensor.chunks[number].box.numel:
                continue
            short, lost = without(catalog, tensor, number)
            with pytest.raises(Incomplete) as caught:
                short.check()
            error = caught.value
            assert error.code == "E0309" and error.key == str(tensor.key) and "the box at" in error.message
            if catalog.indexes:
                assert error.path in catalog.indexes and f"{error.path} leaves out" in error.message
            else:
                assert error.path is None or error.path in lost, (tensor.key, number, error.path, lost)
                if error.path is None:
                    continue
                named += 1
    if f"{name}/{folder.name}" in TELLING:
        assert named, "no gap at all was laid to its file"


# -- the collectors ----------------------------------------------------------------------------------------------------


def fails(name: str) -> str:
    if name.startswith("bad"):
        raise CorruptFile("cut short", path=name)
    if name in ("evil", "odd"):
        raise UnsafeInput("asks for code", path=name, code="E0420" if name == "evil" else "E0437")
    return name.upper()


@pytest.mark.parametrize("names", [["a", "b"], ["a", "bad1"], ["bad1", "a", "bad2", "bad3"]])
def test_all_are_tried_before_any_fault_is_raised(names: list[str]) -> None:
    bad = [name for name in names if name.startswith("bad")]
    if not bad:
        assert read_each(names, fails) == ["A", "B"]
        return
    with pytest.raises(CorruptFile) as caught:
        read_each(names, fails)
    assert caught.value.path == bad[0] and caught.value.faults == tuple(f"cut short ({name})" for name in bad[1:])


def test_what_asks_for_code_goes_before_what_is_broken() -> None:
    with pytest.raises(UnsafeInput) as caught:
        read_each(["bad1", "odd", "evil", "bad2"], fails)
    assert caught.value.path == "evil"
    with pytest.raises(CorruptFile, match="cut short"):
        read_each(["bad1", "odd"], fails)


def test_a_file_is_named_once_and_two_readings_together() -> None:
    pairs = [("bad1", 0), ("bad1", 1), ("a", 0), ("bad2", 0)]
    with pytest.raises(CorruptFile) as caught:
        both(
            lambda: read_each(pairs, lambda pair: fails(pair[0]), file=lambda pair: pair[0]),
            lambda: read_each(["bad3", "bad4"], fails),
        )
    assert [caught.value.path, *caught.value.faults] == ["bad1", *(f"cut short (bad{n})" for n in (2, 3, 4))]
    assert both(lambda: 1, lambda: "b") == (1, "b")
