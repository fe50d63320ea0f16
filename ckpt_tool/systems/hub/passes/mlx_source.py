"""Models that MLX saved: which rules describe their tensors, and an error if none do.

mlx-lm converts a model to a layout of its own when it loads one, and saves it that way: experts stacked, kernels of
convolutions transposed, 1 added to norms, multipliers multiplied into weights. Names do not always show it. So a model
that MLX saved is read by rules for MLX (a dialect `mlx`), or as the hub's model if mlx-lm is known to change nothing.
Any other is refused: read as the hub's it would be a wrong model without any error.

Signs of MLX: `format: mlx` in the files' metadata, `quantization` in config.json (MLX's key), names that only MLX has,
kernels of convolutions of a shape that only MLX gives them. The last two remain if a model was converted through a
format that can't store the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpt_tool.errors import InputError, UsageError
from ckpt_tool.families.base import Config, Shape
from ckpt_tool.families.registry import FamilyMatch, find
from ckpt_tool.formats.hub_folder.saved_by import MLX, SavedBy
from ckpt_tool.sources.chosen import Chosen
from ckpt_tool.sources.config import file_config
from ckpt_tool.sources.source_names import SourceNames
from ckpt_tool.systems.hub import mlx_names as mlx

_NO_RULES = "E2911"
_SECTION = "quantization"


def names_of_mlx(chosen: Chosen) -> SourceNames | None:
    """The rules for names of MLX, None unless MLX saved the first source."""
    if not is_from_mlx(chosen):
        return None
    kept = "codes of MLX stay in MLX's names and layout: --dequantize converts them to the hub's"
    return SourceNames(MLX, kept if holds_codes(chosen) else "", partial(_find_family, chosen.sources[0].path))


def _find_family(path: str, shapes: Mapping[str, Shape], config: Config | None, family: str | None) -> FamilyMatch:
    """The family and dialect of a model that MLX saved.

    path: of the source, for messages. Raises InputError E2911 if no rules describe the model.
    """
    try:
        found = find(config, shapes, family=family)
    except InputError as e:
        raise refuse_layout(str((config or {}).get("model_type") or "its names"), path) from e
    if family is not None and ":" in family:  # the user named the dialect (`--family NAME:DIALECT`)
        return found
    if MLX in found.family.dialects:
        return find(config, shapes, stated=MLX, family=found.family.name)
    if is_named_by(found, config):
        return found
    raise refuse_layout(found.family.name, path)


def is_from_mlx(chosen: Chosen) -> bool:
    """Whether MLX saved the first source, by any of the signs that the module lists."""
    saved = chosen.all_hints.get(SavedBy)
    if saved is not None and saved.name == MLX:
        return True
    if any(word in name for name in chosen.model for word in mlx.WORDS):
        return True
    if any(_is_turned_kernel(name, row.tensor.shape) for name, row in chosen.model.items()):
        return True
    # `quantization` with these two keys is MLX's form; the hub has `quantization_config`.
    stated: Any = _config_beside(chosen).get(_SECTION)
    return isinstance(stated, Mapping) and {"group_size", "bits"} <= stated.keys()


def _is_turned_kernel(name: str, shape: Shape) -> bool:
    """Whether this is a depthwise convolution's kernel in MLX's order (channels, width, 1)."""
    return name.endswith(mlx.KERNELS) and len(shape) == 3 and shape[1] > 1 == shape[2]


def _config_beside(chosen: Chosen) -> Config:
    """The config of `--config` or of config.json; {} if there is none, or if it can't be read.

    An unreadable config is reported by the code that needs one.
    """
    if chosen.config is not None:
        return chosen.config
    try:
        return file_config(chosen.sources[0]) or {}
    except UsageError:
        return {}


def holds_codes(chosen: Chosen) -> bool:
    """Whether some weights are quantised by MLX: integer codes, which only MLX's own layout can hold."""
    return any(row.tensor.dtype.name == "U32" for row in chosen.model.values())


def is_named_by(found: FamilyMatch, config: Config | None) -> bool:
    """Whether MLX saves models of this type under the hub's names and with the hub's values."""
    kind = (config or {}).get("model_type")
    return kind in mlx.AS_ON_THE_HUB or (kind is None and set(found.family.model_types) <= mlx.AS_ON_THE_HUB)


def refuse_layout(what: str, path: str) -> InputError:
    """The error for a model whose layout in MLX no rules describe."""
    reason = mlx.NOT_UNDONE.get(what)
    because = f": {reason}" if reason is not None else ""
    return InputError(
        f"MLX saved this model, and no rules say how its layout of {what} differs from the hub's{because}",
        code=_NO_RULES,
        path=path,
        hint="take the model's files of the hub; --dialect keep writes names and values as MLX has them, for MLX alone",
    )
