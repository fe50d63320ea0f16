"""The options of the command line that only GGUF has."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.option_kinds.statement import TRAVEL
from ckpt_tool.option_kinds.values import only_one_of, patterns

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0", "mxfp4")


@dataclass(frozen=True, slots=True)
class GgufOptions:
    """The ggml type to write, and the matrices that get it. None and () mean that the option is not given."""

    gguf_type: str | None = TRAVEL.option(
        f"Write matrices in this type: {', '.join(GGUF_TYPES)}. Default: as in the source.",
        only_one_of(GGUF_TYPES, "--gguf-only PATTERN says which matrices have it"),
        "TYPE",
        kind="values",
        choices=GGUF_TYPES,
        system="GGUF",
        by_format=True,
    )
    gguf_only: tuple[str, ...] = TRAVEL.option(
        "Apply --gguf-type to these matrices alone: '*ffn_down*'. Repeatable.",
        patterns,
        "PATTERN",
        kind="values",
        default=(),
        system="GGUF",
        by_format=True,
    )
