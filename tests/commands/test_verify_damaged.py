"""`ckpt verify` of a checkpoint in which one file of several is damaged: the file, its rank and the byte are named, all
others are judged, and the exit code is that of findings. Of every format's fixtures."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import WEIGHT_SUFFIXES

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLDERS = (
    "dcp",
    "deepspeed",
    "deepspeed-universal",
    "megatron",
    "megatron-dist",
    "megatron-fsdp",
    "meta",
    "nemo2",
    "orbax",
    "paddle",
    "paddle-flex",
    "paddle-unified",
    "peft",
    "safetensors",
    "sharded",
    "torch",
    "verl",
)
PARTS = (*WEIGHT_SUFFIXES, ".distcp")
# Names of weight files that no reader of these folders takes for a part: a trainer's schedule, an optimizer that is
# listed as not read, a rank's file of an older save.
NO_PARTS = re.compile(r"scheduler\.\w+|optimizer\.bin")
# An older save's files among the newer ones; a fixture that verl saved without all its parts.
NOT_WHOLE = {"dcp/stale_files", "verl/vpp2"}
ASKS_FOR_CODE = "E0420"  # a damaged pickle may name a function; without a checksum that is said first


def sources() -> Iterator[Any]:
    """Each fixture that is a folder with several files of weights; all but the first two of a format in the slow
    tier."""
    for name in FOLDERS:
        folders = [path for path in sorted(FIXTURES.joinpath(name).iterdir()) if len(parts_of(path)) > 1]
        for number, path in enumerate(folders):
            case = f"{name}/{path.name}"
            if case in NOT_WHOLE:
                continue
            marks = [pytest.mark.slow] if number > 1 else []
            yield pytest.param(path, id=case, marks=marks)


def parts_of(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.name.endswith(PARTS) and path.stat().st_size and not NO_PARTS.fullmatch(path.name)
    )


def places_of(data: bytes) -> dict[str, int]:
    """A byte in each kind of place: header, pickle, zip directory, data."""
    if data.startswith(b"PK\x03\x04"):
        pickle = data.index(b"data.pkl") + 60
        directory = data.rindex(b"PK\x01\x02")
        return {"pickle": pickle, "directory": directory + 1, "checksum": directory + 16, "end": len(data) - 6}
    if data[8:9] == b"{":
        length = int.from_bytes(data[:8], "little")
        return {"length": 6, "header": 8, "data": min(8 + length + 1, len(data) - 1)}
    return {"head": 0, "middle": len(data) // 2}


def names_in(finding: Mapping[str, Any]) -> set[str]:
    """The files that a finding names; several where a digest is of a tensor that several hold parts of."""
    return {Path(file).name for file in (finding["file"], *finding.get("files", ())) if file}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("fixture", list(sources()))
def test_a_damaged_file_is_named_and_the_others_are_judged(fixture: Path, tmp_path: Path) -> None:
    folder = tmp_path / fixture.name
    shutil.copytree(fixture, folder)
    whole = ckpt.verify(folder)
    known = {json.dumps(each) for each in whole["findings"]}
    file = parts_of(folder)[-1]
    data = file.read_bytes()
    for place, at in places_of(data).items():
        flip(file, at)
        where = f"{file.name}, byte {at} ({place})"
        try:
            document = ckpt.verify(folder)
        except CkptError as fault:
            assert fault.code == ASKS_FOR_CODE and not data.startswith(b"PK"), (where, fault)
        else:
            new = [each for each in document["findings"] if json.dumps(each) not in known]
            if new:
                assert any(file.name in names_in(each) for each in new), (where, new)
            else:  # nothing tells: the file is among those that no checksum covers, or that no reader takes
                assert place not in ("directory", "length", "end", "checksum"), where
                uncovered = {Path(row["file"]).name for row in document["uncovered"]}
                unread = any(f"{file.parent.name}/" in note for note in document["notes"])
                assert file.name in uncovered or unread, where
        flip(file, at)


def test_a_damaged_item_of_a_dcp_leaves_the_rest_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One byte of the pickle of one item: rank, file, byte and tensor are named; every other tensor has a digest."""
    folder = tmp_path / "step"
    shutil.copytree(FIXTURES / "dcp" / "fsdp2_dp4", folder)
    sound = ckpt.verify(folder)
    file = folder / "__2_0.distcp"
    flip(file, 23040)

    document = ckpt.verify(folder)
    (found,) = document["findings"]
    assert (found["code"], found["rank"], found["offset"]) == ("E0347", "dp 2", 22972)
    assert found["tensor"] == "embed.weight [exp_avg]"
    assert Path(found["file"]).name == file.name
    assert document["digests"]["model"] == sound["digests"]["model"]
    assert len(document["digests"]["exp_avg"]) == len(sound["digests"]["exp_avg"]) - 1
    assert "embed.weight" not in document["digests"]["exp_avg"]
    assert run(["verify", str(folder)]) == 1
    assert "dp 2" in capsys.readouterr().out


