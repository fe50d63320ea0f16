"""mergekit and `ckpt merge` on the same configs and the same tiny models, fp32, bf16, tied, and of experts.

CKPT_MERGEKIT_PYTHON names a Python with mergekit (tested: 0.1.5 with torch 2.15 and transformers 5.23, on a processor
with FMA). What leaves nothing to chance is equal bit for bit where no sum over a whole tensor goes into it; the others
are within the distance stated. mergekit's masks by chance are other masks of the same law.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peers import Runner
from safetensors.torch import load_file, save_file

PYTHON = os.environ.get("CKPT_MERGEKIT_PYTHON")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="CKPT_MERGEKIT_PYTHON names no Python with mergekit"),
]
Tensors = dict[str, torch.Tensor]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(folder: Path) -> None:
    """Four models of each kind, three of them grown from the first."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    llama = LlamaConfig(**SIZES, tie_word_embeddings=False)
    kinds: dict[str, tuple[Any, Any, torch.dtype]] = {
        "llama": (LlamaForCausalLM, llama, torch.float32),
        "bf16": (LlamaForCausalLM, llama, torch.bfloat16),
        "tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True), torch.float32),
        "moe": (
            MixtralForCausalLM,
            MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
            torch.float32,
        ),
    }
    for name, (kind, config, dtype) in kinds.items():
        for number in range(4):
            torch.manual_seed(0)
            model = kind(config)
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for parameter in model.parameters() if number else ():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            model.to(dtype).save_pretrained(folder / f"{name}{number}")
            if name == "moe":
                fuse(folder / f"moe{number}", folder / f"fused{number}")


def fuse(source: Path, target: Path) -> None:
    """The experts of a layer in two tensors: what mergekit 0.1.5 makes of a Mixtral with transformers 5."""
    shutil.copytree(source, target)
    save_file(fused(tensors_of(source)), target / "model.safetensors", {"format": "pt"})


def fused(tensors: Tensors) -> Tensors:
    out = Tensors()
    experts = dict[str, dict[str, list[torch.Tensor]]]()
    for name in sorted(tensors):
        layer, found, rest = name.partition(".block_sparse_moe.experts.")
        if found:
            experts.setdefault(layer, {}).setdefault(rest.split(".")[1], []).append(tensors[name])
        else:
            out[name.replace(".block_sparse_moe.gate.", ".mlp.gate.")] = tensors[name]
    for layer, parts in experts.items():
        gates = [torch.cat(pair) for pair in zip(parts["w1"], parts["w3"], strict=True)]
        out[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gates)
        out[f"{layer}.mlp.experts.down_proj"] = torch.stack(parts["w2"])
    return out


class Case(NamedTuple):
    """A config without its models. exact: equal bit for bit; otherwise `far`: |a - b| <= far * max(|a|, |b|, 0.05)."""

    name: str
    config: dict[str, Any]
    models: tuple[dict[str, Any], ...] = ({"weight": 0.3}, {"weight": 0.7})
    base: bool = True
    far: float = 0.0
    slices: list[Any] | None = None


GRADIENT = {"weight": [0.1, 0.5, 0.9], "density": [{"filter": "self_attn", "value": [0.3, 0.7]}, {"value": 0.6}]}
PLAIN = ({"weight": 0.5, "density": 0.4}, {"weight": 0.8, "density": 0.6})
THREE = (*PLAIN, {"weight": -0.2, "density": 0.5})
SUMS = 2e-6  # coefficients of sums over whole tensors: mergekit sums in fp32, this tool in fp64


def vectors(method: str, models: Any = PLAIN, **parameters: Any) -> dict[str, Any]:
    return {"merge_method": method, "parameters": parameters} if parameters else {"merge_method": method}


