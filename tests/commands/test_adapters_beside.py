"""Weights that a trainer trained in full and saved in a file next to the adapter are folded in with it."""

from __future__ import annotations

import json
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from adapter_models import load, model, save_adapter, save_base
from safetensors.torch import load_file, save_file

from ckpt_tool.adapters.fold import fold
from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.adapters.beside import unknown_weights
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source

pytestmark = pytest.mark.skipif(find_spec("peft") is None or find_spec("transformers") is None, reason="without PEFT")
FILES = [
    f"{stem}{ending}"
    for stem in ("non_lora_state_dict", "non_lora_trainables", "trainable_params")
    for ending in (".bin", ".safetensors")
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(base, adapter) of one model."""
    folder = tmp_path_factory.mktemp("llama")
    base = save_base("llama", folder / "base")
    return base, save_adapter("llama", folder / "adapter", r=2, lora_alpha=6, target_modules=["q_proj", "up_proj"])


def trained_weights(seed: int = 5) -> dict[str, torch.Tensor]:
    """Weights trained in full, under the names that they have in the wrapped model."""
    torch.manual_seed(seed)
    return {
        f"base_model.model.{name}": torch.randn_like(value)
        for name, value in model("llama").state_dict().items()
        if "o_proj" in name or "norm" in name or "lm_head" in name
    }


def save_trained(weights: dict[str, torch.Tensor], file: Path) -> None:
    if file.suffix == ".bin":
        torch.save(weights, file)
    else:
        save_file(weights, file)


def merged_by_peft(base: Path, adapter: Path, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As these trainers' own merge scripts do it: the weights trained in full first, then the adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = AutoModelForCausalLM.from_pretrained(base)
        plain = {name.removeprefix("base_model.model."): value for name, value in trained.items()}
        assert not made.load_state_dict(plain, strict=False).unexpected_keys
        return PeftModel.from_pretrained(made, adapter).merge_and_unload().state_dict()


def run(base, adapter, out, **reading):
    return fold([str(base), str(adapter)], str(out), Reading(**reading), Writing(verify="full"), Silent())


@pytest.mark.parametrize("file", FILES)
def test_they_are_folded_in(file, llama, tmp_path):
    base, plain = llama
    shutil.copytree(plain, tmp_path / "adapter")
    trained = trained_weights()
    theirs = merged_by_peft(base, plain, trained)
    save_trained(trained, tmp_path / "adapter" / file)

    run(base, tmp_path / "adapter", tmp_path / "out")
    ours = load(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def test_names_of_wrappers_and_of_modules_to_save(llama, tmp_path):
    base, plain = llama
    shutil.copytree(plain, tmp_path / "adapter")
    trained = trained_weights()
    head = "base_model.model.lm_head.weight"
    norm = "base_model.model.model.norm.weight"
    renamed = {
        "module.base_model.model.lm_head.modules_to_save.default.weight": trained[head],
        norm: trained[norm],
    }
    torch.save(renamed, tmp_path / "adapter/non_lora_trainables.bin")

    run(base, tmp_path / "adapter", tmp_path / "out")
    ours = load(tmp_path / "out")
    theirs = merged_by_peft(base, plain, {name: trained[name] for name in (head, norm)})
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def test_weights_that_the_base_does_not_have_are_an_error(llama, tmp_path):
    """LLaVA's projector, which a base of language alone lacks."""
    base, plain = llama
    shutil.copytree(plain, tmp_path / "adapter")
    torch.save(
        {"base_model.model.model.mm_projector.0.weight": torch.ones(3, 3)},
        tmp_path / "adapter/non_lora_trainables.bin",
    )
    with pytest.raises(CkptError, match="mm_projector") as e:
        run(base, tmp_path / "adapter", tmp_path / "out")
    assert e.value.code == "E1424" and not (tmp_path / "out").exists()


def test_a_name_in_both_files_is_refused(llama, tmp_path):
    _, plain = llama
    shutil.copytree(plain, tmp_path / "adapter")
    name = next(iter(load_file(plain / "adapter_model.safetensors")))
    torch.save({name: torch.ones(2, 24)}, tmp_path / "adapter/non_lora_state_dict.bin")
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path / "adapter"), Reading())
    assert (e.value.code, e.value.exit_code) == ("E2930", 3)


OF_NO_TRAINER = (  # with a word in the name that files of trainers have too, or with another library's ending
    "optimized_embeddings.bin",
    "my_scheduler_weights.bin",
    "new_tokenizer_embeddings.bin",
    "scaler_head.pt",
    "sampler_projector.pth",
    "WEIGHTS.BIN",
    "projector.th",
    "embeddings.npy",
    "head.h5",
)


@pytest.mark.parametrize("name", OF_NO_TRAINER)
def test_a_word_of_trainers_in_a_name_does_not_explain_weights(name: str) -> None:
    assert unknown_weights([name, "adapter_config.json"]) == [name]


