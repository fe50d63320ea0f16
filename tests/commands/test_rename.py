"""`--rename`: every state of a tensor follows it, in each format; what can't be renamed is an error that shows why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
HUB = FIXTURES / "safetensors" / "llama_one_file"
TRAINED = (
    "dcp/fsdp2_dp4",
    "torch/training.pt",
    "sharded/fsdp2_tp2_dp2",
    "deepspeed/moe_z2_ep2_dp4",
    "deepspeed-universal/pipe_pp2_dp2",
    "paddle/ernie_bf16_io_tp2sd2v2",
    "paddle-unified/ernie_nm_tp2",
    "paddle-flex/ema",
    "megatron-dist/dp2_model_space",
    "megatron-fsdp/fsdp_dp2",
    "orbax/adamw_ocdbt_zarr2",
)


def names_of(path: Path | str) -> set[str]:
    return {key.name for key in ckpt.open(path).catalog.tensors}


@pytest.mark.parametrize("source", TRAINED)
def test_all_states_follow_a_renamed_tensor(source: str, tmp_path: Path) -> None:
    """Values, optimizer groups and step counts are those of the source, under the new names."""
    suffix = "re:$=_renamed"
    ckpt.reshard(FIXTURES / source, tmp_path / "out", rename=[suffix])
    found = ckpt.diff(FIXTURES / source, tmp_path / "out", rename=[suffix])
    assert found["equal"], found["differences"][:5]
    assert found["compared"] > 1
    assert all(name.endswith("_renamed") for name in names_of(tmp_path / "out"))


def test_optimizer_groups_follow(tmp_path: Path) -> None:
    ckpt.reshard(FIXTURES / "dcp" / "fsdp2_dp4", tmp_path / "out", rename=["layers.*=blocks.*"])
    text = str(ckpt.open(tmp_path / "out").catalog.extras)
    assert "blocks.0." in text
    assert "layers.0." not in text


@pytest.mark.parametrize("prefix", ["module.", "student.backbone."])
def test_a_prefix_that_is_taken_off_makes_the_family_known(prefix: str, tmp_path: Path) -> None:
    """--rename comes before families: what is renamed to the hub's names converts to Megatron's like the hub's own."""
    prefixed = prefixed_copy(HUB, tmp_path / "prefixed", prefix)
    ckpt.convert(prefixed, tmp_path / "a", to="megatron", rename=[f"{prefix}*=*"], tp=2)
    ckpt.convert(HUB, tmp_path / "b", to="megatron", tp=2)
    assert ckpt.diff(tmp_path / "a", tmp_path / "b")["equal"]


def prefixed_copy(source: Path, folder: Path, prefix: str) -> Path:
    folder.mkdir()
    catalog = ckpt.open(source)
    tensors = {f"{prefix}{name}": np.ascontiguousarray(catalog[name].numpy()) for name in names_of(source)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def test_rules_come_from_a_file_with_comments(tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("# names of the trainer\n\nmodel.embed_tokens.*=tok.*  # the embedding\nlm_head.*=out.*\n")
    ckpt.convert(HUB, tmp_path / "out.pt", to="torch", dialect="keep", rename=[f"@{rules}"])
    assert {"tok.weight", "out.weight"} <= names_of(tmp_path / "out.pt")


def test_removal_goes_by_the_names_of_the_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ckpt.convert(HUB, tmp_path / "out.pt", to="torch", rename=["lm_head.*=out.*"], remove_keys=["lm_head.*"])
    assert caught.value.code == "E2970"  # nothing of that name is left to rename


def test_two_tensors_under_one_name_are_refused_and_both_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ckpt.convert(HUB, tmp_path / "out", to="safetensors", rename=["model.layers.*.mlp.*=model.layers.*.mlp.w"])
    assert caught.value.code == "E2971"
    assert "down_proj" in caught.value.message
    assert "gate_proj" in caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_name_that_would_take_the_place_of_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ckpt.convert(HUB, tmp_path / "out", to="safetensors", rename=["lm_head.weight=model.norm.weight"])
    assert caught.value.code == "E2971"


@pytest.mark.parametrize("call", ["convert", "merge", "diff"])
def test_a_rule_that_matches_nothing_names_what_is_near(call: str, tmp_path: Path) -> None:
    rules = ["model.laiers.*=*", "nothing=at_all"]
    calls: dict[str, Any] = {
        "convert": lambda: ckpt.convert(HUB, tmp_path / "out", to="safetensors", rename=rules),
        "merge": lambda: ckpt.merge([HUB, HUB], tmp_path / "out", on_conflict="first", rename=rules),
        "diff": lambda: ckpt.diff(HUB, HUB, rename=rules),
    }
    with pytest.raises(UsageError) as caught:
        calls[call]()
    assert caught.value.code == "E2970"
    assert "model.layers.0" in (caught.value.hint or "")
    assert len(caught.value.faults) == 1


def test_of_several_sources_one_may_lack_what_a_rule_matches(tmp_path: Path) -> None:
    """A prefix of one model alone: the merge of both is that of the plain ones."""
    prefixed = prefixed_copy(HUB, tmp_path / "prefixed", "module.")
    ckpt.merge([prefixed, HUB], tmp_path / "out", method="linear", weight=[0.5, 0.5], rename=["module.*=*"])
    assert ckpt.diff(tmp_path / "out", HUB)["equal"]


def test_an_empty_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ckpt.convert(HUB, tmp_path / "out", to="safetensors", rename=["re:^lm_head.weight$="])
    assert caught.value.code == "E2972"


FLAT = ("safetensors", "gguf", "paddle-unified")
NESTED = ("torch", "dcp", "orbax", "paddle", "paddle-flex", "deepspeed", "sharded", "megatron")


@pytest.mark.parametrize(
    "rule",
    [
        "*=shadow_params.*",
        "*=model_ema.*",
        "*=params_ema.*",
        "*=teacher.*",
        "model.embed_tokens.*=ema_model.*",
        "model.norm.weight=teacher.lm_head.weight",
        "model.norm.weight=model_ema.num_updates",
    ],
)
@pytest.mark.parametrize("to", [*FLAT, *NESTED])
def test_a_word_of_averages_is_refused_or_read_back_as_the_model(to: str, rule: str, tmp_path: Path) -> None:
    """Where a reader takes the new name for an average, no such file is written."""
    target = tmp_path / ("out.gguf" if to == "gguf" else "out")
    try:
        ckpt.convert(HUB, target, to=to, dialect="keep", rename=[rule])
    except UsageError as error:
        assert error.code in ("E3015", "E0243"), error
        assert not target.exists()
    else:
        assert ckpt.diff(HUB, target, rename=[rule])["equal"]
        assert {key.state for key in ckpt.open(target).catalog.tensors} == {"model"}
