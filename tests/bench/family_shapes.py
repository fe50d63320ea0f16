"""What it costs to plan models of 30 to 80 billion parameters of the newer families, on sparse files.

    python tests/bench/family_shapes.py [NAME ...] [--rounds 3] [--work DIR]

Each is the real class of transformers on the meta device, with the sizes of a published model: names and shapes are as
`save_pretrained` writes them, tensor bytes are holes. Measured are whole processes of `ckpt convert --to megatron-dist
--tp 4 --pp 4 --ep 8 --dry-run`, less the bare start of `ckpt`; the goal is a second. No tensor byte is read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
from measure import median, say

ROOT = Path(__file__).resolve().parents[2]
CKPT = [sys.executable, "-m", "ckpt_tool"]
DEGREES = ("--tp", "4", "--pp", "4")
SPLITS = {"glm4_moe_lite": "12,12,12,11"}  # layers that four stages do not share evenly
SHARD = 5_000_000_000  # bytes
# Sizes of config.json: Qwen3-Next-80B-A3B, Qwen3-VL-30B-A3B, Qwen3.5-27B, Nemotron-3-Nano-30B-A3B, GLM-4.7-Flash (the
# class's own), Qwen3-30B-A3B
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 5120,
    },
    "qwen3_vl_moe": {
        "text_config": {
            "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "intermediate_size": 6144, "mlp_only_layers": [],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20]},
        },
        "vision_config": {"depth": 27, "hidden_size": 1152, "out_hidden_size": 2048, "num_heads": 16,
                          "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
    },
    "qwen3_5": {
        "text_config": {
            "vocab_size": 248320, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408,
            "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        },
        "vision_config": {"depth": 27, "hidden_size": 1152, "out_hidden_size": 5120, "num_heads": 16,
                          "intermediate_size": 4304},
    },
    "nemotron_h": {
        "vocab_size": 131072, "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    },
    "glm4_moe_lite": {"num_hidden_layers": 47},
    "qwen3_moe": {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144,
    },
}  # fmt: skip

BUILD = """
import json, sys
import torch, transformers
from transformers.core_model_loading import revert_weight_conversion
kind, given = sys.argv[1], json.loads(sys.argv[2])
config = transformers.AutoConfig.for_model(kind, **given)
kinds = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
auto = kinds[0] if "vision_config" in given else kinds[1]
with torch.device("meta"):
    model = auto.from_config(config, dtype=torch.bfloat16)
config.architectures = [type(model).__name__]
saved = revert_weight_conversion(model, model.state_dict())
print(json.dumps([config.to_json_string(use_diff=False), {name: list(each.shape) for name, each in saved.items()}]))
"""


def build(kind: str, folder: Path) -> None:
    """The checkpoint of sparse files; the class is built in a process of its own, for it imports torch."""
    from deepseek_shape import write_sparse

    line = [sys.executable, "-c", BUILD, kind, json.dumps(MODELS[kind])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    made = subprocess.run(line, check=True, capture_output=True, text=True, env=environment).stdout
    config, shapes = json.loads(made.splitlines()[-1])
    folder.mkdir(parents=True)
    files: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = total = 0
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        if filled + size > SHARD:
            files.append([])
            filled = 0
        files[-1].append((name, "BF16", tuple(shape)))
        filled = filled + size
        total = total + size
    weight_map = {}
    for number, entries in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_sparse(folder / name, entries)
        weight_map.update({entry[0]: name for entry in entries})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(config)
    say(f"{kind}: {len(shapes):,} tensors, {total / 2e9:.1f} billion parameters")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = [name for name in MODELS if (ROOT / "ckpt_tool" / "families" / "models" / f"{name}.py").exists()]
    parser.add_argument("names", nargs="*", default=known)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ckpt-bench")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        if not (given.work / name).exists():
            partial = given.work / "partial"
            measure.remove(partial)
            build(name, partial)
            partial.rename(given.work / name)
    measure.as_installed(ROOT, given.work)
    start = median([measure.run([*CKPT, "--version"]) for _ in range(given.rounds)], "cpu")
    rows: list[list[str]] = []
    for name in given.names:
        experts = ("--ep", "8") if "expert" in (given.work / name / "config.json").read_text() else ()
        if name in SPLITS:
            experts = (*experts, "--pp-split", SPLITS[name])
        out = ["--to", "megatron-dist", *DEGREES, *experts, "--dry-run", "-q"]
        line = [*CKPT, "convert", str(given.work / name), str(given.work / "out"), *out]
        samples = [measure.run(line) for _ in range(given.rounds + 1)][1:]  # the first warms the caches
        least = min(sample.cpu for sample in samples)
        wall = median(samples, "wall")
        rows.append([name, f"{least - start:.2f}", f"{wall:.2f}", f"{median(samples, 'peak') / 2**20:.0f}", "1 s CPU"])
    print(f"{given.rounds} rounds, warm cache; {measure.machine(given.work)}\n")
    print(measure.table(("dry run to tp 4, pp 4, ep 8", "least CPU s", "wall s", "peak MiB", "goal"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