@pytest.mark.parametrize(
    "name",
    """
    optimizer.pt optimizer.bin optimizer_1.bin optim_world_size_4_rank_0.pt scheduler.pt lr_scheduler.pt scheduler_1.bin
    scaler.pt sampler.bin sampler_1.bin dl_state_dict.bin train_dl_state_dict.bin rng_state_0.pth training_args.bin
    extra_state_world_size_4_rank_0.pt trainer_state.pt tokenizer.bin random_states_0.pt 0000100_adapters.safetensors
    adapter_model.bin recipe_state.pt
    """.split(),
)
def test_names_that_trainers_give_are_known(name: str) -> None:
    assert unknown_weights([name, "adapter_config.json"]) == []


@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_trained_weights_in_numbered_files_are_read_as_one(ending, llama, tmp_path):
    """Their index names the folder no model of its own: the adapter would be left out."""
    base, plain = llama
    adapter = tmp_path / "adapter"
    shutil.copytree(plain, adapter)
    trained = trained_weights()
    parts = [f"non_lora_state_dict-{number + 1:05d}-of-{len(trained):05d}.{ending}" for number in range(len(trained))]
    for part, (name, value) in zip(parts, trained.items(), strict=True):
        save_trained({name: value}, adapter / part)
    index = {"weight_map": dict(zip(trained, parts, strict=True))}
    (adapter / f"non_lora_state_dict.{ending}.index.json").write_text(json.dumps(index))

    opened = open_source(str(adapter), Reading())
    assert opened.catalog.format == "peft"
    assert {key.name for key in opened.catalog.tensors} >= set(trained)
    run(base, adapter, tmp_path / "out")

    (adapter / parts[0]).unlink()
    with pytest.raises(CkptError, match="of weights that were trained") as e:
        run(base, adapter, tmp_path / "again")
    assert e.value.code == "E3025"


@pytest.mark.parametrize("file", ["mm_projector.bin", "vit.safetensors", "extra.pt", "value_head.safetensors"])
def test_weights_that_nothing_explains_are_not_passed_over(file, llama, tmp_path):
    base, plain = llama
    shutil.copytree(plain, tmp_path / "adapter")
    save_trained(trained_weights(), tmp_path / "adapter" / file) if file.endswith("safetensors") else torch.save(
        trained_weights(), tmp_path / "adapter" / file
    )
    with pytest.raises(CkptError, match=file) as e:
        run(base, tmp_path / "adapter", tmp_path / "out")
    assert (e.value.code, e.value.exit_code) == ("E2931", 2) and not (tmp_path / "out").exists()
    run(base, tmp_path / "adapter", tmp_path / "out", lenient=True)


@pytest.mark.parametrize("to", ["peft", "dcp", "torch"])
@pytest.mark.parametrize("file", ["mm_projector.bin", "value_head.safetensors"])
def test_they_are_not_left_behind_where_the_adapter_is_written(file, to, llama, tmp_path):
    _, plain = llama
    shutil.copytree(plain, tmp_path / "adapter")
    save_trained(trained_weights(), tmp_path / "adapter" / file)

    def write(name, **more):
        reading = Reading(from_format="peft", **more)
        convert(str(tmp_path / "adapter"), str(tmp_path / name), reading, Writing(to=to), Silent())

    with pytest.raises(CkptError, match=file) as e:
        write("out")
    assert (e.value.code, e.value.exit_code) == ("E2931", 2) and not (tmp_path / "out").exists()
    write("lenient", lenient=True)

    # The way of the hint: under the name that trainers give to such weights they go along.
    (tmp_path / "adapter" / file).rename(tmp_path / "adapter" / f"non_lora_trainables{Path(file).suffix}")
    write("named")
    written = open_source(str(tmp_path / "named"), Reading()).catalog.tensors
    assert set(trained_weights()) < {key.name for key in written}


@pytest.mark.parametrize(
    "file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "the base's own"]
)
def test_files_of_the_trainer_and_of_the_base_are_no_hindrance_to_writing(file, llama, tmp_path):
    base, plain = llama
    shutil.copytree(plain, tmp_path / "adapter")
    if file == "the base's own":
        for name in (*base.glob("*.safetensors"), base / "config.json"):
            shutil.copy(name, tmp_path / "adapter")
    else:
        torch.save({"state": {}}, tmp_path / "adapter" / file)
    reading = Reading(from_format="peft")
    convert(str(tmp_path / "adapter"), str(tmp_path / "out"), reading, Writing(to="peft"), Silent())
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    assert written.keys() == load_file(plain / "adapter_model.safetensors").keys()


@pytest.mark.parametrize(
    "file", ["optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "scaler.pt", "optimizer.bin"]
)
def test_what_a_trainer_keeps_there_is_no_hindrance(file, llama, tmp_path):
    base, plain = llama
    shutil.copytree(plain, tmp_path / "adapter")
    torch.save({"state": {}}, tmp_path / "adapter" / file)
    run(base, tmp_path / "adapter", tmp_path / "out")


def test_they_travel_with_the_adapter(llama, tmp_path):
    _, plain = llama
    shutil.copytree(plain, tmp_path / "adapter")
    trained = trained_weights()
    torch.save(trained, tmp_path / "adapter/non_lora_state_dict.bin")
    convert(str(tmp_path / "adapter"), str(tmp_path / "out"), Reading(), Writing(to="peft"), Silent())
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    assert written.keys() == {*load_file(plain / "adapter_model.safetensors"), *trained}
    assert all(torch.equal(written[name], value) for name, value in trained.items())
