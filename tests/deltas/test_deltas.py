"""`ckpt delta` and `ckpt patch` against a decoder written from the specification, over formats, layouts and chains."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import ckpt_tool as ckpt
from ckpt_tool.errors import CkptError, CorruptFile, InconsistentCheckpoint, UsageError
from ckpt_tool.plan.schedule import units

HERE = Path(__file__).parent
FIXTURES = HERE.parents[1] / "fixtures"
SLIME = FIXTURES / "deltas" / "xor_xxh3128"
LLAMA = FIXTURES / "convert" / "llama" / "hf"


def _judge():
    spec = importlib.util.spec_from_file_location("delta_judge", HERE / "judge.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


judge = _judge()


def patch(sources, out, **options):
    return ckpt.patch(sources[0], sources[1:], out, **options)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trained(source, target, seed, share=0.02):
    """A copy of a folder of safetensors files in which a share of the bytes of most tensors is others'."""
    shutil.copytree(source, target)
    rng = np.random.default_rng(seed)
    for path in sorted(target.glob("*.safetensors")):
        entries, _ = judge.tensors(path)
        raw = bytearray(path.read_bytes())
        start = len(raw) - sum(len(data) for _, data in entries.values())
        for number, (entry, data) in enumerate(entries.values()):
            if number % 4:  # every fourth stays as it is
                at = rng.choice(len(data), max(1, int(share * len(data))), replace=False) + start
                for position in at + entry["data_offsets"][0]:
                    raw[position] ^= 1 + int(rng.integers(15))
        path.write_bytes(raw)
    return target


# -- what slime writes -------------------------------------------------------------------------------------------------


def test_a_chain_of_slimes_is_folded_to_each_of_its_versions(tmp_path):
    chain = [SLIME / "deltas" / f"weight_v00000{number}" for number in (1, 2)]
    for count in (1, 2):
        patch([SLIME / "base", *chain[:count]], tmp_path / str(count), fsync=False)
        want = {
            name.removeprefix("model/"): data
            for name, data in judge.model(SLIME / f"truth.v{count}.safetensors").items()
        }
        assert judge.model(tmp_path / str(count)) == want
    assert (tmp_path / "2" / "config.json").read_bytes() == (SLIME / "base" / "config.json").read_bytes()


def test_what_is_no_chain_is_refused_and_nothing_is_left(tmp_path):
    one, two = (SLIME / "deltas" / f"weight_v00000{number}" for number in (1, 2))
    for deltas, code in (((two, one), "E2609"), ((one, one), "E2609"), ((two,), "E2614"), ((SLIME / "base",), "E2610")):
        with pytest.raises((InconsistentCheckpoint, UsageError)) as caught:
            patch([SLIME / "base", *deltas], tmp_path / "out")
        assert caught.value.code == code
    assert "is the base version 1" in _refused([SLIME / "base", two], tmp_path / "out").hint
    assert list(tmp_path.iterdir()) == []


def _refused(sources, out):
    with pytest.raises(CkptError) as caught:
        patch(sources, out)
    return caught.value


def test_the_link_that_went_wrong_is_named(tmp_path):
    first = tmp_path / "weight_v000001"
    second = tmp_path / "weight_v000002"
    one = trained(LLAMA, tmp_path / "one", 1)
    two = trained(one, tmp_path / "two", 2)
    ckpt.delta(LLAMA, one, first)
    ckpt.delta(one, two, second)
    file = second / "model-00000-of-00001.safetensors"
    raw = bytearray(file.read_bytes())
    entries, digests = judge.tensors(file)
    name, other = sorted(digests)[:2]
    raw[:] = raw.replace(digests[name].encode(), digests[other].encode())  # a digest of another tensor
    file.write_bytes(raw)
    fault = _refused([LLAMA, first, second], tmp_path / "out")
    assert (fault.code, fault.key) == ("E2614", name) and "version 2 is damaged" in fault.hint
    third = tmp_path / "base"
    trained(LLAMA, third, 3, share=0.001)
    assert "is the base version 0" in _refused([third, first], tmp_path / "out").hint
    assert not (tmp_path / "out").exists()


