"""Every family: transformers saves a model, `convert` makes a Megatron checkpoint of many ranks of it and brings it
back.

What comes back is the source, bit for bit and name for name, and transformers loads it and computes the same logits.
The judges are safetensors and transformers; the model's values are random, so that a wrong permutation can't pass.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import EXPERTS, REMOTE, hub_shapes, logits, tiny_config, tiny_model
from writings import writing_of

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.registry import by_name
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Comparison

transformers = pytest.importorskip("transformers", minversion="5")
NAMES = [family.name for family in FAMILIES if "megatron" in family.dialects]
HUB_ALONE = [family.name for family in FAMILIES if "megatron" not in family.dialects]
# What transformers has no class of: their own names and shapes, drawn values
DRAWN = [family.name for family in FAMILIES if family.classes[0].architecture in REMOTE or family.classes[0].like]
ONE_RANK = ("deepseek_v4",)  # core has it on one tensor-parallel rank alone
OWN_SIZES = {"longcat_flash": {"qk_rope_head_dim": 64}}  # what its class turns, whatever its config says of heads
CLASSES = frozenset(dir(transformers))  # names alone: `hasattr` imports the module of each class
OTHER_CLASSES = [  # parts of a model with a tower are tested as that
    (family.name, each.model_type, each.architecture)
    for family in FAMILIES
    for each in family.classes[1:]
    if not each.part and not each.like and each.model_type in transformers.CONFIG_MAPPING
    if each.architecture in CLASSES
]
ROUTES: list[tuple[str, str | None]] = [
    ("megatron-dist", None),
    ("megatron", None),
    ("megatron-dist", "te"),
    ("megatron", "te"),
]
# none of Megatron-LM's say all of it, or nothing of a tower's heads
NO_ARGUMENTS = (
    "falcon",
    "qwen3_vl",
    "qwen3_vl_moe",
    *(family.name for family in FAMILIES if not family.classes[0].forms),
)
CHAINS = [
    (family, chain)
    for family in ("llama", "qwen2", "ernie4_5_moe", "glm4_moe")
    for chain in (("paddle-flex", "megatron-dist"), ("megatron", "paddle-unified"))
] + [("llama", ("megatron-dist", "meta"))]
Saved = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """family -> (its model, the folder that transformers saved), once a module."""
    folder = tmp_path_factory.mktemp("hub")
    made = dict[str, Any]()

    def make(family: str) -> tuple[Any, Path]:
        if family not in made and family in DRAWN:
            made[family] = None
            draw(family, tiny_config(family), folder / family)
        elif family not in made:
            made[family] = tiny_model(family, **OWN_SIZES.get(family, {}))
            made[family].save_pretrained(folder / family)
        return made[family], folder / family

    return make


def draw(family: str, config: dict[str, Any], folder: Path) -> None:
    """A checkpoint of the family as it lies on the hub, of random values."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(n, generator=generator) for name, n in hub_shapes(family, config).items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def hop(source: Path, out: Path, to: str, family: str | None = None, **writing: Any) -> dict[str, Any]:
    return convert(str(source), str(out), Reading(family=family), writing_of(to=to, fsync=False, **writing), Silent())


def as_released(source: Path, family: str, folder: Path) -> Path:
    """What transformers saved, in the layout of the released files, which our own rules make where it is another."""
    if by_name(family).saved == "hf" or family in DRAWN:
        return source
    hop(source, folder, "safetensors", dialect="hf")
    return folder


