"""Optimizer states that hang on objects of classes nobody here knows, in every format of torch files: listed under the
names that the same states have as plain tensors, left behind by word, refused else; and nothing is made of an object.

The files are real checkpoints (`fixtures/README.md`), loaded and saved again by torch.
"""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.tensor import DTensor

from ckpt_tool.cli import run
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).parents[2] / "fixtures"
MOMENT = "exp_avg"


def subclassed(held: torch.Tensor) -> Any:
    """A subclass, or a DTensor whose part is one: the pickle tells the tensor's shape."""
    if isinstance(held, DTensor):
        return DTensor(held.to_local().as_subclass(Subclass), held._spec, requires_grad=False)
    return held.as_subclass(Subclass)


class Subclass(torch.Tensor):
    pass


class Holder:
    """Whatever holds a tensor, and says nothing of it."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


CLASSES = {make: f"{__name__}.{name}" for make, name in ((subclassed, "Subclass"), (Holder, "Holder"))}


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


CASES = {  # the files that hold the moments
    "torch/ranks_fsdp2_dp4": "optim_*",
    "torch/training.pt": "training.pt",
    "megatron/gpt2_tied_pp2_adamw": "model_optim_rng.pt",
    "megatron/moe_tp2ep2etp1": "distrib_optim.pt",
    "megatron/muon_files_tp2dp2": "layer_wise_optimizer_*.pt",
    "deepspeed/z0_bf16_dp2": "*model_states.pt",
    "deepspeed/z1_bf16_dp4": "*optim_states.pt",
    "deepspeed/z3_sub_groups_dp4": "*optim_states.pt",
    "deepspeed/moe_z0_ep2_dp2": "*optim_states.pt",
    "deepspeed-universal/z1_bf16_dp2": "exp_avg.pt",
}


class Stub:
    """An object of such a class, an enum's member too."""

    def __init__(self, *args: Any) -> None:
        self.__dict__["args"] = args

    def __reduce__(self) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key != "args"}
        return (type(self), self.__dict__.get("args", ()), *([state] if state else []))


class Stubs(pickle.Unpickler):
    """Classes of systems that are not installed are made as they are met."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            parts = module.split(".")
            for stop in range(1, len(parts) + 1):
                stub = sys.modules.setdefault(above := ".".join(parts[:stop]), types.ModuleType(above))
                stub.__path__ = []
            if not hasattr(stub, name):
                setattr(stub, name, type(name, (Stub,), {"__module__": module}))
            return getattr(stub, name)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the value of a torch file of our own fixtures."""
    before = set(sys.modules)
    stubs = types.ModuleType("stubs")
    # type: ignore[attr-defined]
    stubs.Unpickler = Stubs
    stubs.load = pickle.load
    value = torch.load(path, pickle_module=stubs, weights_only=False)
    change(value)
    torch.save(value, path)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__path__", None) == []:
            del sys.modules[name]


def hang(value: Any, kind: Callable[[torch.Tensor], Any], under: tuple[Any, ...] = ()) -> None:
    """Hang every moment in `value` on an object of class `kind`."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(item, torch.Tensor) and (key == MOMENT or (key == "param" and not under)):
            value[key] = kind(item)
        elif isinstance(item, dict | list):
            hang(item, kind, (*under, key))


@pytest.fixture(params=CASES)
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Path]]:
    """(a checkpoint, its files that hold moments)."""
    source = FIXTURES / request.param
    copy = tmp_path / source.name
    if source.is_file():
        shutil.copy(source, copy)
        return copy, [copy]
    shutil.copytree(source, copy)
    return copy, sorted(copy.rglob(CASES[request.param]))


@pytest.mark.parametrize("kind", [subclassed, Holder])
def test_moments_on_objects_are_named_and_stay_behind_by_word(
    copied: tuple[Path, list[Path]],
    kind: Callable[[torch.Tensor], Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, files = copied
    before = open_source(str(source), Reading()).catalog
    for file in files:
        edit(file, lambda value: hang(value, kind))
    catalog = open_source(str(source), Reading()).catalog
    moments = {key for key in before.tensors if key.state == MOMENT}
    assert moments and {one.key for one in catalog.unread} == moments
    assert dict.fromkeys(key for key in before.tensors if key not in moments) == dict.fromkeys(catalog.tensors)
    if kind is subclassed:
        assert all(one.shown.endswith(str(list(before.tensors[one.key].shape))) for one in catalog.unread)
    for words in ([], ["--drop", "extras"]):
        assert run(["convert", str(source), str(tmp_path / "out"), "--to", "sharded", *words]) == 4
        error = capfd.readouterr().err
        assert CLASSES[kind] in error and "--state model leaves out" in error and not (tmp_path / "out").exists()
    weights = ["--state", "model", *(["--state", "master"] if source.match("*z3*") else [])]
    for number, words in enumerate((weights, ["--drop", "optimizer"])):
        out = tmp_path / f"out{number}"
        assert run(["convert", str(source), str(out), "--to", "sharded", *words]) == 0
        report = " ".join(capfd.readouterr().out.split())
        assert f"{MOMENT}: {len(moments)} tensor" in report and f"held by objects of class {CLASSES[kind]}" in report
        assert run(["diff", str(source), str(out), "--state", "model", "-q"]) == 0


def test_a_job_s_own_object_beside_them_is_named_and_left(copied: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """A dataclass of the user's, without tensors, in the same files."""
    source, files = copied
    if source.match("*universal*") or "zero" in files[0].parts:
        pytest.skip("a folder a parameter has no place for objects")

    def add(value: Any) -> None:
        target = value if isinstance(value, dict) else value[0]
        inner = target.get("optimizer_state_dict", target)
        inner["settings"] = Settings()

    for file in files:
        edit(file, add)
    out = str(tmp_path / "out")
    assert run(["inspect", str(source)]) == 0
    assert run(["convert", str(source), out, "--to", "sharded"]) == 4
    assert run(["convert", str(source), out, "--to", "sharded", "--drop", "optimizer", "--drop", "extras"]) == 0


