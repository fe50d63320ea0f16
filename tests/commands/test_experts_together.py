"""Experts of one layer in two layouts: never joined, found by an audit; and `--experts` where it has nothing to say."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.families.experts import FUSED, SPLIT, expert_layouts, mixed_experts
from ckpt_tool.families.registry import by_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))

from family_models import EXPERTS, config_of, hub_shapes

BOTH = [name for name in EXPERTS if {SPLIT, FUSED} <= expert_layouts(by_name(name)).keys()]


def names_in(family: str, dialect: str) -> list[str]:
    """One name of each form of the dialect."""
    table = by_name(family).table(dialect)
    written = {spots[0].rule for spots in table.right.values()}
    terms = [term for number in written for term in table.rules[number].left if term.name is not None]
    return [term.name.form.replace("%d", "0") for term in terms]


@pytest.mark.parametrize("family", BOTH)
def test_a_layout_alone_is_no_mixture_and_both_are(family: str) -> None:
    layouts = expert_layouts(by_name(family))
    split, fused = (names_in(family, layouts[layout]) for layout in (SPLIT, FUSED))
    pure = [mixed_experts(names) for names in (split, fused)]
    # A family may keep the layers of multi-token prediction in the other layout: another module, no mixture.
    assert pure == [[], []]
    renamed = not {
        name for name in fused if ".experts." in name and name.split("experts")[0] + "experts.0" in str(split)
    }
    assert renamed or mixed_experts([*split, *fused])


def model(folder: Path, family: str) -> tuple[str, str]:
    """(its experts one by one, its experts in one tensor)."""
    config = {**config_of(family), "num_experts_per_tok": 2}
    folder.mkdir()
    arrays = {name: np.ones(shape, np.float32) for name, shape in hub_shapes(family, config).items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for layout in (SPLIT, FUSED):
        ckpt.convert(str(folder), str(folder.with_name(layout)), to="safetensors", experts=layout)
    return str(folder.with_name(SPLIT)), str(folder.with_name(FUSED))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "olmoe"])
def test_a_merge_refuses_and_an_audit_finds_them(family: str, tmp_path: Path) -> None:
    split, fused = model(tmp_path / "in", family)
    for sources in ([split, fused], [fused, split]):
        for policy in ("first", "last"):
            with pytest.raises(InconsistentCheckpoint, match="experts one by one") as caught:
                ckpt.merge(sources, str(tmp_path / "out"), on_conflict=policy)
            assert caught.value.code == "E2912" and not (tmp_path / "out").exists()

    together = tmp_path / "together"
    shutil.copytree(split, together)
    file = together / "model.safetensors"
    both = {**safetensors.numpy.load_file(Path(fused) / "model.safetensors"), **safetensors.numpy.load_file(file)}
    save_file(both, file, {"format": "pt"})
    found = [each for each in ckpt.audit(str(together))["findings"] if "both one by one" in each["message"]]
    assert [each["code"] for each in found] == ["A0104"]
    assert not [each for each in ckpt.audit(split)["findings"] if each["code"] == "A0104"]


@pytest.mark.parametrize("layout", [SPLIT, FUSED])
def test_an_adapter_has_no_layout_to_choose(layout: str, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    front = "base_model.model.model.layers.0.mlp.experts.0.up_proj"
    pair = {
        f"{front}.lora_A.weight": np.ones((2, 4), np.float32),
        f"{front}.lora_B.weight": np.ones((4, 2), np.float32),
    }
    save_file(pair, adapter / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=f"--experts {layout} has no effect: an adapter") as caught:
        ckpt.convert(str(adapter), str(tmp_path / "out"), to="peft", experts=layout)
    assert caught.value.code == "E1284" and not (tmp_path / "out").exists()
