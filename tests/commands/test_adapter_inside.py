"""Whole models with an adapter inside, as jobs save the wrapped model: recognised in every format, never written under
names that no library loads, and folded as PEFT folds them."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from adapter_models import load, merged, model, save_base, saved
from safetensors.torch import load_file, save_file

from ckpt_tool.adapters.fold import fold
from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.commands.merge import merge
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.adapters.inside import find_inside
from ckpt_tool.formats.adapters.lone import is_adapter
from ckpt_tool.merging.options import MergeOptions
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source

pytestmark = pytest.mark.skipif(find_spec("peft") is None or find_spec("transformers") is None, reason="without PEFT")

# case: (base, settings of the adapter)
CASES = {
    "lora": ("llama", {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}),
    "ranks": (
        "llama",
        {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 3}},
    ),
    "saved": (
        "llama",
        {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "norm"], "bias": "all"},
    ),
    "embedding": ("llama", {"r": 3, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head"]}),
    "tokens": (
        "llama",
        {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [50, 3, 7]}},
    ),
    "dora": ("llama", {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "gpt2": ("gpt2", {"r": 4, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"]}),
    "experts": (
        "moe",
        {
            "r": 2,
            "lora_alpha": 6,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}
FORMATS = ("safetensors", "bin", "trainer", "dcp", "ranks")


@lru_cache
def train(case: str) -> tuple[tempfile.TemporaryDirectory[str], dict[str, torch.Tensor]]:
    """(a folder with the base and PEFT's own adapter, the state of the wrapped model)."""
    from peft import LoraConfig, get_peft_model

    kind, settings = CASES[case]
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    save_base(kind, folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model(kind), LoraConfig(**settings))
        torch.manual_seed(4)
        with torch.no_grad():
            for name, value in adapted.named_parameters():
                if "magnitude" in name:
                    value.mul_(1 + torch.rand_like(value))
                elif value.requires_grad:
                    value.copy_(torch.randn_like(value) * 0.3)
        adapted.save_pretrained(folder / "adapter")
    return kept, {name: value.detach().clone().contiguous() for name, value in adapted.state_dict().items()}


def wrapped(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """The state of the wrapped model. The base is copied to `folder`/base, PEFT's own adapter to `folder`/adapter."""
    kept, state = train(case)
    shutil.copytree(kept.name, folder, dirs_exist_ok=True)
    return dict(state)


def save_as(fmt: str, state: dict[str, torch.Tensor], folder: Path, base: Path) -> Path:
    """The state as a job saves it; the path to pass."""
    path = folder / "job"
    path.mkdir(parents=True)
    if fmt == "safetensors":
        save_file(state, path / "model.safetensors", {"format": "pt"})
        shutil.copy(base / "config.json", path)
    elif fmt == "bin":
        torch.save(state, path / "pytorch_model.bin")
        shutil.copy(base / "config.json", path)
    elif fmt == "trainer":
        torch.save({"model": state, "step": 7}, path / "step_7.pt")
        return path / "step_7.pt"
    elif fmt == "ranks":
        torch.save(state, path / "model_world_size_1_rank_0.pt")
    else:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": state}, checkpoint_id=str(path), no_dist=True)
    return path


def run(src, out, reading=None, **writing):
    return fold([str(src)], str(out), reading or Reading(), Writing(verify="full", **writing), Silent())


def refused(call, code):
    with pytest.raises(CkptError) as e:
        call()
    assert e.value.code == code and (e.value.hint or code == "E2933"), e.value
    return e.value


@pytest.mark.parametrize("case", CASES)
def test_it_is_folded_as_peft_folds_it(case, tmp_path):
    state = wrapped(case, tmp_path)
    src = save_as("safetensors", state, tmp_path, tmp_path / "base")
    shutil.copy(tmp_path / "adapter/adapter_config.json", src)
    run(src, tmp_path / "out", reading=Reading(from_format="safetensors"))

    kind = CASES[case][0]
    theirs = merged(tmp_path / "base", tmp_path / "adapter")
    ours = load(tmp_path / "out")
    if case != "experts":  # in memory experts are fused, and the folder keeps the names that it came with
        theirs = load(saved(theirs, kind, tmp_path / "theirs"))
    assert not [name for name in theirs.keys() & ours.keys() if not torch.equal(ours[name], theirs[name])]
    assert theirs.keys() - ours.keys() <= {"lm_head.weight"} and ours.keys() - theirs.keys() <= {"lm_head.weight"}


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_of_a_job(fmt, tmp_path):
    """With the config a folder above, in verl's places, and by the user's word."""
    state = wrapped("ranks", tmp_path)
    src = save_as(fmt, state, tmp_path / "run", tmp_path / "base")
    theirs = load(saved(merged(tmp_path / "base", tmp_path / "adapter"), "llama", tmp_path / "theirs"))
    refused(lambda: run(src, tmp_path / "none"), "E2932")

    folder = src if src.is_dir() else src.parent
    config = Reading(config=str(tmp_path / "base/config.json"))
    shutil.copy(tmp_path / "adapter/adapter_config.json", folder.parent if src.is_dir() else folder)
    run(src, tmp_path / "above", reading=config, to="safetensors")
    for file in (folder, folder.parent):
        (file / "adapter_config.json").unlink(missing_ok=True)

    run(src, tmp_path / "stated", reading=Reading(config=config.config, lora_alpha=6), to="safetensors")
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}))
    run(src, tmp_path / "noted", reading=config, to="safetensors")
    for out in ("above", "stated", "noted"):
        ours = load(tmp_path / out)
        assert ours.keys() == theirs.keys()
        assert not [name for name in ours if not torch.equal(ours[name], theirs[name])], out
    refused(lambda: run(src, tmp_path / "no", reading=Reading(lora_alpha=7)), "E2791")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("to", ["safetensors", "torch", "gguf", "megatron-dist", "paddle-unified", "meta"])
