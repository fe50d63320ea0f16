"""What can't be merged: everything that is wrong is told at once, before a byte is written, with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import CkptError, InputError, UsageError
from ckpt_tool.merging import mergekit as yaml_file
from ckpt_tool.merging.job import last_of
from ckpt_tool.merging.mergekit import read_config

FIXTURES = Path(__file__).parents[3] / "fixtures"

Models = Callable[..., list[str]]


def fault(kind: type[CkptError], *sources: Any, out: Path, **options: Any) -> CkptError:
    with pytest.raises(kind) as caught:
        ckpt.merge(list(sources), out, **options)
    assert not out.exists() and not list(out.parent.glob(f".{out.name}*")), "something was written"
    return caught.value


def said(error: CkptError) -> str:
    return "\n".join([error.message, *error.faults, error.hint or "", error.code])


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("linear", {"weight": (1, 2, 3)}, ["--weight is given 3 times for 2 models", "E1442"]),
        ("linear", {"weight": (1, -1)}, ["the weights sum to 0", "E1441"]),
        ("linear", {"base": "m0", "t": 0.5}, ["linear has no base", "t: no parameter of linear"]),
        (
            "ties",
            {"density": 1.5, "weight": 1},
            ["--weight is given 1 times", "needs a base", "density is 1.5, want above 0 to 1"],
        ),
        ("ties", {"base": "m0", "density": 0}, ["density is 0"]),
        ("slerp", {"t": 1.5}, ["t is 1.5, want from 0 to 1"]),
        ("slerp", {}, ["slerp needs a t"]),
        ("slerp", {"t": 0.5, "base": "m2"}, ["slerp takes 2 models, the base counted; there are 3"]),
        ("nuslerp", {"base": "m0"}, ["nuslerp takes 2 models in addition to the base; there are 1"]),
        ("model-stock", {"base": "m0"}, ["model-stock takes at least 3 models"]),
        ("della", {"base": "m0", "density": 0.9, "epsilon": 0.2}, ["density 0.9 +- epsilon 0.2 leaves (0, 1)"]),
        ("della", {"base": "m0", "density": 0.5, "gamma": 0.2}, ["gamma: no parameter of della"]),
        ("passthrough", {}, ["passthrough takes 1 model; there are 2"]),
        ("ema", {"weight": (1, 2)}, ["ema has its weights from --decay", "ema needs --decay from 0 to below 1"]),
        ("ema", {"decay": 1.0}, ["found 1"]),
        ("linear", {"decay": 0.5}, ["--decay only applies to --method average"]),
        ("union", {"weight": (1, 2), "seed": 3}, ["--weight, --seed: no effect with merge --method union", "E1442"]),
        ("linear", {"on_conflict": "last"}, ["--on-conflict only applies to --method union"]),
        ("lora", {"on_conflict": "first"}, ["--on-conflict only applies to --method union"]),
        ("slerp", {"t": 0.5, "weight": (1, 1)}, ["weight: no parameter of slerp"]),
        ("linear", {"weight": (1e39, 1)}, ["weight is 1e+39, beyond the range of fp32"]),
        ("linear", {"weight": (3e38, 3e38)}, ["the weights sum to more than fp32 has"]),
        ("linear", {"weight": (1e-50, 1e-50)}, ["the weights sum to 0 in fp32"]),
        ("linear", {"weight": (1, -1.00000000001)}, ["the weights sum to 0 in fp32"]),
        ("linear", {"seed": 3}, ["--seed: linear leaves nothing to chance"]),
        ("breadcrumbs", {"base": "m0", "gamma": 0.1}, ["--gamma: nothing is trimmed without a --density below 1"]),
        ("della", {"base": "m0", "density": 1, "epsilon": 0.1}, ["--epsilon: nothing is trimmed"]),
        (
            "ties",
            {"base": "m0", "density": 0.5, "vocab_size": 64},
            ["rows of zeros would count among those that ties leaves out"],
        ),
        ("linear", {"state": "optimizer"}, ["optimizer states of several jobs have no mean"]),
        ("linear", {"plan": "p.json"}, ["E0264"]),
    ],
)
def test_options(method: str, options: dict[str, Any], words: list[str], models: Models, tmp_path: Path) -> None:
    paths = models(3)
    if "base" in options:
        options = {**options, "base": paths[int(options["base"][1])]}
    text = said(fault(UsageError, *paths[:2], out=tmp_path / "out", method=method, **options))
    assert all(word in text for word in words), text


def test_a_model_is_named_twice(models: Models, tmp_path: Path) -> None:
    (path,) = models(1)
    assert "named twice" in said(fault(UsageError, path, path, out=tmp_path / "out", method="linear"))


def test_architectures_and_tokenizers_at_once(models: Models, tmp_path: Path) -> None:
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}, "added_tokens": []}
    first, second, third = models(3, tokenizer=vocabulary)
    config = json.loads((Path(second) / "config.json").read_text())
    (Path(second) / "config.json").write_text(
        json.dumps({**config, "hidden_size": 32, "model_type": "qwen2", "rope_theta": 1})
    )
    other = {**vocabulary, "added_tokens": [{"id": 2, "content": "<pad>"}]}
    (Path(third) / "tokenizer.json").write_text(json.dumps(other))
    error = fault(InputError, first, second, third, out=tmp_path / "out", method="linear")
    text = said(error)
    assert error.code == "E1446" and "model_type is qwen2 and llama" in text and "hidden_size is 32 and 16" in text
    assert "1 tokens have another number" in text and "'<pad>' is None here, 2 there" in text
    error = fault(InputError, first, third, out=tmp_path / "out", method="linear")
    assert error.code == "E1448" and "--tokenizer base" in (error.hint or "")
    report = ckpt.merge([first, third], tmp_path / "out", method="linear", tokenizer="base")
    assert any("merged by their number" in note for note in report["notes"])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (Path(first) / "tokenizer.json").read_bytes()


def test_adapters_of_two_scalings(tmp_path: Path) -> None:
    """Their products are scaled by one config, which can't be that of both."""
    for k in range(2):
        (tmp_path / f"a{k}").mkdir()
        save_file(
            {"m.lora_A.weight": torch.ones(2, 3), "m.lora_B.weight": torch.ones(3, 2)},
            tmp_path / f"a{k}" / "adapter_model.safetensors",
        )
        about = {"peft_type": "LORA", "r": 2, "lora_alpha": 2 + k, "rank_pattern": None if k else {}}
        (tmp_path / f"a{k}" / "adapter_config.json").write_text(json.dumps(about))
    error = fault(InputError, tmp_path / "a0", tmp_path / "a1", out=tmp_path / "out", method="linear")
    assert "the adapters' lora_alpha is 3 and 2" in error.message and not error.faults
    ckpt.merge([tmp_path / "a0", f"{tmp_path}/./a0/"], tmp_path / "out", method="linear")


