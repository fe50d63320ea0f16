"""`ckpt audit`: silent on what is sound, and each fault that is planted, or that an exporter is known for, is found."""

from __future__ import annotations

import json
import os
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import jsonschema
import numpy as np
import pytest
from exports import (
    BRIDGE,
    Tensors,
    bridge_export,
    ghost_export,
    release,
    shards_of,
    tail_export,
    whole_model,
)
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.auditing import findings
from ckpt_tool.cli import run
from ckpt_tool.commands.explain import explain
from ckpt_tool.errors import CkptError, catalogue
from ckpt_tool.report.audit import audit as page_of
from ckpt_tool.report.plain import Look, render

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
SCHEMA = json.loads((FIXTURES / "schemas/sarif-schema-2.1.0.json").read_text())
NO_MODELS = ("make", "bridge", "families", "lookalikes", "convert", "schemas")  # several in one folder, or none


def codes(document: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in document["findings"]}


def seen(document: dict[str, Any]) -> list[str]:
    """The report that each finding is nearest to."""
    return [finding["seen"][0]["name"] for finding in document["findings"] if finding["seen"]]


# -- silent on what is sound -------------------------------------------------------------------------------------------

CHECKPOINTS = sorted(
    path
    for kind in FIXTURES.iterdir()
    if kind.is_dir() and kind.name not in NO_MODELS and not kind.name.startswith("paddle-")
    for path in kind.iterdir()
    if ".truth." not in path.name and path.suffix != ".json"
)


@pytest.mark.share(32)
@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_silent_on_every_real_checkpoint(path: Path) -> None:
    document = ckpt.audit(path, values=True)
    assert document["ok"] and document["findings"] == [] and document["tensors"]


@pytest.mark.share(24)
@pytest.mark.parametrize(
    "case", sorted(path.name.removesuffix(".config.json") for path in BRIDGE.glob("*.config.json"))
)
def test_silent_on_the_names_and_shapes_of_every_family(case: str, tmp_path: Path) -> None:
    document = ckpt.audit(release(tmp_path, *whole_model(case), 3), values=True)
    assert document["findings"] == [] and document["family"]


TINY = (
    "llama qwen2 qwen3 gemma gemma2 gemma3 mixtral qwen3_moe deepseek_v3 gpt2 phi3 falcon bloom olmo2 olmoe granite "
    "glm4 glm4_moe gpt_oss starcoder2 nemotron_h qwen3_next qwen3_5_moe qwen3_vl qwen3_omni_moe mistral4 kimi_linear "
    "llama4 smollm3 cohere2"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_silent_on_tiny_models_that_transformers_saved(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sys.path.append(str(ROOT / "tests/acceptance"))
    from tiny_models import tiny_model

    tiny_model(family).save_pretrained(tmp_path, max_shard_size="60KB")
    document = ckpt.audit(tmp_path, values=True)
    assert document["findings"] == [] and document["family"] == family


# -- what exporters are known for --------------------------------------------------------------------------------------


def is_ahead(name: str, layers: int) -> bool:
    return "mtp" in name.split(".") or f".layers.{layers}." in name


def spread(names: list[str], layers: int, count: int) -> dict[str, list[str]]:
    """Files of a release in two of which lies a part of the MTP layer, as published ones have it."""
    ahead = [name for name in names if is_ahead(name, layers)]
    others = [name for name in names if name not in ahead]
    half = len(ahead) // 2
    return shards_of([*ahead[:half], *others, *ahead[half:]], count)


def without_ahead(case: str) -> tuple[dict[str, Any], dict[str, list[str]], Tensors]:
    """A config, the files of the release, and what an export of a job without MTP yields."""
    config, tensors = whole_model(case)
    layers = config.get("text_config", config)["num_hidden_layers"]
    shards = spread(list(tensors), layers, 8)
    return config, shards, {name: array for name, array in tensors.items() if not is_ahead(name, layers)}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("qwen3_5_moe_released", "AReaL #1403"),
        ("qwen3_next", "AReaL #1403"),
        ("glm4_moe_lite", "Megatron-Bridge #4188"),
        ("glm4_moe", "Megatron-Bridge #4188"),
    ],
)
def test_files_that_were_left_out_whole(case: str, name: str, tmp_path: Path) -> None:
    config, shards, yielded = without_ahead(case)
    folder = bridge_export(tmp_path / "out", config, shards, yielded)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {path.name for path in folder.glob("*.safetensors")} == set(index["weight_map"].values()) < set(shards)
    document = ckpt.audit(folder)
    assert seen(document) == [name] and document["findings"][0]["code"] == "A0901"
    lost = {finding["tensor"] for finding in document["findings"] if finding["code"] == "A0101"}
    assert lost and "A0106" in codes(document)
    written = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    gone = set(yielded) - set(written)
    assert any(each in gone or any(name.startswith(each.rstrip("*")) for name in gone) for each in lost)


