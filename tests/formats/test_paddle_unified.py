"""Unified checkpoints: layouts, indexes, options of the job, and every way in which they can be wrong.

The checkpoints here are written by the safetensors library and `json`; the expectations are NumPy's.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.target import LayoutWish, Wanted, WantedTensor
from ckpt_tool.core.tensor import LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError, UnknownFormat, UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.job import PaddleHints
from ckpt_tool.systems.paddle.rules import module_of
from ckpt_tool.systems.paddle.unified.files import file_key, optimizer_key
from ckpt_tool.systems.paddle.unified.format import FORMAT
from ckpt_tool.systems.paddle.unified.read import transposed
from ckpt_tool.systems.paddle.unified.target import unified_target

BF16 = ml_dtypes.bfloat16
LLAMA = {"model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4}
SHAPES = {
    "model.embed_tokens.weight": (6, 4),
    "model.layers.0.mlp.gate_proj.weight": (4, 6),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.norm.weight": (4,),
}
LISTED = ("gate_proj", "q_proj")


def values(start: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def write(
    folder: Path,
    stem: str,
    tensors: Mapping[str, np.ndarray],
    *,
    layout: str = "np",
    files: int = 1,
    said: Mapping[str, Any] | None = None,
    total: float | None = None,
) -> None:
    """Files and index of one kind, as Paddle names them."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        mine = {name: np.array(tensors[name], order="C") for name in names[number::files]}
        path = f"{stem}-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file(mine, folder / path, metadata={"format": layout})
        weight_map |= dict.fromkeys(mine, path)
    size = sum(value.nbytes for value in tensors.values()) if total is None else total
    index = {"metadata": {"total_size": size}, "weight_map": {name: weight_map[name] for name in names}, **(said or {})}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=4))


def job(
    folder: Path,
    *,
    layout: str = "pt",
    config: Mapping[str, Any] | None = LLAMA,
    masters: bool = True,
    optimizer: bool = True,
    files: int = 1,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> dict[str, np.ndarray]:
    """A whole checkpoint; the values by STATE/NAME, in Paddle's layout."""
    truth = {}
    for number, (name, shape) in enumerate(shapes.items()):
        wide = values(100 * number, shape)
        truth[f"model/{name}"] = wide.astype(BF16)
        if masters:
            truth[f"master/{name}"] = wide
        if optimizer:
            truth |= {
                f"exp_avg/{name}": wide + 1000,
                f"exp_avg_sq/{name}": wide + 2000,
                f"beta1_pow_acc/{name}": np.full((1,), 0.9, np.float32),
            }
    model = {key[6:]: value for key, value in truth.items() if key.startswith("model/")}
    if layout == "pt":
        model = {n: v.T if any(f".{m}." in n for m in LISTED) else v for n, v in model.items()}
    write(folder, "model", model, layout=layout, files=files)
    if masters:
        write(folder, "master_weights", {k[7:]: v for k, v in truth.items() if k.startswith("master/")}, files=files)
    if optimizer:
        kinds = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0", "beta1_pow_acc": "beta1_pow_acc_0"}
        states = {
            f"{k.split('/')[1]}/{kinds[k.split('/')[0]]}": v for k, v in truth.items() if k.split("/")[0] in kinds
        }
        write(folder, "optimizer", states, files=files, said={"quant_ckpt_resume_times": 0, "master_weights": True})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return truth


def read(folder: Path, **options: Any) -> Catalog:
    catalog = FORMAT.read(Tree(folder), ReadOptions(**options))
    catalog.check()
    return catalog


def same(folder: Path, truth: Mapping[str, np.ndarray]) -> None:
    opened = open_source(str(folder), Reading())
    catalog = OpenCatalog(opened.tree, opened.catalog)
    assert {f"{key.state}/{key.name}" for key in opened.catalog.tensors} == set(truth)
    for key, want in truth.items():
        state, name = key.split("/", 1)
        got = catalog.state(state)[name]
        assert got.shape == want.shape, key
        assert got.numpy().tobytes() == np.ascontiguousarray(want).tobytes(), key


def fails(folder: Path, code: str, **options: object) -> CkptError:
    with pytest.raises(CkptError) as caught:
        read(folder, **options)
    fault = caught.value
    assert (fault.code, fault.exit_code) == (code, 3) or code.startswith("E04"), (fault.code, fault.message)
    assert fault.code == code and fault.message and (fault.path or fault.key) and fault.hint
    return fault


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index, indent=4))


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("layout", ["pt", "np"])
def test_both_layouts_show_paddles(layout: str, files: int, tmp_path: Path) -> None:
    same(tmp_path, job(tmp_path, layout=layout, files=files))