def test_tokenizers_that_say_the_same_are_the_same(models: Models, tmp_path: Path) -> None:
    first, second = models(2, tokenizer={"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}, "version": "1"})
    text = json.dumps({"version": "2", "model": {"merges": ["a b"], "vocab": {"b": 1, "a": 0}}}, indent=3)
    (Path(second) / "tokenizer.json").write_text(text)
    ckpt.merge([first, second], tmp_path / "out", method="linear")


def test_tensors_shapes_and_dtypes_at_once(models: Models, tmp_path: Path) -> None:
    first, second = models(2)
    tensors = load_file(Path(second) / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["extra.weight"] = torch.ones(3)
    tensors["lm_head.weight"] = torch.ones(40, 16)
    tensors["model.norm.weight"] = torch.ones(16, dtype=torch.float64)
    save_file(tensors, Path(second) / "model.safetensors")
    error = fault(InputError, first, second, out=tmp_path / "out", method="linear")
    text = said(error)
    assert error.code == "E1447" and error.exit_code == 3
    for part in (
        f"model.layers.1.mlp.up_proj.weight: not in {second}",
        f"extra.weight: not in {first}",
        "lm_head.weight: [48, 16]",
        "[40, 16]",
        "model.norm.weight: F64 is not merged",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"lm_head.weight": torch.ones(40, 16)}, "--vocab-size"),
        ({"model.norm.weight": torch.ones(16, dtype=torch.float64)}, "--dtype"),
        ({"model.norm.weight": torch.ones(8)}, "one architecture"),
        ({"model.norm.weight": None}, "--remove-keys"),
        ({"lm_head.weight": None}, "--tied-head"),
    ],
)
def test_the_hint_is_about_the_fault(
    change: dict[str, torch.Tensor | None], hint: str, models: Models, tmp_path: Path
) -> None:
    first, second = models(2)
    tensors = {**load_file(Path(second) / "model.safetensors"), **change}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, Path(second) / "model.safetensors"
    )
    error = fault(InputError, first, second, out=tmp_path / "out", method="linear")
    assert error.code == "E1447" and hint in (error.hint or "")


