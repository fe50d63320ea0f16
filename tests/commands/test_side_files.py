"""What lies beside the weights arrives, byte for byte, and config.json and Megatron's arguments are those of the
output.

The oracles: the bytes of the files, `torch.load` for Megatron's `args`, and transformers' config classes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InputError, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 6,
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "max_position_embeddings": 64,
    "dtype": "float32",
    "bos_token_id": 3,
}
BESIDE = {
    "tokenizer.json": b'{"a": 1}',
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{ }",
    "vocab.json": b"{}",
    "merges.txt": b"a b",
    "tokenizer.model": bytes(range(256)),
    "chat_template.jinja": b"{{ x }}",
    "generation_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "README.md": b"# hi",
    "LICENSE": b"free",
    "modeling_own.py": b"raise SystemExit(1)",
}
STALE = {"trainer_state.json": b"{}", "training_args.bin": b"\x80\x04N.", "scheduler.pt.bak": b"x", "notes.txt": b"x"}
FORMATS = ("torch", "dcp", "sharded", "megatron", "megatron-dist", "paddle-unified", "paddle-flex", "paddle")


def model(folder: Path, config: dict[str, Any] | None = CONFIG) -> dict[str, np.ndarray]:
    layer = {
        "self_attn.q_proj.weight": (16, 8),
        "self_attn.k_proj.weight": (8, 8),
        "self_attn.v_proj.weight": (8, 8),
        "self_attn.o_proj.weight": (8, 16),
        "self_attn.q_norm.weight": (4,),
        "self_attn.k_norm.weight": (4,),
        "mlp.gate_proj.weight": (6, 8),
        "mlp.up_proj.weight": (6, 8),
        "mlp.down_proj.weight": (8, 6),
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
    }
    names = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    names |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    arrays = dict[str, np.ndarray]()
    start = 0
    for name, shape in names.items():
        arrays[name] = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
        start += arrays[name].size
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    for name, data in (BESIDE | STALE).items():
        (folder / name).write_bytes(data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return arrays


def run(source: Path, out: Path, reading: Reading | None = None, **writing: Any) -> str:
    """The notes of a conversion."""
    made = Writing(**{"to": "safetensors", "fsync": False, **writing})
    return "\n".join(convert(str(source), str(out), reading or Reading(), made, Silent())["notes"])


def config_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def args_in(folder: Path) -> dict[str, Any]:
    file = next(folder.rglob("common.pt"), None) or next(folder.rglob("model_optim_rng.pt"))
    return vars(torch.load(file, weights_only=False)["args"])


@pytest.mark.parametrize("to", FORMATS)
def test_side_files_travel_through_every_format(to: str, tmp_path: Path) -> None:
    arrays = model(tmp_path / "hub")
    notes = run(tmp_path / "hub", tmp_path / "there", to=to)
    assert "modeling_own.py" in notes
    run(tmp_path / "there", tmp_path / "back")
    for folder in ("there", "back"):
        for name, data in BESIDE.items():
            assert (tmp_path / folder / name).read_bytes() == data, (folder, name)
        assert not [name for name in STALE if (tmp_path / folder / name).exists()]
    assert {name: value.tolist() for name, value in load_file(tmp_path / "back" / "model.safetensors").items()} == {
        name: value.tolist() for name, value in arrays.items()
    }
    if not to.startswith("paddle"):
        assert (tmp_path / "there" / "config.json").read_bytes() == (tmp_path / "hub" / "config.json").read_bytes()
        assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "hub" / "config.json").read_bytes()
    else:
        back = config_in(tmp_path / "back")
        assert {key: back.get(key) for key in CONFIG} | {"rope_parameters": 0, "dtype": 0} == CONFIG | {
            "rope_parameters": 0,
            "dtype": 0,
        }
        assert back["rope_theta"] == 1e6 and back["torch_dtype"] == "float32" and not back["rope_scaling"]


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_arguments_of_megatron_and_the_way_back_from_them_alone(to: str, tmp_path: Path) -> None:
    model(tmp_path / "hub")
    notes = run(tmp_path / "hub", tmp_path / "there", to=to, degrees={"tp": 2, "pp": 2}, dtypes={"": "BF16"})
    assert "--norm-epsilon 1e-06 --qk-layernorm --make-vocab-size-divisible-by 1" in notes
    args = args_in(tmp_path / "there")
    want = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_query_groups": 2,
        "kv_channels": 4,
        "qk_layernorm": True,
        "rotary_base": 1000000,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "vocab_size": 10,
        "padded_vocab_size": 10,
        "layernorm_epsilon": 1e-6,
        "untie_embeddings_and_output_weights": True,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "hidden_dropout": 0.0,
        "max_position_embeddings": 64,
        "seq_length": 64,
    }
    assert args.items() >= want.items()
    (tmp_path / "there" / "config.json").unlink()
    notes = run(tmp_path / "there", tmp_path / "back")
    assert "derived from Megatron's arguments" in notes
    back = config_in(tmp_path / "back")
    plain = {key: value for key, value in CONFIG.items() if key not in ("rope_parameters", "dtype", "bos_token_id")}
    assert back.items() >= {**plain, "rope_theta": 1e6, "torch_dtype": "bfloat16"}.items()


def test_newer_arguments_win_over_a_copied_config(tmp_path: Path) -> None:
    model(tmp_path / "hub")
    run(tmp_path / "hub", tmp_path / "there", to="megatron-dist")
    old = {**CONFIG, "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}, "num_key_value_heads": 4}
    (tmp_path / "there" / "config.json").write_text(json.dumps(old))
    notes = run(tmp_path / "there", tmp_path / "back")
    assert "older than Megatron's arguments" in notes and "rotary_base 1000000, not 5" in notes
    back = config_in(tmp_path / "back")
    assert (back["rope_theta"], back["num_key_value_heads"], back["bos_token_id"]) == (1e6, 2, 3)
    assert "rope_parameters" not in back


def test_config_follows_what_is_written(tmp_path: Path) -> None:
    model(tmp_path / "hub")
    notes = run(tmp_path / "hub", tmp_path / "out", dtypes={"": "BF16"}, vocab_size=7)
    assert config_in(tmp_path / "out") == {**CONFIG, "dtype": "bfloat16", "vocab_size": 7}
    assert "vocab_size becomes 7" in notes and "dtype becomes bfloat16" in notes
    run(tmp_path / "hub", tmp_path / "keep")
    assert (tmp_path / "keep" / "config.json").read_bytes() == (tmp_path / "hub" / "config.json").read_bytes()


SEES = {
    "model_type": "qwen3_vl",
    "dtype": "float32",
    "text_config": {
        **{key: value for key, value in CONFIG.items() if key != "architectures"},
        "model_type": "qwen3_vl_text",
    },
    "vision_config": {"depth": 0},
}


def seeing(folder: Path) -> None:
    """The same model inside one that sees, whose tower is one tensor."""
    arrays = model(folder, SEES)
    at = {name: name.replace("model.", "model.language_model.") for name in arrays}
    more = {"model.visual.pos_embed.weight": np.ones((3, 4), np.float32)}
    save_file({at[name]: array for name, array in arrays.items()} | more, folder / "model.safetensors")


def test_the_config_of_a_language_model_inside_follows_too(tmp_path: Path) -> None:
    seeing(tmp_path / "hub")
    notes = run(tmp_path / "hub", tmp_path / "out", dtypes={"": "BF16"}, vocab_size=7)
    want = {**SEES, "dtype": "bfloat16", "text_config": {**SEES["text_config"], "dtype": "bfloat16", "vocab_size": 7}}
    assert config_in(tmp_path / "out") == want and "vocab_size becomes 7" in notes
    run(tmp_path / "hub", tmp_path / "there", to="megatron-dist")
    older = {**SEES, "text_config": {**SEES["text_config"], "num_key_value_heads": 4}}
    (tmp_path / "there" / "config.json").write_text(json.dumps(older))
    notes = run(tmp_path / "there", tmp_path / "back")
    assert "older than Megatron's arguments" in notes and "vocab_size" not in config_in(tmp_path / "back")
    assert config_in(tmp_path / "back")["text_config"]["num_key_value_heads"] == 2


@pytest.mark.parametrize("passed", [True, False])
def test_a_config_that_contradicts_itself_is_refused_whole(passed: bool, tmp_path: Path) -> None:
    wrong = {**CONFIG, "num_attention_heads": 5, "hidden_size": -8}
    model(tmp_path / "hub", None if passed else wrong)
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    reading = Reading(config=str(tmp_path / "wrong.json")) if passed else Reading()
    with pytest.raises(UsageError if passed else InputError) as caught:
        run(tmp_path / "hub", tmp_path / "out", reading, to="megatron-dist")
    assert caught.value.code == ("E1240" if passed else "E1378")
    assert len(caught.value.faults) == 1 and not (tmp_path / "out").exists()


def test_a_paddle_config_spells_out_what_paddle_takes_otherwise(tmp_path: Path) -> None:
    short = {key: value for key, value in CONFIG.items() if key not in ("tie_word_embeddings", "rms_norm_eps")}
    model(tmp_path / "hub", short)
    run(tmp_path / "hub", tmp_path / "there", to="paddle-unified")
    config = config_in(tmp_path / "there")
    assert config["tie_word_embeddings"] is False  # Paddle's default is True
    assert config["rope_theta"] == 1e6 and "rope_parameters" not in config  # Paddle does not look into it
    assert config["rms_norm_eps"] == 1e-6 and config["torch_dtype"] == "float32" and "dtype" not in config


def test_what_lies_one_folder_down_comes_to_the_top_of_a_model(tmp_path: Path) -> None:
    """verl keeps the model's config and tokenizer in `huggingface/`, beside the files of its ranks."""
    ranks = tmp_path / "ranks"
    (ranks / "huggingface").mkdir(parents=True)
    state = {"model.embed_tokens.weight": torch.arange(80.0).reshape(10, 8), "model.norm.weight": torch.ones(8)}
    torch.save(state, ranks / "model_world_size_1_rank_0.pt")
    (ranks / "huggingface" / "config.json").write_text(json.dumps(CONFIG))
    (ranks / "huggingface" / "tokenizer.json").write_text("{}")
    run(ranks, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


TOKENIZER = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"a": 1}',
    "tokenizer.model": "x",
    "special_tokens_map.json": "{}",
}


@pytest.mark.parametrize("place", ["step", "run"])
def test_a_job_s_tokenizer_folder_goes_along(place: str, tmp_path: Path) -> None:
    """Megatron-Bridge keeps the tokenizer in a folder of its own: a hub has it at the top, others as it was."""
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "megatron-dist/llama_tp2", run)
    folder = run / "tokenizer" if place == "run" else run / "iter_0000001/tokenizer"
    folder.mkdir()
    for name, text in TOKENIZER.items():
        (folder / name).write_text(text)
    for to, front in (("safetensors", ""), ("megatron-dist", "tokenizer/"), ("dcp", "tokenizer/")):
        out = tmp_path / f"{to}-{place}"
        ckpt.convert(str(run), str(out), to=to)
        found = {name: next(out.rglob(name)) for name in TOKENIZER}
        assert {name: path.read_text() for name, path in found.items()} == TOKENIZER
        assert all(str(path).endswith(f"/{front}{name}") for name, path in found.items())