def test_the_lists_settle_a_square_weight_and_nothing_else_does(tmp_path: Path) -> None:
    truth = job(tmp_path, config=None)
    fault = fails(tmp_path, "E1353")
    assert "q_proj" in (fault.key or "") and "--config" in (fault.hint or "")
    catalog = read(tmp_path, config=LLAMA)
    assert catalog.tensors[TensorKey("model.layers.0.self_attn.q_proj.weight")].chunks[0].array.strides == (1, 4)
    assert read(tmp_path, family="llama").hints.get(PaddleHints).told is True
    del truth


def test_weights_of_an_unknown_model_are_settled_by_their_masters(tmp_path: Path) -> None:
    shapes = {"x.layers.0.odd.weight": (4, 6), "x.layers.1.odd.weight": (4, 6), "x.norm.weight": (4,)}
    truth = {}
    for number, (name, shape) in enumerate(shapes.items()):
        truth |= {
            f"model/{name}": values(number * 50, shape).astype(BF16),
            f"master/{name}": values(number * 50, shape),
        }
    write(tmp_path, "model", {k[6:]: v.T for k, v in truth.items() if k.startswith("model/")}, layout="pt")
    write(tmp_path, "master_weights", {k[7:]: v for k, v in truth.items() if k.startswith("master/")})
    same(tmp_path, truth)


def test_what_one_weight_shows_holds_for_its_module() -> None:
    stored = {"a.1.odd.weight": (6, 4), "a.2.odd.weight": (4, 4), "a.1.lora_A": (4, 4), "a.bias": (4,)}
    flips, notes = transposed(stored, {"a.1.odd.weight": (4, 6)}, {}, path="x")
    assert flips == {"a.1.odd.weight", "a.2.odd.weight"} and not notes
    flips, notes = transposed({"a.1.q_proj.weight": (6, 4)}, {"a.1.q_proj.weight": (6, 4)}, LLAMA, path="x")
    assert flips == set() and "q_proj" in notes[0].message  # its master weight's shape is stronger than the list
    with pytest.raises(CkptError) as caught:
        both = {"a.1.odd.weight": (6, 4), "a.2.odd.weight": (6, 4)}
        transposed(both, {"a.1.odd.weight": (4, 6), "a.2.odd.weight": (6, 4)}, {}, path="x")
    assert caught.value.code == "E1354"
    assert module_of("mtp_linear_proj.0.weight") == "mtp_linear_proj"


def test_masters_and_moments_are_in_paddles_layout_whatever_they_say(tmp_path: Path) -> None:
    truth = job(tmp_path)
    for stem in ("master_weights", "optimizer"):
        path = tmp_path / f"{stem}-00001-of-00001.safetensors"
        save_file(load_file(path), path, metadata={"format": "pt"})
    same(tmp_path, truth)


# -- whose folder it is ------------------------------------------------------------------------------------------------


def test_a_model_alone_is_ours_only_in_paddles_layout(tmp_path: Path) -> None:
    for layout, name in (("np", "paddle-unified"), ("pt", "safetensors")):
        folder = tmp_path / layout
        job(folder, layout=layout, masters=False, optimizer=False)
        tree = Tree(folder)
        assert registry.detect(tree)[0].name == name
        assert tree.bytes_read <= 64 << 10
        assert [claim.name for claim in registry.settle(registry.claims(tree))] == [name]
    single = Tree(tmp_path / "np" / "model-00001-of-00001.safetensors")
    assert registry.detect(single)[0].name == "safetensors"


