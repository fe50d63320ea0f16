"""One flipped bit, over the registry and the fixtures: in every kind of place of every kind of file.

`verify` finds it, or says that no checksum covers the file there. What a zip's own CRC covers comes from Python's
`zipfile`, never by our reader: there it is found always, named by file, byte and member; and no conversion gives other
values for it. Every other verb that reads the values sees it too.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tool
from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Inspection, Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
FILES = 5  # of each fixture
END = b"PK\x05\x06"  # a zip's end record, 22 bytes


class Member(NamedTuple):
    """A record of a zip: bytes [start, stop) of the file."""

    name: str
    start: int
    stop: int


def fixtures() -> Iterator[Any]:
    for name in registry.NAMES:
        for path in sorted((FIXTURES / name).glob("*")):
            if ".truth." not in path.name and path.suffix not in (".md", ".json"):
                yield pytest.param(path, id=f"{name}-{path.name}")


def members_of(data: bytes) -> list[Member]:
    """The records with a CRC of the zip that the file is, or of those that lie in it end to end."""
    found = list[Member]()
    start = 0
    if not data.startswith(b"PK\x03\x04"):
        return found
    while (end := data.find(END, start)) >= 0:
        piece = data[start : end + 22]
        try:
            infos = zipfile.ZipFile(io.BytesIO(piece)).infolist()
        except zipfile.BadZipFile:  # these four bytes stood in a tensor
            return found
        for info in infos:
            local = piece[info.header_offset :]
            at = (
                start
                + info.header_offset
                + 30
                + int.from_bytes(local[26:28], "little")
                + int.from_bytes(local[28:30], "little")
            )
            if info.file_size and info.CRC:
                found.append(Member(info.filename, at, at + info.file_size))
        start = end + 22
    return found


def places(data: bytes, members: list[Member], dice: random.Random) -> dict[str, int]:
    """A byte in each kind of place."""
    size = len(data)
    picked = {
        "head": dice.randrange(min(size, 30)),
        "tail": size - 1 - dice.randrange(min(size, 22)),
        "any": dice.randrange(size),
    }
    storages = [member for member in members if "/data/" in member.name]
    others = [member for member in members if "/data/" not in member.name]
    for what, some in (("storage", storages), ("record", others)):
        for number in range(min(2, len(some))):
            member = dice.choice(some)
            picked[f"{what} {number}"] = dice.randrange(member.start, member.stop)
    if storages:
        picked["last storage"] = storages[-1].stop - 1
    pickles = [member for member in others if member.name.endswith("data.pkl")]
    if pickles:
        member = dice.choice(pickles)
        picked["pickle"] = dice.randrange(member.start, member.stop)
    if members:
        between = [at for at in (dice.randrange(size) for _ in range(400)) if not covering(members, at)]
        picked |= {"between": between[0]} if between else {}
    elif size > 64:
        picked["data"] = size // 2 + dice.randrange(size // 2)
    return picked


def storages_of(file: Path) -> list[Member]:
    return [member for member in members_of(file.read_bytes()) if "/data/" in member.name]


def covering(members: list[Member], at: int) -> Member | None:
    return next((member for member in members if member.start <= at < member.stop), None)


def flipped(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        (old,) = f.read(1)
        f.seek(at)
        f.write(bytes([old ^ 1 << bit]))


def copied(path: Path, folder: Path) -> Path:
    source = folder / path.name
    if path.is_dir():
        shutil.copytree(path, source)
    else:
        shutil.copyfile(path, source)
    return source


def belonging(source: Path) -> tuple[list[Path], Path]:
    """(the files of the checkpoint, the root that they lie in)."""
    opened = open_source(str(source), Reading())
    root = opened.tree.root
    return [root / name for name in dict.fromkeys((*opened.catalog.files, *opened.catalog.sidefiles))], root


def judged(source: Path) -> tuple[dict[str, Any] | None, CkptError | None]:
    """(verify's document, None) or (None, why the checkpoint can't be opened)."""
    try:
        return verify(str(source), Reading(), progress=Silent()), None
    except CkptError as fault:
        return None, fault


@pytest.mark.share(24)
@pytest.mark.parametrize("path", list(fixtures()))
def test_every_flipped_bit_is_found_or_lies_where_nothing_covers(path: Path, tmp_path: Path) -> None:
    flip_all(path, tmp_path)


@pytest.mark.share(24)
@pytest.mark.parametrize("source", ["deepspeed/z1_bf16_dp4", "megatron/moe_tp2ep2etp1"])
@pytest.mark.parametrize("fmt", sorted(name for name in registry.NAMES if not registry.by_name(name).holds.adapter))
def test_the_same_of_what_we_write(fmt: str, source: str, tmp_path: Path) -> None:
    """Training states of ZeRO and of Megatron's distributed optimizer, in every format that there is a writer for."""
    if fmt == "meta" and source.startswith("megatron"):
        pytest.skip("a model that Meta's code does not have")
    (tmp_path / "written").mkdir()
    written = tmp_path / "written" / f"{fmt}.of-{Path(source).name}"
    convert(str(FIXTURES / source), str(written), Reading(), Writing(to=fmt), Silent())
    flip_all(written, tmp_path, digests=fmt == "sharded")