def test_no_output_has_such_names(fmt, to, tmp_path):
    src = save_as(fmt, wrapped("lora", tmp_path), tmp_path / "run", tmp_path / "base")
    config = Reading(config=str(tmp_path / "base/config.json"))
    error = refused(lambda: convert(str(src), str(tmp_path / "out"), config, Writing(to=to), Silent()), "E2933")
    assert "--method lora" in error.hint and not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["reshard", "merge"])
def test_no_verb_writes_a_hub_folder_with_such_names(verb, tmp_path):
    src = str(save_as("safetensors", wrapped("lora", tmp_path), tmp_path / "run", tmp_path / "base"))
    out = str(tmp_path / "out")

    def call(**writing):
        if verb == "reshard":
            reshard(src, out, Reading(), Writing(**writing), Silent())
        else:
            merge([src], out, Reading(), Writing(**writing), MergeOptions(), Silent())

    refused(call, "E2933")
    call(dialect="keep")
    assert load(tmp_path / "out").keys() == load(tmp_path / "run/job").keys()


def test_names_are_kept_where_a_job_goes_on(tmp_path):
    state = wrapped("lora", tmp_path)
    src = save_as("bin", state, tmp_path / "run", tmp_path / "base")
    convert(str(src), str(tmp_path / "out"), Reading(), Writing(to="dcp"), Silent())
    assert {key.name for key in open_source(str(tmp_path / "out"), Reading()).catalog.tensors} == state.keys()


@pytest.mark.parametrize("case", ["lora", "saved", "embedding", "dora", "tokens", "experts"])
def test_the_adapter_alone_is_pefts_own_folder(case, tmp_path):
    src = save_as("safetensors", wrapped(case, tmp_path), tmp_path / "run", tmp_path / "base")
    shutil.copy(tmp_path / "adapter/adapter_config.json", src.parent)
    convert(str(src), str(tmp_path / "out"), Reading(), Writing(to="peft"), Silent())
    ours = load_file(tmp_path / "out/adapter_model.safetensors")
    theirs = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert theirs.keys() <= ours.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours.keys() == theirs.keys()
    assert json.loads((tmp_path / "out/adapter_config.json").read_text()) == json.loads(
        (tmp_path / "adapter/adapter_config.json").read_text()
    )


