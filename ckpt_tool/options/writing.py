"""How an output is laid out and written: the options of every verb that writes.

Checks that need the checkpoint (does this degree divide? does this pattern match?) are left to the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ckpt_tool.core.fallback import POLICIES
from ckpt_tool.formats.entry import dialects, option_groups
from ckpt_tool.option_kinds.statement import KEYS, LAYOUT, PLAN, RUN, TO, TRAVEL, Section, carried
from ckpt_tool.option_kinds.values import (
    between,
    count,
    dtypes,
    only_one_of,
    output,
    patterns,
    rename_rules,
    size,
    sizes,
    stages,
    text,
    with_file,
    words,
)
from ckpt_tool.options.reading import CALLED, FORMATS
from ckpt_tool.weight_schemes.written_schemes import SCHEMES

EMA_THEN_MODEL = "ema,model"  # of --as-model: where there is no average, the model's own
# of one system's names, by another tool for it or for another form of the model -> whose names they are
VARIANTS = {dialect.name: dialect.variant_of for dialect in dialects().values() if dialect.variant_of}
DIALECTS = (*dialects(), "keep")
EXPERTS = ("split", "fused")  # layouts of a layer's experts in the hub's files: one by one, stacked in one tensor
REPACKS = ("compressed-tensors",)
DEVICES = ("cpu", "cuda")
G = TypeVar("G")
ENGINES = ("slurm", "k8s", "ray")  # what job files are written for
DEFAULT_POLICY = "largest-dim"
MOST_ROWS = (1 << 31) - 1  # of --vocab-size: token ids are 32-bit numbers
DEFAULT_SHARD_SIZE = 5_000_000_000  # bytes; what `save_pretrained` of transformers calls "5GB"
DEFAULT_MEMORY = 1 << 30  # bytes


def device(section: Section) -> Any:
    """The option `--device` of a verb that moves or reads values."""
    return section.choice("Choose where bytes are ordered, cast and hashed. Default cpu.", DEVICES, default="cpu")


@dataclass(frozen=True, slots=True)
class Writing:
    """How an output is laid out and written. None and empty mean "not given": the command takes its default."""

    to: str | None = TO.choice(f"Write this format: {', '.join(FORMATS)}.", FORMATS, "FORMAT", meant=CALLED)

    # mesh dim -> size, only those that were given
    degrees: Mapping[str, int] = LAYOUT.each(
        {
            "tp": "Write for N tensor parallel ranks: --tp 8.",
            "pp": "Write for N pipeline stages: --pp 4.",
            "ep": "Write for N expert parallel ranks: --ep 8.",
            "etp": "Cut experts for N tensor parallel ranks: --etp 1.",
            "dp": "Write for N data parallel ranks: --dp 4.",
            "cp": "Write for N context parallel ranks: --cp 2.",
            "vpp": "Give each rank N virtual pipeline stages: --vpp 2.",
        },
        count,
        "N",
    )
    pp_split: tuple[int, ...] | Literal["auto"] = LAYOUT.option(
        "Set the layers of each pipeline stage: 8,9,9,6; auto makes stages of about equal bytes.",
        stages,
        "N,N,...|auto",
        default=(),
    )
    zero: int | None = LAYOUT.option(
        "Set the ZeRO stage, which says what data parallel ranks shard: --zero 1.", between(0, 3), "0|1|2|3"
    )
    layout: str | None = LAYOUT.option(
        "Read the mesh and placement rules from a TOML file: --layout mesh.toml.", text, "FILE"
    )
    on_indivisible: str | None = LAYOUT.choice(
        f"Choose what happens where a dim does not divide: {', '.join(POLICIES)}. Default "
        f"{DEFAULT_POLICY}; for data ranks dtensor.",
        POLICIES,
        "POLICY",
        also=(
            LAYOUT.means(
                "strict_shard", "error", "Refuse dims that do not divide: the same as --on-indivisible error."
            ),
        ),
    )

    dialect: str | None = TRAVEL.choice(
        f"Write the names and structure of this system: {', '.join(DIALECTS)}. Default: that of the format.",
        DIALECTS,
        "NAME",
    )
    experts: str | None = TRAVEL.choice(
        "Write experts one by one (split) or stacked in one tensor (fused), under Hugging Face's "
        "names. Default: as in the source, or as released.",
        EXPERTS,
    )
    aoa: str | None = TRAVEL.option(
        "Map names and structure by Paddle's any-to-any (AOA) statements: --aoa rules.txt.",
        text,
        "FILE",
        system="Paddle",
    )
    # states, drop: as given; "all" and "optimizer" are the command's to expand
    states: tuple[str, ...] = TRAVEL.option(
        "Take only these states: model, master, optimizer, ema, extras, or all.",
        words,
        "S,S,...",
        kind="values",
        keyword="state",
        default=(),
    )
    drop: tuple[str, ...] = TRAVEL.option(
        "Leave this state out: model, master, optimizer, ema or extras. --drop optimizer strips a "
        "training checkpoint. Repeatable.",
        words,
        "S,S,...",
        kind="values",
        default=(),
    )
    as_model: str | None = TRAVEL.choice(
        "Write this state as the model: --as-model ema. ema,model takes weights that have no average from the model.",
        ("ema", "master", EMA_THEN_MODEL),
    )
    # state ("" for all) -> ckpt's name of the dtype
    dtypes: Mapping[str, str] = TRAVEL.option(
        "Cast values: --dtype bf16, or one state: --dtype optimizer=bf16. Repeatable.",
        dtypes,
        "[STATE=]DTYPE",
        kind="values",
        keyword="dtype",
        default={},
    )
    dequantize: bool = TRAVEL.flag("Write quantised weights and states as floats.")
    quantize: str | None = TRAVEL.option(
        f"Quantise the weights of layers, rounding to nearest: {', '.join(SCHEMES)}.",
        only_one_of(SCHEMES, "--quantize-only and --quantize-skip PATTERN say which weights are quantised"),
        "SCHEME",
        kind="values",
        choices=tuple(SCHEMES),
    )
    quantize_skip: tuple[str, ...] = TRAVEL.option(
        "Leave these weights unquantised too: --quantize-skip '*.o_proj.*'. Repeatable.",
        patterns,
        "PATTERN",
        kind="values",
        default=(),
    )
    quantize_only: tuple[str, ...] = TRAVEL.option(
        "Quantise only these weights: --quantize-only '*.experts.*'. Repeatable.",
        patterns,
        "PATTERN",
        kind="values",
        default=(),
    )
    repack: str | None = TRAVEL.choice(
        "Store the same values of GPTQ or AWQ weights as another library does: compressed-tensors.", REPACKS
    )
    vocab_size: int | None = TRAVEL.option(
        "Set the rows of the vocabulary: further rows are cut off, missing ones are zeros. --vocab-size 32000.",
        between(1, MOST_ROWS),
        "N",
    )
    tied_head: str | None = TRAVEL.choice(
        "Write an output layer that equals the embedding once (tie) or twice (untie).", ("keep", "tie", "untie")
    )
    allow_lossy: bool = TRAVEL.flag("Allow casts that overflow or saturate, and count them.")

    # remove_keys, keep_keys: patterns (`@FILE` already read)
    remove_keys: tuple[str, ...] = KEYS.option(
        "Leave out tensors with all their states: 'lm_head.*', re:EXPRESSION or @FILE. Repeatable.",
        patterns,
        "PATTERN",
        kind="values",
        default=(),
    )
    keep_keys: tuple[str, ...] = KEYS.option(
        "Leave out all tensors but these: 'model.layers.*'. Repeatable.", patterns, "PATTERN", kind="values", default=()
    )
    # rules, as `core.renaming` reads them
    rename: tuple[str, ...] = KEYS.option(
        "Rename tensors with all their states: 'module.*=*', 're:^h\\.(\\d+)=layers.\\1', or @FILE. Repeatable.",
        rename_rules,
        "OLD=NEW",
        kind="values",
        default=(),
    )
    model_only: bool = KEYS.flag("Remove keys from the model alone, and keep their optimizer, master and EMA states.")

    force: bool = RUN.flag("Replace an existing checkpoint at OUT in one step, and nothing else that is stored there.")
    resume: bool = RUN.switch("Continue where an interrupted run stopped (the default).", default=True)
    fsync: bool = RUN.switch("Wait until the disk has all bytes before the output appears (the default).", default=True)
    dry_run: bool = RUN.flag("Show the plan and write nothing.")
    memory: int = RUN.option(
        "Bound working memory: --memory 256MiB. Default 1GiB.", size, "SIZE", default=DEFAULT_MEMORY
    )
    # None lets the executor choose
    threads: int | None = RUN.option("Use N threads to move bytes: --threads 8.", count, "N")
    verify: str = RUN.choice(
        "Check the output after writing. Default quick.", ("off", "quick", "full"), default="quick"
    )
    ray: str | None = RUN.option("Run the plan on a Ray cluster: --ray auto.", text, "ADDRESS|auto", system="Ray")
    emit: tuple[str, str] | None = RUN.option(
        "Write the job file that runs the plan on many nodes, and nothing else: --emit slurm job.sh.",
        with_file(ENGINES),
        f"{'|'.join(ENGINES)} FILE",
        kind="pair",
        choices=ENGINES,
    )
    sign: str | None = RUN.option(
        "Sign the output with this private key (PEM, ECDSA), as OpenSSF model signing does: --sign key.pem.",
        text,
        "KEY",
    )
    attest: str | None = RUN.option(
        "Write what was made from what, by which command (in-toto, SLSA provenance): --attest "
        "out.json. Signed too with --sign.",
        output,
        "FILE",
    )
    device: str = device(RUN)
    # bytes of large and of small blocks of pinned memory that `device` sets aside before it begins; (0, 0) for what the
    # run needs
    pinned: tuple[int, int] = RUN.option(
        "Set aside this much pinned memory for --device cuda: --pinned 1GiB. Default: what the run needs.",
        sizes,
        "LARGE[,SMALL]",
        default=(0, 0),
        system="GPU",
    )

    # max_shard_size, memory: bytes
    max_shard_size: int | None = PLAN.option(
        "Limit the size of each file: --max-shard-size 2GB. Default 5GB.", size, "SIZE"
    )
    plan_file: str | None = PLAN.option(
        "Save the plan for ckpt apply, and write nothing else: --plan plan.json.", output, "FILE", keyword="plan"
    )

    # the options that one system alone has, a value of each group (`formats.entry.option_groups`)
    of_systems: tuple[Any, ...] = carried(option_groups)

    # the words of the line, for --attest: they decide nothing
    command: tuple[str, ...] = field(default=(), compare=False, metadata={"options": ()})

    def of(self, group: type[G]) -> G:
        """The options of one system, by their group; defaults if none were given."""
        from ckpt_tool.core.target import pick_group  # help and completion need nothing of a target

        return pick_group(self.of_systems, group)

    @property
    def state_as_model(self) -> str | None:
        """The state that `--as-model` names, without what fills it up."""
        return self.as_model.partition(",")[0] if self.as_model else None