def assert_same(found: Path, want: Path) -> None:
    """The same names, dtypes, shapes and bits."""
    mine = load_file(found / "model.safetensors")
    theirs = load_file(want / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (mine[name].dtype, mine[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(mine[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.share(24)
@pytest.mark.parametrize(("to", "spec"), ROUTES)
@pytest.mark.parametrize("family", NAMES)
def test_there_and_back(family: str, to: str, spec: str | None, saved: Saved, tmp_path: Path) -> None:
    _, source = saved(family)
    degrees = {"tp": 1 if family in ONE_RANK else 2, "pp": 2, **({"ep": 2} if family in EXPERTS else {})}
    split = (2, 1) if family == "kimi_k3" else ()  # three layers, one of each kind
    report = hop(source, tmp_path / "there", to, degrees=degrees, spec=spec, pp_split=split)
    assert any(f"the family {family}, hf" in note and "to megatron" in note for note in report["notes"])
    assert not any("in no rule" in note for note in report["notes"]) and not report["dropped"]
    hop(tmp_path / "there", tmp_path / "back", "safetensors")
    assert_same(tmp_path / "back", as_released(source, family, tmp_path / "released"))


@pytest.mark.share(2)
@pytest.mark.parametrize(("to", "spec"), ROUTES)
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])
def test_tied_heads_stay_tied(family: str, to: str, spec: str | None, tmp_path: Path) -> None:
    """One matrix in the hub; in rank folders of two stages the last one has a copy, as Megatron has it."""
    tiny_model(family, tie_word_embeddings=True).save_pretrained(tmp_path / "hub")
    assert "lm_head.weight" not in load_file(tmp_path / "hub" / "model.safetensors")
    hop(tmp_path / "hub", tmp_path / "there", to, degrees={"tp": 2, "pp": 2}, spec=spec)
    hop(tmp_path / "there", tmp_path / "back", "safetensors")
    assert_same(tmp_path / "back", tmp_path / "hub")


def test_a_tied_head_of_megatron_is_written_for_meta(tmp_path: Path) -> None:
    """Whose `output.weight` is always there."""
    tiny_model("llama", head_dim=4, tie_word_embeddings=True).save_pretrained(tmp_path / "hub")
    hop(tmp_path / "hub", tmp_path / "there", "megatron", degrees={"pp": 2})
    hop(tmp_path / "there", tmp_path / "meta", "meta", degrees={"tp": 2})
    hop(tmp_path / "meta", tmp_path / "back", "safetensors", tied_head="tie")
    assert_same(tmp_path / "back", tmp_path / "hub")


@pytest.mark.parametrize("to", ["paddle", "paddle-flex"])
def test_a_tied_head_comes_back_from_paddle_s_ranks(to: str, tmp_path: Path) -> None:
    """They hold it beside the embedding; the hub has one of the two, unless the user wants both."""
    tiny_model("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path / "hub")
    hop(tmp_path / "hub", tmp_path / "there", to, degrees={"tp": 2})
    left_out = hop(tmp_path / "there", tmp_path / "back", "safetensors")["dropped"]
    assert [name for entry in left_out for name in entry["names"]] == ["lm_head.weight"]
    assert_same(tmp_path / "back", tmp_path / "hub")
    pair = str(tmp_path / "hub"), str(tmp_path / "there")
    assert diff(*pair, Reading(), Comparison(dialect="hf"), progress=Silent())["equal"]
    hop(tmp_path / "there", tmp_path / "both", "safetensors", tied_head="keep")
    assert "lm_head.weight" in load_file(tmp_path / "both" / "model.safetensors")


@pytest.mark.share(6)
@pytest.mark.parametrize("family", [name for name in NAMES if name not in DRAWN])
def test_transformers_takes_what_came_back(family: str, saved: Saved, tmp_path: Path) -> None:
    """Of the Omni models, which as wholes compute nothing but speech, what thinks."""
    model, source = saved(family)
    hop(source, tmp_path / "there", "megatron-dist", degrees={"tp": 1 if family in ONE_RANK else 2, "pp": 2})
    hop(tmp_path / "there", tmp_path / "back", "safetensors")
    if family == "qwen2_5_omni":  # whose class wants voices beside its weights, and tells nothing of its loading
        torch.save({}, tmp_path / "back" / "spk_dict.pt")
        found = type(model).from_pretrained(tmp_path / "back")
    else:
        found, told = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
        assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    mine, theirs = (getattr(each, "thinker", each) for each in (found.eval(), model))
    assert torch.equal(logits(mine), logits(theirs))


@pytest.mark.share(3)
@pytest.mark.parametrize(("family", "kind", "architecture"), OTHER_CLASSES)
def test_every_class_of_a_family_comes_back(family: str, kind: str, architecture: str, tmp_path: Path) -> None:
    """Classes beside the first, whose tensors are the family's too: over Megatron, or where nothing maps them over
    DCP."""
    if kind == "gemma3n":
        pytest.importorskip("timm", reason="its tower is timm's")
    model = tiny_model(family, classes=(kind, architecture))
    source = tmp_path / "hub"
    model.save_pretrained(source)
    ranks = {"tp": 2, "pp": 2, **({"ep": 2} if family in EXPERTS else {})}
    to, degrees = ("dcp", {"dp": 3}) if family in HUB_ALONE else ("megatron-dist", ranks)
    hop(source, tmp_path / "there", to, degrees=degrees)
    hop(tmp_path / "there", tmp_path / "back", "safetensors")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == kind
    assert_same(tmp_path / "back", source)
    pair = str(source), str(tmp_path / "there")
    assert diff(*pair, Reading(), Comparison(dialect="hf"), progress=Silent())["equal"]
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "back").eval()), logits(model))


@pytest.mark.share(9)
@pytest.mark.parametrize(("to", "degrees"), [("dcp", {"dp": 3}), ("sharded", {"tp": 2, "dp": 2})])
@pytest.mark.parametrize("family", HUB_ALONE)
def test_what_no_megatron_holds_keeps_its_names(
    family: str, to: str, degrees: dict[str, int], saved: Saved, tmp_path: Path
) -> None:
    """There and back over other systems' files; Megatron is refused with the reason before a byte moves."""
    model, source = saved(family)
    hop(source, tmp_path / "there", to, degrees=degrees)
    hop(tmp_path / "there", tmp_path / "back", "safetensors")
    assert_same(tmp_path / "back", source)
    pair = str(source), str(tmp_path / "there")
    assert diff(*pair, Reading(), Comparison(), progress=Silent())["equal"]
    with pytest.raises(UsageError, match=f"family {family} has no dialect 'megatron': ") as caught:
        hop(source, tmp_path / "ranks", "megatron-dist", degrees={"tp": 2})
    assert caught.value.code == "E1231" and not (tmp_path / "ranks").exists()
    if family not in DRAWN and to == "dcp":
        found = type(model).from_pretrained(tmp_path / "back").eval()
        assert torch.equal(logits(found), logits(model))


@pytest.mark.parametrize("to", ["megatron-dist", "megatron"])
def test_more_ranks_than_query_groups_are_told(to: str, saved: Saved, tmp_path: Path) -> None:
    _, source = saved("llama")
    report = hop(source, tmp_path / "there", to, degrees={"tp": 8})
    assert any("share the 4 query groups" in note and "0.16" in note for note in report["notes"])
    hop(tmp_path / "there", tmp_path / "back", "safetensors")
    assert_same(tmp_path / "back", source)
    with pytest.raises(UsageError, match="4 query groups do not divide by 3") as caught:
        hop(source, tmp_path / "three", to, degrees={"tp": 3})
    assert caught.value.code == "E0273"


@pytest.mark.share(9)
@pytest.mark.parametrize("to", ["megatron-dist", "megatron"])
@pytest.mark.parametrize("family", [name for name in NAMES if name not in NO_ARGUMENTS])
def test_megatron_s_arguments_alone_tell_the_sizes(family: str, to: str, saved: Saved, tmp_path: Path) -> None:
    _, source = saved(family)
    hop(source, tmp_path / "there", to)
    (tmp_path / "there" / "config.json").unlink()
    hop(tmp_path / "there", tmp_path / "back", "safetensors", family=family)
    assert_same(tmp_path / "back", as_released(source, family, tmp_path / "released"))


@pytest.mark.parametrize("family", ["internvl", "gemma4"])
def test_names_tell_whose_part_a_language_model_is(family: str, saved: Saved, tmp_path: Path) -> None:
    """Megatron's arguments are a Qwen2's, a Gemma's; the names are no decoder's alone."""
    _, source = saved(family)
    hop(source, tmp_path / "there", "megatron-dist", degrees={"tp": 2})
    (tmp_path / "there" / "config.json").unlink()
    notes = hop(tmp_path / "there", tmp_path / "back", "safetensors")["notes"]
    assert any(f"the image or audio part of a {family}" in note for note in notes)
    assert_same(tmp_path / "back", as_released(source, family, tmp_path / "released"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3", "attention_bias"),
        ("llama", "attention_bias"),
        ("llama", "mlp_bias"),
        ("deepseek_v3", "attention_bias"),
    ],
)
def test_biases_that_megatron_has_no_word_for_are_told_by_the_tensors(family: str, key: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(family, **{key: True})
    model.save_pretrained(tmp_path / "hub")
    hop(tmp_path / "hub", tmp_path / "there", "megatron-dist")
    (tmp_path / "there" / "config.json").unlink()
    notes = hop(tmp_path / "there", tmp_path / "back", "safetensors", family=family)["notes"]
    assert any(f"{key} becomes True" in note for note in notes)
    assert_same(tmp_path / "back", tmp_path / "hub")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()), logits(model))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_of_multi_token_prediction_come_back(family: str, saved: Saved, tmp_path: Path) -> None:
    """transformers leaves them out; they are put beside what it saved, with the copies that their authors publish."""
    _, source = saved(family)
    hub = tmp_path / "hub"
    shutil.copytree(source, hub)
    config = {**json.loads((hub / "config.json").read_text()), "num_nextn_predict_layers": 1}
    (hub / "config.json").write_text(json.dumps(config))
    have = load_file(hub / "model.safetensors")
    at = "model.layers.4."
    copies = {f"{at}embed_tokens.weight": "model.embed_tokens.weight", f"{at}shared_head.head.weight": "lm_head.weight"}
    shapes = {name: shape for name, shape in hub_shapes(family, config, mtp=True).items() if name.startswith(at)}
    for seed, (name, shape) in enumerate(shapes.items()):
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        have[name] = have[copies[name]].clone() if name in copies else drawn
    save_file(have, hub / "model.safetensors", {"format": "pt"})
    there = hop(hub, tmp_path / "there", "megatron-dist", degrees={"tp": 2, "pp": 2, "ep": 2})
    assert {name for entry in there["dropped"] for name in entry["names"]} == copies.keys()
    assert any("hold copies" in note for note in hop(tmp_path / "there", tmp_path / "back", "safetensors")["notes"])
    assert_same(tmp_path / "back", hub)
    have[f"{at}embed_tokens.weight"][3, 3] += 1
    save_file(have, hub / "model.safetensors", {"format": "pt"})
    with pytest.raises(InconsistentCheckpoint, match="copies") as caught:  # Megatron would lose what differs
        hop(hub, tmp_path / "unlike", "megatron-dist")
    assert caught.value.code == "E1481"