# -- what we write -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "checksum"), [("xor", "xxh3-128"), ("overwrite", "adler32")])
def test_a_chain_is_what_the_specification_makes_of_it(tmp_path, encoding, checksum):
    steps = [LLAMA]
    chain = []
    judged = judge.model(LLAMA)
    for number in (1, 2, 3):
        steps.append(trained(steps[-1], tmp_path / f"step{number}", number))
        chain.append(tmp_path / f"weight_v00000{number}")
        document = ckpt.delta(steps[-2], steps[-1], chain[-1], encoding=encoding, checksum=checksum, fsync=False)
        assert (document["delta"]["version"], document["delta"]["base_version"]) == (number, number - 1)
        assert document["delta"]["unchanged"] and document["delta"]["changed"]
        judged = judge.apply(judged, chain[-1])
        assert judged == judge.model(steps[-1])
    patch([LLAMA, *chain], tmp_path / "out", fsync=False)
    assert judge.model(tmp_path / "out") == judged
    shown = ckpt_inspect(chain[1])
    assert shown["format"] == "delta" and shown["delta"]["version"] == 2 and shown["delta"]["encoding"] == encoding
    with pytest.raises(CkptError, match="not a model") as caught:
        ckpt.convert(chain[0], tmp_path / "no", to="torch")
    assert "ckpt patch BASE" in caught.value.hint


def ckpt_inspect(path):
    from ckpt_tool.commands.inspect import inspect
    from ckpt_tool.options.reading import Reading

    return inspect(str(path), Reading())


def test_the_same_delta_whatever_the_layout_and_the_threads(tmp_path):
    new = trained(LLAMA, tmp_path / "new", 5)
    ckpt.delta(LLAMA, new, tmp_path / "weight_v000001", threads=1)
    ckpt.convert(new, tmp_path / "megatron", to="megatron-dist", tp=2, fsync=False)
    ckpt.delta(LLAMA, tmp_path / "megatron", tmp_path / "other", weight_version=1, threads=3)
    frames = [judge.model(tmp_path / name) for name in ("weight_v000001", "other")]
    assert frames[0] == frames[1]
    ckpt.convert(LLAMA, tmp_path / "base", to="megatron-dist", tp=2, fsync=False)
    document = patch([tmp_path / "base", tmp_path / "other"], tmp_path / "out", tp=1, fsync=False)
    assert document["target"]["format"] == "megatron-dist"
    assert ckpt.diff(tmp_path / "out", tmp_path / "megatron")["equal"]


def test_a_wrong_base_shows_in_a_tensor_that_did_not_change(tmp_path):
    new = trained(LLAMA, tmp_path / "new", 6)
    ckpt.delta(LLAMA, new, tmp_path / "delta")
    unchanged = json.loads((tmp_path / "delta" / judge.INDEX).read_text())["unchanged"]
    base = tmp_path / "base"
    shutil.copytree(LLAMA, base)
    (file,) = base.glob("*.safetensors")
    entries, _ = judge.tensors(file)
    name = next(iter(unchanged))
    raw = bytearray(file.read_bytes())
    raw[len(raw) - sum(len(data) for _, data in entries.values()) + entries[name][0]["data_offsets"][0]] ^= 1
    file.write_bytes(raw)
    fault = _refused([base, tmp_path / "delta"], tmp_path / "out")
    assert (fault.code, fault.key) == ("E2614", name)


def test_nothing_changed_is_a_delta_without_files(tmp_path):
    document = ckpt.delta(LLAMA, LLAMA, tmp_path / "delta")
    assert document["delta"]["changed"] == 0 and [path.name for path in (tmp_path / "delta").iterdir()] == [judge.INDEX]
    patch([LLAMA, tmp_path / "delta"], tmp_path / "out", fsync=False)
    assert judge.model(tmp_path / "out") == judge.model(LLAMA)
    assert ckpt_inspect(tmp_path / "delta")["total"]["tensors"] == 0


def test_other_tensors_are_refused_by_name(tmp_path):
    mixtral = FIXTURES / "convert" / "mixtral" / "hf"
    with pytest.raises(InconsistentCheckpoint, match="do not hold the same tensors") as caught:
        ckpt.delta(LLAMA, mixtral, tmp_path / "delta")
    assert caught.value.code == "E2615" and len(caught.value.faults) > 10
    ckpt.delta(LLAMA, trained(LLAMA, tmp_path / "new", 1), tmp_path / "delta")
    assert _refused([mixtral, tmp_path / "delta"], tmp_path / "out").code == "E2615"
    assert not (tmp_path / "out").exists()


# -- large tensors: many tiles, several units, an output that is not in the line's order ------------------------------