def test_one_file_in_paddles_layout_needs_no_index(tmp_path: Path) -> None:
    truth = {f"model/{name}": values(3, shape) for name, shape in SHAPES.items()}
    tensors = {key[6:]: value for key, value in truth.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np"})
    assert registry.detect(Tree(tmp_path))[0].name == "paddle-unified"
    same(tmp_path, truth)
    assert read(tmp_path).files == ("model.safetensors",)


def test_a_model_alone_that_was_written_here_is_known_again(tmp_path: Path) -> None:
    truth = job(tmp_path / "a")
    convert(
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        Reading(),
        Writing(to="paddle-unified", states=("model",), verify="full"),
        Silent(),
    )
    assert registry.detect(Tree(tmp_path / "b"))[0].name == "paddle-unified"
    same(tmp_path / "b", {key: value for key, value in truth.items() if key.startswith("model/")})


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.tp00.safetensors_shard_0001",
        "master_weights.safetensors.index.json",
        "optimizer.safetensors",
    ],
)
def test_paddles_names_are_never_hugging_faces(name: str, tmp_path: Path) -> None:
    save_file({"w": values(0, (2,))}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / name).write_bytes(b"{}")
    assert registry.detect(Tree(tmp_path))[0].name == "paddle-unified"


def test_paddles_adapter_beside_a_hubs_model_is_two_checkpoints(tmp_path: Path) -> None:
    save_file({"w": values(0, (2,))}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "peft_model-00001-of-00001.safetensors").write_bytes(b"{}")
    with pytest.raises(UnknownFormat, match="safetensors and paddle-unified"):
        registry.detect(Tree(tmp_path))


# -- indexes -----------------------------------------------------------------------------------------------------------


def test_files_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    job(tmp_path, files=2)
    (tmp_path / "optimizer-00002-of-00002.safetensors").unlink()
    assert "optimizer-00002-of-00002" in fails(tmp_path, "E0380").message


def test_files_that_no_index_names_are_told(tmp_path: Path) -> None:
    truth = job(tmp_path)
    save_file({"x": values(0, (2,))}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04cposix\nsystem\n.")
    (tmp_path / "rng_state_0.pth").write_bytes(b"\x80\x04cposix\nsystem\n.")
    same(tmp_path, truth)
    notes = {note.code: note.message for note in read(tmp_path).notes}
    assert "model-00002-of-00002" in notes["W-stray"] and "training_args.bin, " not in notes.get("W-ignored", "")
    assert "training_args.bin" in notes["W-job-files"] and "rng_state_0.pth" in notes["W-job-files"]


@pytest.mark.parametrize("stem", ["model", "optimizer", "master_weights"])
def test_a_lost_index_is_told(stem: str, tmp_path: Path) -> None:
    job(tmp_path)
    (tmp_path / f"{stem}.safetensors.index.json").unlink()
    assert stem in (fails(tmp_path, "E1352").path or "")


def test_index_and_headers_are_held_against_each_other(tmp_path: Path) -> None:
    job(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    edit(index, lambda i: i["weight_map"].update(lost="model-00001-of-00001.safetensors"))
    assert "lost" in fails(tmp_path, "E0381").message
    edit(index, lambda i: (i["weight_map"].pop("lost"), i["weight_map"].pop("model.norm.weight")))
    assert "model.norm.weight" in fails(tmp_path, "E0382").message
    assert any(note.code == "W-extra-tensors" for note in read(tmp_path, lenient=True).notes)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    job(tmp_path, files=2)
    for number in (1, 2):
        path = tmp_path / f"model-0000{number}-of-00002.safetensors"
        save_file({**load_file(path), "model.norm.weight": values(0, (4,))}, path, metadata={"format": "pt"})
    assert "model.norm.weight" in fails(tmp_path, "E0383").message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda i: i["weight_map"].update(x="../../secret.safetensors"), "E0410"),
        (lambda i: i["weight_map"].update(x="/etc/passwd"), "E0410"),
        (lambda i: i["weight_map"].update(x="MODEL-00001-of-00001.safetensors"), "E0387"),
        (lambda i: i["weight_map"].update(x=7), "E0338"),
        (lambda i: i.update(weight_map=[]), "E0336"),
        (lambda i: i.pop("weight_map"), "E0336"),
    ],
)
def test_indexes_are_data_of_strangers(change: Callable[[dict[str, Any]], None], code: str, tmp_path: Path) -> None:
    job(tmp_path)
    edit(tmp_path / "model.safetensors.index.json", change)
    fails(tmp_path, code)


