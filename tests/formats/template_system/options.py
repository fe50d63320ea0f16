"""The option that the made-up system alone has."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.option_kinds.statement import TRAVEL
from ckpt_tool.option_kinds.values import text


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """What is stated among the extras. None: not given."""

    toy_comment: str | None = TRAVEL.option(
        "State this line among the extras: --toy-comment 'a run of May'.",
        text,
        "TEXT",
        system="Toy",
        by_format=True,
    )
