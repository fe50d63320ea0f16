"""Finds the layers of a Gemma 4 that have sliding-window attention.

Its two kinds of attention are stored under separate keys, and the keys don't show the kind of each layer:

    decoder.layers.self_attention_sliding.linear_qkv.weight (2, 72, 12)      layers 0 and 2, if the model has it there

These sources state it, the nearest to the job first: the arguments in the checkpoint, Megatron-Bridge's
`run_config.yaml` next to the items (its `model` is the provider's fields), the config that the user names, the
config.json in the folder. Words and their meanings: `core.attention_window`. Cost: a file of 20 KB if there is one.
What it does not do: guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.attention_window import hub_windows, stated_windows
from ckpt_tool.errors import CorruptFile, InputError
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts import strict_json
from ckpt_tool.systems.megatron.adapter import RUN_CONFIG, run_config
from ckpt_tool.systems.megatron.args import arguments

KINDS_UNKNOWN = "E2006"
_CONFIG = "config.json"
_LIMIT = 1 << 20  # bytes


def windows_of(tree: Tree, folder: str, extras: Mapping[str, Any], config: Mapping[str, Any] | None) -> list[bool]:
    """Return for each layer whether it has sliding-window attention.

    Raises InputError E2006 if nothing states it, or if `run_config.yaml` is not plain YAML.
    """
    found = (
        stated_windows(arguments(extras))
        or stated_windows(_provider(tree, folder))
        or hub_windows(config or {})
        or hub_windows(_read_near_config(tree, folder))
    )
    if not found:
        raise InputError(
            "attentions of windowed and of whole layers are stored apart, and nothing states which layers are which",
            code=KINDS_UNKNOWN,
            path=tree.display(folder),
            hint=f"pass the model's config with --config FILE, or put {RUN_CONFIG} back next to the items",
        )
    return found


def _provider(tree: Tree, folder: str) -> Mapping[str, Any]:
    """Return the model's fields in `run_config.yaml`, {} if there is no such file."""
    hint = "get the file again; without it --config FILE says which layers are windowed"
    model = run_config(tree, folder, code=KINDS_UNKNOWN, fault="is {}", hint=hint).get("model")
    return model if isinstance(model, dict) else {}


def _read_near_config(tree: Tree, folder: str) -> Mapping[str, Any]:
    """Return the config.json in the folder or at the root, {} if there is none or it is damaged.

    A damaged one is no error here: the code that reads the model's config reports it.
    """
    for path in dict.fromkeys((folder + _CONFIG, _CONFIG)):
        if tree.exists(path):
            try:
                value = strict_json.parse(tree.read_whole(path, limit=_LIMIT), path=tree.display(path))
            except CorruptFile:
                return {}
            return value if isinstance(value, dict) else {}
    return {}
