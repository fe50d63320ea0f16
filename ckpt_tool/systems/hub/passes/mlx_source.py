"""Models that MLX saved: whose rules name them, and an error where nobody's do.

mlx-lm brings a model into a layout of its own when it loads one, and saves it so: experts stacked, kernels of
convolutions turned, norms to which one is added, multipliers multiplied in. Names do not always show it. So a source
that says it is MLX's is read by rules of MLX (a dialect `mlx`), or as the hub's where mlx-lm is known to change
nothing, and is refused otherwise: taken for the hub's it would be another model, and no error would say so.

What says so: `format: mlx` in the files' metadata, `quantization` in config.json (MLX's word), names that only MLX has,
kernels of convolutions of a shape that only MLX gives them. The last two are left where a model came through a format
that has no place for the first.
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
    """MLX's names, where MLX saved the first source."""
    if not is_from_mlx(chosen):
        return None
    kept = "codes of MLX stay in MLX's names and layout: --dequantize converts them to the hub's"
    return SourceNames(MLX, kept if holds_codes(chosen) else "", partial(_find_family, chosen.sources[0].path))


def _find_family(path: str, shapes: Mapping[str, Shape], config: Config | None, family: str | None) -> FamilyMatch:
    """The family and the dialect of what MLX saved. path: of the source. Raises InputError E2911 where no rules
    describe it."""
    try:
        found = find(config, shapes, family=family)
    except InputError as e:
        raise refuse_layout(str((config or {}).get("model_type") or "its names"), path) from e
    if family is not None and ":" in family:
        return found
    if MLX in found.family.dialects:
        return find(config, shapes, stated=MLX, family=found.family.name)
    if is_named_by(found, config):
        return found
    raise refuse_layout(found.family.name, path)


def is_from_mlx(chosen: Chosen) -> bool:
    """Did MLX save the first source?"""
    saved = chosen.all_hints.get(SavedBy)
    if saved is not None and saved.name == MLX:
        return True
    if any(word in name for name in chosen.model for word in mlx.WORDS):
        return True
    if any(_is_turned_kernel(name, row.tensor.shape) for name, row in chosen.model.items()):
        return True
    stated: Any = _config_beside(chosen).get(_SECTION)
    return isinstance(stated, Mapping) and {"group_size", "bits"} <= stated.keys()


def _is_turned_kernel(name: str, shape: Shape) -> bool:
    """Is it the kernel of a convolution over one channel each, with its last two dims as MLX has them?"""
    return name.endswith(mlx.KERNELS) and len(shape) == 3 and shape[1] > 1 == shape[2]


def _config_beside(chosen: Chosen) -> Config:
    """What `--config` or config.json says, {} where neither is there or can be read: whoever needs it says why."""
    if chosen.config is not None:
        return chosen.config
    try:
        return file_config(chosen.sources[0]) or {}
    except UsageError:
        return {}


def holds_codes(chosen: Chosen) -> bool:
    """Are some of its weights MLX's codes, which only MLX's own layout can hold?"""
    return any(row.tensor.dtype.name == "U32" for row in chosen.model.values())


def is_named_by(found: FamilyMatch, config: Config | None) -> bool:
    """Are the hub's rules of this family true of what MLX saves of this model?"""
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
