"""Determines the mesh and the layout of the output from the user's options, the source and the target format.

A layout file (`--layout FILE.toml`) has degrees and placement rules; it is read in bounded time whatever it contains.

    [mesh]
    tp = 4
    [[rule]]
    match = "*.w1.weight"
    shard = { 0 = ["tp"] }

CPython's TOML parser is recursive and takes the square of a dotted key's parts, so size and dots of a line are bounded
first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tool.conversion.asked import may_hold_codes
from ckpt_tool.core.bounds import DIGITS
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.mesh import Mesh, divisors_near
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import MODEL, LogicalTensor
from ckpt_tool.errors import UsageError, wrap_os_error
from ckpt_tool.formats.base import Format
from ckpt_tool.option_kinds.values import AUTO
from ckpt_tool.options.writing import DEFAULT_POLICY, Writing
from ckpt_tool.plan.placing import PlacingRule, Wishes, describe_split, lay_out, rules_from, stages_by_bytes
from ckpt_tool.sources.chosen import Chosen

if TYPE_CHECKING:
    from ckpt_tool.weight_schemes.quantised_weights import Units

FEW = 1024  # ranks of a job up to which degrees are accepted whatever the tensors are
RANKS = 1 << 17  # ranks of a job at most; the largest jobs so far have some 100,000


def degrees_of(chosen: Chosen, writing: Writing) -> Degrees:
    """The known degrees, for a format that determines its own layout."""
    catalog = chosen.sources[0].catalog
    inherited: dict[str, int] = {}
    if chosen.inherits:
        stated = chosen.all_hints.get(Degrees)
        inherited = stated.stated() if stated else {}
        inherited = inherited or dict(catalog.mesh.dims)
        if not stated and "ep" in inherited:
            inherited["dp"] = inherited.get("dp", 1) * inherited["ep"]
    if "tp" in writing.degrees and "etp" not in writing.degrees and inherited.get("etp") == inherited.get("tp"):
        inherited.pop("etp", None)  # experts follow tp unless the source or the user gave them another degree
    degrees = {**inherited, **writing.degrees}
    refuse_idle_ranks(degrees, (row.tensor.shape for row in chosen.stored))
    return Degrees(**degrees)


def refuse_idle_ranks(degrees: Mapping[str, int], shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise UsageError E1651 for degrees that are too large: more ranks than any tensor can be split among, or more
    ranks in total than any job has. Up to `FEW` ranks nothing is refused, even if the layout leaves some of them empty.

    Args:
        degrees: mesh dim -> size.
        shapes: of the tensors to write; only evaluated if there are more than `FEW` ranks.
    """
    ranks = prod(max(size, 1) for size in degrees.values())
    if ranks <= FEW:
        return
    known = [shape for shape in shapes if shape]
    longest = max((max(shape) for shape in known), default=1)
    most = {name: max(longest, FEW) for name in degrees} | {"dp": max(FEW, *(prod(shape) for shape in known))}
    for name, size in degrees.items():
        if size > min(most[name], RANKS):
            raise UsageError(
                f"--{name} {_shown(size)}: no tensor has so many "
                f"{'elements' if name == 'dp' else 'rows or columns'} to share"
                if size > most[name]
                else f"--{name} {_shown(size)}: more ranks than a plan can have",
                code="E1651",
                hint=f"the nearest that it takes is --{name} {min(most[name], RANKS)}",
            )
    if ranks > RANKS:
        shown = " x ".join(f"{name} {_shown(size)}" for name, size in degrees.items() if size > 1)
        largest = max(degrees, key=lambda name: degrees[name])
        raise UsageError(
            f"{shown} are more ranks than a plan can have, {RANKS} at most",
            code="E1651",
            hint=f"the nearest that it takes is --{largest} {max(RANKS * degrees[largest] // ranks, 1)}",
        )


def _shown(size: int) -> str:
    return str(size) if size < 10**DIGITS else "of very many digits"


def layout_of(chosen: Chosen, wanted: Wanted, fmt: Format, writing: Writing) -> tuple[Layout, list[dict[str, Any]]]:
    """(layout of the output, report entries for tensors that could not be split as requested).

    Raises UsageError E0260 to E0262 for degrees that the format cannot express.
    """
    if fmt.holds.own_layout:
        rules_of = ", ".join(filter(None, [f"the rules of {fmt.name}", describe_split(wanted.wish.pp_split)]))
        return Layout(Mesh.of_degrees(wanted.wish.degrees.stated()), (), rules_of), []

    inherited = chosen.sources[0].catalog.mesh.dims if chosen.inherits else ()
    degrees = {**dict(inherited), **writing.degrees}
    rules: tuple[PlacingRule, ...] = ()
    if writing.layout:
        named, rules = read_layout(writing.layout)
        degrees |= named

    refuse_idle_ranks(degrees, (tensor.shape for tensor in wanted.tensors))
    degrees = _carve_experts(degrees, writing)
    foreign = [name for name, size in degrees.items() if size > 1 and name not in fmt.holds.mesh]
    if foreign:
        foreign.sort(key=lambda name: name not in writing.degrees)  # name what was typed, not what was inherited
        if any(name in writing.degrees for name in foreign) or writing.layout:
            raise UsageError(
                f"--{foreign[0]} {degrees[foreign[0]]}: {fmt.name} holds whole tensors, not a rank's share",
                code="E0260",
                hint="any number of ranks load whole tensors: leave the degree off, or write dcp or sharded, with a "
                "file for each rank",
            )
        degrees = {name: size for name, size in degrees.items() if name not in foreign}

    # The dims along which the source's ranks split tensors; `plan.placing` takes them into account.
    cuts: dict[str, int] = {}
    for row in chosen.stored:
        if row.tensor.key.state == MODEL:
            dim = _cut_dim(row.tensor, chosen.sources[row.source].catalog.mesh)
            if dim is not None:
                cuts[row.tensor.key.name] = dim
    zero = fmt.holds.zero if writing.zero is None else writing.zero

    return lay_out(
        wanted.tensors,
        Wishes(
            Mesh.of(**degrees),
            zero,
            writing.on_indivisible or DEFAULT_POLICY,
            writing.on_indivisible is None,
            rules,
            cuts,
            split_of(chosen, writing, degrees.get("pp", 1)),
            chosen.all_hints.dialect == "paddle",
            _units_of_codes(wanted.tensors, chosen, degrees),
        ),
    )