def large(folder, data):
    folder.mkdir()
    rows = len(data) // 4096
    judge.safetensors(folder / "model.safetensors", {"w": ("BF16", [rows, 2048], data.tobytes())}, {"format": "pt"})
    return folder


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_tensor_of_several_units_is_patched_and_proved(tmp_path, encoding, monkeypatch):
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, 12 << 20, np.uint8)
    versions = [base]
    for _ in range(2):
        new = versions[-1].copy()
        at = rng.integers(3 << 20, len(new), 5000)
        new[at] = rng.integers(0, 256, len(at), np.uint8)
        versions.append(new)
    folders = [large(tmp_path / f"v{number}", data) for number, data in enumerate(versions)]
    chain = [tmp_path / "weight_v000001", tmp_path / "weight_v000002"]
    for before, after, delta in zip(folders, folders[1:], chain, strict=False):
        ckpt.delta(before, after, delta, encoding=encoding, fsync=False)
    monkeypatch.setattr(
        "ckpt_tool.run.executor.units", partial(units, size=2 << 20)
    )  # so that threads take parts of it in any order
    patch([folders[0], *chain], tmp_path / "out", threads=3, fsync=False)
    assert judge.model(tmp_path / "out")["w"] == versions[-1].tobytes()
    patch([folders[0], *chain], tmp_path / "cut", to="sharded", dp=3, fsync=False)
    assert ckpt.diff(tmp_path / "cut", folders[-1])["equal"]
    fault = _refused([folders[0], chain[1]], tmp_path / "no")
    assert fault.code in ("E2609", "E2614")


# -- a step's files ----------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("case", ["dcp/fsdp2_dp4", "deepspeed/z1_bf16_dp4", "megatron/*", "paddle-unified/*"])
def test_the_files_of_a_step_come_back_byte_for_byte(tmp_path, case):
    from ckpt_tool.deltas.archive import entries_of
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.sources.opening import open_source

    found = next(path for path in sorted(FIXTURES.glob(case)) if path.is_dir())
    steps = [Path(open_source(str(found), Reading()).tree.root)]
    chain = []
    for number in (1, 2):
        step = tmp_path / f"step_{number}"
        shutil.copytree(steps[-1], step)
        for at, (name, entry) in enumerate(entries_of(open_source(str(step), Reading())).items()):
            if name.startswith("rest/") or not at % 3:
                continue
            for chunk in entry.tensor.chunks:
                with open(step / chunk.array.path, "r+b") as file:
                    file.seek(chunk.array.offset + chunk.box.numel // 2)
                    file.write(bytes([number]))
        (step / "trainer.txt").write_text("steps " * number)
        (step / "empty").touch()
        chain.append(tmp_path / f"archive_{number}")
        encoding = ("xor", "overwrite")[number % 2]
        ckpt.delta(steps[-1], step, chain[-1], dedup=True, weight_version=number, encoding=encoding, fsync=False)
        steps.append(step)
    document = patch([steps[0], *chain], tmp_path / "out", fsync=False)
    assert files(tmp_path / "out") == files(steps[-1]) and document["digest_checked"]
    assert _refused([steps[0], chain[1]], tmp_path / "no").code in ("E2614", "E2615")
    assert not (tmp_path / "no").exists()


def test_steps_give_the_versions_their_numbers(tmp_path):
    one = tmp_path / "checkpoint-100"
    two = tmp_path / "checkpoint-250"
    shutil.copytree(LLAMA, one)
    trained(LLAMA, two, 1)
    document = ckpt.delta(one, two, tmp_path / "archive", dedup=True, fsync=False)
    assert (document["delta"]["version"], document["delta"]["base_version"]) == (250, 100)
    with pytest.raises(UsageError, match="rebuilt as they were"):
        patch([one, tmp_path / "archive"], tmp_path / "out", to="torch")
    patch([one, tmp_path / "archive"], tmp_path / "out")
    assert files(tmp_path / "out") == files(two)


# -- bent folders ------------------------------------------------------------------------------------------------------


def frame(data: bytes, **more) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=1, **more).compress(data)


def overwriting(*positions: int, count: int | None = None, values: bytes | None = None) -> bytes:
    head = (len(positions) if count is None else count).to_bytes(4, "little")
    places = b"".join(at.to_bytes(4, "little") for at in positions)
    return frame(head + places + (bytes(len(positions)) if values is None else values))


