"""The options that are one verb's own. `merging.options` has those of `merge`, beside its methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckpt_tool.guide import LANGUAGES
from ckpt_tool.options.statement import OPTIONS
from ckpt_tool.options.values import between, count, output, rename_rules, share, text, tolerance, words
from ckpt_tool.options.writing import DEVICES, DIALECTS, device


@dataclass(frozen=True)
class Comparison:
    """`ckpt diff`. map_file: names of the first as the second calls them."""

    rtol: float = OPTIONS.option("Relative tolerance. Default 0: bit for bit.", tolerance, "X", default=0.0)
    atol: float = OPTIONS.option("Absolute tolerance. Default 0.", tolerance, "X", default=0.0)
    map_file: str | None = OPTIONS.option("Rename tensors of the first before comparing.", text, "FILE", keyword="map")
    rename: tuple[str, ...] = OPTIONS.option(
        "Rename tensors of A before comparing: 'module.*=*', 're:EXPRESSION=REPLACEMENT', or @FILE. Repeatable.",
        rename_rules,
        "OLD=NEW",
        kind="values",
        default=(),
    )
    dialect: str | None = OPTIONS.choice(
        f"Compare both under these names: {', '.join(DIALECTS)}. Default keep.", DIALECTS, "NAME"
    )
    states: tuple[str, ...] = OPTIONS.option(
        "Only this state. Repeatable.", words, "S", kind="values", keyword="state", default=()
    )
    rank: bool = OPTIONS.flag("Say which files, and whose ranks', hold the values that differ.")
    device: str = device(OPTIONS)


@dataclass(frozen=True)
class Verification:
    """`ckpt verify`."""

    mode: str = OPTIONS.choice(
        "quick: headers, extents, cover. full: values and checksums too. Default full.",
        ("quick", "full"),
        names=("--mode", "--verify"),
        default="full",
    )
    key: str | None = OPTIONS.option(
        "The public key (PEM) by which it has to be signed: model.sig, or the file of --attest.", text, "PUB"
    )
    attest: str | None = OPTIONS.option("Hold it against this attestation too.", text, "FILE")
    device: str = device(OPTIONS)


@dataclass(frozen=True)
class Share:
    """`ckpt apply`. part: (i, n) for share i of n, from 1; `auto`: the launcher says which; None for the whole plan.

    claim: be one of any number of workers that take what nobody has taken yet.
    """

    part: tuple[int, int] | Literal["auto"] | None = OPTIONS.option(
        "Run share I of N, from 1/N to N/N; auto: the one that the launcher's variables name.", share, "I/N|auto"
    )
    claim: bool = OPTIONS.flag(
        "Be one of any number of workers, on any machines: take what none has taken, and what one left that died."
    )


@dataclass(frozen=True)
class Looking:
    """`ckpt status`."""

    watch: bool = OPTIONS.flag("Look again until it is written, or nobody writes any more.")


@dataclass(frozen=True)
class Page:
    """`ckpt help`."""

    language: str | None = OPTIONS.choice("Its language. Default: that of the locale.", LANGUAGES, keyword="lang")


@dataclass(frozen=True)
class Cleaning:
    """`ckpt clean`."""

    remove: bool = OPTIONS.flag("Remove it. Without this it is only listed.")


@dataclass(frozen=True)
class Auditing:
    """`ckpt audit`."""

    values: bool = OPTIONS.flag("Read the values too: copies, zeros, constants, NaN, order of fused parts.")
    sarif: str | None = OPTIONS.option("The findings as SARIF 2.1.0.", output, "FILE")
    junit: str | None = OPTIONS.option("The findings as JUnit XML.", output, "FILE")


@dataclass(frozen=True)
class Search:
    """`ckpt latest`."""

    skip_unreadable: bool = OPTIONS.flag("Pass over newer steps that can't be read. Default: an error.")


@dataclass(frozen=True)
class Retention:
    """`ckpt prune`. keep_last, keep_every: None where not given."""

    keep_last: int | None = OPTIONS.option("Keep the last N sound steps.", count, "N")
    keep_every: int | None = OPTIONS.option("Keep steps whose number is a multiple of K.", count, "K")
    skip_unreadable: bool = OPTIONS.flag(
        "Leave alone what can't be read, and remove others all the same. Default: remove nothing then."
    )
    dry_run: bool = OPTIONS.flag("Show what would go; remove nothing.")


@dataclass(frozen=True)
class Validating:
    """`ckpt validate`. source, target: layouts as `tp2,pp2,dp2,ep2`; both or none. matrix: None for one pair.

    steps: after the resume, and as many before the save. keep: a folder in which everything stays.
    """

    source: str | None = OPTIONS.option(
        "Train and save so: tp2,pp2,dp2,ep2; also vpp2, zero0 to zero3, split=2-1-1.",
        text,
        "LAYOUT",
        keyword="from_layout",
    )
    target: str | None = OPTIONS.option(
        "Reshard to this and go on. Without layouts a matrix of pairs is run.", text, "LAYOUT", keyword="to_layout"
    )
    fmt: str | None = OPTIONS.option(
        "What the job saves. Default sharded; in a matrix formats take turns.", text, "F", keyword="format"
    )
    matrix: str | None = OPTIONS.choice(
        "quick (default), full, or round-trip: A -> X -> A in every format.", ("quick", "full", "round-trip"), "NAME"
    )
    mode: str = OPTIONS.choice(
        "Sums in one order, held to the bit; or all-reduces, held to a tolerance.",
        ("canonical", "native"),
        default="canonical",
    )
    optimizer: str = OPTIONS.choice(
        "adamw; or muon for the layers' matrices, as Megatron chains it with Adam.", ("adamw", "muon"), default="adamw"
    )
    device: str = OPTIONS.choice("Where the ranks train. Default cpu.", DEVICES, default="cpu")
    backend: str = OPTIONS.choice("How the ranks talk. Default gloo.", ("gloo", "nccl", "sim"), default="gloo")
    steps: int = OPTIONS.option("Steps before the save, and after the resume. Default 3.", count, "N", default=3)
    seed: int = OPTIONS.option("Of weights, data and dropout. Default 1234.", count, "N", default=1234)
    no_controls: bool = OPTIONS.flag("Plant no faults.")
    keep: str | None = OPTIONS.option("Leave every checkpoint there.", output, "FOLDER")


@dataclass(frozen=True)
class Kernels:
    """`ckpt kernels`. The help of each begins with the action that it is of."""

    arch: str | None = OPTIONS.option(
        "build: GPUs, as 90,100 (sm_90, sm_100), native or host. Default 80,90,100.", text, "N,N"
    )
    out: str | None = OPTIONS.option(
        "build: write the library to FILE, for CKPT_KERNELS=path:FILE elsewhere.", output, "FILE"
    )
    force: bool = OPTIONS.flag("build: though it is built, and over FILE.")
    cases: int | None = OPTIONS.option("check: random cases a kernel. Default 200.", count, "N")
    seed: int | None = OPTIONS.option("check: what the cases are made from. Default 0.", between(0, 2**63 - 1), "N")
    only: tuple[str, ...] = OPTIONS.option(
        "check: only this kernel. Repeatable.", words, "NAME", kind="values", keyword="kernel", default=()
    )
    quick: bool = OPTIONS.flag("bench: minutes less, with more spread.")