def flip_all(path: Path, tmp_path: Path, *, digests: bool | None = None) -> None:
    source = copied(path, tmp_path)
    digests = path.parent.name == "sharded" if digests is None else digests
    before, fault = judged(source)
    assert before is not None, fault
    known = {json.dumps(finding) for finding in before["findings"]}
    files, _ = belonging(source)
    uncovered = {Path(row["file"]).resolve(): row for row in before["uncovered"]}
    assert set(uncovered) <= {file.resolve() for file in files}
    dice = random.Random(path.name)
    for file in sorted(dice.sample(files, min(FILES, len(files)))):
        data = file.read_bytes()
        if not data:
            continue
        members = members_of(data)
        row = uncovered.get(file.resolve())
        if row is not None and not digests:  # of `sharded`, digests of the values cover them too
            assert row == {
                "file": row["file"],
                "size": len(data),
                "bytes": len(data) - sum(m.stop - m.start for m in members),
            }
        for what, at in places(data, members, dice).items():
            member = covering(members, at)
            bit = dice.randrange(8)
            where = f"{file.relative_to(tmp_path)} byte {at} bit {bit} ({what}, {member})"
            flipped(file, at, bit)
            after, refused = judged(source)
            if refused is not None:
                assert refused.exit_code in (3, 4), (where, refused)
            elif after is not None:
                new = [finding for finding in after["findings"] if json.dumps(finding) not in known]
                assert after["ok"] is not bool(after["findings"])
                is_named = any(file.resolve() in named_in(f) for f in new)
                is_uncovered = member is None and row is not None  # an index that leads elsewhere, and has no checksum
                assert is_named or is_uncovered or not new, (where, new)
                if member is not None:
                    # E0347: a record that the reader needs, E0351: any other. Of zips in a zip both are named.
                    of_file = [f for f in new if f["file"] and Path(f["file"]).resolve() == file.resolve()]
                    of_records = [f for f in of_file if f["code"] in ("E0347", "E0351")]
                    broken_pickles = [f for f in of_file if f not in of_records]
                    assert broken_pickles or member.start in [f["offset"] for f in of_records], (where, new)
                    assert all(f["place"] == member.name for f in of_records if f["code"] == "E0347"), (where, new)
                    # None: its reader needed the values
                    assert all(f["place"] in (None, member.name) for f in of_records), (where, new)
                else:
                    assert new or row is not None, f"{where}: not found, and said to be covered"
            if member is not None:
                unharmed(path, source, tmp_path / "out", where)
            flipped(file, at, bit)


def named_in(finding: dict[str, Any]) -> set[Path]:
    """The files that a finding names: several where a digest is of a tensor that several hold parts of."""
    return {Path(name).resolve() for name in (finding["file"], *finding.get("files", ())) if name}


def unharmed(path: Path, source: Path, out: Path, where: str) -> None:
    """A conversion of what a checksum tells to be damaged fails, or gives what that of the sound checkpoint gives."""
    try:
        convert(str(source), str(out), Reading(), Writing(to="sharded"), Silent())
    except CkptError as fault:
        assert fault.exit_code in (3, 4), (where, fault)
        assert not out.exists()
        return
    same = diff(str(path), str(out), Reading(), progress=Silent())
    assert same["equal"], f"{where}: converted in silence: {same['differences'][:3]}"
    index, sound = (json.loads((at / "ckpt.index.json").read_text()) for at in (out, sound_copy(path, out)))
    assert index["extras"] == sound["extras"], f"{where}: other extras"
    shutil.rmtree(out)


def sound_copy(path: Path, out: Path) -> Path:
    made = out.with_name("sound")
    if not made.exists():
        convert(str(path), str(made), Reading(), Writing(to="sharded"), Silent())
    return made


@pytest.mark.share(4)
@pytest.mark.parametrize("path", list(fixtures()))
def test_required_checksums_are_there_or_the_source_is_refused(path: Path) -> None:
    opened = open_source(str(path), Reading())
    without = [
        key
        for key, tensor in opened.catalog.tensors.items()
        if key not in opened.catalog.digests
        and tensor.numel
        and any(chunk.array.crc is None for chunk in tensor.chunks)
    ]
    if not without:
        open_source(str(path), Reading(require_checksums=True))
        return
    with pytest.raises(CkptError) as raised:
        open_source(str(path), Reading(require_checksums=True))
    assert raised.value.code == "E0397"


# -- whoever reads the bytes -------------------------------------------------------------------------------------------

NAMES = ("block.q_proj.weight", "block.up_proj.weight", "norm.weight")


