"""What says the scaling of an adapter inside a whole model: PEFT's config near it, what verl notes, or the user.

    checkpoint-500/adapter_config.json                       next to the weights, or a folder above them (accelerate's
                                                             `pytorch_model_fsdp_0/`, DeepSpeed's `global_step500/`)
    actor/lora_adapter/adapter_config.json                   verl's, which is complete
    actor/lora_train_meta.json {"r": 8, "lora_alpha": 16}    verl's, of its FSDP rank files
    --lora-alpha 16                                          nothing there

Source: verl `utils/checkpoint/fsdp_checkpoint_manager.py`, `model_merger/base_model_merger.py` (which writes an alpha
of 0 into adapter_config.json where it knows none). Cost: one small file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_tool.errors import CorruptFile, Incomplete, UsageError
from ckpt_tool.formats.adapters.inside import AdapterInside
from ckpt_tool.formats.adapters.lone import CONFIG
from ckpt_tool.sources.opening import Opened
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts.strict_json import parse

UNSTATED = "E2932"
CONTRADICTED = "E2791"
LIMIT = 16 << 20  # bytes
_OF_VERL = "lora_train_meta.json"
_FOLDERS = ("", "lora_adapter/", "huggingface/")


class FoundConfig(NamedTuple):
    """config: as adapter_config.json has it. path: where it is from, for messages."""

    config: Mapping[str, Any]
    path: str


def config_of_inside(
    opened: Opened, inside: AdapterInside, shapes: Mapping[str, tuple[int, ...]], alpha: float | None
) -> FoundConfig:
    """The config of the adapter inside a model. shapes: of the stored tensors. alpha: what the user states.

    Raises Incomplete E2932 where nothing states the scaling, UsageError E2791 where two things state it otherwise."""
    found = find_near(opened)
    if found is None and alpha is None:
        raise Incomplete(
            f"a LoRA is inside this model, and nothing near it states its scaling: there is no {CONFIG}",
            code=UNSTATED,
            path=opened.path,
            hint=f"put the {CONFIG} of the training next to the checkpoint, or state its alpha with --lora-alpha N",
        )
    ranks = _ranks_of(inside, shapes)
    if found is None:
        return FoundConfig(_made_config(inside, ranks, {}, alpha), opened.path)
    config = with_stated_alpha(found.config, alpha, found.path)
    if "peft_type" not in config:  # verl's note
        config = _made_config(inside, ranks, config, None)
    return FoundConfig(config, found.path)


def with_stated_alpha(config: Mapping[str, Any], alpha: float | None, path: str) -> Mapping[str, Any]:
    """The config with the alpha that the user states where it states none, or 0. path: of the config.

    Raises UsageError E2791 where it states another."""
    if alpha is None:
        return config
    stated = config.get("lora_alpha")
    if stated not in (alpha, 0, None):
        raise UsageError(
            f"--lora-alpha {alpha:g}, but the config says {str(stated)[:40]}",
            code=CONTRADICTED,
            path=path,
            hint="leave --lora-alpha off: what the run says counts",
        )
    return {**config, "lora_alpha": alpha}


def find_near(opened: Opened) -> FoundConfig | None:
    """The config near a checkpoint, None where there is none."""
    for tree in _trees(opened):
        for name in (f"{folder}{CONFIG}" for folder in _FOLDERS):
            if tree.exists(name):
                return _read(tree, name)
        if tree.exists(_OF_VERL):
            return _read(tree, _OF_VERL)
    return None


def _trees(opened: Opened) -> Iterator[Tree]:
    """The folders in which a config of this checkpoint may be stored, nearest first."""
    tree = opened.tree
    if tree.single is None:
        yield tree
    if opened.outer is not None and opened.outer.single is None:
        yield opened.outer
    if not tree.local:
        return
    if tree.single is not None:
        yield open_tree(tree.root)
        return
    yield open_tree(tree.root.resolve().parent)


def _read(tree: Tree, name: str) -> FoundConfig:
    shown = tree.display(name)
    value = parse(tree.read_whole(name, limit=LIMIT), path=shown)
    if not isinstance(value, dict):
        raise CorruptFile(
            "the adapter's config is no JSON object", code="E1423", path=shown, hint="fetch the adapter's config again"
        )
    return FoundConfig(value, shown)


def _ranks_of(inside: AdapterInside, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Module, as PEFT's config calls it -> its rank, by its A."""
    ranks = {}
    for stored, name in inside.adapter.items():
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in ("lora_A", "lora_embedding_A") and shapes[stored]:
            ranks[module.removeprefix("base_model.model.")] = shapes[stored][0]
    return ranks


def _made_config(
    inside: AdapterInside, ranks: Mapping[str, int], noted: Mapping[str, Any], alpha: float | None
) -> dict[str, Any]:
    """An adapter_config.json of what the tensors show, what the trainer noted and what the user states."""
    common = Counter(ranks.values()).most_common(1)[0][0] if ranks else 8
    scaling = noted.get("lora_alpha") if alpha is None else alpha
    if isinstance(scaling, float) and scaling.is_integer():
        scaling = int(scaling)
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": scaling,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": common,
        "rank_pattern": {module: rank for module, rank in ranks.items() if rank != common},
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
        "task_type": noted.get("task_type") or "CAUSAL_LM",
        "use_dora": any(name.endswith("lora_magnitude_vector") for name in inside.adapter.values()),
        "use_rslora": False,
    }