@pytest.mark.parametrize(("family", "chain"), CHAINS)
def test_systems_meet_without_the_hub(family: str, chain: tuple[str, str], saved: Saved, tmp_path: Path) -> None:
    """hub -> one system -> another -> hub."""
    _, source = saved(family)
    if "meta" in chain:
        tiny_model(family, head_dim=4).save_pretrained(tmp_path / "narrow")  # Meta's heads are as wide as the model
        source = tmp_path / "narrow"
    at = source
    for number, to in enumerate((*chain, "safetensors")):
        ranks = {"tp": 2} if to in ("megatron", "megatron-dist", "paddle-flex") else {}
        hop(at, tmp_path / f"{number}", to, degrees=ranks)
        at = tmp_path / f"{number}"
    assert_same(at, source)


def test_the_spec_says_how_norms_and_experts_are_spelled(saved: Saved, tmp_path: Path) -> None:
    _, source = saved("mixtral")
    for spec in ("local", "te"):
        hop(source, tmp_path / spec, "megatron", spec=spec)
    local, te = (
        torch.load(tmp_path / spec / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["model"]
        for spec in ("local", "te")
    )
    at = "decoder.layers.1"
    assert torch.equal(local[f"{at}.input_layernorm.weight"], te[f"{at}.self_attention.linear_qkv.layer_norm_weight"])
    assert torch.equal(local[f"{at}.pre_mlp_layernorm.weight"], te[f"{at}.pre_mlp_layernorm.weight"])
    assert torch.equal(
        local[f"{at}.mlp.experts.local_experts.3.linear_fc1.weight"], te[f"{at}.mlp.experts.linear_fc1.weight3"]
    )
    with safe_open(source / "model.safetensors", "pt") as hub:
        names = (f"model.layers.1.block_sparse_moe.experts.3.{half}.weight" for half in ("w1", "w3"))
        gate, up = (hub.get_tensor(name) for name in names)
    assert torch.equal(te[f"{at}.mlp.experts.linear_fc1.weight3"], torch.cat([gate, up]))
    with pytest.raises(UsageError) as caught:
        hop(source, tmp_path / "hf", "sharded", spec="te")
    assert caught.value.code == "E0261"


def test_layers_ahead_without_copies_get_none(tmp_path: Path) -> None:
    """Ling's, as their authors' code saves them, hold no second embedding and no second output layer."""
    config = {**tiny_config("bailing_moe_v2"), "num_nextn_predict_layers": 1}
    draw("bailing_moe_v2", config, tmp_path / "hub")
    assert any(name.endswith(".enorm.weight") for name in load_file(tmp_path / "hub" / "model.safetensors"))
    hop(tmp_path / "hub", tmp_path / "there", "megatron-dist", degrees={"tp": 2, "pp": 2, "ep": 2})
    notes = hop(tmp_path / "there", tmp_path / "back", "safetensors")["notes"]
    assert not any("hold copies" in note for note in notes)
    assert_same(tmp_path / "back", tmp_path / "hub")