EXACT = [
    Case("linear", {"merge_method": "linear"}, base=False),
    Case(
        "linear-plain",
        {"merge_method": "linear", "parameters": {"normalize": False}},
        ({"weight": 0.5}, {"weight": 0.9}, {"weight": -0.1}),
        False,
    ),
    Case(
        "linear-gradient",
        {"merge_method": "linear"},
        ({"weight": GRADIENT["weight"]}, {"weight": [{"filter": "mlp", "value": 0.25}, {"value": 1}]}),
        False,
    ),
    Case(
        "task-arithmetic",
        {"merge_method": "task_arithmetic", "parameters": {"lambda": 0.7}},
        ({"weight": 0.3}, {"weight": 0.9}, {"weight": -0.5}),
    ),
    Case("task-arithmetic-normalize", {"merge_method": "task_arithmetic", "parameters": {"normalize": True}}),
    Case("ties", {"merge_method": "ties"}, THREE),
    Case(
        "ties-plain",
        {"merge_method": "ties", "parameters": {"normalize": False, "lambda": 1.5, "int8_mask": True}},
        PLAIN,
    ),
    Case("ties-gradient", {"merge_method": "ties"}, (GRADIENT, {"weight": 0.5, "density": 1.0})),
    Case("breadcrumbs", {"merge_method": "breadcrumbs", "parameters": {"gamma": 0.05}}, PLAIN),
    Case("breadcrumbs-ties", {"merge_method": "breadcrumbs_ties"}, THREE),
    Case("dare-linear-whole", {"merge_method": "dare_linear"}),
    Case("dare-ties-whole", {"merge_method": "dare_ties", "parameters": {"density": 1.0}}),
    Case("della-whole", {"merge_method": "della"}),
    Case("passthrough", {"merge_method": "passthrough"}, base=False, slices=[("1", 0, 2), ("2", 1, 3), ("1", 2, 3)]),
    Case(
        "passthrough-scale",
        {
            "merge_method": "passthrough",
            "parameters": {"scale": [{"filter": "down_proj", "value": 0.5}, {"value": 1.0}]},
        },
        base=False,
        slices=[("1", 0, 3), ("2", 1, 2)],
    ),
]
NEAR = [
    Case("slerp", {"merge_method": "slerp", "parameters": {"t": [0, 0.3, 1]}}, ({},), far=SUMS),
    Case("nuslerp", {"merge_method": "nuslerp"}, base=False, far=SUMS),
    Case("nuslerp-base", {"merge_method": "nuslerp"}, far=SUMS),
    Case("nuslerp-rows", {"merge_method": "nuslerp", "parameters": {"nuslerp_flatten": False}}, base=False, far=SUMS),
    Case(
        "nuslerp-columns",
        {"merge_method": "nuslerp", "parameters": {"nuslerp_flatten": False, "nuslerp_row_wise": True}},
        base=False,
        far=SUMS,
    ),
    Case("model-stock", {"merge_method": "model_stock"}, ({}, {}, {}), far=SUMS),
    Case("model-stock-rows", {"merge_method": "model_stock", "parameters": {"filter_wise": True}}, ({}, {}), far=SUMS),
    Case("ties-rescale", {"merge_method": "ties", "parameters": {"rescale": True}}, PLAIN, far=SUMS),
]
CHANCE = [
    Case("dare-linear", {"merge_method": "dare_linear"}, ({"weight": 1.0, "density": 0.4},)),
    Case(
        "della-linear",
        {"merge_method": "della_linear", "parameters": {"epsilon": 0.3}},
        ({"weight": 1.0, "density": 0.5},),
    ),
]
KINDS = {"llama": {}, "bf16": {"dtype": "float32", "out_dtype": "bfloat16"}, "tied": {}, "moe": {}}
ALL = [(kind, case) for kind in KINDS for case in (*EXACT, *NEAR, *CHANCE)]


