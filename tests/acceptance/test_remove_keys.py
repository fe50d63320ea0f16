"""`ckpt merge SRC OUT --remove-keys PATTERN` in every format: the key, its twins and its bytes are gone, the rest
stays.

The report must name each removed tensor with its state and bytes, and add up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FIXTURES, Runner, Tensors, assert_same, by_state, leaves, load_dcp, load_sharded, named, param_names
from safetensors.torch import load_file, save_file

GONE = "lm_head.weight"
SOURCES = ["dcp", "torch", "torch-bin", "safetensors", "sharded", "sharded-tp2"]


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, ckpt: Runner, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(format, path, truth) of a checkpoint in each format."""
    folder = tmp_path_factory.mktemp(request.param.replace("-", "_"))
    dcp = FIXTURES / "dcp" / "fsdp2_dp4"
    if request.param == "dcp":
        return "dcp", dcp, load_file(dcp.with_name("fsdp2_dp4.truth.safetensors"))
    if request.param == "torch":
        path = FIXTURES / "torch" / "training_named.pt"
        return "torch", path, load_file(path.with_name("training_named.truth.safetensors"))
    if request.param == "torch-bin":
        path = FIXTURES / "torch" / "hf_bin"
        return "torch-bin", path, load_file(path.with_name("hf_bin.truth.safetensors"))
    if request.param == "safetensors":
        truth = load_file(FIXTURES / "torch" / "hf_bin.truth.safetensors")
        names = sorted(truth)
        for number, part in enumerate((names[:4], names[4:]), 1):
            tensors = {key.removeprefix("model/"): truth[key] for key in part}
            save_file(tensors, folder / f"model-{number:05d}-of-00002.safetensors", {"format": "pt"})
        weight_map = {
            key.removeprefix("model/"): f"model-{1 + (key in names[4:]):05d}-of-00002.safetensors" for key in names
        }
        total = sum(tensor.nbytes for tensor in truth.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return "safetensors", folder, truth
    degrees = ["--tp", "2"] if request.param == "sharded-tp2" else []
    ckpt("convert", dcp, folder / "made", "--to", "sharded", *degrees)
    return request.param, folder / "made", load_file(dcp.with_name("fsdp2_dp4.truth.safetensors"))


def load(kind: str, out: Path, ckpt: Runner, scratch: Path) -> Tensors:
    """The output by the real library; cut shards are joined by `ckpt` first."""
    if kind == "dcp":
        return by_state(load_dcp(out))
    if kind == "torch":
        file = out if out.is_file() else next(out.glob("*.p*t*"))
        loaded = torch.load(file, weights_only=True)
        return named(by_state(loaded), param_names(loaded["optimizer"]))
    if kind == "torch-bin":
        index = out / "pytorch_model.bin.index.json"
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"pytorch_model.bin"}
        return by_state({k: v for file in sorted(files) for k, v in torch.load(out / file, weights_only=True).items()})
    if kind == "safetensors":
        return {f"model/{k}": v for file in sorted(out.glob("*.safetensors")) for k, v in load_file(file).items()}
    if kind == "sharded-tp2":
        ckpt("convert", out, scratch, "--to", "sharded")
        return load_sharded(scratch)
    return load_sharded(out)


def raw(path: Path) -> bytes:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return b"".join(file.read_bytes() for file in files)


@pytest.mark.share(9)
@pytest.mark.parametrize("pattern", [GONE, "lm_head.*", "re:^lm_head\\.", "layers.*.w1.weight"])
def test_the_key_its_twins_and_its_bytes_are_gone(source: Any, pattern: str, ckpt: Runner, tmp_path: Path) -> None:
    kind, path, truth = source
    out = tmp_path / (path.name if path.is_file() else "out")
    said = ckpt("merge", path, out, "--remove-keys", pattern)
    gone = {
        key: tensor
        for key, tensor in truth.items()
        if (".w1." in key if "w1" in pattern else key.split("/", 1)[1] == GONE)
    }
    assert len(gone) >= 1
    rows = {f"{row['state']}/{row['name']}": row["bytes"] for row in said["removed"]}
    assert rows == {key: tensor.nbytes for key, tensor in gone.items()}
    assert said["removed_bytes"] == sum(tensor.nbytes for tensor in gone.values())

    assert_same(load(kind, out, ckpt, tmp_path / "joined"), {k: v for k, v in truth.items() if k not in gone})
    data = raw(out)
    for key, tensor in gone.items():
        sample = tensor.contiguous().flatten()[-8:].numpy().tobytes()  # the end of it: in the last shard, whole
        if tensor.numel() >= 8 and sample.strip(b"\0"):
            assert sample in raw(path), "the yardstick: the source holds these bytes"
            assert sample not in data, f"the bytes of {key} are still there"
        name = key.split("/", 1)[1]
        assert f'"{name}"'.encode() not in data, f"{name} is still listed in an index"
    assert ckpt("verify", out)["ok"] is True
    assert_index(out)


