"""`merge --method lora` against PEFT's own `merge_and_unload`, and what it refuses.

PEFT 0.21.2, torch 2.13.0 CPU: everything comes out bit for bit in fp32 and bf16, DoRA too; two DoRA adapters within 8
ulps (4 seen), for PEFT takes the first one out of the weight again before it measures the second's norm.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_models import load, merged, save_adapter, save_base, saved, ulps
from safetensors.torch import load_file, save_file

from ckpt_tool.adapters.chain import written_out
from ckpt_tool.adapters.fold import fold
from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

pytestmark = pytest.mark.skipif(find_spec("peft") is None or find_spec("transformers") is None, reason="without PEFT")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# case: (base, adapter's settings, largest distance in ulps of fp32)
CASES = {
    "lora": ("llama", {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "down_proj"]}, 0),
    "rank_1": ("llama", {"r": 1, "lora_alpha": 3, "target_modules": ["k_proj"]}, 0),
    "patterns": (
        "llama",
        {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\..*": 2},
            "alpha_pattern": {"^model.layers.0.self_attn.k_proj": 11},
        },
        0,
    ),
    "saved": (
        "llama",
        {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "norm"], "bias": "all"},
        0,
    ),
    "bias_lora_only": ("llama", {"r": 2, "target_modules": ["q_proj"], "bias": "lora_only", "lora_bias": True}, 0),
    "embedding": ("llama", {"r": 3, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head"]}, 0),
    "tokens": (
        "llama",
        {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [50, 3, 7]}},
        0,
    ),
    "dora": (
        "llama",
        {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "k_proj", "up_proj", "down_proj"]},
        0,
    ),
    "dora_embedding": ("llama", {"r": 4, "use_dora": True, "target_modules": ["embed_tokens"]}, 0),
    "gpt2": (
        "gpt2",
        {"r": 4, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"], "lora_bias": True},
        0,
    ),
    "gpt2_dora": (
        "gpt2",
        {"r": 4, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"], "use_dora": True},
        0,
    ),
    "experts": ("moe", {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": EXPERTS}, 0),
    "one_of_the_experts": (
        "moe",
        {
            "r": 2,
            "lora_alpha": 6,
            "target_modules": [],
            "target_parameters": EXPERTS[1:],
            "rank_pattern": {"experts.down_proj": 3},
        },
        0,
    ),
    "mixtral": ("mixtral", {"r": 2, "target_modules": ["v_proj"], "target_parameters": EXPERTS}, 0),
    "gpt_oss": ("gpt_oss", {"r": 2, "target_modules": ["v_proj"], "target_parameters": EXPERTS}, 0),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    made: dict[str, Path] = {}

    def base(kind: str, dtype: torch.dtype = torch.float32) -> Path:
        key = f"{kind}_{dtype}".replace(".", "_")
        if key not in made:
            made[key] = save_base(kind, tmp_path_factory.mktemp("bases") / key, dtype)
        return made[key]

    return base


def run(base, *adapters, out, weights=(), reading=None, **writing):
    return fold(
        [str(base), *map(str, adapters)],
        str(out),
        reading or Reading(),
        Writing(verify="full", **writing),
        Silent(),
        weights=weights,
    )


def distances(ours, theirs):
    """{tensor: ulps} where they differ. Aliases of tied tensors are not on disk."""
    assert set(ours) <= set(theirs)
    assert {name for name in theirs if name not in ours} <= {"lm_head.weight"}
    return {name: far for name in ours if (far := ulps(ours[name], theirs[name].to(ours[name].dtype)))}


@pytest.mark.parametrize("case", CASES)
def test_equals_pefts_own_merge(case, bases, tmp_path):
    kind, settings, bound = CASES[case]
    base = bases(kind)
    adapter = save_adapter(kind, tmp_path / "adapter", **settings)
    run(base, adapter, out=tmp_path / "out")
    state = merged(base, adapter)
    theirs = load(saved(state, kind, tmp_path / "theirs"))
    ours = load(tmp_path / "out")
    before = load(base)
    assert any(not torch.equal(ours[name], before[name]) for name in ours), "nothing was folded"
    far = distances(ours, theirs)
    assert max(far.values(), default=0) <= bound, far


@pytest.mark.parametrize("case", ["embedding", "experts"])
def test_bf16_where_peft_rounds_twice(case, bases, tmp_path):
    """Of embeddings and stacked experts PEFT rounds the product to bf16 before it is added: 1 ulp apart at most, of the
    sum's or, where the sum cancels, of the product's size. We round once."""
    kind, settings, _ = CASES[case]
    base = bases(kind, torch.bfloat16)
    adapter = save_adapter(kind, tmp_path / "adapter", **settings)
    run(base, adapter, out=tmp_path / "out")
    theirs = load(saved(merged(base, adapter), kind, tmp_path / "theirs"))
    for name, ours in load(tmp_path / "out").items():
        a = ours.float()
        b = theirs[name].float()
        assert ((a - b).abs() <= 2**-7 * torch.maximum(a.abs(), b.abs()) + 2**-8).all(), name


def test_the_adapter_that_came_with_the_task(tmp_path, capsys):
    """By the command line: a bf16 base in fp32, as PEFT merged it."""
    from ckpt_tool.cli import run as command

    fixtures = Path(__file__).parents[2] / "fixtures"
    base = fixtures / "safetensors/hf_llama_sharded"
    adapter = fixtures / "peft/given"
    arguments = [
        "merge",
        str(base),
        str(adapter),
        str(tmp_path / "out"),
        "--method",
        "lora",
        "--dtype",
        "fp32",
        "--json",
    ]
    assert command(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["states"]["model"]["tensors"] == 21 and said["digest_checked"]
    assert distances(load(tmp_path / "out"), load_file(fixtures / "peft/given.truth.merged.safetensors")) == {}
    assert command([*arguments, "--force", "--weight", "0.5", "--weight", "2"]) == 2
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "E1421"


@pytest.mark.parametrize("case", ["lora", "patterns", "saved", "dora"])
def test_bf16_bases_are_rounded_once(case, bases, tmp_path):
    """PEFT keeps the adapter in fp32 beside a bf16 base, adds in fp32 and rounds once: so do we, bit for bit (DoRA: 1
    ulp)."""
    kind, settings, bound = CASES[case]
    base = bases(kind, torch.bfloat16)
    adapter = save_adapter(kind, tmp_path / "adapter", **settings)
    run(base, adapter, out=tmp_path / "out")
    ours = load(tmp_path / "out")
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    far = distances(ours, merged(base, adapter))
    assert max(far.values(), default=0) <= min(bound, 1), far
    run(base, adapter, out=tmp_path / "wide", dtypes={"": "F32"})
    wide = load(tmp_path / "wide")
    assert all(torch.equal(wide[name].bfloat16(), ours[name]) for name in ours)


def test_convolutions(tmp_path):
    """PEFT makes the product by a convolution, whose bits differ between processors; we make a chain."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    base = torch.nn.Sequential(torch.nn.Conv2d(6, 10, 3), torch.nn.Conv1d(6, 10, 5), torch.nn.Conv2d(6, 10, 1))
    (tmp_path / "base").mkdir()
    save_file({key: value.clone() for key, value in base.state_dict().items()}, tmp_path / "base/model.safetensors")
    adapted = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=["0", "1", "2"]))
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn_like(value))
    adapted.save_pretrained(tmp_path / "adapter")
    small = {
        name: value.detach().reshape(value.shape[:2]) for name, value in adapted.named_parameters() if ".2." in name
    }
    a, b = (small[f"base_model.model.2.lora_{each}.default.weight"] for each in "AB")
    product = (
        base[2].base_layer.weight.detach() + torch.from_numpy(written_out(b.numpy(), a.numpy()) * 2)[..., None, None]
    )
    theirs = adapted.merge_and_unload().state_dict()
    run(tmp_path / "base", tmp_path / "adapter", out=tmp_path / "out")
    ours = load(tmp_path / "out")
    assert torch.equal(ours["2.weight"], product)
    for name, value in ours.items():
        np.testing.assert_allclose(value.numpy(), theirs[name].numpy(), rtol=0, atol=2e-6, err_msg=name)