@pytest.mark.parametrize("case", CASES)
def test_an_adapters_own_file_is_none(case, tmp_path):
    """Nor is one that kept the adapter's own name in its names."""
    wrapped(case, tmp_path)
    names = list(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    assert find_inside(names) is None
    named = [
        name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        for name in names
        if ".lora_" in name
    ]
    assert find_inside(named) is None


def test_models_with_such_words_are_none():
    assert find_inside(["base.base_layer.0.weight", "base.level0.0.weight", "head.weight"]) is None
    assert find_inside(["a.lora_A.weight", "a.lora_B.weight", "norm.weight"]) is None


def test_several_adapters_and_other_methods(tmp_path):
    state = wrapped("lora", tmp_path)
    second = {name.replace(".default.", ".other."): value.clone() for name, value in state.items() if ".lora_" in name}
    src = save_as("safetensors", {**state, **second}, tmp_path / "run", tmp_path / "base")
    shutil.copy(tmp_path / "adapter/adapter_config.json", src.parent)
    assert "default, other" in refused(lambda: run(src, tmp_path / "out"), "E2934").message
    run(src, tmp_path / "out", remove_keys=("*.other.*",))

    lokr = {".lora_A.default.weight": ".lokr_w1.default", ".lora_B.default.weight": ".lokr_w2.default"}
    renamed = dict(state)
    for ours, theirs in lokr.items():
        renamed = {name.replace(ours, theirs): value for name, value in renamed.items()}
    other = save_as("safetensors", renamed, tmp_path / "lokr", tmp_path / "base")
    assert "lokr_w1" in refused(lambda: run(other, tmp_path / "no"), "E2934").message
    refused(lambda: convert(str(other), str(tmp_path / "no"), Reading(), Writing(to="safetensors"), Silent()), "E2933")


@pytest.mark.parametrize("fmt", ["safetensors", "trainer", "dcp"])
@pytest.mark.parametrize("method", ["prompt", "prefix", "p_tuning", "norms"])
def test_what_other_methods_train_next_to_the_weights_is_no_model(method, fmt, tmp_path):
    """Their parts are not in the layers' projections: an encoder at the root, or the norms."""
    import peft

    virtual = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    settings = {
        "prompt": lambda: peft.PromptTuningConfig(**virtual),
        "prefix": lambda: peft.PrefixTuningConfig(**virtual, prefix_projection=True, encoder_hidden_size=4),
        "p_tuning": lambda: peft.PromptEncoderConfig(**virtual, encoder_hidden_size=4),
        "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    }
    save_base("llama", tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model("llama"), settings[method]())
    state = {name: value.detach().clone().contiguous() for name, value in adapted.state_dict().items()}
    src = save_as(fmt, state, tmp_path / "run", tmp_path / "base")
    config = Reading(config=str(tmp_path / "base/config.json"))

    for to in ("safetensors", "gguf"):
        refused(lambda to=to: convert(str(src), str(tmp_path / "no"), config, Writing(to=to), Silent()), "E2933")
    convert(str(src), str(tmp_path / "kept"), Reading(), Writing(to="safetensors", dialect="keep"), Silent())
    assert load(tmp_path / "kept").keys() == state.keys()


def test_a_prompt_encoder_of_a_model_is_none():
    sam = ["point_embed.0.weight", "no_mask_embed.weight", "mask_embed.conv1.weight", "shared_embedding.positions"]
    names = [f"prompt_encoder.{name}" for name in sam]
    assert find_inside([*names, *(f"vision_encoder.layers.{i}.mlp.lin1.weight" for i in range(4))]) is None


def test_a_base_or_an_adapter_that_is_such_a_model(tmp_path):
    src = save_as("safetensors", wrapped("lora", tmp_path), tmp_path / "run", tmp_path / "base")
    assert not is_adapter(open_source(str(src), Reading()).catalog.tensors)
    for sources in ([src, tmp_path / "adapter"], [tmp_path / "base", src]):
        with pytest.raises(CkptError, match="inside") as e:
            fold([str(path) for path in sources], str(tmp_path / "out"), Reading(), Writing(), Silent())
        assert e.value.code == "E1420"


def test_an_alpha_of_zero_is_not_taken_for_one(tmp_path):
    """verl's merger writes 0 where it knows no alpha."""
    wrapped("lora", tmp_path)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 0}))
    sources = [str(tmp_path / "base"), str(tmp_path / "adapter")]
    refused(lambda: fold(sources, str(tmp_path / "out"), Reading(), Writing(), Silent()), "E1422")
    fold(sources, str(tmp_path / "out"), Reading(lora_alpha=6), Writing(), Silent())
    fold(sources, str(tmp_path / "lenient"), Reading(lenient=True), Writing(), Silent())
