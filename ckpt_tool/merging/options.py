"""The options of `ckpt merge`."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.merging.methods import METHODS
from ckpt_tool.merging.schedules import SCHEDULES
from ckpt_tool.option_kinds.statement import OPTIONS, options_of
from ckpt_tool.option_kinds.values import count, integer, number, numbers, text, words

# next to the methods of arithmetic: tensors as they are, adapters folded, averages of the steps of a run
UNION = "union"
LORA = "lora"
AVERAGE = "average"
EMA = "ema"
NAMES = (UNION, LORA, *METHODS, AVERAGE, EMA)


@dataclass(frozen=True)
class MergeOptions:
    """The options of `merge`, as given."""

    method: str | None = OPTIONS.choice(f"Merge by this method: {', '.join(NAMES)}. Default union.", NAMES, "NAME")
    # weights, density: one for each source but the base, or one for all
    weights: tuple[float, ...] = OPTIONS.option(
        "Weight a source, in their order: --weight 0.7 --weight 0.3. Repeatable.",
        numbers,
        "W",
        kind="values",
        keyword="weight",
        default=(),
    )
    base: str | None = OPTIONS.option("Name the model that the sources were trained from: --base llama.", text, "SRC")
    density: tuple[float, ...] = OPTIONS.option(
        "Keep this share of a task vector (ties, dare, della, breadcrumbs): --density 0.5. Repeatable.",
        numbers,
        "D",
        kind="values",
        default=(),
    )
    t: float | None = OPTIONS.option("Interpolate to this point with slerp, 0 to 1: --t 0.3.", number, "T")
    epsilon: float | None = OPTIONS.option(
        "Vary della's share by rank by this much: --epsilon 0.1. Default 0.15.", number, "E"
    )
    gamma: float | None = OPTIONS.option(
        "Leave out this share of the largest values with breadcrumbs: --gamma 0.02. Default 0.01.", number, "G"
    )
    # `--lambda`
    factor: float | None = OPTIONS.option(
        "Multiply the merged task vector: --lambda 0.8. Default 1.", number, "L", keyword="lambda_"
    )
    normalize: bool | None = OPTIONS.switch(
        "Divide by the sum of the weights, or don't. Default: as the method does.", default=None
    )
    schedule: str | None = OPTIONS.choice(
        f"Weight steps by age with --method average: {', '.join(SCHEDULES)}. Default uniform.", SCHEDULES, "NAME"
    )
    decay: float | None = OPTIONS.option("Keep this share of the average at each step (ema): --decay 0.9.", number, "D")
    last: int | None = OPTIONS.option("Merge the last N checkpoints of the folder SRC: --last 4.", count, "N")
    steps: tuple[str, ...] = OPTIONS.option(
        "Merge these steps of the folder SRC: --steps 100,200,300.", words, "A,B,C", default=()
    )
    seed: int | None = OPTIONS.option("Seed the random choices of dare and della: --seed 7. Default 0.", integer, "N")
    tokenizer: str | None = OPTIONS.choice("Merge though tokenizers differ, and keep the base's.", ("base",))
    # a mergekit config, which says all but the seed and the tokenizer
    config: str | None = OPTIONS.option(
        "Read a mergekit config, which names the sources; only OUT is given then: --config merge.yaml.", text, "FILE"
    )
    on_conflict: str = OPTIONS.choice(
        "Choose what happens where sources have one tensor with different values. Default error.",
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
