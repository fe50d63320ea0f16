"""An option changes what a writing verb writes, or it is an error: for every verb and every mode of it.

`test_options_used` asks the same of formats. Here the verbs are compared: each takes the same group of options, and
some leave out the step of a conversion that one of them is about.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from ckpt_tool.cli import run

MODEL = Path(__file__).parents[2] / "fixtures" / "safetensors" / "llama_one_file"
LINES = {
    "convert": ["convert", "base", "out", "--to", "torch"],
    "reshard": ["reshard", "base", "out"],
    "merge of one": ["merge", "base", "out"],
    "merge, union": ["merge", "base", "new", "out", "--on-conflict", "last"],
    "merge, linear": ["merge", "base", "new", "out", "--method", "linear"],
    "patch": ["patch", "base", "delta", "out"],
    "patch, archive": ["patch", "base", "archive", "out"],
}
OPTIONS = [
    "--remove-keys=*norm*",
    "--keep-keys=model.layers.*",
    "--rename=model.*=net.*",
    "--model-only",
    "--as-model=ema",
    "--dtype=fp16",
    "--dequantize",
    "--quantize=int8",
    "--vocab-size=40",
    "--tied-head=tie",
    "--experts=split",
    "--dialect=megatron",
    "--aoa=rules.aoa",
    "--hybrid-layer-pattern=*-*-",
    "--max-shard-size=20kB",
    "--state=optimizer",
    "--drop=model",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, a changed copy, a delta and an archive."""
    folder = tmp_path_factory.mktemp("heeded")
    shutil.copytree(MODEL, folder / "base")
    shutil.copytree(MODEL, folder / "new")
    weights = folder / "new" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-40:-20] = bytes(20)
    weights.write_bytes(content)
    (folder / "rules.aoa").write_text("model.norm.weight -> norm.weight\n")
    assert run(["delta", str(folder / "base"), str(folder / "new"), str(folder / "delta"), "-q"]) == 0
    assert run(["delta", str(folder / "base"), str(folder / "new"), str(folder / "archive"), "--dedup", "-q"]) == 0
    return folder


def written(folder: Path) -> dict[str, str]:
    files = [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.share(3)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mode", LINES)
def test_an_option_changes_the_output_or_is_an_error(
    mode: str, option: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(place)
    line = [str(tmp_path / "out") if word == "out" else word for word in LINES[mode]]
    code = run([*line, option, "--no-fsync", "-q"])
    said = capsys.readouterr().err
    if code:
        assert code in (2, 3) and said.startswith("error[E"), said
        assert not (tmp_path / "out").exists()
        return
    with_option = written(tmp_path / "out")
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out").unlink(missing_ok=True)
    assert run([*line, "--no-fsync", "-q"]) == 0
    assert with_option != written(tmp_path / "out")


def test_a_patched_model_without_keys_and_under_other_names(place: Path, tmp_path: Path) -> None:
    """The same as the patched model, from which convert removes and renames."""
    words = ["--remove-keys", "lm_head*", "--rename", "model.*=net.*", "-q"]
    one = str(tmp_path / "one")
    two = str(tmp_path / "two")
    assert run(["patch", str(place / "base"), str(place / "delta"), one, *words]) == 0
    assert run(["convert", str(place / "new"), two, "--to", "safetensors", *words]) == 0
    assert run(["diff", one, two, "-q"]) == 0