def test_total_size_is_checked_and_may_be_a_float(tmp_path: Path) -> None:
    job(tmp_path)
    assert not [note for note in read(tmp_path).notes if note.code == "W-total-size"]
    index = tmp_path / "model.safetensors.index.json"
    edit(index, lambda i: i["metadata"].update(total_size=float(i["metadata"]["total_size"])))
    assert not [note for note in read(tmp_path).notes if note.code == "W-total-size"]
    for wrong in (1, 1e300, "many", True):
        edit(index, lambda i, wrong=wrong: i["metadata"].update(total_size=wrong))
        told = [note for note in read(tmp_path).notes if note.code == "W-total-size"]
        assert bool(told) == (wrong == 1 and wrong is not True), wrong


def test_empty_state_dicts_are_no_fault(tmp_path: Path) -> None:
    truth = job(tmp_path, masters=False)
    save_file({}, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    (tmp_path / "master_weights.safetensors.index.json").write_text(json.dumps(index))
    same(tmp_path, truth)


# -- options of the job ------------------------------------------------------------------------------------------------


def test_sixteen_bit_integers_are_bf16_where_something_says_so(tmp_path: Path) -> None:
    truth = job(tmp_path, config={"model_type": "llama"})
    path = tmp_path / "model-00001-of-00001.safetensors"
    save_file({k: v.view(np.uint16) for k, v in load_file(path).items()}, path, metadata={"format": "pt"})
    same(tmp_path, truth)  # every weight has a master
    for part in (*tmp_path.glob("optimizer*"), *tmp_path.glob("master*")):
        part.unlink()
    save_file(load_file(path), path, metadata={"format": "np"})
    assert "dtype" in (fails(tmp_path, "E1357").hint or "")
    assert read(tmp_path, config={"dtype": "bfloat16"}).tensors[TensorKey("model.norm.weight")].dtype.name == "BF16"
    fails(tmp_path, "E1357", config={"dtype": "float16"})


def test_masters_that_are_the_model_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    wide = {name: values(7, shape) for name, shape in SHAPES.items()}
    write(folder, "model", wide)
    moments = {f"{name}/moment1_0": value for name, value in wide.items()}
    write(folder, "optimizer", moments, said={"quant_ckpt_resume_times": 0, "master_weights": True})
    (folder / "config.json").write_text(json.dumps(LLAMA))
    same(folder, {f"{state}/{n}": v for n, v in wide.items() for state in ("master", "exp_avg")})
    convert(str(folder), str(tmp_path / "out"), Reading(), Writing(to="paddle-unified", verify="full"), Silent())
    assert not list((tmp_path / "out").glob("master*"))
    same(tmp_path / "out", {f"{state}/{n}": v for n, v in wide.items() for state in ("master", "exp_avg")})
    (folder / "config.json").write_text("{}")
    catalog = read(folder)
    assert catalog.states() == ("model", "exp_avg") and any(n.code == "W-masters-as-model" for n in catalog.notes)
    (folder / "config.json").write_text('{"dtype": "float32"}')
    assert read(folder).states() == ("model", "exp_avg")  # a run in fp32


def test_one_process_says_truly_whether_it_had_masters(tmp_path: Path) -> None:
    job(tmp_path, masters=False)
    assert "master" not in read(tmp_path).states()  # several processes always say true
    edit(tmp_path / "optimizer.safetensors.index.json", lambda i: i.pop("quant_ckpt_resume_times"))
    fails(tmp_path, "E1359")


def test_an_asynchronous_save_that_did_not_finish(tmp_path: Path) -> None:
    truth = job(tmp_path)
    parts = ("model", "optimizer", "master")
    for part in parts:
        for rank in (0, 1):
            (tmp_path / f".{part}_weight.done.{rank}").write_bytes(b"")
    same(tmp_path, truth)
    (tmp_path / ".optimizer_weight.done.1").unlink()
    assert ".optimizer_weight.done.1" in fails(tmp_path, "E1351").message
    for part in parts:
        (tmp_path / f".{part}_weight.done.1").unlink(missing_ok=True)
        (tmp_path / f".{part}_weight.done.0").rename(tmp_path / f".{part}_weight.done.-1")
    same(tmp_path, truth)  # a job of one process


def test_optimizer_keys(tmp_path: Path) -> None:
    for key, dtype, state in (
        ("w/moment1_0", "F32", "exp_avg"),
        ("w/moment1_0", "I8", "exp_avg@int8"),
        ("w/moment2_0", "U8", "exp_avg_sq@uint8"),
        ("w/moment2_0", "I8", "exp_avg_exp_avg_sq@int4"),
        ("w/moment1_0@scales", "F32", "exp_avg@scales"),
        ("w/moment2_0@max_scales", "F32", "exp_avg_sq@max_scales"),
        ("w/velocity_0", "F32", "momentum_buffer"),
        ("w/beta2_pow_acc_0", "F32", "beta2_pow_acc"),
        ("w/moment2_max_0", "F32", "max_exp_avg_sq"),
        ("w/odd_0", "F32", "odd"),
    ):
        found = optimizer_key(key, DTYPES[dtype], path="x")
        assert found == TensorKey("w", state) and file_key(found) == key
    job(tmp_path)
    path = tmp_path / "optimizer-00001-of-00001.safetensors"
    save_file({**load_file(path), "no type": values(0, (2,))}, path)
    edit(tmp_path / "optimizer.safetensors.index.json", lambda i: i["weight_map"].update({"no type": path.name}))
    fails(tmp_path, "E1350")
    with pytest.raises(UsageError):
        file_key(TensorKey("w", "moment1"))


def test_slices_of_sharding_v2_in_merged_files(tmp_path: Path) -> None:
    """As PaddleFormers 1.2.0 writes them: a line in two files, padded, of which the index names the last."""
    truth = job(tmp_path, layout="np", optimizer=False)
    (tmp_path / "master_weights-00001-of-00001.safetensors").unlink()
    halves: list[dict[str, np.ndarray]] = [{}, {}]
    for number, (name, shape) in enumerate(SHAPES.items()):
        line = np.concatenate([truth[f"master/{name}"].reshape(-1), np.zeros(128 - int(np.prod(shape)), np.float32)])
        if number == 1:
            halves[0][name], halves[1][name] = line[:10], line[10:]
        else:
            halves[number % 2][name] = line
    where = {}
    for number, half in enumerate(halves):
        path = f"master_weights-0000{number + 1}-of-00002.safetensors"
        save_file(half, tmp_path / path, metadata={"format": "np"})
        where |= dict.fromkeys(half, path)
    size = 4 * 128 * len(SHAPES)
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (tmp_path / "master_weights.safetensors.index.json").write_text(json.dumps(index))
    same(tmp_path, truth)
    write(tmp_path, "model", {k[6:]: v for k, v in truth.items() if k.startswith("model/")}, files=2)
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    assert "tensor or pipeline" in fails(tmp_path, "E1361").message


def test_slices_of_a_job_with_expert_ranks(tmp_path: Path) -> None:
    """Expert ranks write model files of their own, in which nothing but experts lies: no tensor or pipeline ranks."""
    dense = "model.norm.weight"
    expert = "model.layers.0.mlp.experts.1.down_proj.weight"
    shapes = {dense: (4,), expert: (4, 6)}
    truth = {f"{state}/{name}": values(9, shape) for name, shape in shapes.items() for state in ("model", "master")}
    write(tmp_path, "model", {dense: truth[f"model/{dense}"], expert: truth[f"model/{expert}"]}, files=2)
    lines = {
        name: np.concatenate([values(9, shape).reshape(-1), np.zeros(8, np.float32)]) for name, shape in shapes.items()
    }
    write(tmp_path, "master_weights", lines, files=2)
    same(tmp_path, truth)


# -- beside ------------------------------------------------------------------------------------------------------------


def test_scheduler_and_scaler_travel(tmp_path: Path) -> None:
    truth = job(tmp_path / "a")
    plain = {"last_epoch": 2, "last_lr": 0.5}
    (tmp_path / "a" / "scheduler.pdparams").write_bytes(pickle.dumps(plain, 4))
    scaler = {"scale": np.array([3.0], np.float32), "incr_ratio": 2.0, "use_dynamic_loss_scaling": True}
    (tmp_path / "a" / "scaler.pdparams").write_bytes(pickle.dumps(scaler, 4))
    truth["extras/scaler.scale"] = scaler["scale"]
    same(tmp_path / "a", truth)
    extras = read(tmp_path / "a").extras
    assert extras == {"scheduler": plain, "scaler": {"incr_ratio": 2.0, "use_dynamic_loss_scaling": True}}
    convert(str(tmp_path / "a"), str(tmp_path / "b"), Reading(), Writing(to="paddle-unified", verify="full"), Silent())
    same(tmp_path / "b", truth)
    assert read(tmp_path / "b").extras == extras
    assert pickle.loads((tmp_path / "b" / "scheduler.pdparams").read_bytes()) == plain
    back = pickle.loads((tmp_path / "b" / "scaler.pdparams").read_bytes())
    assert back["scale"] == scaler["scale"] and back["incr_ratio"] == 2.0


def test_pickles_that_ask_for_code_are_named_and_refused(tmp_path: Path) -> None:
    job(tmp_path / "a")
    (tmp_path / "a" / "scheduler.pdparams").write_bytes(b"\x80\x04cposix\nsystem\n(S'true'\ntR.")
    assert "posix.system" in read(tmp_path / "a").unsafe[0]
    with pytest.raises(CkptError) as caught:
        convert(str(tmp_path / "a"), str(tmp_path / "b"), Reading(), Writing(to="sharded"), Silent())
    assert caught.value.exit_code == 4 and not (tmp_path / "b").exists()


# -- writing -----------------------------------------------------------------------------------------------------------


def test_the_same_kind_is_written_again_to_the_byte(tmp_path: Path) -> None:
    for layout in ("pt", "np"):
        source = tmp_path / layout
        out = tmp_path / f"{layout}_out"
        job(source, layout=layout)
        convert(str(source), str(out), Reading(), Writing(to="paddle-unified", verify="full"), Silent())
        for path in source.iterdir():
            if path.name != "optimizer.safetensors.index.json":
                assert (out / path.name).read_bytes() == path.read_bytes(), path.name
        index = json.loads((out / "optimizer.safetensors.index.json").read_text())
        assert index["master_weights"] is True and index["metadata"]["total_size"] == sum(
            value.nbytes for value in load_file(out / "optimizer-00001-of-00001.safetensors").values()
        )


def test_many_files_and_a_note_for_jobs_of_one_process(tmp_path: Path) -> None:
    truth = job(tmp_path / "a")
    writing = Writing(to="paddle-unified", verify="full", max_shard_size=150)
    report = convert(str(tmp_path / "a"), str(tmp_path / "b"), Reading(), writing, Silent())
    assert any("reads the first alone" in note for note in report["notes"])
    same(tmp_path / "b", truth)
    index = json.loads((tmp_path / "b" / "optimizer.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    for file in files:
        with safe_open(tmp_path / "b" / file, "np") as opened:
            assert set(opened.keys()) == {key for key, where in index["weight_map"].items() if where == file}


def wanted(tensors: Mapping[TensorKey, tuple[tuple[int, ...], str]], hints: Mapping[str, Any]) -> Wanted:
    rows = tuple(WantedTensor(key, shape, DTYPES[dtype]) for key, (shape, dtype) in tensors.items())
    return Wanted(rows, hints=Hints(hints))


def test_layout_of_a_foreign_source_follows_the_loader() -> None:
    """PaddleFormers transposes on loading, unless told not to, whatever the file says."""
    name = "model.layers.0.mlp.gate_proj.weight"
    rows = {TensorKey(name): ((4, 6), "BF16")}

    def made(**hints: Any) -> Any:
        return unified_target(wanted(rows, hints), "x")

    known = made(dialect="paddle", paddle={"config": LLAMA})
    array = known.files[0].arrays[0]
    assert array.strides == (1, 4) and b'"pt"' in known.files[0].literals[0][1]
    assert b'"shape":[6,4]' in known.files[0].literals[0][1] and not known.notes
    unknown = made(dialect="paddle")
    assert unknown.files[0].arrays[0].strides is None and "--convert_from_hf 0" in unknown.notes[0]
    foreign = made()
    assert foreign.files[0].arrays[0].strides is None and "--dialect paddle" in foreign.notes[0]
    kept = made(dialect="paddle", paddle={"kind": "unified", "layout": "np", "config": LLAMA})
    assert kept.files[0].arrays[0].strides is None and not kept.notes


def test_a_file_in_the_hugging_face_layout_can_be_read_by_itself(tmp_path: Path) -> None:
    truth = job(tmp_path / "a")
    convert(str(tmp_path / "a"), str(tmp_path / "b"), Reading(), Writing(to="sharded"), Silent())
    (tmp_path / "b" / "config.json").unlink(missing_ok=True)
    convert(str(tmp_path / "a"), str(tmp_path / "torch.pt"), Reading(), Writing(to="torch"), Silent())
    convert(
        str(tmp_path / "torch.pt"),
        str(tmp_path / "c"),
        Reading(),
        Writing(to="paddle-unified", verify="full", dialect="keep"),
        Silent(),
    )
    same(tmp_path / "c", truth)
    rows = {TensorKey("q_proj.weight"): ((4, 4), "BF16")}
    target = unified_target(wanted(rows, {"dialect": "paddle", "paddle": {"config": LLAMA}}), "x")
    assert b'"ckpt_model_type":"llama"' in target.files[0].literals[0][1]  # no config.json goes along


def test_weights_are_rounded_from_masters_that_are_alone(tmp_path: Path) -> None:
    array = StoredArray("x", 0, DTYPES["F32"], (4, 6))
    both = [simple_tensor(TensorKey("a", state), array) for state in ("master", "exp_avg")]
    hints = Hints.of(PaddleHints(config={"dtype": "bfloat16"}))
    made = FORMAT.fit(both, {}, hints, LayoutWish())
    assert [tensor.key for _, tensor in made.tensors][-1] == TensorKey("a") and made.casts[
        TensorKey("a")
    ].name == "BF16"
    assert "rounded to BF16" in made.dropped[0]["reason"]
    for other, wish in (
        (Hints(), LayoutWish()),
        (Hints.of(PaddleHints(config={"dtype": "float32"})), LayoutWish()),
        (hints, LayoutWish(removed=frozenset({TensorKey("a")}))),
        (Hints.of(PaddleHints(config={"dtype": "bfloat16"}, skip_save_model_weight=True)), LayoutWish()),
    ):
        assert len(FORMAT.fit(both, {}, other, wish).tensors) == 2, (other, wish)


def test_states_of_a_tied_pair_are_written_under_both_names() -> None:
    """The loader of a job of several processes looks for both."""
    array = StoredArray("x", 0, DTYPES["F32"], (6, 4))
    head = "lm_head.weight"
    table = "model.embed_tokens.weight"
    rows = [simple_tensor(TensorKey(*key), array) for key in ((head, "model"), (table, "model"), (table, "exp_avg"))]
    tied = Hints.of(PaddleHints(config={"tie_word_embeddings": True}))
    made = FORMAT.fit(rows, {}, tied, LayoutWish())
    assert made.tensors[-1][0] == 2 and made.tensors[-1][1].key == TensorKey(head, "exp_avg")
    assert "both names" in made.dropped[0]["reason"]
    unified = Hints.of(PaddleHints(kind="unified", config={"tie_word_embeddings": True}))
    for hints in (unified, Hints(), Hints.of(PaddleHints(config={"tie_word_embeddings": False}))):
        assert len(FORMAT.fit(rows, {}, hints, LayoutWish()).tensors) == 3
    assert len(FORMAT.fit(rows[1:], {}, tied, LayoutWish()).tensors) == 2  # one of them was removed
    keys = {row.key: ((6, 4), "F32") for row in rows}
    config = {"config": {**LLAMA, "tie_word_embeddings": True}, "kind": "unified"}
    told = unified_target(wanted(keys, {"dialect": "paddle", "paddle": config}), "x").notes
    assert any("looks for both names" in note for note in told)


def test_what_scales_stays_with_what_is_scaled(tmp_path: Path) -> None:
    q = np.arange(-12, 12, dtype=np.int8).reshape(4, 6)
    states: dict[str, np.ndarray] = {}
    for name in ("a", "b", "c"):
        states |= {
            f"{name}/moment1_0": q,
            f"{name}/moment1_0@scales": values(1, (6,)),
            f"{name}/moment2_0": q.view(np.uint8),
            f"{name}/moment2_0@min_scales": values(2, (6,)),
            f"{name}/moment2_0@max_scales": values(3, (6,)),
        }
    write(tmp_path / "a", "optimizer", states, said={"ckpt_quant_stage": "O1", "quant_ckpt_resume_times": 1})
    named = lambda i: [i["weight_map"].pop(key) for key in list(i["weight_map"]) if "scales" in key]  # noqa: E731
    edit(tmp_path / "a" / "optimizer.safetensors.index.json", lambda i: (named(i), None)[1])
    catalog = read(tmp_path / "a")
    assert len(catalog.tensors) == 15 and catalog.hints.plain["quantised"] == {
        "kind": "paddle",
        "stage": "O1",
        "resume_times": 1,
    }
    writing = Writing(to="paddle-unified", verify="full", max_shard_size=130)
    convert(str(tmp_path / "a"), str(tmp_path / "b"), Reading(lenient=True), writing, Silent())
    files = sorted((tmp_path / "b").glob("optimizer-*"))
    assert len(files) == 3 and all(len(load_file(file)) == 5 for file in files)
    index = json.loads((tmp_path / "b" / "optimizer.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == 6 and index["ckpt_quant_stage"] == "O1" and index["quant_ckpt_resume_times"] == 1
    assert index["metadata"]["total_size"] == 6 * 24 * 4  # of what was quantised, as Paddle counts


def test_the_first_moments_of_stage_o2_are_named_but_packed(tmp_path: Path) -> None:
    packed = np.arange(64 * 2, dtype=np.uint8).view(np.int8).reshape(64, 2)
    states = {
        "a/moment2_0": packed,
        "a/moment1_0@scales": values(1, (2, 2)),
        "a/moment2_0@min_scales": values(2, (2, 2)),
        "a/moment2_0@max_scales": values(3, (2, 2)),
        "n/moment1_0": values(4, (2,)),
        "n/moment2_0": values(5, (2,)),
    }
    write(tmp_path, "optimizer", states, said={"ckpt_quant_stage": "O2", "quant_ckpt_resume_times": 0})
    index = tmp_path / "optimizer.safetensors.index.json"
    edit(index, lambda i: i["weight_map"].update({"a/moment1_0": "optimizer-00001-of-00001.safetensors"}))
    assert TensorKey("a", "exp_avg_exp_avg_sq@int4") in read(tmp_path).tensors
    edit(index, lambda i: i["weight_map"].update({"n/lost_0": "optimizer-00001-of-00001.safetensors"}))
    fails(tmp_path, "E0381")


def test_moments_in_eight_bits_of_others_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        unified_target(wanted({TensorKey("a", "exp_avg"): ((4,), "U8")}, {}), "x")
    assert caught.value.code == "E1273"


def test_zero_sized_tensors_travel(tmp_path: Path) -> None:
    empty = {"a.weight": np.zeros((0, 4), np.float32), "b.weight": np.zeros((), np.float32)}
    write(tmp_path / "a", "model", empty)
    convert(str(tmp_path / "a"), str(tmp_path / "b"), Reading(), Writing(to="paddle-unified", verify="full"), Silent())
    same(tmp_path / "b", {f"model/{name}": value for name, value in empty.items()})


def test_the_table_makes_tensors_when_asked(tmp_path: Path) -> None:
    job(tmp_path)
    table = read(tmp_path).tensors
    assert isinstance(table[TensorKey("model.norm.weight")], LogicalTensor)
    assert TensorKey("no") not in table and len(list(table)) == len(table)
    with pytest.raises(KeyError):
        table[TensorKey("no")]