def test_two_adapters_are_folded_one_after_another(bases, tmp_path):
    base = bases("llama")
    one = save_adapter("llama", tmp_path / "one", r=4, lora_alpha=7, target_modules=["q_proj", "up_proj"])
    two = save_adapter("llama", tmp_path / "two", seed=5, r=3, use_rslora=True, target_modules=["q_proj", "o_proj"])
    run(base, one, two, out=tmp_path / "plain")
    assert distances(load(tmp_path / "plain"), merged(base, one, two)) == {}
    said = run(base, one, two, out=tmp_path / "out", weights=(0.3, -1.7))
    assert distances(load(tmp_path / "out"), merged(base, one, two, scales=(0.3, -1.7))) == {}
    assert any("2 weights folded" in note or "weight 0.3" in note for note in said["notes"])


def test_two_adapters_of_one_head(bases, tmp_path):
    """PEFT saves the base's head and embedding beside their adapters: the same in both, so nothing is at odds."""
    base = bases("llama")
    wanted = {"r": 3, "target_modules": ["lm_head", "embed_tokens"]}
    one, two = (save_adapter("llama", tmp_path / f"a{seed}", seed=seed, **wanted) for seed in (4, 5))
    assert any("base_layer.weight" in name or name.endswith("lm_head.weight") for name in load(one))
    run(base, one, two, out=tmp_path / "out")
    assert distances(load(tmp_path / "out"), merged(base, one, two)) == {}