def assert_index(out: Path) -> None:
    for index in out.glob("*.index.json") if out.is_dir() else ():
        said = json.loads(index.read_text())
        if "weight_map" not in said:
            continue
        sizes = 0
        for file in set(said["weight_map"].values()):
            tensors = load_file(out / file) if file.endswith(".safetensors") else torch.load(out / file)
            assert {name for name, where in said["weight_map"].items() if where == file} == set(tensors)
            sizes += sum(tensor.nbytes for tensor in tensors.values())
        assert said["metadata"]["total_size"] == sizes
        stale = {p.name for p in out.iterdir() if p.suffix in (".bin", ".safetensors")} - set(
            said["weight_map"].values()
        )
        assert not stale, "shards that nothing names"


def test_model_only_keeps_the_twins(source: Any, ckpt: Runner, tmp_path: Path) -> None:
    kind, path, truth = source
    if kind not in ("dcp", "torch", "sharded"):
        pytest.skip("no optimizer states in this source")
    out = tmp_path / (path.name if path.is_file() else "out")
    said = ckpt("merge", path, out, "--remove-keys", GONE, "--model-only")
    assert [(row["state"], row["name"]) for row in said["removed"]] == [("model", GONE)]
    assert said["removed_bytes"] == truth[f"model/{GONE}"].nbytes
    got = load(kind, out, ckpt, tmp_path / "joined")
    assert f"model/{GONE}" not in got and len(got) == len(truth) - 1


def test_param_groups_no_longer_list_the_removed_parameter(ckpt: Runner, tmp_path: Path) -> None:
    """A DCP optimizer that still lists a parameter without state can't be loaded."""
    ckpt("merge", FIXTURES / "dcp" / "fsdp2_dp4", tmp_path / "out", "--remove-keys", "lm_head.*")
    groups = load_dcp(tmp_path / "out")["optim"]["param_groups"]
    assert [group["params"] for group in groups] == [
        ["embed.weight", "layers.0.w1.weight", "layers.0.w2.weight"],
        ["layers.0.norm.weight"],
    ]


@pytest.mark.parametrize("case", ["titan", "titan_root", "wrapper_names", "accelerate_fsdp2", "no_collectives"])
def test_no_layout_of_dcp_still_lists_it(case: str, ckpt: Runner, tmp_path: Path) -> None:
    ckpt("merge", FIXTURES / "dcp" / case, tmp_path / "out", "--remove-keys", "lm_head.*")
    listed = [path for path, _ in leaves(load_dcp(tmp_path / "out"))]
    assert listed and not [path for path in listed if "lm_head" in ".".join(map(str, path))]
    assert b"lm_head" not in raw(tmp_path / "out")


def test_extras_that_only_share_the_name_stay(ckpt: Runner, tmp_path: Path) -> None:
    """A config value called like a parameter, and a list of words, are no parameters."""
    extras = {"config": {"scale": 3, "freeze": ["scale", "head"]}, "epoch": 2}
    model = {"scale": torch.ones(3), "head": torch.ones(2, 2)}
    torch.save({"model": model, **extras}, tmp_path / "in.pt")
    ckpt("merge", tmp_path / "in.pt", tmp_path / "out.pt", "--remove-keys", "scale")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(loaded.pop("model")) == ["head"] and loaded == extras


def test_numbers_and_names_of_groups_leave_together(ckpt: Runner, tmp_path: Path) -> None:
    """torch's own optimizer loads what is left: a model without the head, and its groups."""
    ckpt("merge", FIXTURES / "torch" / "training_named.pt", tmp_path / "out.pt", "--remove-keys", GONE)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    matrices = ["embed.weight", *(f"layers.{i}.w{j}.weight" for i in (0, 1) for j in (1, 2))]
    groups = loaded["optimizer"]["param_groups"]
    assert [group["param_names"] for group in groups] == [matrices, ["layers.0.norm.weight", "layers.1.norm.weight"]]
    parameters = [[(name, torch.nn.Parameter(loaded["model"][name])) for name in g["param_names"]] for g in groups]
    optimizer = torch.optim.AdamW([{"params": group} for group in parameters])
    optimizer.load_state_dict(loaded["optimizer"])
    for group in parameters:
        for name, parameter in group:
            number = groups[0 if name in matrices else 1]["params"][[n for n, _ in group].index(name)]
            got = optimizer.state[parameter]["exp_avg"]
            want = loaded["optimizer"]["state"][number]["exp_avg"]
            assert torch.equal(got, want) and got.shape == parameter.shape


@pytest.mark.share(3)
def test_keep_keys_is_the_mirror(source: Any, ckpt: Runner, tmp_path: Path) -> None:
    kind, path, truth = source
    out = tmp_path / (path.name if path.is_file() else "out")
    ckpt("merge", path, out, "--keep-keys", "layers.*")
    want = {key: tensor for key, tensor in truth.items() if key.split("/", 1)[1].startswith("layers.")}
    assert_same(load(kind, out, ckpt, tmp_path / "joined"), want)


def test_a_pattern_without_a_match_is_a_usage_error_with_near_misses(source: Any, ckpt: Runner, tmp_path: Path) -> None:
    _, path, _ = source
    ran = ckpt.run("merge", path, tmp_path / "out", "--remove-keys", "lm_haed.weight")
    assert ran.code == 2 and ran.out is None
    error = json.loads(ran.err.strip().splitlines()[-1])["error"]
    assert "lm_haed.weight" in error["message"]
    assert GONE in json.dumps(error), "near misses name the key that was meant"
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir()) == []
