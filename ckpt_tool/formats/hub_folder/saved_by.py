"""SavedBy: the library that wrote a safetensors file, if the file names it and its tensors have another layout.

    __metadata__: {"format": "mlx"}     mlx-lm, whose experts and convolutions are not laid out as on the hub
    __metadata__: {"format": "pt"}      torch: nothing is noted

Source: mlx-lm 0.32.2 `utils.py` (`save_model`), transformers 5.24 `modeling_utils.py` (which reads `mlx` too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ckpt_tool.core.hints import Hint

MLX = "mlx"  # what mlx-lm's files say of themselves, and the dialect of their names (`systems.hub.mlx_names`)


@dataclass(frozen=True, slots=True)
class SavedBy(Hint):
    """name: what the files' `format` says."""

    KEY: ClassVar[str] = "saved_by"
    name: str