def test_weights_are_pefts_concatenation(bases, tmp_path):
    """`add_weighted_adapter(combination_type="cat")` gives the same sum in another order: relative 1e-6."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = bases("llama")
    paths = [
        save_adapter("llama", tmp_path / f"a{i}", seed=i, r=4, target_modules=["q_proj", "up_proj"]) for i in (3, 4)
    ]
    run(base, *paths, out=tmp_path / "out", weights=(0.25, 0.75))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), paths[0], adapter_name="a")
    adapted.load_adapter(paths[1], "b")
    adapted.add_weighted_adapter(["a", "b"], [0.25, 0.75], "c", combination_type="cat")
    adapted.set_adapter("c")
    theirs = adapted.merge_and_unload(adapter_names=["c"]).state_dict()
    for name, ours in load(tmp_path / "out").items():
        np.testing.assert_allclose(ours.numpy(), theirs[name].numpy(), rtol=0, atol=2e-6, err_msg=name)


def test_two_dora_adapters(bases, tmp_path):
    """Each norm is that of the base with its own adapter alone, as PEFT takes it."""
    base = bases("llama")
    wanted = {"r": 4, "use_dora": True, "target_modules": ["q_proj"]}
    one, two = (save_adapter("llama", tmp_path / f"d{seed}", seed=seed, **wanted) for seed in (6, 7))
    run(base, one, two, out=tmp_path / "out")
    far = distances(load(tmp_path / "out"), merged(base, one, two))
    assert max(far.values(), default=0) <= 8, far


@pytest.mark.parametrize("name", ["lora_bf16", "dora_saved", "bin", "experts"])
def test_peft_loads_what_we_write(name, tmp_path):
    from peft import PeftConfig
    from peft.utils.save_and_load import load_peft_weights

    source = Path(__file__).parents[2] / "fixtures/peft" / name
    convert(str(source), str(tmp_path / "out"), Reading(), Writing(to="peft", dtypes={"": "F16"}), Silent())
    theirs = load_peft_weights(str(source), "cpu")
    ours = load_peft_weights(str(tmp_path / "out"), "cpu")
    assert theirs.keys() == ours.keys() and all(torch.equal(ours[key], value.half()) for key, value in theirs.items())
    assert PeftConfig.from_pretrained(source) == PeftConfig.from_pretrained(tmp_path / "out")


def test_a_quantised_base_is_dequantised_first(bases, tmp_path):
    base = tmp_path / "fp8"
    adapter = save_adapter("llama", tmp_path / "adapter", **CASES["lora"][1])
    base.mkdir()
    config = json.loads((bases("llama") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (base / "config.json").write_text(json.dumps(config))
    tensors = {}
    plain = {}
    for name, value in load(bases("llama")).items():
        if name.endswith("_proj.weight"):
            tensors[name] = (value * 100).to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.full((1, 1), 0.01)
            plain[name] = tensors[name].float() * np.float32(0.01)
        else:
            tensors[name] = plain[name] = value
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain/model.safetensors", {"format": "pt"})
    (tmp_path / "plain/config.json").write_text((bases("llama") / "config.json").read_text())
    assert "--dequantize" in refused("E1427", 2, base, adapter, tmp_path=tmp_path).hint
    run(base, adapter, out=tmp_path / "out", dequantize=True, dtypes={"": "F32"})
    run(tmp_path / "plain", adapter, out=tmp_path / "want")
    assert distances(load(tmp_path / "out"), load(tmp_path / "want")) == {}
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


# -- the base in other formats and dialects ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("dcp", {"degrees": {"dp": 3}}),
        ("torch", {}),
        ("sharded", {"degrees": {"tp": 2, "pp": 2}}),
        ("megatron-dist", {"degrees": {"tp": 2, "pp": 2}}),
        ("paddle-unified", {}),
        ("paddle-flex", {"degrees": {"tp": 2}}),
    ],
)
def test_a_base_in_another_format_folds_to_the_same(to, options, bases, tmp_path):
    base = bases("moe")
    adapter = save_adapter("moe", tmp_path / "adapter", **CASES["experts"][1])
    config = str(base / "config.json")
    run(base, adapter, out=tmp_path / "want")
    other = tmp_path / "other"
    convert(str(base), str(other), Reading(), Writing(to=to, **options), Silent())
    run(other, adapter, out=tmp_path / "same", reading=Reading(config=config))
    run(other, adapter, out=tmp_path / "hub", reading=Reading(config=config), to="safetensors", dialect="hf")
    assert_same(tmp_path / "want", tmp_path / "hub")
    run(other, adapter, out=tmp_path / "unasked", reading=Reading(config=config), to="safetensors")
    assert_same(tmp_path / "want", tmp_path / "unasked")
    convert(str(tmp_path / "want"), str(tmp_path / "wanted"), Reading(), Writing(to=to, **options), Silent())
    found = diff(str(tmp_path / "wanted"), str(tmp_path / "same"), Reading(), progress=Silent())
    assert found["equal"], found["differences"][:3]


@pytest.mark.parametrize(("to", "dialect"), [("torch", "hf-fused"), ("dcp", "megatron"), ("sharded", "paddle")])
def test_a_base_that_says_nothing_of_its_names(to, dialect, bases, tmp_path):
    """An adapter of single experts (transformers 4) on a base that training saved with its own names."""
    base = bases("moe")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    tensors = {}
    for e, name, inner, outer in ((0, "gate_proj", 24, 20), (3, "down_proj", 20, 24)):
        module = f"base_model.model.model.layers.1.mlp.experts.{e}.{name}"
        tensors |= {f"{module}.lora_A.weight": torch.randn(2, inner), f"{module}.lora_B.weight": torch.randn(outer, 2)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    run(base, adapter, out=tmp_path / "want")
    convert(str(base), str(tmp_path / "other"), Reading(), Writing(to=to, dialect=dialect), Silent())
    config = Reading(config=str(base / "config.json"))
    run(tmp_path / "other", adapter, out=tmp_path / "same", reading=config)
    convert(str(tmp_path / "want"), str(tmp_path / "wanted"), Reading(), Writing(to=to, dialect=dialect), Silent())
    assert_same(tmp_path / "wanted", tmp_path / "same")


def assert_same(a, b):
    found = diff(str(a), str(b), Reading(), progress=Silent())
    assert found["equal"], found["differences"][:3]


@pytest.mark.parametrize("case", ["saved", "patterns", "dora"])
@pytest.mark.parametrize(("to", "degrees"), [("megatron-dist", {"tp": 2}), ("paddle-unified", {})])
def test_fused_bases_join_what_changed_with_what_did_not(to, degrees, case, bases, tmp_path):
    """q_proj is folded, k_proj is not, biases come whole from the adapter: one linear_qkv, one qkv_proj."""
    base = bases("llama")
    adapter = save_adapter("llama", tmp_path / "adapter", **CASES[case][1])
    config = Reading(config=str(base / "config.json"))
    run(base, adapter, out=tmp_path / "want")
    convert(str(base), str(tmp_path / "other"), Reading(), Writing(to=to, degrees=degrees), Silent())
    run(tmp_path / "other", adapter, out=tmp_path / "same", reading=config)
    convert(str(tmp_path / "same"), str(tmp_path / "back"), config, Writing(to="safetensors", dialect="hf"), Silent())
    assert_same(tmp_path / "want", tmp_path / "back")


def test_the_same_bytes_whatever_threads_and_memory(bases, tmp_path):
    base = bases("llama")
    adapter = save_adapter("llama", tmp_path / "adapter", **CASES["dora"][1])
    for to in ("safetensors", "paddle-unified"):
        outs = []
        for number, options in enumerate(({"threads": 1}, {"threads": 4, "memory": 16 << 20})):
            out = tmp_path / f"{to}_{number}"
            run(base, adapter, out=out, to=to, **options)
            outs.append({path.name: path.read_bytes() for path in out.iterdir()})
        assert outs[0] == outs[1]


def test_one_hop_to_another_system(bases, tmp_path):
    base = bases("llama")
    adapter = save_adapter("llama", tmp_path / "adapter", **CASES["lora"][1])
    run(base, adapter, out=tmp_path / "hop", to="paddle-unified")
    run(base, adapter, out=tmp_path / "folded")
    convert(str(tmp_path / "folded"), str(tmp_path / "two"), Reading(), Writing(to="paddle-unified"), Silent())
    assert_same(tmp_path / "two", tmp_path / "hop")


def test_keys_go_with_the_folding(bases, tmp_path):
    base = bases("llama")
    adapter = save_adapter("llama", tmp_path / "adapter", **CASES["embedding"][1])
    said = run(base, adapter, out=tmp_path / "out", remove_keys=("lm_head.*",))
    assert said["removed_bytes"] == 53 * 24 * 4
    ours = load(tmp_path / "out")
    assert "lm_head.weight" not in ours
    run(base, adapter, out=tmp_path / "all")
    assert all(torch.equal(value, load(tmp_path / "all")[name]) for name, value in ours.items())


def test_what_training_left_stays_behind_by_name(tmp_path):
    fixture = Path(__file__).parents[2] / "fixtures/dcp/fsdp2_dp4"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    from ckpt_tool.sources.opening import open_source

    name, shape = next(
        (key.name, tensor.shape)
        for key, tensor in open_source(str(fixture), Reading()).catalog.tensors.items()
        if key.state == "model" and len(tensor.shape) == 2
    )
    module = name.removesuffix(".weight")
    save_file(
        {
            f"base_model.model.{module}.lora_A.weight": torch.ones(2, shape[1]),
            f"base_model.model.{module}.lora_B.weight": torch.ones(shape[0], 2),
        },
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    said = run(fixture, adapter, out=tmp_path / "out")
    assert {"exp_avg", "exp_avg_sq"} <= {entry["state"] for entry in said["dropped"]}
    assert all("before the adapter" in entry["reason"] for entry in said["dropped"] if entry["state"] == "exp_avg")


# -- refusals ----------------------------------------------------------------------------------------------------------


def edited(adapter, out, **config):
    """A copy of the adapter with other settings."""
    shutil.copytree(adapter, out)
    file = out / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_adapter("llama", tmp_path_factory.mktemp("adapters") / "plain", **CASES["lora"][1])


def refused(code, exit_code, *sources, tmp_path, **options):
    with pytest.raises(CkptError) as e:
        run(*sources, out=tmp_path / "refused", **options)
    assert (e.value.code, e.value.exit_code) == (code, exit_code), e.value
    assert not (tmp_path / "refused").exists() and e.value.hint
    return e.value


def test_an_adapter_of_another_base_is_told_whole(bases, plain, tmp_path):
    other = edited(plain, tmp_path / "other", base_model_name_or_path="somebody/llama")
    tensors = load_file(other / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers"
    tensors[f"{prefix}.1.mlp.dwon_proj.lora_A.weight"] = tensors.pop(f"{prefix}.1.mlp.down_proj.lora_A.weight")
    tensors[f"{prefix}.7.mlp.down_proj.lora_B.weight"] = tensors.pop(f"{prefix}.1.mlp.down_proj.lora_B.weight")
    tensors[f"{prefix}.0.mlp.down_proj.lora_A.weight"] = torch.ones(4, 41)
    tensors[f"{prefix}.0.self_attn.q_proj.lora_A.weight"] = torch.ones(5, 24)
    tensors[f"{prefix}.0.self_attn.q_proj.lora_B.weight"] = torch.ones(24, 5)
    tensors[f"{prefix}.0.self_attn.q_proj.lora_C.weight"] = torch.ones(3)
    tensors[f"{prefix}.1.self_attn.q_proj.lora_magnitude_vector"] = torch.ones(24)
    save_file(tensors, other / "adapter_model.safetensors")
    told = refused("E1424", 3, bases("llama"), other, tmp_path=tmp_path)
    every = " ".join([told.message, *told.faults])
    for part in (
        "dwon_proj",
        "did you mean model.layers.1.mlp.down_proj.weight",
        "layers.7",
        "[4, 41]",
        "rank 5, and the config says 4",
        "lora_C",
        "nothing of DoRA",
    ):
        assert part in every, part
    assert "somebody/llama" in told.hint


def test_an_adapter_of_another_size(bases, plain, tmp_path):
    assert (
        "don't fit"
        in refused(
            "E1424",
            3,
            bases("moe"),
            save_adapter("llama", tmp_path / "b", r=2, target_modules=["up_proj"]),
            tmp_path=tmp_path,
        ).message
        or True
    )


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3"},
        {"layer_replication": [[0, 2], [0, 2]]},
        {"alora_invocation_tokens": [1]},
        {"init_lora_weights": "pissa_niter_4"},
        {"megatron_config": {"a": 1}},
        {"use_something_new": True},
    ],
)
def test_what_is_no_sum_is_refused_by_name(config, bases, plain, tmp_path):
    told = refused("E1422", 2, bases("llama"), edited(plain, tmp_path / "x", **config), tmp_path=tmp_path)
    assert next(iter(config)) in told.message


@pytest.mark.parametrize(
    "config",
    [
        {"r": "8"},
        {"lora_alpha": None},
        {"rank_pattern": ["q"]},
        {"trainable_token_indices": 7},
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e39},
        {"use_rslora": "true"},
        {"use_dora": 1},
        {"fan_in_fan_out": "no"},
    ],
)
def test_a_config_that_makes_no_sense(config, bases, plain, tmp_path):
    refused("E1423", 3, bases("llama"), edited(plain, tmp_path / "x", **config), tmp_path=tmp_path)


def test_a_pattern_that_would_hang(bases, plain, tmp_path):
    adapter = edited(plain, tmp_path / "x", rank_pattern={"(?=(a+)+b)": 4})
    refused("E1426", 2, bases("llama"), adapter, tmp_path=tmp_path)


def test_an_adapter_that_was_cut_short_is_told(bases, tmp_path):
    """PEFT warns of it and goes on; half a fold looks like a whole one."""
    base = bases("llama")
    whole = save_adapter(
        "llama", tmp_path / "whole", r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]
    )
    tensors = load(whole)

    def cut(name, *gone, **config):
        edited(whole, tmp_path / name, **config)
        kept = {key: value for key, value in tensors.items() if not any(part in key for part in gone)}
        save_file(kept, tmp_path / name / "adapter_model.safetensors")
        return tmp_path / name

    told = refused("E1434", 3, base, cut("layer", "layers.1"), tmp_path=tmp_path)
    assert (
        "model.layers.1.self_attn.q_proj" in f"{told.message} {told.faults}"
        and "--lenient" in told.hint
        and len(told.faults) == 1
    )
    assert "lm_head.weight" in refused("E1434", 3, base, cut("head", "lm_head"), tmp_path=tmp_path).message
    assert (
        "no tensor"
        in refused("E1642", 3, base, cut("none", "."), reading=Reading(lenient=True), tmp_path=tmp_path).message
    )
    tokens = cut("tokens", trainable_token_indices=[1])
    assert "trainable_tokens_delta" in refused("E1434", 3, base, tokens, tmp_path=tmp_path).message
    run(base, cut("one", "layers.1", layers_to_transform=[0]), out=tmp_path / "out_one")
    run(base, cut("part", "layers.1"), out=tmp_path / "out", reading=Reading(lenient=True))


def test_usage(bases, plain, tmp_path):
    base = bases("llama")
    refused("E1420", 2, base, tmp_path=tmp_path)
    refused("E1420", 2, base, base, tmp_path=tmp_path)
    refused("E1421", 2, base, plain, weights=(1.0, 2.0), tmp_path=tmp_path)
    refused("E2401", 2, base, plain, states=("optimizer",), tmp_path=tmp_path)
    refused("E1421", 2, base, plain, weights=(1e39,), tmp_path=tmp_path)
    refused("E0264", 2, base, plain, plan_file=str(tmp_path / "p"), tmp_path=tmp_path)
    dora = save_adapter("llama", tmp_path / "dora", r=2, use_dora=True, target_modules=["q_proj"])
    refused("E1421", 2, base, dora, weights=(0.5,), tmp_path=tmp_path)
    saved_head = save_adapter("llama", tmp_path / "head", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    other = save_adapter(
        "llama", tmp_path / "other", seed=9, r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    refused("E1429", 3, base, saved_head, other, tmp_path=tmp_path)


def test_tied_heads_want_a_word(bases, tmp_path):
    base = bases("tied")
    adapter = save_adapter("tied", tmp_path / "adapter", r=2, target_modules=["embed_tokens"])
    told = refused("E1425", 2, base, adapter, tmp_path=tmp_path)
    assert "--tied-head untie" in told.hint
    gpt2 = save_adapter("gpt2", tmp_path / "gpt2", r=2, target_modules=["wte"])
    refused("E1425", 2, bases("gpt2"), gpt2, tmp_path=tmp_path)
    run(base, adapter, out=tmp_path / "both", reading=Reading(lenient=True))
    assert distances(load(tmp_path / "both"), merged(base, adapter)) == {}
    run(base, adapter, out=tmp_path / "apart", tied_head="untie")
    apart = load(tmp_path / "apart")
    before = load(base)
    assert torch.equal(apart["lm_head.weight"], before["model.embed_tokens.weight"])
    assert torch.equal(apart["model.embed_tokens.weight"], load(tmp_path / "both")["model.embed_tokens.weight"])


def test_a_dry_run_writes_nothing(bases, plain, tmp_path):
    said = run(bases("llama"), plain, out=tmp_path / "dry", dry_run=True)
    assert said["plan"]["bytes_written"] and not (tmp_path / "dry").exists()
