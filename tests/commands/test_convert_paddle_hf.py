"""`ckpt convert` is the external weights tool of Paddle: both ways equal what PaddleFormers' own saves hold, name for
name.

`fixtures/families/NAME`: `paddle.safetensors` is a live model's state dict, `hf.safetensors` what its `save_pretrained`
wrote.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.transposed import PANEL

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))

from family_models import config_of, counted, hub_shapes

FIXTURES = Path(__file__).parents[2] / "fixtures" / "families"
HUB_LAYOUT = FIXTURES.parent / "paddle-unified" / "llama_tied_hf"
TIED = ("gemma3",)  # whose second copy is a matter of --tied-head
NAMES = sorted(path.name for path in FIXTURES.iterdir() if (path / "hf.safetensors").exists() and path.name not in TIED)


def converted(name: str, kind: str, out: Path, **writing: str) -> dict[str, torch.Tensor]:
    source = out / "in"
    source.mkdir(parents=True)
    shutil.copy(FIXTURES / name / f"{kind}.safetensors", source / "model.safetensors")
    shutil.copy(FIXTURES / name / "config.json", source)
    convert(str(source), str(out / "out"), Reading(), Writing(to="safetensors", fsync=False, **writing), Silent())
    assert json.loads((out / "out" / "config.json").read_text())["model_type"]
    return load_file(out / "out" / "model.safetensors")


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    wrong = [name for name, tensor in want.items() if not torch.equal(got[name], tensor)]
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_the_hub_from_paddle(name: str, tmp_path: Path) -> None:
    want = load_file(FIXTURES / name / "hf.safetensors")
    if name == "ernie4_5_vl_moe":  # transformers 5 saves the tower inside the model
        want = {key.replace("vision_model.", "model.vision_model."): tensor for key, tensor in want.items()}
    assert_same(converted(name, "paddle", tmp_path), want)


@pytest.mark.parametrize("name", NAMES)
def test_paddle_from_the_hub(name: str, tmp_path: Path) -> None:
    got = converted(name, "hf", tmp_path, dialect="paddle")
    assert_same(got, load_file(FIXTURES / name / "paddle.safetensors"))


def released(hub: dict[str, torch.Tensor], *, sees: bool) -> dict[str, torch.Tensor]:
    """What ERNIE's tools/paddle2torch makes the hub of: [Q | K | V], [gate | up], matrices turned, the root `ernie.`;
    the tower outside; of what sees, routers lie as they are."""
    out = {}
    for key, value in hub.items():
        place, _, leaf = key.rpartition(".")
        parts = {"q_proj": ("q", "k", "v"), "gate_proj": ("gate", "up")}.get(place.rpartition(".")[2])
        if place.endswith(("k_proj", "v_proj", "up_proj")):
            continue
        if parts:
            stem = place.rpartition(".")[0]
            value = torch.cat([hub[f"{stem}.{part}_proj.{leaf}"] for part in parts])
            key = f"{stem}.{'qkv' if parts[0] == 'q' else 'up_gate'}_proj.{leaf}"
        straight = "embed_tokens" in key or "e_score" in key or (sees and ".mlp.gate." in key)
        key = (
            key.replace("model.vision_model.", "vision_model.")
            if "vision_model" in key
            else key.replace("model.", "ernie.", 1)
        )
        out[key] = value if straight or value.ndim < 2 else value.T.contiguous()
    return out


@pytest.mark.parametrize("name", ["ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe"])
def test_ernie_s_own_releases_need_no_word(name: str, tmp_path: Path) -> None:
    config = config_of(name, moe_k=2)
    hub = {key: torch.from_numpy(array).float() for key, array in counted(hub_shapes(name, config)).items()}
    source = tmp_path / "in"
    source.mkdir()
    save_file(released(hub, sees=name == "ernie4_5_vl_moe"), source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    done = convert(str(source), str(tmp_path / "out"), Reading(), Writing(to="safetensors", fsync=False), Silent())
    assert any(f"the family {name}, paddle-" in note for note in done["notes"])
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), hub)


@pytest.mark.parametrize(("to", "panels"), [("paddle-unified", False), ("paddle", True)])
def test_only_what_is_turned_takes_memory_for_it(to: str, panels: bool, tmp_path: Path) -> None:
    """Read through swapped strides and written through them, elements keep their order."""
    document = convert(
        str(HUB_LAYOUT), str(tmp_path / "out"), Reading(), Writing(to=to, threads=1, dry_run=True), Silent()
    )
    assert document["plan"]["peak_memory"] == (4 << 20) + panels * PANEL