SIZE = 64
BENT = {
    "a bomb": (frame(bytes(200 << 20)), {}, "E2611"),
    "a bomb that hides its size": (frame(bytes(200 << 20), write_content_size=False), {}, "E2611"),
    "too short": (frame(bytes(SIZE - 1), write_content_size=False), {}, "E2611"),
    "cut": (frame(bytes(range(SIZE)))[:-3], {}, "E2611"),
    "two frames": (frame(bytes(SIZE)) * 2, {}, "E2611"),
    "no frame": (b"no zstd frame at all", {}, "E2611"),
    "a window of 2 GiB": (b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(20), {}, "E2611"),
    "out of range": (overwriting(1, SIZE), {"delta_encoding": "overwrite"}, "E2611"),
    "not ascending": (overwriting(5, 4), {"delta_encoding": "overwrite"}, "E2611"),
    "twice": (overwriting(5, 5), {"delta_encoding": "overwrite"}, "E2611"),
    "a count of 4 billion": (overwriting(1, count=0xFFFFFFFF), {"delta_encoding": "overwrite"}, "E2611"),
    "more positions than values": (overwriting(1, 2, values=b"x"), {"delta_encoding": "overwrite"}, "E2611"),
    "more values than positions": (overwriting(1, 2, values=b"xyz"), {"delta_encoding": "overwrite"}, "E2611"),
    "an encoding of nobody's": (frame(bytes(SIZE)), {"delta_encoding": "subtract"}, "E2608"),
    "another compression": (frame(bytes(SIZE)), {"compression_format": "lz4"}, "E2608"),
    "no digest's name": (frame(bytes(SIZE)), {"checksum_format": None}, "E2608"),
    "a version in words": (frame(bytes(SIZE)), {"version": "new"}, "E2608"),
    "a version on itself": (frame(bytes(SIZE)), {"base_version": "000001"}, "E2608"),
    "a version of 5000 digits": (frame(bytes(SIZE)), {"version": "9" * 5000}, "E2608"),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("case", BENT)
def test_a_bent_delta_is_refused_and_leaves_nothing(tmp_path, case):
    data, metadata, code = BENT[case]
    base = tmp_path / "base"
    base.mkdir()
    judge.safetensors(base / "model.safetensors", {"w": ("U8", [SIZE], bytes(range(SIZE)))}, {"format": "pt"})
    digest = judge.digest("xxh3-128", bytes(range(SIZE)))
    delta = judge.delta(tmp_path / "delta", {"w": data}, {"w": digest}, **metadata)
    fault = _refused([base, delta], tmp_path / "out")
    assert (fault.code, type(fault)) == (code, CorruptFile), fault.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "delta"]


def test_an_index_that_contradicts_its_files_is_refused(tmp_path):
    good = frame(bytes(SIZE))
    digest = judge.digest("xxh3-128", bytes(SIZE))

    def refused(name, change, **more):
        delta = judge.delta(tmp_path / name, {"w": good}, {"w": digest} if more.get("digest", True) else {"w": "00"})
        index = json.loads((delta / judge.INDEX).read_text())
        change(delta, index)
        (delta / judge.INDEX).write_text(json.dumps(index))
        assert _refused([LLAMA, delta], tmp_path / "out").code == "E2608", name

    refused("stray file", lambda delta, index: (delta / "model-x.safetensors").write_bytes(b""))
    refused("name", lambda delta, index: index["weight_map"].update({"v": "model-00000-of-00001.safetensors"}))
    refused("digest", lambda delta, index: None, digest=False)
    refused("unchanged twice", lambda delta, index: index.update(unchanged={"w": digest}))
    refused("archive of nothing", lambda delta, index: index.update(archive={"files": 3}))
    pieces = {"format": "dcp", "files": {"a": [9, [[9, "v"]]]}, "whole": []}
    refused("archive of others", lambda delta, index: index.update(archive=pieces))
    pieces = {"format": "dcp", "files": {"a": [9, [[8, "w"]]]}, "whole": []}
    refused("archive with a gap", lambda delta, index: index.update(archive=pieces))


def test_a_path_that_leaves_the_folder_is_refused(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    judge.safetensors(base / "model.safetensors", {"w": ("U8", [SIZE], bytes(SIZE))}, {"format": "pt"})
    delta = judge.delta(tmp_path / "delta", {"w": frame(bytes(SIZE))}, {"w": judge.digest("xxh3-128", bytes(SIZE))})
    index = json.loads((delta / judge.INDEX).read_text())
    index["archive"] = {"format": "dcp", "files": {"../victim": [SIZE, [[SIZE, "w"]]]}, "whole": ["w"]}
    (delta / judge.INDEX).write_text(json.dumps(index))
    fault = _refused([base, delta], tmp_path / "out")
    assert fault.code == "E1600" and not (tmp_path / "victim").exists()