def test_a_model_of_other_sizes_than_the_reference(tmp_path: Path) -> None:
    config, tensors = whole_model("deepseek_v3")
    names = [*tensors, *(f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(20, 40))]
    some = ckpt.audit(bridge_export(tmp_path / "some", config, shards_of(names, 6), tensors))
    assert seen(some) == ["Megatron-Bridge #1883"] and {"A0101", "A0106"} <= codes(some)
    each = {file: [*part, f"model.layers.{60 + i}.x"] for i, (file, part) in enumerate(shards_of(names, 6).items())}
    none = bridge_export(tmp_path / "none", config, each, tensors)
    for left in (none, none / "model.safetensors.index.json"):
        document = ckpt.audit(none)
        assert seen(document) == ["Megatron-Bridge #1883"] and codes(document) == {"A0901", "A0107"}
        left.unlink() if left.is_file() else None
    (none / "model.safetensors.index.json").unlink(missing_ok=True)
    assert codes(ckpt.audit(none)) == {"A0901", "A0107"}


def test_an_index_that_says_more_or_less_than_the_files(tmp_path: Path) -> None:
    config, shards, yielded = without_ahead("qwen3_next")
    ghosts = ckpt.audit(ghost_export(tmp_path / "ghosts", config, shards, yielded))
    assert seen(ghosts) == ["Relax #148"] and codes(ghosts) == {"A0901", "E0381"}
    tail = ckpt.audit(tail_export(tmp_path / "tail", config, *reversed(_whole("qwen3_next"))))
    assert seen(tail) == ["Megatron-Bridge #4083"] and codes(tail) == {"A0901", "E0382"}


def _whole(case: str) -> tuple[Tensors, dict[str, list[str]]]:
    _, tensors = whole_model(case)
    return tensors, shards_of(list(tensors), 5)


@pytest.mark.share(3)
@pytest.mark.parametrize("cut", ["model.safetensors", "optimizer_state_dict.pt"])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.95])
def test_a_save_that_was_killed(cut: str, share: float, tmp_path: Path) -> None:
    """speculators: folders `0`, `1`, ..., each file under its final name, the highest number is resumed from."""
    config, tensors = whole_model("qwen3")
    for epoch in ("0", "1"):
        folder = tmp_path / epoch
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copy2(FIXTURES / "torch/training.pt", folder / "optimizer_state_dict.pt")
        assert ckpt.audit(folder)["ok"]
    os.truncate(folder / cut, int((folder / cut).stat().st_size * share))
    assert seen(ckpt.audit(folder)) == ["speculators #739"]
    assert ckpt.latest(tmp_path)["path"] == str(tmp_path / "0")


# -- what is planted ---------------------------------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
Change = Callable[[Tensors, dict[str, Any]], None]


def less(name: str) -> Change:
    return lambda t, c: (t.pop(name), None)[1]


def moved(name: str, to: str) -> Change:
    return lambda t, c: t.update({to: t.pop(name)})


def layer_copied(t: Tensors, c: dict[str, Any]) -> None:
    t.update({name.replace(".1.", ".2."): array for name, array in t.items() if ".layers.1." in name})


def filled(name: str, value: float) -> Change:
    return lambda t, c: t[name].fill(value)


def stated(**more: Any) -> Change:
    return lambda t, c: c.update(more)


def cast(name: str) -> Change:
    return lambda t, c: t.update({name: t[name].astype(np.float16)})


def cut_columns(name: str) -> Change:
    return lambda t, c: t.update({name: np.ascontiguousarray(t[name][:, :-1])})


def one_nan(t: Tensors, c: dict[str, Any]) -> None:
    t[UP][0, 0] = np.nan


def codes8(t: Tensors, c: dict[str, Any]) -> None:
    import ml_dtypes

    t[UP] = t[UP].astype(ml_dtypes.float8_e4m3fn)
    t[f"{UP}_scale_inv"] = np.ones((1, 1), np.float32)


