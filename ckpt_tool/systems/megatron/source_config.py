"""The model's config (in the hub's terms) that Megatron's arguments state.

    arguments only              translated to the hub's keys (`families.config.translation`)
    config.json next to them    config.json, changed where the arguments differ; a note lists the differences

The arguments take precedence, because a job may have continued the training with another context length or rope: then
the copied config.json is out of date.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.formats.adapters.run import LoraHints
from ckpt_tool.sources.config import NAME, ModelConfig, change_config
from ckpt_tool.sources.opening import Opened

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")  # arguments without these are not a model's


def read_arguments(opened: Opened, config: Mapping[str, Any] | None, family: str | None) -> ModelConfig | None:
    """Return the config in the hub's terms, None if the source has no arguments of a model.

    Args:
        opened: the source.
        config: its config.json, None if there is none.
        family: the model's family if it is known.
    """
    args = model_arguments(opened)
    if not args:
        return None
    if config is not None:
        return _merge(config, args)

    from ckpt_tool.families.config.translation import from_megatron

    stated = from_megatron(args, family)
    whole = {**stated.config, **_beside(args)}
    return ModelConfig(whole, stated.notes, origin="Megatron's arguments", derived=True)


def _beside(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's keys that describe stored tensors: their dtype and the rows of the vocabulary."""
    from ckpt_tool.systems.megatron.args import torch_dtype

    dtype = torch_dtype(args.get("params_dtype"))
    rows = args.get("vocab_size") or args.get("padded_vocab_size")
    return {key: value for key, value in (("torch_dtype", dtype), ("vocab_size", rows)) if value is not None}


def model_arguments(opened: Opened) -> dict[str, Any]:
    """Return the source's arguments of Megatron, {} if it has none or too few to describe a model."""
    extras = opened.catalog.extras
    args: Mapping[str, Any]
    if "args" in extras:
        from ckpt_tool.systems.megatron.args import arguments

        args = arguments(extras)
    elif opened.catalog.format.startswith("megatron"):
        run = opened.catalog.hints.get(LoraHints)
        args = run.arguments if run is not None else {}
    else:
        return {}
    return dict(args) if all(type(args.get(name)) is int for name in _NEEDED) else {}


def centred_norms(opened: Opened) -> bool | None:
    """Return whether Megatron's norms multiply by 1 + weight (`--apply-layernorm-1p`), None if nothing states it."""
    if "args" not in opened.catalog.extras:
        return None
    from ckpt_tool.systems.megatron.args import arguments

    args = arguments(opened.catalog.extras)
    for name in ("layernorm_zero_centered_gamma", "apply_layernorm_1p"):
        if isinstance(args.get(name), bool):
            return bool(args[name])
    return None


def _merge(config: Mapping[str, Any], args: Mapping[str, Any]) -> ModelConfig:
    """Return config.json, changed where Megatron's arguments differ.

    In the config of a larger model only the part of the language model is compared and changed.
    """
    from ckpt_tool.families.config.translation import (
        differing,
        from_megatron,
        kind_of,
        language_model,
        megatron_args,
        set_mtp_layers,
    )
    from ckpt_tool.families.models import CLASSES, family_of, known_family

    kind = kind_of(config)
    facts = CLASSES[kind] if kind is not None else language_model(config)[0]
    if facts is None:
        return ModelConfig(config, file=True)
    mine = megatron_args(config).config
    if not args.get("mtp_num_layers"):  # transformers names MTP layers in the config, and leaves their tensors out
        mine = set_mtp_layers(mine, 0)
    # Both sides are compared as Megatron's arguments, the config translated to them.
    wrong = list(differing(args, mine))
    if not wrong:
        return ModelConfig(config, file=True)
    whole = known_family(config.get("model_type"))
    family = whole if whole is not None and facts.part else family_of(facts.model_type)
    here, there = (
        family.part(found) or found
        for found in (from_megatron(args, family.name).config, from_megatron(mine, family.name).config)
    )
    changed = {key: here.get(key) for key in dict.fromkeys((*here, *there)) if here.get(key) != there.get(key)}
    note = f"{NAME} is older than Megatron's arguments, which are taken: {'; '.join(wrong)}"
    path = whole.language.split(".") if whole is not None and whole.part(config) is not None else []
    return ModelConfig(change_config(config, path, changed), (note,), file=True)
