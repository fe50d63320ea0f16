"""What the Python functions return is of the types that they state: real documents of every function, key by key."""

from __future__ import annotations

import json
import shutil
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.core import documents

if sys.version_info >= (3, 11):
    from typing import get_type_hints, is_typeddict
else:
    from typing_extensions import get_type_hints, is_typeddict

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
LLAMA = FIXTURES / "convert" / "llama"


def mismatches(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Where a value is not of a type: keys that a TypedDict does not have, keys that are missing, other types."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if kind is Any:
        return
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict):
            yield f"{where}: {type(value).__name__} in place of {kind.__name__}"
            return
        yield from (f"{where}: {kind.__name__} has no key {key!r}" for key in value.keys() - hints.keys())
        yield from (f"{where}: {key!r} is missing" for key in kind.__required_keys__ - value.keys())
        for key in value.keys() & hints.keys():
            yield from mismatches(value[key], hints[key], f"{where}.{key}")
    elif origin in (typing.Union, types.UnionType):
        found = [list(mismatches(value, each, where)) for each in arguments]
        if all(found):
            yield from min(found, key=len)
    elif origin is typing.Literal:
        if value not in arguments:
            yield f"{where}: {value!r} is none of {arguments}"
    elif origin in (list, tuple):
        if not isinstance(value, list | tuple):
            yield f"{where}: {type(value).__name__} in place of a list"
            return
        for number, each in enumerate(value):
            yield from mismatches(each, arguments[0], f"{where}[{number}]")
    elif origin is dict:
        if not isinstance(value, dict):
            yield f"{where}: {type(value).__name__} in place of a dict"
            return
        for key, each in value.items():
            yield from mismatches(key, arguments[0], f"{where} key")
            yield from mismatches(each, arguments[1], f"{where}[{key!r}]")
    else:
        allowed = (int, float) if kind is float else kind
        is_number_for_bool = kind is int and isinstance(value, bool)
        if not isinstance(value, allowed) or is_number_for_bool:
            yield f"{where}: {value!r} is no {kind.__name__}"


def check(document: Any, kind: Any) -> Any:
    assert not list(mismatches(document, kind, kind.__name__))
    json.dumps(document)
    return document


def test_a_key_that_no_type_has_is_found() -> None:
    """The check of this file, checked."""
    assert list(mismatches({"file": "a", "offset": "0"}, documents.ChunkEntry, "x"))
    assert list(mismatches({"file": "a", "names": "b", "more": 1}, documents.Pointer, "x")) == [
        "x: Pointer has no key 'more'"
    ]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (LLAMA / "hf", {}),
        (LLAMA / "hf", {"stats": True, "placement": True, "match": "*norm*"}),
        (LLAMA / "torch_dist", {"placement": True}),
        (LLAMA / "torch_dist", {"security": True}),
        (LLAMA / "torch_dist", {"anonymous": True, "placement": True, "security": True}),
    ],
)
def test_inspect(source: Path, options: dict[str, Any]) -> None:
    found = check(ckpt.inspect(source, **options), ckpt.InspectResult)
    assert found["total"]["tensors"] == len(found["tensors"])


@pytest.mark.parametrize(("source", "gone"), [("sharded/llama_tp4_pp2", "model.tp03_pp01*"), ("dcp/ddp", ".metadata")])
def test_inspect_of_what_is_incomplete(source: str, gone: str, tmp_path: Path) -> None:
    """A rank's file is missing; what ties all others together is, so that each is read alone."""
    folder = tmp_path / "step"
    shutil.copytree(FIXTURES / source, folder)
    next(folder.glob(gone)).unlink()
    found = check(ckpt.inspect(folder, lenient=True), ckpt.InspectResult)
    assert found["missing"]["error"]["exit_code"] == 3 and found["tensors"]
    check(ckpt.inspect(folder, lenient=True, anonymous=True), ckpt.InspectResult)


def test_what_the_command_line_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documents of `--json`, which are written by other code than the functions' results."""
    hf = str(LLAMA / "hf")
    out = str(tmp_path / "out")
    delta = str(tmp_path / "delta")
    damaged = tmp_path / "damaged"
    shutil.copytree(FIXTURES / "sharded" / "llama_tp4_pp2", damaged)
    file = damaged / "model.tp03_pp01.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    lines: list[tuple[str, Any]] = [
        (f"inspect {hf} --placement --stats --security", ckpt.InspectResult),
        (f"convert {hf} {out} --to dcp --dp 2 --remove-keys lm_head*", ckpt.WriteResult),
        (f"convert {hf} {out} --to dcp --force --dry-run", ckpt.WriteResult),
        (f"reshard {out} {out}4 --dp 4", ckpt.WriteResult),
        (f"merge {hf} {out}1 --max-shard-size 50kB", ckpt.WriteResult),
        (f"diff {hf} {out}1 --rtol 0.1", ckpt.DiffResult),
        (f"diff {out} {hf}", ckpt.DiffResult),
        (f"verify {damaged}", ckpt.VerifyResult),
        (f"audit {hf}", ckpt.AuditResult),
        (f"delta {hf} {out}1 {delta}", ckpt.DeltaResult),
        (f"latest {tmp_path}", ckpt.LatestResult),
        (f"status {out}", ckpt.StatusResult),
    ]
    for line, kind in lines:
        assert run([*line.split(), "--json"]) in (0, 1), line
        check(json.loads(capsys.readouterr().out), kind)