PLANTED: dict[str, tuple[Change, str, bool]] = {
    "a tensor": (less(UP), "A0101", False),
    "the last norm": (less("model.norm.weight"), "A0101", False),
    "the embedding": (less("model.embed_tokens.weight"), "A0101", False),
    "a head that is not tied": (less("lm_head.weight"), "A0101", False),
    "a name misspelt": (moved(UP, UP.replace("up_proj", "up_projj")), "A0102", False),
    "a shape": (cut_columns(UP), "A0103", False),
    "too few layers": (stated(num_hidden_layers=4, layer_types=["full_attention"] * 4), "A0101", False),
    "a config that can't be": (stated(layer_types=["full_attention"]), "A0108", False),
    "rows of the vocabulary": (stated(vocab_size=31), "A0401", False),
    "a tied head that is another": (stated(tie_word_embeddings=True), "A0301", False),
    "a dtype": (cast(UP), "A0302", False),
    "a quantisation of nothing": (stated(quantization_config={"quant_method": "fp8"}), "A0501", False),
    "codes without a config": (codes8, "A0501", False),
    "a layer twice": (layer_copied, "A0201", True),
    "zeros": (filled(UP, 0), "A0202", True),
    "a constant": (filled(UP, 0.5), "A0203", True),
    "NaN": (one_nan, "A0204", True),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("what", PLANTED)
def test_each_planted_fault_is_found(what: str, tmp_path: Path) -> None:
    change, code, values = PLANTED[what]
    config, tensors = whole_model("qwen3")
    change(tensors, config)
    document = ckpt.audit(release(tmp_path / "out", config, tensors, 3), values=values)
    assert code in codes(document), document["findings"]
    assert codes(document) <= {code, "A0101"} and not document["ok"]
    assert not values or ckpt.audit(tmp_path / "out")["ok"], "headers do not show it"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t, c: [t.pop(name) for name in [*t] if ".experts.1." in name and ".layers.1." in name], "A0104"),
        (lambda t, c: [t.pop(name) for name in [*t] if ".experts.0." in name and ".layers.1." in name], "A0101"),
        (
            lambda t, c: t.update(
                {n.replace("experts.0", "experts.1"): a for n, a in t.items() if "1.mlp.experts.0." in n}
            ),
            "A0201",
        ),
    ],
    ids=["the last expert", "an expert between", "an expert twice"],
)
def test_experts(change: Callable[..., Any], code: str, tmp_path: Path) -> None:
    config, tensors = whole_model("qwen3_moe")
    tensors = {name: array for name, array in tensors.items() if not _beyond(name, 2)}
    config = {**config, "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    tensors = {name: array[:2] if name.endswith("mlp.gate.weight") else array for name, array in tensors.items()}
    assert ckpt.audit(release(tmp_path / "whole", config, tensors, 3), values=True)["findings"] == []
    change(tensors, config)
    assert code in codes(ckpt.audit(release(tmp_path / "out", config, tensors, 3), values=True))


def _beyond(name: str, count: int) -> bool:
    words = name.split(".")
    return "experts" in words and int(words[words.index("experts") + 1]) >= count


def test_a_part_of_the_layers_of_mtp(tmp_path: Path) -> None:
    config, tensors = whole_model("qwen3_next")
    config["num_nextn_predict_layers"] = 2
    assert "A0105" in codes(ckpt.audit(release(tmp_path / "part", config, tensors, 1)))
    config["num_nextn_predict_layers"] = 1
    none = {name: array for name, array in tensors.items() if "mtp" not in name.split(".")}
    document = ckpt.audit(release(tmp_path / "none", config, none, 1))
    assert document["ok"] and any("speculative decoding" in note for note in document["notes"])


def test_tokenizers(tmp_path: Path) -> None:
    folder = release(tmp_path, *whole_model("qwen3"), 1)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocab = {f"w{i}": i for i in range(rows)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    (folder / "added_tokens.json").write_text(json.dumps({"<a>": rows - 1}))
    assert ckpt.audit(folder)["ok"]
    for value in (
        {"model": {"vocab": vocab}, "added_tokens": [{"id": rows}]},
        {"model": {"vocab": [["a", 0.0]] * (rows + 1)}},
    ):
        (folder / "tokenizer.json").write_text(json.dumps(value))
        assert codes(ckpt.audit(folder)) == {"A0401"}
    (folder / "tokenizer.json").unlink()
    (folder / "added_tokens.json").write_text(json.dumps({"<a>": rows}))
    assert codes(ckpt.audit(folder)) == {"A0401"}
    (folder / "added_tokens.json").write_text('{"<a>": 1')
    assert codes(ckpt.audit(folder)) == {"E1671"}


def test_index_against_files(tmp_path: Path) -> None:
    folder = release(tmp_path, *whole_model("qwen3"), 2)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["metadata"]["total_size"] += 4
    index.write_text(json.dumps(value))
    assert codes(ckpt.audit(folder)) == {"W-total-size"}


# -- fused weights -----------------------------------------------------------------------------------------------------


def fused_model(order: str, layers: int = 6, turned: int | None = None) -> tuple[dict[str, Any], Tensors]:
    """Phi-3 with queries, keys and values, gates and ups of the sizes that trained ones have (rows of Llama's: queries
    and keys larger than values, gates larger than ups), laid out as `order` says."""
    heads = 8
    groups = 2
    size = 16
    hidden = 64
    inner = 96
    rng = np.random.default_rng(3)

    def rows(count: int, scale: float) -> np.ndarray:
        spread = rng.lognormal(0, 0.05, (count, 1))
        return (rng.normal(0, scale, (count, hidden)) * spread).astype(np.float32)

    config = {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": groups, "num_hidden_layers": layers, "vocab_size": 40,
        "head_dim": size, "tie_word_embeddings": False,
    }  # fmt: skip
    out = {"model.embed_tokens.weight": rows(40, 0.02), "lm_head.weight": rows(40, 0.02)}
    for layer in range(layers):
        front = f"model.layers.{layer}"
        q = rows(heads * size, 0.04)
        k = rows(groups * size, 0.06)
        v = rows(groups * size, 0.02)
        gate = rows(inner, 0.03)
        up = rows(inner, 0.02)
        parts = [each.reshape(groups, -1, hidden) for each in (q, k, v)]
        qkv = np.concatenate(parts, 1).reshape(-1, hidden) if order == "by group" else np.concatenate((q, k, v))
        pair = [up, gate] if layer == turned else [gate, up]
        stripes = 2 if order == "two ranks" else inner if order == "row by row" else 1
        split = [each.reshape(stripes, -1, hidden) for each in pair]
        out |= {
            f"{front}.self_attn.qkv_proj.weight": np.ascontiguousarray(qkv),
            f"{front}.mlp.gate_up_proj.weight": np.ascontiguousarray(np.concatenate(split, 1).reshape(-1, hidden)),
            f"{front}.self_attn.o_proj.weight": rows(hidden, 0.02)[:, : heads * size].repeat(2, 1),
            f"{front}.mlp.down_proj.weight": rows(hidden, 0.02)[:, :1].repeat(inner, 1)
            + rng.normal(0, 0.01, (hidden, inner)).astype(np.float32),
            f"{front}.input_layernorm.weight": rng.normal(1, 0.1, hidden).astype(np.float32),
            f"{front}.post_attention_layernorm.weight": rng.normal(1, 0.1, hidden).astype(np.float32),
        }
    return config, {**out, "model.norm.weight": np.ones(hidden, np.float32)}


@pytest.mark.parametrize("order", ["as stated", "by group", "two ranks", "row by row"])
def test_parts_in_another_order_are_suspected(order: str, tmp_path: Path) -> None:
    document = ckpt.audit(release(tmp_path, *fused_model(order), 2), values=True)
    assert codes(document) == (set() if order == "as stated" else {"A0205"}), document["findings"]
    wanted = {"by group": "in 2 stripes", "two ranks": "in 2 stripes", "row by row": "row by row"}.get(order)
    assert all(wanted in each["message"] and each["severity"] == "suspicion" for each in document["findings"])


def test_gate_and_up_swapped_in_one_layer(tmp_path: Path) -> None:
    document = ckpt.audit(release(tmp_path, *fused_model("as stated", turned=3), 2), values=True)
    assert [each["tensor"] for each in document["findings"]] == ["model.layers.3.mlp.gate_up_proj.weight"]
    assert codes(document) == {"A0205"}


# -- how it is told ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Findings of every severity, in tensors with hostile names."""
    config, tensors = whole_model("qwen3")
    tensors["model.layers.1.mlp.<script>alert(1)</script>\x1b[31m‮"] = np.ones((3, 3), np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.float16)
    del tensors[UP], tensors["model.norm.weight"]
    return release(tmp_path_factory.mktemp("audit") / "a b", config, tensors, 3)


def test_sarif_is_what_the_standard_says(broken: Path, tmp_path: Path) -> None:
    validator = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
    for folder, name in ((broken, "bad.sarif"), (FIXTURES / "safetensors/llama_one_file", "good.sarif")):
        document = ckpt.audit(folder, sarif=str(tmp_path / name))
        value = json.loads((tmp_path / name).read_text())
        assert not [error.message for error in validator.iter_errors(value)]
        (only,) = value["runs"]
        rules = [rule["id"] for rule in only["tool"]["driver"]["rules"]]
        assert [rules[result["ruleIndex"]] for result in only["results"]] == [f["code"] for f in document["findings"]]
        uris = [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in only["results"]]
        assert all(" " not in uri and uri.startswith("file:///") for uri in uris)
    value["runs"][0]["results"] = [{"level": "bad"}]
    assert list(validator.iter_errors(value)), "the validator sees nothing"


def test_junit_counts_the_findings(broken: Path, tmp_path: Path) -> None:
    document = ckpt.audit(broken, junit=str(tmp_path / "a.xml"))
    root = ET.parse(tmp_path / "a.xml").getroot()
    assert root.attrib["failures"] == root.attrib["tests"] == str(len(document["findings"]))
    assert [case.attrib["classname"] for case in root.iter("testcase")] == [f["code"] for f in document["findings"]]
    ckpt.audit(FIXTURES / "safetensors/llama_one_file", junit=str(tmp_path / "a.xml"))
    root = ET.parse(tmp_path / "a.xml").getroot()
    assert (root.attrib["failures"], root.attrib["tests"]) == ("0", "1")


def test_reports_replace_reports_alone(broken: Path, tmp_path: Path, capfd: Any) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for option in ("--sarif", "--junit"):
        assert run(["audit", str(broken), option, str(notes), "-q"]) == 5 and notes.read_text() == "mine"
        inside = broken / "report"
        assert run(["audit", str(broken), option, str(inside), "-q"]) == 5 and not inside.exists()
        assert run(["audit", str(broken), option, str(tmp_path / "no/where"), "-q"]) == 7
        for _ in range(2):
            assert run(["audit", str(broken), option, str(tmp_path / f"out{option}"), "-q"]) == 1


@pytest.mark.parametrize("width", [None, 60])
def test_the_page(width: int | None, broken: Path, capfd: Any) -> None:
    document = ckpt.audit(broken)
    text = render(page_of(document), Look(width=width))
    for finding in document["findings"]:
        assert finding["code"] in text and finding["severity"] in text
    assert "\x1b" not in text and "‮" not in text and max(map(len, text.splitlines())) <= (width or 10**6)
    assert run(["audit", str(broken)]) == 1
    assert "findings: " in capfd.readouterr().out.splitlines()[-1]
    assert run(["audit", str(FIXTURES / "safetensors/llama_one_file"), "--values"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("complete and plausible: no findings")


def test_the_document(broken: Path, capfd: Any) -> None:
    assert run(["audit", str(broken), "--json"]) == 1
    document = json.loads(capfd.readouterr().out)
    assert document["schema_version"] == 1 and document["ok"] is False and document["family"] == "qwen3"
    keys = {"code", "severity", "title", "message", "file", "tensor", "do", "seen"}
    assert all(set(finding) == keys and finding["do"] for finding in document["findings"])
    order = ["error", "warning", "suspicion"]
    severities = [order.index(finding["severity"]) for finding in document["findings"]]
    assert severities == sorted(severities)


def test_every_code_is_explained() -> None:
    stated = {value for value in vars(findings).values() if isinstance(value, str) and value.startswith("A0")}
    assert stated == {code for code in catalogue() if code.startswith("A")}
    assert explain("a0101")["exit_code"] == 1 and explain("A0901")["class"] == "Finding"


def test_a_model_behind_a_url(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.put(str(release(tmp_path / "m", *whole_model("qwen3"), 2)), "/audit/m", recursive=True)
    try:
        assert ckpt.audit("memory://audit/m", values=True)["ok"]
        for file in store.glob("/audit/m/*.safetensors"):
            store.rm(file)
        assert codes(ckpt.audit("memory://audit/m")) == {"E0380"}
        store.rm("/audit/m/model.safetensors.index.json")
        assert codes(ckpt.audit("memory://audit/m")) == {"A0901", "A0107"}
    finally:
        store.rm("/audit", recursive=True)


def test_what_is_no_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    with pytest.raises(CkptError) as caught:
        ckpt.audit(tmp_path)
    assert caught.value.exit_code == 3
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    save_file({"w": np.ones((8, 8), np.float32)}, tmp_path / "model.safetensors")
    assert codes(ckpt.audit(tmp_path)) == {"E0239"}
