"""Optimizers that each rank wrote for itself: cut by NumPy here, joined by the reader."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.options.reading import Reading
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.unified.format import FORMAT

CONFIG = {"model_type": "ernie4_5", "num_key_value_heads": 4, "vocab_size": 8, "hidden_size": 4}
SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.mlp.up_gate_proj.weight": (4, 8),
    "model.layers.0.mlp.down_proj.weight": (4, 4),
    "model.layers.0.self_attn.qkv_proj.weight": (4, 16),
    "model.layers.0.input_layernorm.weight": (4,),
    "lm_head.weight": (8, 4),
}
AXIS = {"embed_tokens": 0, "up_gate_proj": 1, "down_proj": 0, "qkv_proj": 1, "lm_head": 0}


def whole(name: str, state: str) -> np.ndarray:
    number = list(SHAPES).index(name) * 10 + ["model", "master", "moment1_0", "moment2_0"].index(state)
    shape = SHAPES[name]
    return np.arange(number * 1000, number * 1000 + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def cut(name: str, value: np.ndarray, tp: int, rank: int) -> np.ndarray:
    """A tensor rank's share, as Paddle's layers cut it: gate and up each by themselves."""
    module = name.split(".")[-2]
    if tp == 1 or module not in AXIS:
        return value
    if module == "up_gate_proj":
        gate, up = np.split(value, 2, axis=1)
        return np.concatenate([np.split(gate, tp, axis=1)[rank], np.split(up, tp, axis=1)[rank]], axis=1)
    return np.split(value, tp, axis=AXIS[module])[rank]


def slices(value: np.ndarray, ranks: int, unit: int, start: int) -> list[tuple[int, np.ndarray]]:
    """Sharding v2: (rank, slice) of a line padded to `unit * ranks`, which begins at `start` of a buffer; its ranks'
    borders lie where they lie."""
    padded = ceil_div(value.size, unit * ranks) * unit * ranks
    line = np.concatenate([value.reshape(-1), np.zeros(padded - value.size, np.float32)])
    share = max(padded, 1)
    first = start % share
    edge = share - first if ranks > 1 else padded
    parts = [line[:edge], line[edge:]]
    return [(min(i, ranks - 1), part) for i, part in enumerate(parts) if part.size]


def write(folder: Path, tp: int, shard: int, *, flat: bool, parts: int = 1, unit: int = 2) -> dict[str, np.ndarray]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = {name: whole(name, "model") for name in SHAPES}
    save_file(model, folder / "model-00001-of-00001.safetensors", metadata={"format": "np"})
    size = sum(value.nbytes for value in model.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(model, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "optimizer.safetensors.index.json").write_text(
        json.dumps({"quant_ckpt_resume_times": 0, "optim_shard_num": parts})
    )
    truth = {f"model/{name}": value for name, value in model.items()}
    states = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0", "master": "master"}
    for t in range(tp):
        files: list[dict[str, dict[str, np.ndarray]]] = [{"optimizer": {}, "master_weights": {}} for _ in range(shard)]
        for number, name in enumerate(SHAPES):
            for state, kind in states.items():
                truth[f"{state}/{name}"] = whole(name, kind)
                mine = cut(name, whole(name, kind), tp, t)
                held = slices(mine, shard, unit, 3 * number) if flat else [(number % shard, mine)]
                for rank, part in held:
                    stem, key = ("master_weights", name) if state == "master" else ("optimizer", f"{name}/{kind}")
                    files[rank][stem][key] = np.ascontiguousarray(part)
                    if stem == "optimizer":
                        files[rank][stem][f"{name}/beta1_pow_acc_0"] = np.full((1,), 0.5, np.float32)
            truth[f"beta1_pow_acc/{name}"] = np.full((1,), 0.5, np.float32)
        for rank, stems in enumerate(files):
            at = [f"tp{t:02d}"] * (tp > 1) + [f"shard{rank:02d}"] * (shard > 1)
            label = f".{'_'.join(at)}" if at else ""
            for stem, tensors in stems.items():
                base = f"{stem}{label}.safetensors"
                for part in range(parts):
                    some = dict(list(tensors.items())[part::parts])
                    save_file(
                        some,
                        folder / (base if parts == 1 else f"{base}_shard_{part + 1:04d}"),
                        metadata={"format": "np"},
                    )
    return truth


def same(folder: Path, truth: dict[str, np.ndarray]) -> None:
    opened = open_source(str(folder), Reading())
    opened.catalog.check()
    catalog = OpenCatalog(opened.tree, opened.catalog)
    assert {f"{key.state}/{key.name}" for key in opened.catalog.tensors} == set(truth)
    for key, want in truth.items():
        state, name = key.split("/", 1)
        np.testing.assert_array_equal(catalog.state(state)[name].numpy(), want, err_msg=key)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.booleans(), st.integers(1, 2), st.integers(1, 9))
def test_ranks_are_joined_to_the_whole(tp: int, shard: int, flat: bool, parts: int, unit: int) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        same(folder, write(folder, tp, shard, flat=flat, parts=parts, unit=unit))
    finally:
        shutil.rmtree(folder)


def test_a_slice_of_padding_alone_is_no_second_copy(tmp_path: Path) -> None:
    same(tmp_path, write(tmp_path, 1, 2, flat=True, unit=4))  # the norm: 4 elements on one rank, 4 zeros on the other


def test_degrees_stand_in_the_names(tmp_path: Path) -> None:
    write(tmp_path, 2, 2, flat=True)
    assert FORMAT.read(Tree(tmp_path)).hints.get(Degrees) == Degrees(tp=2, dp=2)


@pytest.mark.parametrize("name", ["optimizer.tp01_shard00.safetensors", "master_weights.tp00_shard01.safetensors"])
def test_a_lost_rank_is_told(name: str, tmp_path: Path) -> None:
    write(tmp_path, 2, 2, flat=True)
    (tmp_path / name).unlink()
    with pytest.raises(CkptError) as caught:
        FORMAT.read(Tree(tmp_path))
    assert caught.value.code == "E1355" and name in caught.value.message


def test_ranks_that_nothing_but_their_states_show_to_be_lost(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, flat=False)
    for path in tmp_path.glob("master*"):
        path.unlink()
    for rank in ("shard01", "shard00"):
        path = tmp_path / f"optimizer.{rank}.safetensors"
        save_file({k: v for k, v in load_file(path).items() if "norm" not in k}, path)
    with pytest.raises(CkptError) as caught:
        FORMAT.read(Tree(tmp_path))
    assert caught.value.code == "E1358" and "norm" in (caught.value.key or "")
    notes = FORMAT.read(Tree(tmp_path), ReadOptions(lenient=True)).notes
    assert any(note.code == "W-untrained" for note in notes)


def test_files_of_two_jobs(tmp_path: Path) -> None:
    write(tmp_path, 2, 1, flat=False)
    (tmp_path / "optimizer.tp00_pp00.safetensors").write_bytes((tmp_path / "optimizer.tp00.safetensors").read_bytes())
    with pytest.raises(CkptError) as caught:
        FORMAT.read(Tree(tmp_path))
    assert caught.value.code == "E0384"


def test_no_files_of_ranks_at_all(tmp_path: Path) -> None:
    write(tmp_path, 1, 1, flat=False)
    for path in (*tmp_path.glob("optimizer.safetensors"), *tmp_path.glob("master*")):
        path.unlink()
    with pytest.raises(CkptError) as caught:
        FORMAT.read(Tree(tmp_path))
    assert caught.value.code == "E1358"


def test_slices_without_the_model_have_no_shape(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, flat=True)
    for path in tmp_path.glob("model*"):
        path.unlink()
    with pytest.raises(CkptError) as caught:
        FORMAT.read(Tree(tmp_path))
    assert caught.value.code == "E1356" and "shape nothing says" in caught.value.message


def test_heads_that_nothing_counts(tmp_path: Path) -> None:
    """k_proj is cut only where tensor ranks divide its heads: the shapes show it, the config is not needed."""
    write(tmp_path, 2, 1, flat=False)
    truth = {}
    for stem in ("optimizer.tp00", "optimizer.tp01", "master_weights.tp00", "master_weights.tp01"):
        path = tmp_path / f"{stem}.safetensors"
        tensors = {k.replace("self_attn.qkv_proj", "self_attn.k_proj"): v for k, v in load_file(path).items()}
        save_file(tensors, path)
    path = tmp_path / "model-00001-of-00001.safetensors"
    tensors = {k.replace("self_attn.qkv_proj", "self_attn.k_proj"): v for k, v in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "np"})
    index = (tmp_path / "model.safetensors.index.json").read_text()
    (tmp_path / "model.safetensors.index.json").write_text(index.replace("qkv_proj", "k_proj"))
    (tmp_path / "config.json").write_text("{}")
    catalog = FORMAT.read(Tree(tmp_path))
    catalog.check()
    shapes = {key.state: t.shape for key, t in catalog.tensors.items() if "k_proj" in key.name}
    assert shapes["master"] == shapes["exp_avg"] == shapes["model"] == (4, 16)
    del truth


def test_quantised_shares_have_scales_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, 2, 1, flat=False)
    for rank in ("tp00", "tp01"):
        path = tmp_path / f"optimizer.{rank}.safetensors"
        tensors = load_file(path)
        for key in [key for key in tensors if key.endswith("moment1_0")]:
            tensors[key] = tensors[key].astype(np.int8)
            tensors[key + "@scales"] = np.ones(tensors[key].shape[1:], np.float32)
        save_file(tensors, path)
    with pytest.raises(CkptError) as caught:
        FORMAT.read(Tree(tmp_path))
    assert caught.value.code == "E1356" and "scales" in caught.value.message
