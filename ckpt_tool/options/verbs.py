"""The options that belong to a single verb. Those of `merge` are in `merging.options`, next to its methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckpt_tool.guide import LANGUAGES
from ckpt_tool.option_kinds.statement import OPTIONS
from ckpt_tool.option_kinds.values import between, count, output, paths, rename_rules, share, text, tolerance, words
from ckpt_tool.options.writing import DEVICES, DIALECTS, device


@dataclass(frozen=True)
class Comparison:
    """`ckpt diff`. map_file: names of the first as the second calls them."""

    rtol: float = OPTIONS.option(
        "Allow this relative difference: --rtol 1e-3. Default 0: bit for bit.", tolerance, "X", default=0.0
    )
    atol: float = OPTIONS.option("Allow this absolute difference: --atol 1e-6. Default 0.", tolerance, "X", default=0.0)
    map_file: str | None = OPTIONS.option(
        "Rename tensors of A by a file of pairs of names before comparing: --map names.json.",
        text,
        "FILE",
        keyword="map",
    )
    rename: tuple[str, ...] = OPTIONS.option(
        "Rename tensors of A before comparing: 'module.*=*', 're:EXPRESSION=REPLACEMENT', or @FILE. Repeatable.",
        rename_rules,
        "OLD=NEW",
        kind="values",
        default=(),
    )
    dialect: str | None = OPTIONS.choice(
        f"Compare both under the names of this system: {', '.join(DIALECTS)}. Default keep.", DIALECTS, "NAME"
    )
    states: tuple[str, ...] = OPTIONS.option(
        "Compare only this state: --state model. Repeatable.", words, "S", kind="values", keyword="state", default=()
    )
    rank: bool = OPTIONS.flag("Name the files and ranks that hold the values which differ.")
    device: str = device(OPTIONS)


@dataclass(frozen=True)
class Verification:
    """`ckpt verify`."""

    mode: str = OPTIONS.choice(
        "Check headers and extents (quick), or values and checksums too (full). Default full.",
        ("quick", "full"),
        names=("--mode", "--verify"),
        default="full",
    )
    key: str | None = OPTIONS.option("Require a signature by this public key (PEM): --key key.pub.", text, "PUB")
    attest: str | None = OPTIONS.option("Compare it with this attestation too: --attest out.json.", text, "FILE")
    device: str = device(OPTIONS)


@dataclass(frozen=True)
class Share:
    """`ckpt apply`. part: (i, n) for share i of n, from 1; `auto`: the launcher says which; None for the whole plan.

    claim: be one of any number of workers, each of which takes shares that no other has taken.
    """

    part: tuple[int, int] | Literal["auto"] | None = OPTIONS.option(
        "Run share I of N: --part 2/8; auto takes the one that the launcher's variables name.", share, "I/N|auto"
    )
    claim: bool = OPTIONS.flag(
        "Work as one of any number of workers on any machines: take what no other has taken, or left when it died."
    )


@dataclass(frozen=True)
class Looking:
    """`ckpt status`."""

    watch: bool = OPTIONS.flag("Watch until it is written, or nothing writes any more.")


@dataclass(frozen=True)
class HelpPage:
    """`ckpt help`."""

    language: str | None = OPTIONS.choice(
        "Choose the language. Default: that of the locale.", LANGUAGES, keyword="lang"
    )


@dataclass(frozen=True)
class Cleaning:
    """`ckpt clean`."""

    remove: bool = OPTIONS.flag("Remove what is listed. Without this it is only listed.")


@dataclass(frozen=True)
class Auditing:
    """`ckpt audit`."""

    values: bool = OPTIONS.flag("Read the values too: copies, zeros, constants, NaN, order of fused parts.")
    sarif: str | None = OPTIONS.option("Save the findings as SARIF 2.1.0: --sarif audit.sarif.", output, "FILE")
    junit: str | None = OPTIONS.option("Save the findings as JUnit XML: --junit audit.xml.", output, "FILE")


@dataclass(frozen=True)
class Search:
    """`ckpt latest`."""

    skip_unreadable: bool = OPTIONS.flag("Pass over newer steps that can't be read. Default: an error.")


@dataclass(frozen=True)
class Retention:
    """`ckpt prune`."""

    # keep_last, keep_every: None where not given
    keep_last: int | None = OPTIONS.option("Keep the last N complete steps: --keep-last 3.", count, "N")
    keep_every: int | None = OPTIONS.option(
        "Keep steps whose number is a multiple of K: --keep-every 1000.", count, "K"
    )
    skip_unreadable: bool = OPTIONS.flag(
        "Leave alone what can't be read, and remove others all the same. Default: remove nothing then."
    )
    with_other_files: bool = OPTIONS.flag(
        "Remove steps with all that is in them. Default: a step stays where it holds files that no trainer writes."
    )
    deltas: tuple[str, ...] = OPTIONS.option(
        "Look here too for deltas that are made on steps of RUN: --deltas /archive/run7. Repeatable.",
        paths,
        "DIR",
        kind="values",
        default=(),
    )
    dry_run: bool = OPTIONS.flag("Show what would be removed, and remove nothing.")


@dataclass(frozen=True)
class Validating:
    """`ckpt validate`."""

    # source, target: layouts as `tp2,pp2,dp2,ep2`; both or none
    source: str | None = OPTIONS.option(
        "Train and save in this layout: tp2,pp2,dp2,ep2; also vpp2, zero0 to zero3, split=2-1-1.",
        text,
        "LAYOUT",
        keyword="from_layout",
    )
    target: str | None = OPTIONS.option(
        "Reshard to this layout and train on: tp4. Without layouts a matrix of pairs is run.",
        text,
        "LAYOUT",
        keyword="to_layout",
    )
    fmt: str | None = OPTIONS.option(
        "Save in this format: --format dcp. Default sharded; in a matrix formats take turns.",
        text,
        "F",
        keyword="format",
    )
    # None for one pair
    matrix: str | None = OPTIONS.choice(
        "Run this matrix of layouts: quick (default), full, or round-trip (A -> X -> A in every format).",
        ("quick", "full", "round-trip"),
        "NAME",
    )
    mode: str = OPTIONS.choice(
        "Sum in one order and compare bits (canonical), or all-reduce and compare within a tolerance (native).",
        ("canonical", "native"),
        default="canonical",
    )
    optimizer: str = OPTIONS.choice(
        "Train with adamw, or with muon for the layers' matrices as Megatron chains it with Adam.",
        ("adamw", "muon"),
        default="adamw",
    )
    device: str = OPTIONS.choice("Choose where the ranks train. Default cpu.", DEVICES, default="cpu")
    backend: str = OPTIONS.choice(
        "Choose how the ranks communicate. Default gloo.", ("gloo", "nccl", "sim"), default="gloo"
    )
    # after the resume, and as many before the save
    steps: int = OPTIONS.option(
        "Train N steps before the save and after the resume: --steps 5. Default 3.", count, "N", default=3
    )
    seed: int = OPTIONS.option("Seed weights, data and dropout: --seed 7. Default 1234.", count, "N", default=1234)
    no_controls: bool = OPTIONS.flag("Skip the runs with planted faults.")
    # a folder in which everything stays
    keep: str | None = OPTIONS.option("Keep every checkpoint in this folder: --keep /tmp/proof.", output, "FOLDER")


@dataclass(frozen=True)
class Kernels:
    """`ckpt kernels`. The help of each option begins with the action that it belongs to."""

    arch: str | None = OPTIONS.option(
        "build: compile for these GPUs: 90,100 (sm_90, sm_100), native or host. Default 80,90,100.", text, "N,N"
    )
    out: str | None = OPTIONS.option(
        "build: write the library to FILE, for CKPT_KERNELS=path:FILE elsewhere.", output, "FILE"
    )
    force: bool = OPTIONS.flag("build: compile again though it is built, and over FILE.")
    cases: int | None = OPTIONS.option("check: run N random cases per kernel. Default 200.", count, "N")
    seed: int | None = OPTIONS.option("check: seed the cases: --seed 7. Default 0.", between(0, 2**63 - 1), "N")
    only: tuple[str, ...] = OPTIONS.option(
        "check: run only this kernel: --kernel box_copy. Repeatable.",
        words,
        "NAME",
        kind="values",
        keyword="kernel",
        default=(),
    )
    quick: bool = OPTIONS.flag("bench: take minutes less, with more spread.")
