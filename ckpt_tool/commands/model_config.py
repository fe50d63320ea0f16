"""The config of the model that a source holds, in the hub's words: from `--config`, config.json, or Megatron's arguments.

    config.json beside the weights                 as it is
    Meta's params.json, nothing beside             what it says (`families.config.meta`)
    Megatron's arguments, nothing beside           what they say (`families.config.translation`)
    both                                           config.json, with what the arguments say otherwise, each told in a note

A Megatron job may have trained on with another context or rope, and then its arguments are right and the file that was copied
beside is old. Side files of a Megatron folder lie at its top, beside the pointer file. Cost: one small file. What it does not
do: run anything, or write (`commands.side_files`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_tool.commands.config import LIMIT, NAME, parsed, read_config
from ckpt_tool.commands.reading import Reading
from ckpt_tool.commands.source import Opened
from ckpt_tool.errors import InputError, UsageError
from ckpt_tool.storage.source import Tree

NESTED = "huggingface/"  # where verl keeps what belongs to the model
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")  # arguments without these are not a model's


class ModelConfig(NamedTuple):
    """config: in the hub's words, None where nothing tells it. notes: for the report. file: does config.json lie there?
    asked: is it what --config says? origin: what told it, in words."""

    config: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()
    file: bool = False
    asked: bool = False
    origin: str = NAME


def config_of(opened: Opened, reading: Reading | None = None, family: str | None = None) -> ModelConfig:
    """What tells the model's config. family: whose arguments they are, where that is known.

    Raises UsageError E0239 for a config that can't be read, StorageError."""
    if reading is not None and reading.config:
        return ModelConfig(read_config(reading.config), asked=True, origin="--config")
    config = file_config(opened)
    args = model_arguments(opened)
    if not args:
        if config is None and (found := meta_config(opened)) is not None:
            return ModelConfig(found, origin="params.json")
        return ModelConfig(config, file=config is not None)
    if family is None and reading is not None and reading.family:
        family = reading.family.partition(":")[0]
    from ckpt_tool.families.config.translation import from_megatron

    if config is None:
        told = from_megatron(args, family)
        return ModelConfig({**told.config, **_beside(args)}, told.notes, origin="Megatron's arguments")
    return _merged(config, args)


def _beside(args: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments say of the tensors alone."""
    from ckpt_tool.formats.megatron.args import torch_dtype

    dtype = torch_dtype(args.get("params_dtype"))
    rows = args.get("vocab_size") or args.get("padded_vocab_size")
    return {key: value for key, value in (("torch_dtype", dtype), ("vocab_size", rows)) if value is not None}


def file_config(opened: Opened) -> Mapping[str, Any] | None:
    """The source's config.json, None where it has none. Raises UsageError E0239."""
    for tree in (opened.tree, opened.outer):
        for name in (NAME, NESTED + NAME) if tree is not None and tree.single is None else ():
            if tree is not None and tree.exists(name):
                return parsed(tree.read_whole(name, limit=LIMIT), tree.display(name))
    return None


def meta_config(opened: Opened) -> Mapping[str, Any] | None:
    """What Meta's params.json says, None where the source has none."""
    own = opened.catalog.hints.get("meta")
    params = own.get("params") if isinstance(own, Mapping) else None
    if not isinstance(params, Mapping):
        return None
    from ckpt_tool.families.config.meta import hub_config

    return hub_config(params, {row.name: row.shape for row in opened.catalog.rows()})


def model_arguments(opened: Opened) -> dict[str, Any]:
    """Megatron's arguments of the model, {} where the source has none or too few."""
    extras = opened.catalog.extras
    if "args" not in extras:
        return {}
    from ckpt_tool.formats.megatron.args import arguments

    args = arguments(extras)
    return args if all(type(args.get(name)) is int for name in _NEEDED) else {}


def centred_norms(opened: Opened) -> bool | None:
    """Do Megatron's norms multiply by 1 + weight (`--apply-layernorm-1p`)? None where nothing tells."""
    if "args" not in opened.catalog.extras:
        return None
    from ckpt_tool.formats.megatron.args import arguments

    args = arguments(opened.catalog.extras)
    for name in ("layernorm_zero_centered_gamma", "apply_layernorm_1p"):
        if isinstance(args.get(name), bool):
            return bool(args[name])
    return None


def _merged(config: Mapping[str, Any], args: Mapping[str, Any]) -> ModelConfig:
    """config.json with what Megatron's arguments say otherwise."""
    from ckpt_tool.families.config.translation import differing, from_megatron, kind_of, megatron_args
    from ckpt_tool.families.models import family_of

    kind = kind_of(config)
    if kind is None:
        return ModelConfig(config, file=True)
    mine = megatron_args(config, kind).config
    if not args.get("mtp_num_layers"):  # transformers names MTP layers in the config, and leaves their tensors out
        mine.pop("mtp_num_layers", None)
    wrong = list(differing(args, mine))
    if not wrong:
        return ModelConfig(config, file=True)
    family = family_of(kind).name
    here, there = from_megatron(args, family).config, from_megatron(mine, family).config
    changed = {key: here.get(key) for key in dict.fromkeys((*here, *there)) if here.get(key) != there.get(key)}
    note = f"{NAME} is older than Megatron's arguments, which are taken: {'; '.join(wrong)}"
    return ModelConfig(_with(config, changed), (note,), file=True)


def _with(config: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other values; rope in one spelling alone."""
    out = {**config, **changed}
    if changed.keys() & {"rope_theta", "rope_scaling", "partial_rotary_factor"}:
        out.pop("rope_parameters", None)
    return {key: value for key, value in out.items() if value is not None or key in config}


def check_config(model: ModelConfig, path: str) -> None:
    """Raise for a config that contradicts itself, all faults at once: UsageError E1240 where --config says it, else
    InputError E1378. path: of the checkpoint, or of what --config names."""
    faults = list(_faults(model.config or {}))
    if not faults:
        return
    message = f"the config contradicts itself: {faults[0]}"
    if model.asked:
        raise UsageError(
            message, code="E1240", path=path, faults=faults[1:],
            hint="pass the config of this very model with --config",
        )  # fmt: skip
    raise InputError(
        message, code="E1378", path=path, place=model.origin, faults=faults[1:],
        hint="pass a sound config with --config FILE",
    )  # fmt: skip


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    from ckpt_tool.families.config.translation import contradictions

    yield from contradictions(config)


def tree_of(opened: Opened, path: str) -> Tree | None:
    """The tree that holds a side file: the checkpoint's folder, or that whose pointer file named it."""
    return next((tree for tree in (opened.tree, opened.outer) if tree is not None and tree.exists(path)), None)