def test_a_damaged_header_of_a_sharded_rank_leaves_the_other_ranks_judged(tmp_path: Path) -> None:
    """The index says where everything is, so that no header is read to open it: the file is damaged, not missing."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "sharded" / "llama_tp4_pp2", folder)
    sound = ckpt.verify(folder)
    flip(folder / "model.tp03_pp01.safetensors", 9)

    document = ckpt.verify(folder)
    (found,) = document["findings"]
    assert Path(found["file"] or "").name == "model.tp03_pp01.safetensors"
    assert found["rank"] == "tp 3, pp 1" and found["message"].startswith("want a key in quotes")
    left_out = set(sound["digests"]["model"]) - set(document["digests"]["model"])
    assert left_out and all("layers.0." not in name for name in left_out)  # those of the other stage are judged
    assert f"in what is damaged: {len(left_out)}" in " ".join(document["notes"])


def test_flat_buckets_that_lack_a_damaged_file_are_not_named_and_the_file_is(tmp_path: Path) -> None:
    """Which parameter a bucket is of can't be known without a part of it: the file is the finding, the model's tensors
    are judged, and the note says what was not."""
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / "megatron-dist" / "muon_flat_pp2dp2", folder)
    whole = ckpt.verify(folder)
    file = next(folder.rglob("__3_0.distcp"))
    flip(file, places_of(file.read_bytes())["checksum"])

    document = ckpt.verify(folder)
    (found,) = document["findings"]
    assert (Path(found["file"] or "").name, found["rank"]) == (file.name, "rank 3")
    assert document["digests"]["model"].keys() <= whole["digests"]["model"].keys()
    assert document["digests"]["model"] and "exp_avg" not in document["digests"]
    assert any(note.startswith("without what is damaged: the model's parameters") for note in document["notes"])


@pytest.mark.parametrize(("place", "code"), [("pickle", 1), ("checksum", 4)])
def test_an_optimizer_that_is_left_out_because_it_is_damaged_is_a_finding(
    place: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Trainer's optimizer.pt, and verl's next to an adapter: the model is judged without them."""
    for name, part in (("safetensors/trainer_qwen3", "optimizer.pt"), ("verl/states_tp2pp2", "__3_0.distcp")):
        folder = tmp_path / Path(name).name
        shutil.copytree(FIXTURES / name, folder)
        whole = ckpt.verify(folder)
        file = next(folder.rglob(part))
        flip(file, places_of(file.read_bytes())[place])

        document = ckpt.verify(folder)
        (found,) = document["findings"]
        assert Path(found["file"] or "").name == part and found["offset"] is not None
        assert found.get("rank") == ("rank 3" if part.endswith(".distcp") else None)
        assert document["digests"]["model"] == whole["digests"]["model"]
        assert not any(found["message"] in note for note in document["notes"])  # it is told once
        assert run(["verify", str(folder)]) == code
        assert not ckpt.audit(folder)["ok"]
    capsys.readouterr()


def test_a_file_that_no_reader_takes_is_looked_at(tmp_path: Path) -> None:
    """The shards next to the whole files that were made of them; a config that ends early."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "safetensors" / "dcp_consolidated", folder)
    shard = sorted(folder.glob("sharded/*.safetensors"))[-1]
    flip(shard, 8)
    (found,) = ckpt.verify(folder)["findings"]
    assert (found["code"], found["file"], found["offset"]) == ("E1671", str(shard), 8)
    flip(shard, 8)

    (folder / "generation_config.json").write_text('{"eos_token_id": 2,')
    (found,) = ckpt.verify(folder, mode="quick")["findings"]
    assert (found["code"], Path(found["file"] or "").name) == ("E1671", "generation_config.json")


def test_a_damaged_pickle_that_names_another_function_is_damage_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checksum differs: the rank is named and the others are judged, and the exit code is that of a refusal."""
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / "megatron-dist" / "llama_tp2", folder)
    file = next(folder.rglob("common.pt"))
    flip(file, places_of(file.read_bytes())["pickle"])
    assert run(["verify", str(folder), "--json"]) == 4
    streams = capsys.readouterr()
    document = json.loads(streams.out)
    (found,) = document["findings"]
    assert (found["code"], Path(found["file"]).name) == ("E0347", "common.pt")
    assert document["digests"]["model"]
    assert json.loads(streams.err)["error"]["code"] == ASKS_FOR_CODE