# -- tensors that torch keeps in other forms than dense ones -----------------------------------------------------------


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    table = torch.eye(4, 3).to_sparse()
    state = {"table": table, "rows": table.to_dense().to_sparse_csr(), "w": torch.arange(6.0)}
    moments = {n: {"exp_avg": torch.zeros(6), "step": torch.tensor(1.0)} for n in range(1)}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": state, "optimizer": optimizer, "epoch": 1}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_sparse_tensors_are_listed_and_left_behind_by_name(sparse: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(sparse)]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "2 tensors are not read: table (F32 [4, 3]), rows (F32 [4, 3])" in shown and "a sparse tensor" in shown
    out = sparse.with_name("out")
    for words in ([], ["--remove-keys", "table"], ["--keep-keys", "[tw]*"]):
        assert run(["convert", str(sparse), str(out), "--to", "dcp", *words]) == 3
        error = capfd.readouterr().err
        assert "E0374" in error and "--remove-keys" in error and not out.exists()
    for number, words in enumerate((["--remove-keys", "table", "--remove-keys", "rows"], ["--keep-keys", "w"])):
        assert run(["convert", str(sparse), f"{out}{number}", "--to", "dcp", *words]) == 0
        report = " ".join(capfd.readouterr().out.split())
        assert "model: 2 tensors, table, rows (not read: the file holds a sparse" in report
        names = {str(key) for key in open_source(f"{out}{number}", Reading()).catalog.tensors}
        assert names == {"w", "w [exp_avg]", "w [step]"}
    assert run(["convert", str(sparse), str(out), "--to", "dcp", "--remove-keys", "[tr]*", "--remove-keys", "no"]) == 2
    assert run(["verify", str(sparse)]) == 3


def test_a_sparse_moment_is_left_behind_with_its_state(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    optimizer = {"state": {0: {"exp_avg": torch.eye(3).to_sparse()}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": {"w": torch.eye(3)}, "optimizer": optimizer}, tmp_path / "a.pt")
    words = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "out"), "--to"]
    assert run([*words, "dcp"]) == 3 and "w [exp_avg]" not in capfd.readouterr().out
    assert run([*words, "safetensors"]) == 0, "it has no place for the state, and nothing asks for code"
    assert "exp_avg: 1 tensor, w (not read: " in " ".join(capfd.readouterr().out.split())


def test_a_sparse_tensor_alone_is_listed(tmp_path: Path) -> None:
    torch.save({"table": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    assert run(["inspect", str(tmp_path / "a.pt")]) == 0
    assert run(["convert", str(tmp_path / "a.pt"), str(tmp_path / "out"), "--to", "safetensors"]) == 3


def test_a_class_that_extras_have_too_is_refused(tmp_path: Path) -> None:
    """What stays behind with its state takes along the lines of its class, unless another object is of that class."""
    state = {"model": {"w": torch.ones(6)}, "optimizer": {"state": {0: {MOMENT: Holder(torch.ones(6))}}}}
    words = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "out"), "--to", "dcp", "--drop", "optimizer"]
    torch.save({**state, "other": {"held": Holder(3)}}, tmp_path / "a.pt")
    assert run(words) == 4
    torch.save(state, tmp_path / "a.pt")
    assert run(words) == 0


def test_one_file_of_a_dcp_leads_to_its_folder_whatever_it_holds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.distributed.checkpoint.save({"w": torch.ones(3).as_subclass(Subclass)}, checkpoint_id=tmp_path, no_dist=True)
    assert run(["inspect", str(tmp_path / "__0_0.distcp")]) == 3
    assert "E0390" in (said := capfd.readouterr().err) and "pass the folder" in said
    for words in ([str(tmp_path)], [str(tmp_path / "__0_0.distcp"), "--from", "torch"]):
        assert run(["inspect", *words]) == 0 and "Subclass" in capfd.readouterr().out
