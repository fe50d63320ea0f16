"""How an output is laid out and written: the options of every verb that writes.

What only the checkpoint can tell (does this degree divide? does this pattern match?) is left to the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt_tool.core.fallback import POLICIES
from ckpt_tool.options.reading import CALLED, FORMATS
from ckpt_tool.options.statement import KEYS, LAYOUT, PLAN, RUN, TO, TRAVEL, Section
from ckpt_tool.options.values import (
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
from ckpt_tool.quantised.schemes import SCHEMES

SHARDINGS = ("v1", "v2")  # what Paddle calls its stages of sharding: whole tensors by owner, slices of fused buffers
SPECS = ("local", "te")  # Megatron's layers: of its own modules, of Transformer Engine's
# of one system's names, by another tool for it or for another form of the model -> whose names they are
VARIANTS = {"megatron-swift": "megatron", "maxtext-unscanned": "maxtext", "torchtune-0.6": "torchtune"}
DIALECTS = ("hf", "megatron", "paddle", "meta", "gguf", "torchtune", "olmo-core", "maxtext", "gemma", *VARIANTS, "keep")
EXPERTS = ("split", "fused")  # layouts of a layer's experts in the hub's files: one by one, stacked in one tensor
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0", "mxfp4")
REPACKS = ("compressed-tensors",)
DEVICES = ("cpu", "cuda")
ENGINES = ("slurm", "k8s", "ray")  # what job files are written for
DEFAULT_POLICY = "largest-dim"
MOST_ROWS = (1 << 31) - 1  # of --vocab-size: token ids are 32-bit numbers
DEFAULT_SHARD_SIZE = 5_000_000_000  # bytes; what `save_pretrained` of transformers calls "5GB"
DEFAULT_MEMORY = 1 << 30  # bytes


def device(section: Section) -> Any:
    """The option `--device` of a verb that moves or reads values."""
    return section.choice("Where bytes are put in order, cast and hashed. Default cpu.", DEVICES, default="cpu")


@dataclass(frozen=True, slots=True)
class Writing:
    """How an output is laid out and written. None and empty mean "not given": the command takes its default.

    degrees: mesh dim -> size, only those that were given. dtypes: state ("" for all) -> the house's dtype name.
    states, drop: as given; "all" and "optimizer" are the command's to expand. remove_keys, keep_keys: patterns
    (`@FILE` already read). rename: rules, as `core.renaming` reads them.
    max_shard_size, memory: bytes. threads: None lets the executor choose. pinned: bytes of
    large and of small blocks of pinned memory that `device` sets aside before it begins; (0, 0) for what the run needs.
    """

    to: str | None = TO.choice(f"One of {', '.join(FORMATS)}.", FORMATS, "FORMAT", meant=CALLED)

    degrees: Mapping[str, int] = LAYOUT.each(
        {
            "tp": "Tensor parallel degree.",
            "pp": "Pipeline parallel degree.",
            "ep": "Expert parallel degree.",
            "etp": "Tensor parallel degree of the experts.",
            "dp": "Data parallel degree.",
            "cp": "Context parallel degree.",
            "vpp": "Virtual pipeline stages a rank.",
        },
        count,
        "N",
    )
    pp_split: tuple[int, ...] | Literal["auto"] = LAYOUT.option(
        "Layers of each pipeline stage: 8,9,9,6; auto: of about the same bytes.", stages, "N,N,...|auto", default=()
    )
    zero: int | None = LAYOUT.option("What data parallel ranks shard among themselves.", between(0, 3), "0|1|2|3")
    sharding: str | None = LAYOUT.choice(
        "Paddle: optimizer states by owner, or as slices. Default the source's.", SHARDINGS
    )
    spec: str | None = LAYOUT.choice(
        "Megatron: layers of its own modules or of Transformer Engine's. Default the source's, or local.", SPECS
    )
    hybrid_layer_pattern: str | None = LAYOUT.option(
        "Megatron: a GPTModel as a HybridModel of these layers (*-*-); none: the other way.", text, "PATTERN|none"
    )
    layout: str | None = LAYOUT.option("A mesh and placement rules by glob, in TOML.", text, "FILE")
    on_indivisible: str | None = LAYOUT.choice(
        f"When a dim does not divide: {', '.join(POLICIES)}. Default {DEFAULT_POLICY}; for data ranks dtensor.",
        POLICIES,
        "POLICY",
        also=(LAYOUT.means("strict_shard", "error", "The same as --on-indivisible error."),),
    )

    dialect: str | None = TRAVEL.choice(
        f"Names and structure: {', '.join(DIALECTS)}. Default: the format's home dialect.", DIALECTS, "NAME"
    )
    experts: str | None = TRAVEL.choice(
        "convert, the hub's names: experts one by one, or stacked. Default: the source's, or as released.", EXPERTS
    )
    aoa: str | None = TRAVEL.option(
        "Paddle's any-to-any statements as the mapping of names and structure.", text, "FILE"
    )
    states: tuple[str, ...] = TRAVEL.option(
        "model, master, optimizer, ema, extras, or all.", words, "S,S,...", kind="values", keyword="state", default=()
    )
    drop: tuple[str, ...] = TRAVEL.option(
        "What may stay behind though it was asked for.", words, "S,S,...", kind="values", default=()
    )
    as_model: str | None = TRAVEL.choice("Write this state as the model.", ("ema", "master"))
    dtypes: Mapping[str, str] = TRAVEL.option(
        "Cast: bf16, or optimizer=bf16. Repeatable.",
        dtypes,
        "[STATE=]DTYPE",
        kind="values",
        keyword="dtype",
        default={},
    )
    dequantize: bool = TRAVEL.flag("Write quantised weights and states as floats.")
    quantize: str | None = TRAVEL.option(
        f"Write the weights of layers as codes and scales, to nearest: {', '.join(SCHEMES)}.",
        only_one_of(SCHEMES, "--quantize-only and --quantize-skip PATTERN say which weights are quantised"),
        "SCHEME",
        kind="values",
        choices=tuple(SCHEMES),
    )
    quantize_skip: tuple[str, ...] = TRAVEL.option(
        "Leave these as they are too. Repeatable.", patterns, "PATTERN", kind="values", default=()
    )
    quantize_only: tuple[str, ...] = TRAVEL.option(
        "Quantise these in place of what the rule says. Repeatable.", patterns, "PATTERN", kind="values", default=()
    )
    repack: str | None = TRAVEL.choice(
        "Write the weights of GPTQ and AWQ as another library stores the same values: compressed-tensors.", REPACKS
    )
    gguf_type: str | None = TRAVEL.option(
        f"GGUF: the type of matrices: {', '.join(GGUF_TYPES)}. Default: the source's.",
        only_one_of(GGUF_TYPES, "--gguf-only PATTERN says which matrices have it"),
        "TYPE",
        kind="values",
        choices=GGUF_TYPES,
    )
    gguf_only: tuple[str, ...] = TRAVEL.option(
        "The matrices that --gguf-type is for, others stay. Repeatable.", patterns, "PATTERN", kind="values", default=()
    )
    vocab_size: int | None = TRAVEL.option(
        "Rows of the vocabulary: padding beyond it is cut off, rows of zeros are added up to it.",
        between(1, MOST_ROWS),
        "N",
    )
    tied_head: str | None = TRAVEL.choice(
        "An output layer that is the embedding: written once or twice.", ("keep", "tie", "untie")
    )
    allow_lossy: bool = TRAVEL.flag("Let a cast overflow or saturate, and count it.")

    remove_keys: tuple[str, ...] = KEYS.option(
        "Leave out: a glob, re:EXPRESSION or @FILE. Repeatable.", patterns, "PATTERN", kind="values", default=()
    )
    keep_keys: tuple[str, ...] = KEYS.option(
        "Leave out all but these. Repeatable.", patterns, "PATTERN", kind="values", default=()
    )
    rename: tuple[str, ...] = KEYS.option(
        "Rename tensors with all their states: 'module.*=*', 're:^h\\.(\\d+)=layers.\\1', or @FILE. Repeatable.",
        rename_rules,
        "OLD=NEW",
        kind="values",
        default=(),
    )
    model_only: bool = KEYS.flag("Leave the optimizer, master and EMA twins of removed keys alone.")

    force: bool = RUN.flag("Replace an existing output, whole and in one step.")
    resume: bool = RUN.switch("Go on where an interrupted run stopped (the default).", default=True)
    fsync: bool = RUN.switch("Wait for the disk before the commit (the default).", default=True)
    dry_run: bool = RUN.flag("Show the plan; write nothing.")
    memory: int = RUN.option("Bound on working memory. Default 1GiB.", size, "SIZE", default=DEFAULT_MEMORY)
    threads: int | None = RUN.option("Threads that move bytes.", count, "N")
    verify: str = RUN.choice("Check the output. Default quick.", ("off", "quick", "full"), default="quick")
    ray: str | None = RUN.option("Run the plan on a Ray cluster.", text, "ADDRESS|auto")
    emit: tuple[str, str] | None = RUN.option(
        "Write the job file that runs the plan on many nodes; write nothing else.",
        with_file(ENGINES),
        f"{'|'.join(ENGINES)} FILE",
        kind="pair",
        choices=ENGINES,
    )
    sign: str | None = RUN.option(
        "Sign the output with this private key (PEM, ECDSA): model.sig, as OpenSSF model signing has it.", text, "KEY"
    )
    attest: str | None = RUN.option(
        "Write what was made of what, by which command (in-toto, SLSA provenance); signed too with --sign.",
        output,
        "FILE",
    )
    device: str = device(RUN)
    pinned: tuple[int, int] = RUN.option(
        "Pinned memory that --device cuda sets aside at once. Default: what the run needs.",
        sizes,
        "LARGE[,SMALL]",
        default=(0, 0),
    )

    max_shard_size: int | None = PLAN.option("Bytes a file of a sharded output. Default 5GB.", size, "SIZE")
    plan_file: str | None = PLAN.option(
        "Save the plan for ckpt apply; write nothing else.", output, "FILE", keyword="plan"
    )

    # the words of the line, for --attest: they decide nothing
    command: tuple[str, ...] = field(default=(), compare=False, metadata={"options": ()})
