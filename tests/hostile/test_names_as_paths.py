"""Names that the source chose become files' names in some formats: none may lead out of the output.

Walks the registry of writers: to every format go tensors, states and counters with hostile names, in one checkpoint and
each alone, planned and for real. Whatever the exit code, what lies beside the output is untouched, nothing is left by a
refusal, and a dry run ends as the run does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tool.cli import run
from ckpt_tool.formats import registry

NAMES = [
    "../../../../victim",
    "../../victim",
    "../victim",
    "/ABSOLUTE/victim",
    "a/../../../../victim",
    "..",
    ".",
    "",
    "a//b",
    "a/",
    "x\0y",
    "C:\\victim",
    "\\\\host\\victim",
    "..\\..\\victim",
    "n" * 300,
    "deep/" * 40 + "w",
    ".ckpt-journal",
    "x/.ckpt-journal",
    ".x.ckpt-partial",
    "ends in a dot.",
    "ends in a space ",
    "two\nlines",
    "\x1b[31mred",
    "optimizer_state.pt",
]
PAIRS = [("w", "W"), ("a", "a/fp32.pt")]
LEAD_ELSEWHERE = {"deepspeed-universal"}  # formats whose files are called as the tensors are


def model(folder: Path, names: tuple[str, ...]) -> Path:
    """A safetensors file of these tensors."""
    path = folder / "model.safetensors"
    safetensors.numpy.save_file({name: np.arange(6, dtype="f4").reshape(2, 3) for name in names}, path)
    return path


def training(folder: Path, names: tuple[str, ...]) -> Path:
    """A torch file of these tensors with Adam's states."""
    import torch

    ramp = torch.arange(6.0).reshape(2, 3)
    tensors = {name: ramp + i for i, name in enumerate(names)}
    state = {name: {"exp_avg": t * 2, "exp_avg_sq": t * 3, "step": torch.tensor(4.0)} for name, t in tensors.items()}
    groups = [{"lr": 0.1, "params": list(names)}]
    path = folder / "training.pt"
    torch.save({"model": tensors, "optimizer": {"state": state, "param_groups": groups}, "iteration": 4}, path)
    return path


def snapshot(folder: Path, *, but: Path) -> dict[str, Any]:
    found = {}
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(at, name) != but]
        for name in (*folders, *names):
            path = Path(at, name)
            if path != but:
                found[str(path)] = (path.lstat().st_mode, path.read_bytes() if path.is_file() else None)
    return found


class Field:
    """A folder whose every level above the output holds a victim."""

    def __init__(self, root: Path, capfd: Any) -> None:
        self.root = root
        self.capfd = capfd
        self.place = root / "deep" / "er" / "place"
        self.place.mkdir(parents=True)
        for folder in (root, root / "deep", root / "deep" / "er", self.place):
            (folder / "victim").write_bytes(b"precious")
            (folder / "victim.d").mkdir()
        self.out = self.place / "out"

    def convert(self, source: Path, to: str, *more: str) -> tuple[int, dict[str, Any]]:
        """Exit code and error. What must hold whatever happens is checked here."""
        before = snapshot(self.root, but=self.out)
        arguments = ["convert", str(source), str(self.out), "--to", to, "--dialect", "keep", "--json", "-q", *more]
        code = run(arguments)
        err = self.capfd.readouterr().err
        assert snapshot(self.root, but=self.out) == before, (to, code, "something beside the output was touched")
        assert "Traceback" not in err and code in (0, 2, 3, 4), (to, code, err[-600:])
        assert self.out.exists() == (code == 0 and "--dry-run" not in more), (to, code, os.listdir(self.place))
        if code == 0 and "--dry-run" not in more:
            import shutil

            shutil.rmtree(self.out)
        return code, json.loads(err.strip().splitlines()[-1])["error"] if code else {}


@pytest.fixture
def field(tmp_path: Path, capfd: Any) -> Field:
    return Field(tmp_path / "field", capfd)


@pytest.mark.share(3)
@pytest.mark.parametrize("make", [model, training])
@pytest.mark.parametrize("to", registry.NAMES)
def test_hostile_names_stay_inside_or_are_refused(to: str, make: Any, tmp_path: Path, field: Field) -> None:
    names = [name.replace("/ABSOLUTE", str(field.root)) for name in NAMES]
    (tmp_path / "source").mkdir()
    everything = make(tmp_path / "source", (*names, "w.weight"))
    code, error = field.convert(everything, to)
    assert (code, error.get("code")) == field_code(field.convert(everything, to, "--dry-run")), (
        "a dry run says otherwise"
    )
    if code == 0:
        assert to not in LEAD_ELSEWHERE
        return
    if to in LEAD_ELSEWHERE:
        assert (code, error["code"]) == (4, "E1600"), error
        told = json.dumps([error["tensor"], error["message"], *error["faults"]])
        assert all(json.dumps(name[:90])[1:-1] in told for name in names[:4]), "every name is told at once"
    for case in (*((name,) for name in names), *PAIRS):
        source = make(tmp_path / "source", (*case, "w.weight"))
        code, error = field.convert(source, to)
        if to in LEAD_ELSEWHERE:
            assert (code, error["code"]) == (4, "E1600"), (case, code, error)
            assert any(error["tensor"].startswith(name[:60]) for name in case), (case, error)
            assert field_code(field.convert(source, to, "--dry-run")) == (4, "E1600"), case
            assert field_code(field.convert(source, to, "--plan", str(tmp_path / "plan.json"))) == (4, "E1600"), case
            assert not (tmp_path / "plan.json").exists()


def field_code(done: tuple[int, dict[str, Any]]) -> tuple[int, Any]:
    return done[0], done[1].get("code")


@pytest.mark.parametrize("to", registry.NAMES)
def test_hostile_states_and_counters_stay_inside(to: str, tmp_path: Path, field: Field) -> None:
    """Names of states are a file's name in `sharded`, counts of steps a folder's in four formats, DCP's roots in
    another."""
    import torch

    ramp = torch.arange(6.0).reshape(2, 3)
    base = {"w.weight": torch.arange(6.0).reshape(2, 3)}
    for name in ("../../victim", "..", "x\0y", "a/b", "n" * 300, str(field.root / "victim"), ".ckpt-journal"):
        states = {"w.weight": {"exp_avg": ramp, "exp_avg_sq": ramp, name: ramp}}
        state = {"state": states, "param_groups": [{"lr": 0.1, "params": ["w.weight"]}]}
        torch.save({"model": base, "optimizer": state}, tmp_path / "state.pt")
        field.convert(tmp_path / "state.pt", to)
    for count in (-1, 10**12, 2**63, 10**600, float("inf"), float("nan"), "../../victim", True):
        said = {"iteration": count, "global_steps": count, "global_step": count, "step": count}
        torch.save({"model": base, **said}, tmp_path / "count.pt")
        field.convert(tmp_path / "count.pt", to)


@pytest.mark.parametrize("to", registry.NAMES)
def test_side_files_with_odd_names_stay_inside(to: str, tmp_path: Path, field: Field) -> None:
    source = model(tmp_path, ("w.weight",)).parent / "folder"
    source.mkdir()
    os.rename(tmp_path / "model.safetensors", source / "model.safetensors")
    for name in (
        "tokenizer\\..\\victim.json",
        "tokenizer\n.json",
        "tokenizer .json",
        "TOKENIZER.json",
        "tokenizer.json",
    ):
        (source / name).write_text("{}")
        field.convert(source, to)
        (source / name).unlink()