def small(folder: Path, seed: int) -> Path:
    """A model in one .bin; its second matrix lies transposed."""
    folder.mkdir()
    dice = torch.Generator().manual_seed(seed)
    values = {name: torch.randn((64, 48), generator=dice) for name in NAMES[:2]} | {NAMES[2]: torch.ones(64)}
    values[NAMES[1]] = values[NAMES[1]].t().contiguous().t()
    torch.save(values, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    return folder


def adapter(folder: Path, *, safe: bool) -> Path:
    folder.mkdir()
    name = "base_model.model.block.q_proj.lora_{}.weight"
    values = {name.format("A"): torch.ones(4, 48), name.format("B"): torch.ones(64, 4)}
    if safe:
        save_file(values, folder / "adapter_model.safetensors")
    else:
        torch.save(values, folder / "adapter_model.bin")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Three(NamedTuple):
    """A model with a flipped bit, a sound one, where an output goes."""

    bad: Path
    sound: Path
    out: Path


def read_all(at: Three) -> None:
    catalog = ckpt_tool.open(at.bad)
    for name in NAMES:
        catalog[name].numpy()


def fold_adapter(at: Three) -> None:
    ckpt_tool.merge([at.bad, adapter(at.out.with_name("lora"), safe=True)], at.out, method="lora")


def merged(method: str, **more: Any) -> Callable[[Three], object]:
    return lambda at: ckpt_tool.merge([at.sound, at.bad], at.out, method=method, **more)


READERS: dict[str, Callable[[Three], object]] = {
    "convert": lambda at: ckpt_tool.convert(at.bad, at.out, to="dcp"),
    "convert, other cuts": lambda at: ckpt_tool.convert(at.bad, at.out, to="sharded", tp=2),
    "convert, one tensor": lambda at: ckpt_tool.convert(at.bad, at.out, to="safetensors", keep_keys="*_proj.weight"),
    "convert, cast": lambda at: ckpt_tool.convert(at.bad, at.out, to="safetensors", dtype="bf16"),
    "join": lambda at: ckpt_tool.merge([at.bad], at.out),
    "linear": merged("linear", weight=(0.5, 0.5)),
    "slerp": merged("slerp", t=0.3),
    "base": lambda at: ckpt_tool.merge([at.sound], at.out, method="task-arithmetic", base=at.bad, weight=(1.0,)),
    "lora": fold_adapter,
    "diff, left": lambda at: ckpt_tool.diff(at.bad, at.sound),
    "diff, right": lambda at: ckpt_tool.diff(at.sound, at.bad),
    "diff, near": lambda at: ckpt_tool.diff(at.sound, at.bad, rtol=10.0, atol=1e6),
    "open": read_all,
    "stats": lambda at: inspect(str(at.bad), Reading(), Inspection(stats=True)),
}


# Folding reads the first tensor only; what lies transposed is not checked when it is opened as a lazy tensor.
SEEN = [(what, n) for what in READERS for n in (0, 1) if (what, n) not in {("lora", 1), ("open", 1)}]


@pytest.mark.share(8)
@pytest.mark.parametrize(("what", "number"), SEEN)
def test_no_verb_that_reads_values_takes_a_flipped_bit(what: str, number: int, tmp_path: Path) -> None:
    at = Three(small(tmp_path / "bad", 1), small(tmp_path / "sound", 1), tmp_path / "out")
    file = at.bad / "pytorch_model.bin"
    member = storages_of(file)[number]
    flipped(file, member.start + 5000, 0)
    with pytest.raises(CkptError) as raised:
        READERS[what](at)
    fault = raised.value
    assert (fault.code, fault.exit_code) == ("E0351", 3)
    assert fault.path == str(file) and fault.offset == member.start
    assert not at.out.exists()


def test_a_damaged_adapter_is_not_folded(tmp_path: Path) -> None:
    base = small(tmp_path / "base", 1)
    lora = adapter(tmp_path / "lora", safe=False)
    file = lora / "adapter_model.bin"
    member = storages_of(file)[0]
    flipped(file, member.start + 7, 3)
    with pytest.raises(CkptError, match="CRC-32") as raised:
        ckpt_tool.merge([base, lora], tmp_path / "out", method="lora")
    assert raised.value.code == "E0351" and not (tmp_path / "out").exists()


def test_both_sides_of_a_diff_are_told_at_once(tmp_path: Path) -> None:
    a = small(tmp_path / "a", 1)
    b = small(tmp_path / "b", 1)
    for folder in (a, b):
        file = folder / "pytorch_model.bin"
        flipped(file, storages_of(file)[1].start + 8, 1)
    with pytest.raises(CkptError) as raised:
        ckpt_tool.diff(a, b)
    assert str(a) in str(raised.value.path) and len(raised.value.faults) == 1 and str(b) in raised.value.faults[0]


def test_many_damaged_records_are_named_one_by_one(tmp_path: Path) -> None:
    file = small(tmp_path / "model", 3) / "pytorch_model.bin"
    wanted = []
    for number, member in enumerate(storages_of(file)[:2]):
        flipped(file, member.start + 12, 2)
        wanted.append((str(file), member.start, member.name, NAMES[number]))
    version = next(member for member in members_of(file.read_bytes()) if member.name.endswith("/version"))
    flipped(file, version.start, 2)
    wanted.append((str(file), version.start, version.name, None))
    document = verify(str(file.parent), Reading(), progress=Silent())
    found = [(f["file"], f["offset"], f["place"], f["tensor"]) for f in document["findings"] if f["code"] == "E0351"]
    assert sorted(found, key=str) == sorted(wanted, key=str) and not document["ok"]