def config_of(case: Case, kind: str, models: Path) -> dict[str, Any]:
    config = {**case.config, **KINDS[kind]}
    if case.slices:
        config["slices"] = [
            {"sources": [{"model": str(models / f"{kind}{number}"), "layer_range": [low, high]}]}
            for number, low, high in case.slices
        ]
        return config
    if case.base:
        config["base_model"] = str(models / f"{kind}0")
    config["models"] = [
        {"model": str(models / f"{kind}{number}"), **({"parameters": own} if own else {})}
        for number, own in enumerate(case.models, 1)
    ]
    return config


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that mergekit makes of the cases, below KIND/CASE, the configs beside them."""
    import yaml

    root = tmp_path_factory.mktemp("mergekit")
    (root / "models").mkdir()
    build(root / "models")
    jobs = []
    for kind, case in ALL:
        config = root / f"{kind}.{case.name}.yaml"
        config.write_text(yaml.safe_dump(config_of(case, kind, root / "models")))
        jobs.append({"config": str(config), "out": str(root / kind / case.name), "seed": 1})
    (root / "jobs.json").write_text(json.dumps(jobs))
    runner = Path(__file__).with_name("load_mergekit.py")
    done = subprocess.run(
        [str(PYTHON), str(runner), str(root / "jobs.json")],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    (root / "said.json").write_text(json.dumps(said))
    print(said, file=sys.stderr)
    return root


def tensors_of(folder: Path) -> Tensors:
    out: Tensors = {}
    for file in folder.glob("*.safetensors"):
        out |= load_file(file)
    return out


def both(ckpt: Runner, merged: Path, kind: str, case: Case, tmp_path: Path) -> tuple[Tensors, Tensors]:
    """(mergekit's tensors, ours), of the same names, shapes and dtypes."""
    failed = json.loads((merged / "said.json").read_text())["failed"].get(str(merged / kind / case.name))
    if failed:
        pytest.skip(f"mergekit fails: {failed}")
    config = merged / f"{kind}.{case.name}.yaml"
    if kind == "moe":
        text = config.read_text().replace("/models/moe", "/models/fused")
        config = tmp_path / "fused.yaml"
        config.write_text(text)
    ckpt("merge", tmp_path / "out", "--config", config)
    want = tensors_of(merged / kind / case.name)
    got = tensors_of(tmp_path / "out")
    assert {k: (v.shape, v.dtype) for k, v in got.items()} == {k: (v.shape, v.dtype) for k, v in want.items()}
    return want, got


def at_thresholds(merged: Path, kind: str, case: Case, name: str) -> torch.Tensor:
    """Elements whose magnitude is that of the threshold in one of the task vectors, where there are several of it:
    which of them are kept mergekit leaves to an unstable sort. Only models of bf16 have such."""
    models = [tensors_of(merged / "models" / f"{kind}{k}").get(name) for k in range(len(case.models) + 1)]
    none = torch.zeros((), dtype=torch.bool)
    if kind != "bf16" or not case.name.startswith(("ties", "breadcrumbs")):
        return none
    for own, model in zip(case.models, models[1:], strict=True):
        size = (model.float() - models[0].float()).abs()
        order = size.flatten().sort().values
        for density in densities(own["density"]):
            left = max(1, int(density * size.numel()))
            for gamma in (0.0, 0.01, 0.05):
                top = size.numel() - int(gamma * size.numel())
                for rank in (top - left, top):
                    if 0 < rank < size.numel() and order[rank - 1] == order[rank]:
                        none = none | (size == order[rank])
    return none


def densities(setting: Any) -> list[float]:
    """All that a setting may come to in a model of three layers."""
    if isinstance(setting, float):
        return [setting]
    low, high = setting[0]["value"]
    return [low, (1 - 0.5) * low + 0.5 * high, high, setting[1]["value"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_equal_bit_for_bit(ckpt: Runner, merged: Path, kind: str, case: Case, tmp_path: Path) -> None:
    want, got = both(ckpt, merged, kind, case, tmp_path)
    for name, theirs in want.items():
        differ = theirs != got[name]
        assert not bool((differ & ~at_thresholds(merged, kind, case, name)).any()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = json.loads((merged / kind / case.name / "config.json").read_text())
    assert config["num_hidden_layers"] == theirs["num_hidden_layers"]


@pytest.mark.parametrize("name", ["linear", "task-arithmetic"])
def test_experts_one_by_one_give_the_same(ckpt: Runner, merged: Path, name: str, tmp_path: Path) -> None:
    ckpt("merge", tmp_path / "out", "--config", merged / f"moe.{name}.yaml")
    want = tensors_of(merged / "moe" / name)
    got = fused(tensors_of(tmp_path / "out"))
    assert want.keys() == got.keys() and all(torch.equal(want[each], got[each]) for each in want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", NEAR, ids=lambda case: case.name)
def test_near(ckpt: Runner, merged: Path, kind: str, case: Case, tmp_path: Path) -> None:
    """fp32 values within `far` of each other. Where they are written as bf16, an exact value between two neighbours may
    fall to either, so a few elements are a unit in the last place apart, 2^-7 of a value just above a power of two.
    (`nuslerp-rows` has two such: in fp64 they lie 2e-8 and 7e-7 off the middle, and both times on the side to which
    this tool rounds.)
    """
    want, got = both(ckpt, merged, kind, case, tmp_path)
    worst = 0.0
    differ = 0
    total = 0
    for name, theirs in want.items():
        a = theirs.double()
        b = got[name].double()
        scale = torch.maximum(torch.maximum(a.abs(), b.abs()), torch.tensor(0.05))
        far = ((a - b).abs() / scale)[~at_thresholds(merged, kind, case, name)]
        worst = max(worst, float(far.max()) if far.numel() else 0.0)
        differ = differ + int((far > 0).sum())
        total = total + far.numel()
    print(f"{kind} {case.name}: {worst:.2e}, {differ} of {total} differ")
    short = kind == "moe" and case.name == "nuslerp-columns"  # vectors of 4, nearly parallel: acos has few digits there
    assert worst <= (2**-7 if kind == "bf16" else 5e-4 if short else case.far)
    assert kind != "bf16" or differ <= 1 + total * 2 * 2**8 * case.far  # as many as lie so near to the middle of two


@pytest.mark.parametrize("kind", ["llama", "moe"])
@pytest.mark.parametrize("case", CHANCE, ids=lambda case: case.name)
def test_the_same_law(ckpt: Runner, merged: Path, kind: str, case: Case, tmp_path: Path) -> None:
    """What is kept: as many, spread alike over magnitudes, and scaled so that the sums of magnitudes are those of
    before."""
    want, got = both(ckpt, merged, kind, case, tmp_path)
    base, end = (tensors_of(merged / "models" / f"{kind.replace('moe', 'fused')}{k}") for k in (0, 1))
    share = {"theirs": [0, 0, 0], "ours": [0, 0, 0]}
    for name, start in base.items():
        delta = end[name] - start
        if delta.numel() < 1000:
            continue
        large = delta.abs() > delta.abs().median()
        for who, made in (("theirs", want[name]), ("ours", got[name])):
            kept = (made - start) != 0
            share[who][0] += int(kept.sum())
            share[who][1] += int((kept & large).sum())
            share[who][2] += kept.numel()
            assert float((made - start).abs().sum() / delta.abs().sum()) == pytest.approx(1, abs=2e-5)
    n = share["ours"][2]
    density = case.models[0]["density"]
    sigma = (density * (1 - density) / n) ** 0.5
    for index in (0, 1):
        theirs = share["theirs"][index] / n
        ours = share["ours"][index] / n
        assert abs(theirs - ours) < 7 * sigma, (theirs, ours)
    assert abs(share["ours"][0] / n - density) < 5 * sigma
