"""Orbax folders of which one part was taken away, cut, doubled or exchanged: never accepted with other values.

Each case edits one part of a real save: a file, a row or a key of `_METADATA`, of an array's header, of the step's
metadata. `verify` reads the result. It must refuse it or find something, or give exactly the tensors and plain values
of the save before the edit.

Left out is what nothing in such a folder tells: two chunk files of one size exchanged, a dtype of as many bytes, the
order of the dims in a plain header (nothing bears a checksum there); and metadata of the user's own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_tool.cli import run
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.progress import SILENT
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.arrays.crc32c import crc32c

CASES = Path(__file__).parents[2] / "fixtures" / "orbax"
NAMES = ("adamw_ocdbt_zarr2", "dtypes_ocdbt_zarr3", "files_zarr2", "files_zarr3", "manager", "plain_ocdbt")
HEADERS = (".zarray", "zarr.json")
Edit = Callable[[Path], None]

# What the user said of a save, which nothing repeats: without it the values are the same.
OF_THE_USER = ("custom_metadata", "metrics")


def files_below(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def edits_of_files(folder: Path) -> Iterator[tuple[str, Edit]]:
    files = files_below(folder)
    for number, file in enumerate(files):
        raw = (folder / file).read_bytes()

        def write(at: Path, content: bytes, file: Path = file) -> None:
            (at / file).write_bytes(content)

        yield f"{file} removed", lambda at, file=file: (at / file).unlink()
        yield f"{file} emptied", lambda at, write=write: write(at, b"")
        yield f"{file} cut by half", lambda at, write=write, raw=raw: write(at, raw[: len(raw) // 2])
        yield f"{file} cut by a byte", lambda at, write=write, raw=raw: write(at, raw[:-1])
        yield f"{file} twice in a row", lambda at, write=write, raw=raw: write(at, raw + raw)
        other = files[(number + 1) % len(files)]
        other_raw = (folder / other).read_bytes()
        if len(other_raw) != len(raw):

            def exchange(at: Path, file: Path = file, other: Path = other) -> None:
                one = (at / file).read_bytes()
                two = (at / other).read_bytes()
                (at / file).write_bytes(two)
                (at / other).write_bytes(one)

            yield f"{file} and {other} exchanged", exchange

    for below in sorted({parent for file in files for parent in file.parents if parent != Path(".")}):
        yield f"folder {below} removed", lambda at, below=below: shutil.rmtree(at / below)


def edits_of_json(folder: Path) -> Iterator[tuple[str, Edit]]:
    """Keys of every JSON file, at any depth, taken away or given another value."""
    for file in files_below(folder):
        if file.name not in ("_METADATA", "_CHECKPOINT_METADATA", "_strings.json", *HEADERS):
            continue
        document = json.loads((folder / file).read_text())
        for place in places_in(document):
            for what, value in other_values(document, place):
                name = f"{file}:{'/'.join(map(str, place))} {what}"
                yield name, lambda at, file=file, place=place, value=value: change(at / file, place, value)


REMOVED = object()


def places_in(value: object, above: tuple = ()) -> Iterator[tuple]:
    items: list = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        yield (*above, key)
        yield from places_in(inner, (*above, key))


def at_place(document: object, place: tuple) -> object:
    for key in place:
        document = document[key]  # type: ignore[index]
    return document


def other_values(document: object, place: tuple) -> Iterator[tuple[str, object]]:
    yield "removed", REMOVED
    value = at_place(document, place)
    if type(value) is bool:
        yield "flipped", not value
    elif type(value) is int:
        for other in (value - 1, value + 1, 2 * value, value // 2):
            if other != value:
                yield f"is {other}", other
    elif type(value) is str:
        yield "is longer", f"{value}x"
        if place[-1] == "value_type":
            for other in ("jax.Array", "scalar", "string", "None", "Dict"):
                if other != value:
                    yield f"is {other}", other
    elif value is not None:
        yield "is null", None


def change(file: Path, place: tuple, value: object) -> None:
    document = json.loads(file.read_text())
    above = at_place(document, place[:-1])
    if value is REMOVED:
        del above[place[-1]]  # type: ignore[attr-defined]
    else:
        above[place[-1]] = value  # type: ignore[index]
    file.write_text(json.dumps(document))


def read(folder: Path) -> tuple[dict, dict] | None:
    """(digests, plain values), None where it was refused or something was found."""
    try:
        document = verify(str(folder), Reading(), progress=SILENT)
        extras = open_source(str(folder), Reading()).catalog.extras
    except CkptError as error:
        assert error.exit_code in (1, 2, 3, 4), error
        return None
    plain = {key: value for key, value in extras.items() if key not in OF_THE_USER}
    return (document["digests"], plain) if document["ok"] else None


def is_told_by_nothing(case: str) -> bool:
    """See the module."""
    return ":order" in case or ":dtype" in case or "_strings.json:" in case or any(key in case for key in OF_THE_USER)


def accepted_edits(name: str, tmp_path: Path, *, one_of: int) -> tuple[list[str], int]:
    """(edits that were accepted with other values, edits that were tried)."""
    source = CASES / name
    truth = read(source)
    assert truth is not None

    wrong = []
    tried = 0
    for number, (case, edit) in enumerate([*edits_of_files(source), *edits_of_json(source)]):
        if number % one_of or is_told_by_nothing(case):
            continue
        folder = tmp_path / "save"
        shutil.copytree(source, folder)
        edit(folder)
        found = read(folder)
        shutil.rmtree(folder)
        tried += 1
        if found is not None and found != truth:
            wrong.append(case)
    return wrong, tried


@pytest.mark.parametrize("name", ["files_zarr3", "manager"])
def test_an_edited_part_is_never_accepted_with_other_values(name: str, tmp_path: Path) -> None:
    """One edit of 29; every one of them: the next test."""
    wrong, tried = accepted_edits(name, tmp_path, one_of=29)
    assert tried > 5 and not wrong


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_no_edited_part_is_accepted_with_other_values(name: str, tmp_path: Path) -> None:
    wrong, tried = accepted_edits(name, tmp_path, one_of=1)
    assert tried > 100 and not wrong


@pytest.mark.parametrize("name", ["files_zarr2", "plain_ocdbt", "manager"])
def test_a_leaf_that_metadata_lacks_is_an_error(name: str, tmp_path: Path) -> None:
    """Its values would be left out, and nothing would say so."""
    folder = tmp_path / "save"
    shutil.copytree(CASES / name, folder)
    (file,) = folder.rglob("_METADATA")
    rows = json.loads(file.read_text())["tree_metadata"]
    change(file, ("tree_metadata", list(rows)[-1]), REMOVED)
    with pytest.raises(CkptError, match="names no such array") as caught:
        open_source(str(folder), Reading())
    assert caught.value.code == "E2871"


def test_a_missing_chunk_of_a_save_without_the_flag_is_lost(tmp_path: Path, capsys) -> None:
    """Unless --lenient says that Orbax before 0.10 wrote it, which left chunks of zeros out."""
    folder = tmp_path / "save"
    shutil.copytree(CASES / "files_zarr2", folder)
    change(folder / "_METADATA", ("store_array_data_equal_to_fill_value",), REMOVED)
    assert run(["verify", str(folder), "-q"]) == 0  # a save without the flag, of which nothing is missing
    capsys.readouterr()

    (folder / "params.params.embed.embedding/1.0").unlink()
    for verb in (["inspect"], ["verify"], ["convert", str(tmp_path / "out"), "--to", "safetensors"]):
        assert run([verb[0], str(folder), *verb[1:]]) == 3
        said = capsys.readouterr().err
        assert "E0309" in said and "--lenient" in said

    assert run(["convert", str(folder), str(tmp_path / "out"), "--to", "safetensors", "--lenient"]) == 0
    assert "params.params.embed.embedding: 1 chunk is not stored" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("lost", ["config", "config/metadata", "state/_METADATA"])
def test_an_item_that_the_step_lists_and_lacks_is_an_error(lost: str, tmp_path: Path) -> None:
    """`state/_METADATA` of a step whose other item is a tree too."""
    folder = tmp_path / "save"
    shutil.copytree(CASES / "manager", folder)
    step = folder / "checkpoint_00000003"
    if lost.endswith("_METADATA"):
        shutil.copytree(step / "state", step / "more")
    path = step / lost
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with pytest.raises(CkptError) as caught:
        open_source(str(folder), Reading())
    assert caught.value.code == ("E3031" if lost.endswith("_METADATA") else "E2872")


def test_a_text_that_metadata_lacks_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "save"
    shutil.copytree(CASES / "dtypes_ocdbt_zarr3", folder)
    change(folder / "_METADATA", ("tree_metadata", "('note',)", "value_metadata", "value_type"), "Dict")
    with pytest.raises(CkptError, match="the text 'note' is stored") as caught:
        open_source(str(folder), Reading())
    assert caught.value.code == "E2755"


def test_chunks_that_the_flag_lets_be_absent_are_named(tmp_path: Path, capsys) -> None:
    """Nothing is filled with zeros without a line: a lost file looks like a chunk that was left out."""
    folder = tmp_path / "save"
    shutil.copytree(CASES / "files_zarr2", folder)
    change(folder / "_METADATA", ("store_array_data_equal_to_fill_value",), False)
    (folder / "params.params.embed.embedding/1.0").unlink()
    assert run(["convert", str(folder), str(tmp_path / "out"), "--to", "safetensors"]) == 0
    assert "params.params.embed.embedding: 1 chunk is not stored" in " ".join(capsys.readouterr().out.split())


def test_chunks_that_a_shard_lacks_are_named(tmp_path: Path, capsys) -> None:
    """The index of a shard says which of its chunks are not stored; their file is there."""
    folder = tmp_path / "save"
    shutil.copytree(CASES / "files_zarr3", folder)
    change(folder / "_METADATA", ("store_array_data_equal_to_fill_value",), False)
    file = folder / "params.layer_0.q.kernel/c/1/0"
    index = b"\xff" * 16
    file.write_bytes(index + crc32c(index).to_bytes(4, "little"))
    assert run(["convert", str(folder), str(tmp_path / "out"), "--to", "safetensors"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "params.layer_0.q.kernel: 1 chunk is not stored" in said and "[0, 0] of c/1/0" in said


def test_a_damaged_index_of_a_shard_leaves_the_rest_judged(tmp_path: Path) -> None:
    """It is read when a tensor's chunks are asked for, after the checkpoint was opened."""
    folder = tmp_path / "save"
    shutil.copytree(CASES / "files_zarr3", folder)
    file = folder / "params.layer_0.q.kernel/c/1/0"
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    file.write_bytes(data)
    document = verify(str(folder), Reading(), progress=SILENT)
    assert [(row["code"], Path(row["file"]).name, row["tensor"]) for row in document["findings"]] == [
        ("E2753", "0", "params.layer_0.q.kernel")
    ]
    whole = verify(str(CASES / "files_zarr3"), Reading(), progress=SILENT)
    judged = document["digests"]["model"]
    assert whole["digests"]["model"].items() - judged.items() == {
        ("layer_0.q.kernel", whole["digests"]["model"]["layer_0.q.kernel"])
    }
    assert judged.items() < whole["digests"]["model"].items()
