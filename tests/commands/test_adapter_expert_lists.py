"""Adapters of experts in a list onto a base that stacks them: the same as PEFT's own adapter of the stacked tensor."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from adapter_models import load, merged, save_adapter, save_base
from safetensors.torch import load_file, save_file

from ckpt_tool.adapters.fold import fold
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

pytestmark = pytest.mark.skipif(find_spec("peft") is None or find_spec("transformers") is None, reason="without PEFT")
EXPERTS = 3


def as_list(adapter, folder, drop=()):
    """The stacked adapter with a pair for each expert, as a model has it whose experts are modules in a list."""
    folder.mkdir()
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = {}
    for name, value in load_file(adapter / "adapter_model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = value
            continue
        # PEFT nests the wrappers of one module: the first parameter is the innermost.
        module, _, part = name.rpartition(".lora_")
        parameter = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
        module = module.removesuffix(".base_layer")
        rank = settings["r"]
        for expert in range(EXPERTS):
            if part.startswith("A"):
                own = value[expert * rank : (expert + 1) * rank]
            else:
                own = value.reshape(value.shape[0], rank, EXPERTS)[:, :, expert]
            if (parameter, expert) not in drop:
                tensors[f"{module}.{parameter}s.{expert}.lora_{part}"] = own.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings |= {"target_parameters": None, "target_modules": ["v_proj"]}
    settings["target_modules"] += [f"{name}s.{expert}" for name in ("gate_up_proj", "down_proj") for expert in range(3)]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def stacked(tmp_path):
    base = save_base("gpt_oss", tmp_path / "base")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = {"r": 2, "lora_alpha": 6, "target_modules": ["v_proj"], "target_parameters": parameters}
    return base, save_adapter("gpt_oss", tmp_path / "adapter", **settings)


def test_equals_the_stacked_adapter(stacked, tmp_path):
    base, adapter = stacked
    lists = as_list(adapter, tmp_path / "lists")
    fold([str(base), str(lists)], str(tmp_path / "out"), Reading(), Writing(verify="full"), Silent())
    ours = load(tmp_path / "out")
    theirs = merged(base, adapter)
    before = load(base)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert sum(not torch.equal(ours[name], before[name]) for name in ours) == 6


def test_an_expert_without_a_pair_is_told(stacked, tmp_path):
    base, adapter = stacked
    lists = as_list(adapter, tmp_path / "lists", drop=[("down_proj", 1)])
    with pytest.raises(CkptError, match="2 experts have an adapter, and the base has 3") as e:
        fold([str(base), str(lists)], str(tmp_path / "out"), Reading(), Writing(), Silent())
    assert e.value.code == "E1424" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_a_head_of_a_family_without_rules_is_untied(kind, tmp_path):
    """A LoRA on the head of a model whose head is its embedding: written apart, and its config says so."""
    import transformers as hf
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4, "tie_word_embeddings": True}
    if kind == "mamba":
        model = hf.MambaForCausalLM(hf.MambaConfig(**sizes))
    else:
        model = hf.Mamba2ForCausalLM(hf.Mamba2Config(**sizes, num_heads=4, head_dim=4, n_groups=1, expand=2))
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=["lm_head"]))
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                value.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    head = adapted.base_model.model.lm_head
    want = head.base_layer.weight + head.get_delta_weight("default")

    sources = [str(tmp_path / "base"), str(tmp_path / "adapter")]
    with pytest.raises(CkptError, match=r"no lm_head\.weight") as e:
        fold(sources, str(tmp_path / "no"), Reading(), Writing(), Silent())
    assert "--tied-head untie" in e.value.hint
    fold(sources, str(tmp_path / "out"), Reading(), Writing(tied_head="untie"), Silent())
    ours = load(tmp_path / "out")
    before = load(tmp_path / "base")
    torch.testing.assert_close(ours.pop("lm_head.weight"), want.detach(), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(ours[name], before[name]) for name in before)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