def test_writers(tmp_path: Path) -> None:
    hf = LLAMA / "hf"
    check(ckpt.convert(hf, tmp_path / "a", to="sharded", tp=2, dtype="bf16", remove_keys="lm_head*"), ckpt.WriteResult)
    check(ckpt.convert(hf, tmp_path / "a", to="sharded", force=True, dry_run=True), ckpt.WriteResult)
    check(ckpt.convert(hf, tmp_path / "q", to="safetensors", quantize="int8"), ckpt.WriteResult)
    check(ckpt.inspect(tmp_path / "q"), ckpt.InspectResult)
    check(ckpt.convert(LLAMA / "torch_dist", tmp_path / "h", to="safetensors"), ckpt.WriteResult)
    check(ckpt.reshard(tmp_path / "a", tmp_path / "b", tp=3), ckpt.WriteResult)
    check(ckpt.merge([hf, tmp_path / "h"], tmp_path / "c", method="linear", weight=[0.5, 0.5]), ckpt.WriteResult)
    check(ckpt.plan(hf, tmp_path / "d", to="dcp", dp=2), ckpt.WriteResult)

    saved = check(ckpt.plan(hf, tmp_path / "d", tmp_path / "plan.json", to="dcp", dp=2), ckpt.WriteResult)
    assert saved["plan_file"] == str(tmp_path / "plan.json") and not (tmp_path / "d").exists()
    half = check(ckpt.apply(tmp_path / "plan.json", part="1/2"), ckpt.ApplyResult)
    assert half["committed"] is False and half["parts"]["missing"] == [2]
    growing = check(ckpt.status(tmp_path / "d"), ckpt.StatusResult)
    assert growing["state"] == "growing" and growing["parts"][0]["state"] == "done"
    assert check(ckpt.apply(tmp_path / "plan.json", part="2/2"), ckpt.ApplyResult)["committed"]
    assert check(ckpt.status(tmp_path / "d"), ckpt.StatusResult)["state"] == "written"
    assert ckpt.diff(hf, tmp_path / "d")["equal"]


def test_a_plan_without_a_format_is_a_reshard(tmp_path: Path) -> None:
    ckpt.convert(LLAMA / "hf", tmp_path / "a", to="sharded", tp=2)
    planned = check(ckpt.plan(tmp_path / "a", tmp_path / "b", pp=2), ckpt.WriteResult)
    assert planned["target"]["mesh"]["pp"] == 2 and planned["target"]["mesh"]["tp"] == 2
    assert planned["target"]["format"] == "sharded" and not (tmp_path / "b").exists()


def test_deltas(tmp_path: Path) -> None:
    save_file({"w": np.zeros(8, np.float32), "v": np.ones(4, np.float32)}, tmp_path / "old.safetensors")
    save_file({"w": np.ones(8, np.float32), "v": np.ones(4, np.float32)}, tmp_path / "new.safetensors")
    old = tmp_path / "old.safetensors"
    new = tmp_path / "new.safetensors"
    check(ckpt.delta(old, new, tmp_path / "planned", dry_run=True), ckpt.DeltaResult)
    made = check(ckpt.delta(old, new, tmp_path / "delta"), ckpt.DeltaResult)
    assert made["delta"]["changed"] == 1
    check(ckpt.inspect(tmp_path / "delta"), ckpt.InspectResult)
    check(ckpt.patch(old, tmp_path / "delta", tmp_path / "back"), ckpt.WriteResult)
    assert ckpt.diff(new, tmp_path / "back")["equal"]

    for name, file in (("old", old), ("new", new)):
        ckpt.convert(file, tmp_path / name, to="dcp")
    check(ckpt.delta(tmp_path / "old", tmp_path / "new", tmp_path / "archive", dedup=True), ckpt.DeltaResult)
    check(ckpt.patch(tmp_path / "old", tmp_path / "archive", tmp_path / "again"), ckpt.WriteResult)


def test_diff(tmp_path: Path) -> None:
    left = {"same": np.ones(4, np.float32), "layers.0.w": np.zeros(8, np.float32), "shape": np.ones(2, np.float32)}
    right = {**left, "layers.0.w": np.ones(8, np.float32), "shape": np.ones(3, np.float32), "x": np.ones(1, np.float32)}
    left["dtype"], right["dtype"] = np.ones(2, np.float32), np.ones(2, np.float16)
    left["y"] = np.ones(1, np.float32)
    save_file(left, tmp_path / "a.safetensors")
    save_file(right, tmp_path / "b.safetensors")
    found = check(ckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rank=True), ckpt.DiffResult)
    assert {row["kind"] for row in found["differences"]} == {
        "value",
        "shape",
        "dtype",
        "missing_left",
        "missing_right",
    }


def test_verify_and_audit(tmp_path: Path) -> None:
    assert check(ckpt.verify(LLAMA / "hf"), ckpt.VerifyResult)["ok"]
    check(ckpt.verify(LLAMA / "torch_dist", mode="quick"), ckpt.VerifyResult)
    check(ckpt.audit(LLAMA / "hf", values=True), ckpt.AuditResult)

    ckpt.convert(LLAMA / "hf", tmp_path / "a", to="sharded", tp=2)
    damaged = next((tmp_path / "a").glob("model*.safetensors"))
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    assert check(ckpt.verify(tmp_path / "a"), ckpt.VerifyResult)["findings"]

    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    assert check(ckpt.audit(tmp_path / "empty"), ckpt.AuditResult)["findings"]


def test_a_run(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        ckpt.convert(LLAMA / "hf", tmp_path / f"checkpoint-{step}", to="safetensors")
    torn = next((tmp_path / "checkpoint-300").glob("*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-8])
    found = check(ckpt.latest(tmp_path), ckpt.LatestResult)
    assert found["step"] == 200 and found["passed_over"][0]["step"] == 300
    check(ckpt.prune(tmp_path, keep_last=1, dry_run=True), ckpt.PruneResult)
    gone = check(ckpt.prune(tmp_path, keep_last=1), ckpt.PruneResult)
    assert [row["step"] for row in gone["remove"] if row["removed"]]