def _units_of_codes(tensors: Sequence[WantedTensor], chosen: Chosen, degrees: Mapping[str, int]) -> Mapping[str, Units]:
    """How tensors of quantised weights may be split; {} if nothing is split or nothing can be codes."""
    if all(size == 1 for size in degrees.values()) or not may_hold_codes(tensors):
        return {}
    from ckpt_tool.quantised.keep_together import held_together

    return held_together(tensors, chosen)


def split_of(chosen: Chosen, writing: Writing, stages: int) -> tuple[int, ...]:
    """The number of layers of each pipeline stage by `--pp-split`; () without the option."""
    if writing.pp_split != AUTO:
        return writing.pp_split
    sizes: dict[str, int] = {}
    for row in chosen.stored:
        sizes[row.tensor.key.name] = sizes.get(row.tensor.key.name, 0) + row.tensor.nbytes
    return stages_by_bytes(sizes, stages)


def _carve_experts(degrees: Mapping[str, int], writing: Writing) -> dict[str, int]:
    """The degrees of the mesh. `--dp` counts all data ranks, and expert ranks are taken from them, so the mesh's `dp`
    is `--dp` divided by `--ep`."""
    out = {name: size for name, size in degrees.items() if size != 1 or name in writing.degrees}
    if out.get("etp", 1) == out.get("tp", 1):
        out.pop("etp", None)
    if out.get("etp", 1) > 1 or out.get("vpp", 1) > 1:
        name = "etp" if out.get("etp", 1) > 1 else "vpp"
        raise UsageError(
            f"--{name} has no meaning for this format", code="E0261", hint="it belongs to Megatron's formats"
        )
    if "ep" in writing.degrees and "dp" in writing.degrees:
        dp = out.get("dp", 1)
        ep = out.get("ep", 1)
        if dp > 1 and dp % ep:
            near = divisors_near(dp, ep)
            raise UsageError(
                f"{ep} expert ranks can't be carved out of {dp} data ranks",
                code="E0262",
                hint=f"--ep that divides --dp {dp}: {', '.join(map(str, near))}",
            )
        if dp > 1:
            out["dp"] = dp // ep
    return out


def _cut_dim(tensor: LogicalTensor, mesh: Mesh) -> int | None:
    """The dim along which the source's tensor parallel ranks split the tensor; None if there is none, or several.

    mesh: the source's, if it is known; then a split whose number of bands does not fit the tensor parallel degree is
        not taken for one (it may be that of the data ranks).
    """
    if len(tensor.chunks) == 1:
        return None
    dims = {
        d
        for chunk in tensor.chunks
        for d, (n, full) in enumerate(zip(chunk.box.shape, tensor.shape, strict=True))
        if n != full
    }
    if len(dims) != 1:
        return None
    dim = dims.pop()
    bands = len({chunk.box.offset[dim] for chunk in tensor.chunks})
    tp = mesh["tp"]
    if mesh.dims and (tp == 1 or bands not in (tp, tp * mesh["dp"] * mesh["ep"])):
        return None
    return dim


# -- layout files ------------------------------------------------------------------------------------------------------


LIMIT = 256 << 10  # bytes of a layout file; a rule takes some hundred
DOTS = 1000  # dots in a line at most: the parser needs quadratic time for a dotted key


def read_layout(file: str) -> tuple[dict[str, int], tuple[PlacingRule, ...]]:
    """Read a layout file: (degrees, rules). Raises UsageError E0252 for invalid content, StorageError."""
    path = Path(file)
    try:
        with path.open("rb") as stream:
            raw = stream.read(LIMIT + 1)
    except OSError as e:
        raise wrap_os_error(e, path, "reading the layout file") from e
    return parse_layout(raw, file)


def parse_layout(raw: bytes, path: str) -> tuple[dict[str, int], tuple[PlacingRule, ...]]:
    """(degrees, rules) of a layout file's bytes. path: the file, for messages. Raises UsageError E0252."""
    if sys.version_info >= (3, 11):  # few jobs have a layout file, so the parser is loaded here
        import tomllib
    else:
        import tomli as tomllib

    try:
        if len(raw) > LIMIT:
            raise ValueError(f"more than {LIMIT >> 10} KiB")
        if max(line.count(b".") for line in raw.split(b"\n")) > DOTS:
            raise ValueError(f"a line with more than {DOTS} dots")
        document = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        what = "nested too deeply" if isinstance(e, RecursionError) else str(e).partition("; use sys.")[0]
        raise UsageError(
            f"the layout file is not TOML: {what}",
            code="E0252",
            path=path,
            hint="want [mesh] with degrees, and [[rule]] tables with match and shard",
        ) from e
    return rules_from(document, path)
