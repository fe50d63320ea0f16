"""A file that is rewritten in place while it is read: every verb that says something of values ends with E0604 (6).

A job that saves into the folder, a download that goes on, a copy over it: the descriptor stays the same, so the bytes
of two states would be mixed, and no read fails.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_tool.auditing import values
from ckpt_tool.cli import run
from ckpt_tool.commands import diff, inspect, verify
from ckpt_tool.storage.source import Tree

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCES = {
    "safetensors": "gguf-made/gemma3",
    "dcp": "dcp/tp2_dp2",
    "gguf": "gguf/llama3.gguf",
    "orbax": "orbax/files_zarr2",
    "torch": "torch/training.pt",
}
# verb -> (its options, where it begins to read values)
VERBS = {
    "verify": (["verify", "SRC"], verify, "_read_all"),
    "diff, left": (["diff", "SRC", "COPY"], diff, "_compared"),
    "diff, right": (["diff", "COPY", "SRC"], diff, "_compared"),
    "audit": (["audit", "SRC", "--values"], values, "findings"),
    "inspect": (["inspect", "SRC", "--stats"], inspect, "_add_statistics"),
}


def largest_file(source: Path) -> Path:
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def rewrite(path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how == "in place":
        with path.open("r+b") as file:
            file.seek(len(raw) // 2)
            file.write(bytes(8))
        os.utime(path, ns=(1, 1))  # whatever the clock of the file system resolves
    elif how == "cut":
        os.truncate(path, len(raw) // 2)
    elif how == "another file":
        other = path.with_name("other")
        other.write_bytes(raw)
        os.replace(other, path)
    else:
        path.unlink()


@pytest.mark.share(4)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["in place", "cut", "another file", "removed"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", SOURCES)
def test_what_changes_while_it_is_read_is_said(
    name: str, verb: str, how: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    given = FIXTURES / SOURCES[name]
    source = tmp_path / "a" / given.name
    copy = tmp_path / "b" / given.name
    for target in (source, copy):
        target.parent.mkdir()
        if given.is_dir():
            shutil.copytree(given, target)
        else:
            shutil.copy(given, target)

    line, module, function = VERBS[verb]
    read_values = getattr(module, function)

    def reading(*arguments: object, **options: object) -> object:
        if when == "before":
            rewrite(largest_file(source), how)
        found = read_values(*arguments, **options)
        if when == "after":
            rewrite(largest_file(source), how)
        return found

    monkeypatch.setattr(module, function, reading)
    words = [{"SRC": str(source), "COPY": str(copy)}.get(word, word) for word in line]
    code = run([*words, "--json"])
    streams = capfd.readouterr()
    assert code == 6, (code, streams.err, streams.out[-500:])
    assert json.loads(streams.err.splitlines()[-1])["error"]["code"] in ("E0603", "E0604")


# What leads to a checkpoint, or says that it is complete, and holds no values: (checkpoint, the step's folder in a run,
# the pointer file, what it says, what it says then: None for a file that is removed)
POINTERS = {
    "Megatron's tracker": (
        "megatron/moe_tp2ep2etp1/iter_0000002",
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
        "2",
        "1",
    ),
    "DeepSpeed's latest": ("deepspeed/z1_bf16_dp4", "global_step2", "latest", "global_step2", "global_step1"),
    "a latest that is removed": ("deepspeed/z1_bf16_dp4", "global_step2", "latest", "global_step2", None),
    "DeepSpeed's universal form": (
        "deepspeed-universal/pipe_pp2_dp2",
        "global_step2_universal",
        "latest_universal",
        "global_step2_universal",
        "global_step1_universal",
    ),
    "a Trainer's folder": (
        "deepspeed/z1_bf16_dp4",
        "checkpoint-2/global_step2",
        "checkpoint-2/latest",
        "global_step2",
        "x",
    ),
}
SIGNALS = ("paddle/ernie_bf16_io_tp2sd2v2", "paddle-flex/ema", "paddle-unified/ernie_nm_tp2")


def read_while(change, source: Path, verb: str, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """Run the verb on a source that `change` changes after its values were read: it ends with E0604."""
    words, module, function = VERBS[verb]
    read_values = getattr(module, function)

    def reading(*arguments: object, **options: object) -> object:
        found = read_values(*arguments, **options)
        change()
        return found

    monkeypatch.setattr(module, function, reading)
    code = run([*(str(source) if word in ("SRC", "COPY") else word for word in words), "--json"])
    streams = capfd.readouterr()
    assert code == 6, (code, streams.err, streams.out[-500:])
    assert json.loads(streams.err.splitlines()[-1])["error"]["code"] == "E0604"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", POINTERS)
def test_a_pointer_file_that_names_another_step_by_now_is_said(
    kind: str, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    given, step, name, before, after = POINTERS[kind]
    source = tmp_path / "run"
    shutil.copytree(FIXTURES / given, source / step)
    pointer = source / name
    pointer.write_text(before)

    def change() -> None:
        if after is None:
            pointer.unlink()
        else:
            pointer.write_text(after)

    read_while(change, source, verb, monkeypatch, capfd)


@pytest.mark.parametrize("how", ["rewritten", "removed"])
@pytest.mark.parametrize("verb", ["verify", "diff, left"])
@pytest.mark.parametrize("given", SIGNALS)
def test_a_marker_of_a_finished_rank_that_changes_is_said(
    given: str, verb: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    source = tmp_path / "step"
    shutil.copytree(FIXTURES / given, source)
    signal = source / "saved_signal_0"
    if not signal.exists():
        signal.write_text("1")
    read_while(signal.unlink if how == "removed" else lambda: signal.write_text("0 "), source, verb, monkeypatch, capfd)


def two_saves(folder: Path) -> tuple[Path, Path]:
    """Two saves of one job: `common.pt` says how far the schedule is, and holds no tensor that is moved."""
    for name, value in (("first", 1.0), ("second", 2.0)):
        source = {
            "model": {"w": torch.full((64, 32), value)},
            "iteration": 1,
            "opt_param_scheduler": {"num_steps": int(value)},
        }
        torch.save(source, folder / f"{name}.pt")
        line = ["convert", str(folder / f"{name}.pt"), str(folder / name), "--to", "megatron-dist", "-q"]
        assert run([*line, "--dialect", "keep"]) == 0
    return folder / "first", folder / "second"


@pytest.mark.parametrize(
    "line",
    [
        ["convert", "SRC", "OUT", "--to", "torch", "--dialect", "keep"],
        ["convert", "SRC", "OUT", "--to", "torch", "--dialect", "keep", "--plan", "PLAN"],
        ["merge", "SRC", "OUT"],
        ["delta", "BASE", "SRC", "OUT"],
        ["verify", "SRC", "--mode", "quick"],
        ["verify", "SRC"],
        ["audit", "SRC"],
    ],
    ids=["convert", "plan", "merge", "delta", "verify quick", "verify", "audit"],
)
def test_what_is_read_first_and_values_of_another_save_never_mix(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """The save is replaced once `common.pt` and `.metadata` have been read, before any file of values is seen."""
    first, second = two_saves(tmp_path)
    shutil.copytree(first, tmp_path / "source")
    find = Tree.fd
    replaced = []

    def replacing(tree: Tree, path: str) -> int:
        if path.endswith(".distcp") and tree.shown.startswith(str(tmp_path / "source")) and not replaced:
            replaced.append(path)
            for file in filter(Path.is_file, second.rglob("*")):
                shutil.copy(file, tmp_path / "new")
                os.replace(tmp_path / "new", tmp_path / "source" / file.relative_to(second))
        return find(tree, path)

    monkeypatch.setattr(Tree, "fd", replacing)
    given = {"SRC": "source", "BASE": "first", "OUT": "out", "PLAN": "plan"}
    code = run([str(tmp_path / given[word]) if word in given else word for word in line])
    assert replaced
    assert code == 6, capfd.readouterr()
    assert not (tmp_path / "out").exists() and not (tmp_path / "plan").exists()


def test_what_was_signed_is_what_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """The hashes of a signature are compared first; a file that is another one after that has no signature."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pem").write_bytes(private)
    (tmp_path / "key.pub").write_bytes(public)
    signed = tmp_path / "signed"
    line = ["convert", str(FIXTURES / "dcp" / "tp2_dp2"), str(signed), "--to", "safetensors", "-q"]
    assert run([*line, "--sign", str(tmp_path / "key.pem")]) == 0

    open_source = verify.open_source

    def opening(*arguments: object) -> object:
        rewrite(signed / "model.safetensors", "another file")
        return open_source(*arguments)

    monkeypatch.setattr(verify, "open_source", opening)
    assert run(["verify", str(signed), "--key", str(tmp_path / "key.pub")]) == 6
