"""The options of `ckpt merge`."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.merging.methods import METHODS
from ckpt_tool.merging.schedules import SCHEDULES
from ckpt_tool.options.statement import OPTIONS, options_of
from ckpt_tool.options.values import count, integer, number, numbers, text, words

# next to the methods of arithmetic: tensors as they are, adapters folded, averages of the steps of a run
UNION, LORA, AVERAGE, EMA = "union", "lora", "average", "ema"
NAMES = (UNION, LORA, *METHODS, AVERAGE, EMA)


@dataclass(frozen=True)
class MergeOptions:
    """The options of `merge`, as given. weights, density: one for each source but the base, or one for all. factor:
    `--lambda`. config: a mergekit config, which says all but the seed and the tokenizer."""

    method: str | None = OPTIONS.choice(f"{', '.join(NAMES)}. Default union.", NAMES, "NAME")
    weights: tuple[float, ...] = OPTIONS.option(
        "The weight of a source, in their order. Repeatable.",
        numbers,
        "W",
        kind="values",
        keyword="weight",
        default=(),
    )
    base: str | None = OPTIONS.option("The model that the sources grew from.", text, "SRC")
    density: tuple[float, ...] = OPTIONS.option(
        "Share of a task vector that is kept: ties, dare, della, breadcrumbs. Repeatable.",
        numbers,
        "D",
        kind="values",
        default=(),
    )
    t: float | None = OPTIONS.option("Where slerp stops, from 0 to 1.", number, "T")
    epsilon: float | None = OPTIONS.option(
        "della: how far the share goes up and down by rank. Default 0.15.", number, "E"
    )
    gamma: float | None = OPTIONS.option(
        "breadcrumbs: share of the largest that is left out. Default 0.01.", number, "G"
    )
    factor: float | None = OPTIONS.option(
        "Factor of the merged task vector. Default 1.", number, "L", keyword="lambda_"
    )
    normalize: bool | None = OPTIONS.switch(
        "Divide by the weights that count, or don't. Default the method's.", default=None
    )
    schedule: str | None = OPTIONS.choice(
        f"average: how weights fall with the age of a step: {', '.join(SCHEDULES)}. Default uniform.", SCHEDULES, "NAME"
    )
    decay: float | None = OPTIONS.option(
        "ema, average --schedule ema: the share that the average keeps at each step, such as 0.9.", number, "D"
    )
    last: int | None = OPTIONS.option("Merge the last N checkpoints of the folder SRC.", count, "N")
    steps: tuple[str, ...] = OPTIONS.option(
        "Merge these steps of the folder SRC, by number or name: 100,200,300.", words, "A,B,C", default=()
    )
    seed: int | None = OPTIONS.option("Seed of dare and della. Default 0.", integer, "N")
    tokenizer: str | None = OPTIONS.choice("Merge though tokenizers differ; the base's is kept.", ("base",))
    config: str | None = OPTIONS.option("A mergekit config; it names the sources, only DST is given.", text, "FILE")
    on_conflict: str = OPTIONS.choice(
        "When sources hold one tensor with different values. Default error.",
        ("error", "first", "last"),
        default="error",
    )

    @property
    def name(self) -> str:
        """The method, the default where none was named."""
        return self.method or UNION

    def given(self) -> list[str]:
        """The options of arithmetic that were given, but the seed."""
        others = ("method", "seed", "config", "on_conflict")
        return [
            option.names[0]
            for option in options_of(MergeOptions).values()
            if option.field not in others and getattr(self, option.field) not in (None, ())
        ]