GOOD = "merge_method: linear\nmodels:\n  - {{model: {0}, parameters: {{weight: 1}}}}\n  - {{model: {1}, parameters: {{weight: 2}}}}\n"  # noqa: E501


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("merge_method: lineer\nmodels: [{{model: {0}}}]", ["no method 'lineer'", "did you mean linear"]),
        ("merge_method: sce\nmodels: [{{model: {0}}}]", ["does not merge by sce"]),
        (GOOD + "dtyp: float32", ["unknown key 'dtyp'", "did you mean dtype"]),
        (
            GOOD + "chat_template: auto\nmodules: {{}}",
            ["chat_template: this build copies", "one of them may have slices"],
        ),
        (GOOD + "tokenizer_source: union", ["'union' asks for another tokenizer"]),
        (
            GOOD + "tokenizer: {{source: base, pad_to_multiple_of: 8, tokens: {{}}}}",
            ["moves no rows", "tokenizer.pad_to_multiple_of", "tokenizer.tokens"],
        ),
        (GOOD + "dtype: float64\nout_dtype: 3", ["dtype: found 'float64'", "out_dtype: found 3"]),
        (GOOD + "parameters: {{normalise: true}}", ["normalise: no parameter of linear", "did you mean normalize"]),
        (GOOD + "parameters: {{normalize: 1}}", ["found 1, want a flag"]),
        (GOOD + "parameters: {{weight: [1, {{filter: x}}]}}", ["a case is {filter"]),
        (GOOD + "parameters: {{weight: [{{filter: x, value: 1, layer: 3}}]}}", ["unknown key 'layer'"]),
        (GOOD + "parameters: {{weight: .inf}}", ["want a number"]),
        (
            "merge_method: linear\nmodels: [{{model: {0}+lora}}, {{model: no/such}}, {{model: no@main}}]",
            ["--method lora", "hf://no/such", "revisions of a hub"],
        ),
        ("merge_method: linear\nmodels: [{{model: {0}, weight: 1}}]", ["unknown key 'weight'"]),
        ("merge_method: linear\nmodels: [{0}]", ["want a mapping with model"]),
        ("merge_method: linear\nmodels: []", ["want one of models and slices"]),
        ("merge_method: linear\nslices: [{{sources: [{{model: {0}}}]}}]", ["layer_range: found None"]),
        (
            "merge_method: linear\nslices: [{{sources: [{{model: {0}, layer_range: [2, 1]}}], residual_weight: 1}}]",
            ["layer_range: found [2, 1]", "residual_weight"],
        ),
        ("merge_method: ties\nmodels: [{{model: {0}, parameters: {{weight: 1}}}}]", ["needs a base"]),
        (
            "merge_method: slerp\nbase_model: {0}\nmodels: [{{model: {1}, parameters: {{t: 1}}}}]",
            ["one for the whole merge, not for the model"],
        ),
        (
            "merge_method: ties\nbase_model: {0}\nslices: [{{sources: [{{model: {1}, layer_range: [0, 1]}}]}}]",
            ["is not among the models"],
        ),
        (
            GOOD + "parameters: {{weight: [{{filter: mpl, value: 1}}, {{value: 2}}]}}",
            ["weight: no tensor's name has the filter 'mpl' in it; did you mean mlp"],
        ),
        (
            GOOD + "parameters: {{weight: [{{value: 2}}, {{filter: mlp, value: 1}}]}}",
            ["those after it are never reached"],
        ),
        ("merge_method: !!bool abc", ["'abc' is no bool"]),
        ("merge_method: " + ":".join(["59"] * 20000), ["is no int of at most 400 characters"]),
        ("3", ["not a mapping"]),
        ("", ["not a mapping"]),
        ("models: [", ["not YAML", "E1443"]),
        ("a: 1\na: 2", ["'a' appears twice"]),
        ("!!python/object/apply:os.system ['echo x']", ["asks for more than values"]),
        ("a: !!python/name:os.system", ["asks for more than values"]),
        ("? [1, 2]\n: 3", ["is no text"]),
        ("a: &x [*x]", ["larger than any config needs"]),
        (
            "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d "
            "[*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: "
            "[*e,*e,*e,*e,*e,*e,*e,*e,*e]",
            ["larger than any config needs"],
        ),
        ("[" * 5000, ["E1443"]),
        ("a: 1\n---\nb: 2", ["E1443"]),
        ("a: \x00", ["E1443"]),
    ],
)
def test_configs(text: str, words: list[str], models: Models, tmp_path: Path) -> None:
    config = tmp_path / "merge.yaml"
    paths = models(2)
    config.write_text(text.format(*paths) if "{{" in text or "{0}" in text else text)
    found = said(fault(UsageError, out=tmp_path / "out", config=config))
    assert all(word in found for word in words), found