def test_a_digest_of_several_files_names_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "sharded" / "llama_tp4_pp2", folder)
    file = folder / "model.tp03_pp01.safetensors"
    flip(file, places_of(file.read_bytes())["data"])
    (found,) = ckpt.verify(folder)["findings"]
    assert found["file"] is None and str(file) in found["files"] and len(found["files"]) == 4
    assert run(["verify", str(folder)]) == 1
    assert "one of model.tp00_pp01.safetensors, " in capsys.readouterr().out


def test_the_rank_of_a_file_of_fsdp_is_that_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    shutil.copytree(FIXTURES / "torch" / "ranks_fsdp2_dp4", folder)
    file = folder / "model_world_size_4_rank_3.pt"
    flip(file, 216)
    (found,) = ckpt.verify(folder)["findings"]
    assert (found["code"], found["rank"], found["offset"]) == ("E0347", "rank 3", 128)


def test_two_damaged_ranks_are_both_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zips that contradict themselves: the exit code is that of an attack, and the result is shown all the same."""
    folder = tmp_path / "step"
    shutil.copytree(FIXTURES / "deepspeed" / "z1_bf16_dp4", folder)
    files = [next(folder.rglob(f"*pp_rank_{rank}_mp_rank_00_optim_states.pt")) for rank in (1, 3)]
    for file in files:
        flip(file, file.read_bytes().rindex(b"PK\x01\x02") + 16)  # the checksum: the record states another
    findings = ckpt.verify(folder)["findings"]
    found = [(Path(each["file"]).name, each["rank"]) for each in findings]
    assert found == [(files[0].name, "dp 1, mp 0"), (files[1].name, "dp 3, mp 0")]

    assert run(["verify", str(folder), "--json"]) == 4
    streams = capsys.readouterr()
    assert [Path(each["file"]).name for each in json.loads(streams.out)["findings"]] == [file.name for file in files]
    error = json.loads(streams.err)["error"]
    assert (error["code"], error["exit_code"], Path(error["path"]).name) == (findings[0]["code"], 4, files[0].name)


@pytest.mark.parametrize(("source", "index"), [("dcp/fsdp2_dp4", ".metadata"), ("torch/training.pt", "training.pt")])
def test_what_can_not_be_read_at_all_is_refused(source: str, index: str, tmp_path: Path) -> None:
    given = FIXTURES / source
    copy = tmp_path / given.name
    if given.is_dir():
        shutil.copytree(given, copy)
    else:
        shutil.copyfile(given, copy)
    file = copy / index if given.is_dir() else copy
    flip(file, 1)
    assert run(["verify", str(copy)]) == 3


def test_the_tensors_that_share_a_damaged_storage_are_all_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    storage = torch.arange(40, dtype=torch.float32)
    torch.save({f"part{n}": storage[n * 8 : n * 8 + 8] for n in range(5)}, tmp_path / "a.pt")
    file = tmp_path / "a.pt"
    flip(file, file.read_bytes().index(storage.numpy().tobytes()) + 5)
    (found,) = ckpt.verify(file)["findings"]
    assert found["tensor"] == "part0, part1, part2 and 2 more"


@pytest.mark.parametrize(
    "name", ["step/0", "params.params.layer_0.mlp.bias/0", "params.params.layer_0.mlp.bias/.zarray"]
)
def test_a_damaged_chunk_or_header_of_orbax_leaves_the_rest_judged(name: str, tmp_path: Path) -> None:
    """A chunk that is read at once (the step), one of a tensor, the header of one array."""
    folder = tmp_path / "step"
    shutil.copytree(FIXTURES / "orbax" / "files_zarr2", folder)
    whole = ckpt.verify(folder)
    file = folder / name
    flip(file, 0)
    document = ckpt.verify(folder)
    (found,) = document["findings"]
    assert found["file"] == str(file)
    if name.endswith("bias/0"):
        assert found["tensor"] == "layer_0.mlp.bias"
        assert set(whole["digests"]["model"]) - set(document["digests"]["model"]) == {"layer_0.mlp.bias"}
    assert run(["verify", str(folder)]) == 1


def test_a_damaged_index_that_readers_can_do_without_is_a_finding(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "safetensors" / "dcp_consolidated", folder)
    index = folder / "model.safetensors.index.json"
    flip(index, 0)
    document = ckpt.verify(folder)
    assert [found["file"] for found in document["findings"]] == [str(index)]
    assert document["digests"]["model"]
