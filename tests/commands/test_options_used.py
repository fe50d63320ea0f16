"""An option changes what is written, or it is an error that names it and the format: for every target and every option.

What a format uses is what its `Holds.uses_options` says; here each row is tried on a checkpoint of the format itself,
both ways.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from writings import writing_of

from ckpt_tool.cli import run
from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.core.progress import SILENT
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import WEIGHT_SUFFIXES
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = FIXTURES / "safetensors" / "llama_one_file"
# a checkpoint of each format, with degrees under which every option that it uses shows; else its first
OF_FORMAT: dict[str, tuple[str, dict[str, int]]] = {
    **{name: (f"{name}/{min(path.name for path in (FIXTURES / name).iterdir())}", {}) for name in registry.NAMES},
    "safetensors": ("safetensors/llama_one_file", {}),
    "torch": ("torch/weights.pt", {}),
    "dcp": ("dcp/fsdp2_dp4", {"dp": 2}),
    "sharded": ("sharded/llama_tp4_pp2", {"tp": 1, "pp": 1, "dp": 3}),
    "megatron": ("megatron/gpt2_tied_pp2_adamw", {}),
    "megatron-dist": ("megatron-dist/llama_tp2", {}),
    "deepspeed": ("deepspeed/z1_bf16_dp4", {"dp": 2}),
    "deepspeed-universal": ("deepspeed-universal/z1_bf16_dp2", {}),
    "paddle": ("paddle/llama_bf16_legacy_tp2", {"tp": 1, "dp": 2}),
    "paddle-unified": ("paddle-unified/llama_tied_hf", {}),
    "paddle-flex": ("paddle-flex/llama_tied_pp2", {"dp": 2}),
    "meta": ("meta/llama1", {}),
    "peft": ("peft/lora_bf16", {}),
}
LAYOUT = '[mesh]\ntp = 2\n\n[[rule]]\nmatch = "*"\nshard = {0 = ["tp"]}\n'
# option -> what is given in words
GIVEN: dict[str, dict[str, Any]] = {
    "max-shard-size": {"max_shard_size": 200},
    "zero": {"zero": 3},
    "sharding": {"sharding": "v2"},
    "spec": {"spec": "te"},
    "pp-split": {"pp_split": (1, 1)},
    "layout": {"layout": "layout.toml"},
    "on-indivisible": {"on_indivisible": "replicate"},
    "gguf-type": {"gguf_type": "q8_0"},
    "gguf-only": {"gguf_type": "q8_0", "gguf_only": ("*attn_q*",)},
    "quantize": {"quantize": "int8"},
    "repack": {"repack": "compressed-tensors"},
}


def plan_of(name: str, tmp_path: Path, **given: Any) -> dict[str, Any]:
    source, degrees = OF_FORMAT[name]
    given["degrees"] = {**degrees, **given.pop("degrees", {})}
    writing = writing_of(dry_run=True, **given)
    return reshard(str(FIXTURES / source), str(tmp_path / "out"), Reading(), writing, SILENT)


def test_every_format_and_option_is_here() -> None:
    assert {option for name in registry.NAMES for option in registry.by_name(name).holds.uses_options} == set(GIVEN)
    suffixes = {suffix for name in registry.NAMES for suffix in registry.by_name(name).holds.single}
    assert suffixes <= set(WEIGHT_SUFFIXES)


@pytest.mark.parametrize("option", GIVEN)
@pytest.mark.parametrize("name", OF_FORMAT)
def test_an_option_that_a_format_does_not_heed_is_an_error(
    name: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layout.toml").write_text(LAYOUT)
    if option in registry.by_name(name).holds.uses_options:
        pytest.skip("it uses it: the next test")
    with pytest.raises(UsageError) as caught:
        plan_of(name, tmp_path, **GIVEN[option])
    error = caught.value
    assert error.code == "E0261" and f"--{option} " in " ".join([error.message, *error.faults])
    assert name in error.message
    assert "it belongs to" in str(error.hint) and not (tmp_path / "out").exists()


# where another source, other degrees or another value show it
SHOWN: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("dcp", "zero"): ("dcp/fsdp2_dp4", {"degrees": {"dp": 2}, "zero": 0}),
    ("sharded", "zero"): ("sharded/llama_tp4_pp2", {"degrees": {"dp": 3}, "zero": 0}),
    ("dcp", "pp-split"): ("sharded/llama_tp4_pp2", {"to": "dcp", "degrees": {"pp": 2, "tp": 1}, "pp_split": (0, 2)}),
    ("sharded", "pp-split"): ("sharded/llama_tp4_pp2", {"degrees": {"pp": 2, "tp": 1}, "pp_split": (0, 2)}),
    ("paddle-flex", "pp-split"): ("paddle-flex/llama_tied_pp2", {"degrees": {"pp": 1}, "pp_split": (1, 1)}),
    ("deepspeed", "pp-split"): ("deepspeed/pipe_pp2_dp2_z1", {"pp_split": (1, 3)}),
}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, each) for name in OF_FORMAT for each in sorted(registry.by_name(name).holds.uses_options)],
)
def test_one_that_it_heeds_changes_the_output_or_is_refused_for_its_value(
    name: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layout.toml").write_text(LAYOUT)
    own, degrees = OF_FORMAT[name]
    source, given = SHOWN.get((name, option), (own, {"degrees": degrees, **GIVEN[option]}))
    keyword = option.replace("-", "_")

    def planned(**options: Any) -> tuple[Any, Any]:
        writing = writing_of(dry_run=True, **options)
        document = reshard(str(FIXTURES / source), str(tmp_path / "out"), Reading(), writing, SILENT)
        return document["target"], document["notes"]

    try:
        with_it = planned(**given)
    except UsageError as e:
        assert e.code != "E0261" and f"--{option}" in e.message, e.message
        return
    assert with_it != planned(**{key: value for key, value in given.items() if key != keyword})


@pytest.mark.parametrize("name", OF_FORMAT)
def test_what_holds_anyway_may_be_said(name: str, tmp_path: Path) -> None:
    """Scripts pass these for every target."""
    for given in ({"on_indivisible": "error", "degrees": {"dp": 1}}, {"degrees": {"vpp": 1, "cp": 1, "etp": 1}}):
        assert plan_of(name, tmp_path, **given)["plan"]["files"]
    if "dp" not in registry.by_name(name).holds.mesh:
        assert plan_of(name, tmp_path, zero=0)["plan"]["files"]


# -- one file, and --max-shard-size ------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("suffix", WEIGHT_SUFFIXES)
@pytest.mark.parametrize("name", OF_FORMAT)
def test_a_name_says_what_is_written(name: str, suffix: str, tmp_path: Path) -> None:
    """One file under a suffix of its own; an error under another's where one file may be had; else a folder."""
    source = str(FIXTURES / OF_FORMAT[name][0])
    single = registry.by_name(name).holds.single
    out = tmp_path / f"out{suffix}"
    if single and suffix not in single:
        with pytest.raises(UsageError, match="named like a file of another format") as caught:
            reshard(source, str(out), Reading(), Writing(dry_run=True), SILENT)
        assert caught.value.code == "E1611" and f"out{single[0]}" in str(caught.value.hint)
        out.mkdir()  # a folder that is there stays one
        reshard(source, str(out), Reading(), Writing(force=True, fsync=False), SILENT)
        assert out.is_dir()
        return
    reshard(source, str(out), Reading(), Writing(fsync=False), SILENT)
    assert out.is_file() == (suffix in single)
    if suffix not in single:
        return
    with pytest.raises(UsageError, match="is one file") as caught:
        reshard(source, str(tmp_path / f"b{suffix}"), Reading(), Writing(max_shard_size=200), SILENT)
    assert caught.value.code == "E0261" and "--max-shard-size" in caught.value.message


def test_training_state_of_torch_is_one_file(tmp_path: Path) -> None:
    source = str(FIXTURES / "torch" / "training.pt")
    out = str(tmp_path / "out")
    with pytest.raises(UsageError, match="--max-shard-size has no effect: torch writes training state"):
        convert(source, out, Reading(), Writing(to="torch", max_shard_size=200), SILENT)
    model = Writing(to="torch", max_shard_size=200, states=("model",), drop=("extras",), fsync=False)
    assert convert(source, out, Reading(), model, SILENT)["plan"]["files"] > 2


def test_all_idle_options_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["convert", str(MODEL), str(tmp_path / "out"), "--to", "meta", "--zero", "3", "--spec", "te", "--json"]
    assert run([*line, "--max-shard-size", "1GB"]) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert [each.split()[0] for each in (error["message"], *error["faults"])] == [
        "--max-shard-size",
        "--zero",
        "--spec",
    ]