def test_a_config_of_any_size_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "big.yaml").write_bytes(b"#" * (yaml_file.LIMIT + 1))
    with pytest.raises(UsageError, match="more than 256 KiB"):
        read_config(str(tmp_path / "big.yaml"))


def test_a_config_says_all(models: Models, tmp_path: Path) -> None:
    paths = models(2)
    (tmp_path / "merge.yaml").write_text(GOOD.format(*paths))
    text = said(fault(UsageError, out=tmp_path / "out", config=tmp_path / "merge.yaml", weight=(1, 2), t=0.5))
    assert "--weight, --t: no effect with --config" in text
    assert "--seed: linear leaves nothing to chance" in said(
        fault(UsageError, out=tmp_path / "out", config=tmp_path / "merge.yaml", seed=3)
    )
    assert "--on-conflict only applies to --method union" in said(
        fault(UsageError, out=tmp_path / "out", config=tmp_path / "merge.yaml", on_conflict="last")
    )
    assert "--config says the method" in said(
        fault(UsageError, out=tmp_path / "out", config=tmp_path / "merge.yaml", method="ties")
    )


def test_what_a_config_says_of_its_base_is_told(models: Models, tmp_path: Path) -> None:
    """mergekit passes over it, and its own examples say it (vlm-ties.yml)."""
    paths = models(2)
    (tmp_path / "merge.yaml").write_text(
        "merge_method: ties\nbase_model: {0}\nparameters:\nmodels:\n  - {{model: {1}, parameters: {{density: [1, "
        "0.7, 0.1], weight: 1.0}}}}\n"
        "  - {{model: {0}, parameters: {{density: 0.5, weight: [0, 0.3, 0.7, 1]}}}}\n".format(*paths)
    )
    report = ckpt.merge([], tmp_path / "out", config=tmp_path / "merge.yaml")
    assert sum("of the base" in note and "no effect" in note for note in report["notes"]) == 2


def test_slices(models: Models, tmp_path: Path) -> None:
    paths = models(2)
    config = tmp_path / "merge.yaml"
    head = "merge_method: passthrough\nslices:\n"
    config.write_text(head + f"  - sources: [{{model: {paths[0]}, layer_range: [1, 9]}}]\n")
    assert "layer_range ends at 9" in said(fault(InputError, out=tmp_path / "out", config=config))
    about = json.loads((Path(paths[0]) / "config.json").read_text())
    (Path(paths[0]) / "config.json").write_text(json.dumps({**about, "first_k_dense_replace": 2}))
    config.write_text(head + f"  - sources: [{{model: {paths[0]}, layer_range: [1, 3]}}]\n")
    assert "kinds of layers by number" in said(fault(UsageError, out=tmp_path / "out", config=config))


def test_last_of_names() -> None:
    names = ["checkpoint-90", "checkpoint-100", "checkpoint-80", "logs", "checkpoint-x"]
    assert last_of("run/", names, 2) == ["run/checkpoint-90", "run/checkpoint-100"]
    with pytest.raises(UsageError, match="2 kinds"):
        last_of("run", ["iter_0000001", "checkpoint-1"], 1)


def test_an_adapter_beside_a_model_is_asked_about(tmp_path: Path) -> None:
    """Joined without a word it would be a model that nobody loads right."""
    sources = [str(FIXTURES / "convert" / "llama" / "hf"), str(FIXTURES / "peft" / "on_llama")]
    with pytest.raises(UsageError, match="is an adapter") as caught:
        ckpt.merge(sources, str(tmp_path / "out"))
    assert "--method lora" in (caught.value.hint or "") and not (tmp_path / "out").exists()
    ckpt.merge(sources, str(tmp_path / "out"), method="union")
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight" in ckpt.open(str(tmp_path / "out"))
