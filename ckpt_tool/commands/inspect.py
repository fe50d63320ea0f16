"""`ckpt inspect`: what is in a checkpoint, read from headers alone. No code of it is run, and torch is not imported.

`--security` lists every pickle of the source and every global that it names, also if nothing else can be read. Findings
of the format's reader come first in `unsafe`, since a survey of single files does not show all of them, such as a
tensor inside an object of an unknown class. Cost: the headers and pickles of every file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpt_tool.commands.incomplete import (
    describe_missing,
    is_broken,
    open_incomplete,
    read_files_alone,
    without_missing,
)
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.extras import display
from ckpt_tool.core.hints import Globals, Stated
from ckpt_tool.core.listing import Listing
from ckpt_tool.core.patterns import Names
from ckpt_tool.core.plurals import agree_all
from ckpt_tool.core.tensor import MASTER, MODEL, UNKNOWN, TensorKey
from ckpt_tool.errors import CkptError, InputError, UnsafeInput
from ckpt_tool.formats.base import ranks_of
from ckpt_tool.options.reading import Inspection, Reading
from ckpt_tool.sources.opening import Opened, open_source, unchanged_sources
from ckpt_tool.sources.select import state_filter
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes.quantised_weights import DTYPES as CODED

# (state, (dtype, shape, bytes of one tensor)) -> number of tensors: totals of large models from few entries
Tally = Mapping[tuple[str, tuple[Any, tuple[int, ...], int]], int]


EVERYTHING = Inspection()


def inspect(
    src: str,
    reading: Reading,
    wanted: Inspection = EVERYTHING,
    *,
    columns: bool = False,
    incomplete: bool = False,
) -> dict[str, Any]:
    """The document of `inspect --json`; its totals count the listed tensors only.

    Args:
        columns: `tensors` may be a `core.listing.Listing`, which generates its rows, or their JSON, on demand.
        incomplete: if a part of the checkpoint is missing, list the rest, and describe the part under `missing`.
            Without it (and without `reading.lenient`) a missing part raises Incomplete.
    """
    if wanted.anonymous:
        return _inspect_anonymously(src, reading, wanted, incomplete=incomplete)

    try:
        opened = open_source(src, reading)
    except (InputError, UnsafeInput) as fault:
        if wanted.security:
            return _unread(src, reading, fault)
        if (document := _of_delta(src, reading)) is not None:
            return document
        if is_broken(fault) and (incomplete or reading.lenient):
            return _of_incomplete(src, reading, wanted, fault)
        raise
    return _of_opened(opened, reading, wanted, columns=columns)


def _inspect_anonymously(src: str, reading: Reading, wanted: Inspection, *, incomplete: bool) -> dict[str, Any]:
    """The document without anything that identifies the owner. Raises UsageError E3050 with `--stats`."""
    from ckpt_tool.commands.anonymous import anonymize, refuse_with

    if wanted.stats:
        refuse_with("--stats", "values")
    return anonymize(inspect(src, reading, replace(wanted, anonymous=False), incomplete=incomplete))


def _of_opened(opened: Opened, reading: Reading, wanted: Inspection, *, columns: bool) -> dict[str, Any]:
    """The document of a checkpoint that its reader could open."""
    catalog = opened.catalog
    blocks = getattr(catalog.tensors, "blocks", None)
    rows: Sequence[dict[str, Any]]
    tally: Tally
    if columns and blocks is not None and not (wanted.match or wanted.states or wanted.placement or wanted.stats):
        rows = listing = Listing(blocks())
        tally = listing.tally()
    else:
        rows = list(_rows(catalog, wanted.match, wanted.states))
        tally = Counter((row["state"], (row["dtype"], tuple(row["shape"]), row["bytes"])) for row in rows)
    document = _document(opened, rows, tally)
    if any(state == MODEL and getattr(dtype, "name", dtype) in CODED for state, (dtype, _, _) in tally):
        _add_quantisation(document, opened, reading, narrowed=bool(wanted.match or wanted.states))
    if wanted.placement:
        _add_chunks(opened, rows)
    if wanted.security or catalog.unsafe:
        document["security"] = _security(opened, survey=wanted.security)
    if wanted.stats:
        with unchanged_sources(opened):
            _add_statistics(opened.refuse_unsafe(), rows)
    return document


def _document(opened: Opened, rows: Sequence[dict[str, Any]], tally: Tally) -> dict[str, Any]:
    """The part of the document that does not depend on options. rows: the listed tensors. tally: the same, counted."""
    catalog = opened.catalog
    by_state = _by_state(tally)
    return {
        "schema_version": 1,
        "format": catalog.format,
        "path": opened.path,
        "resolved": opened.resolved,
        "mesh": catalog.mesh.to_json(),
        "total": {
            "tensors": len(rows),
            "bytes": sum(entry["bytes"] for entry in by_state.values()),
            "parameters": sum(count * prod(shape) for (state, (_, shape, _)), count in tally.items() if state == MODEL)
            + (_masters_alone(rows) if MASTER in by_state else 0),
        },
        "states": by_state,
        "tensors": rows,
        "extras": display(catalog.extras),
        **({"metadata": _metadata(stated)} if (stated := catalog.hints.get(Stated)) else {}),
        "notes": agree_all(note.message for note in catalog.notes),
    }


def _metadata(stated: Stated) -> dict[str, Any]:
    """The metadata that the files state about the model, with the number of values in place of long lists."""
    return {**stated.values, **{key: f"{count} values" for key, count in stated.long.items()}}


def _security(opened: Opened, *, survey: bool) -> dict[str, Any]:
    """The findings of the reader in the pickles that it read; with `survey` also those of all other files."""
    found: dict[str, Any] = {
        "unsafe": list(opened.catalog.unsafe),
        "globals": list(named.names) if (named := opened.catalog.hints.get(Globals)) else [],
    }
    if survey:
        _add_survey(found, opened.tree)
    return found


def _add_survey(security: dict[str, Any], tree: Tree) -> None:
    """Survey the pickles of all files: extend `unsafe` and `globals`, and add `files`, an entry for each pickle."""
    from ckpt_tool.storage.pickles.survey import survey, unsafe_lines

    files = []
    unsafe = dict[str, None]()
    names = dict.fromkeys(security["globals"])
    for found in survey(tree):
        lines = unsafe_lines(tree, found)
        unsafe.update(dict.fromkeys(lines))
        mentioned = [str(use) for use in found.uses]
        names.update(dict.fromkeys(mentioned))
        files.append(
            {"file": found.path, "member": found.member, "globals": mentioned, "unsafe": lines, "unseen": found.unseen}
        )
    security["unsafe"] = list({**dict.fromkeys(security["unsafe"]), **unsafe})
    security["globals"] = list(names)
    security["files"] = files


def _unread(src: str, reading: Reading, fault: CkptError) -> dict[str, Any]:
    """The document for a source that its reader refuses: no tensors, only the survey of its pickles."""
    from ckpt_tool.storage.opening import open_tree

    tree = open_tree(src, follow_symlinks=reading.follow_symlinks)
    security: dict[str, Any] = {"unsafe": [], "globals": []}
    _add_survey(security, tree)
    where = f" ({fault.where()})" if fault.where() else ""
    return {
        "schema_version": 1,
        "format": "unread",
        "path": src,
        "resolved": "",
        "mesh": {},
        "total": {"tensors": 0, "bytes": 0, "parameters": 0},
        "states": {},
        "tensors": [],
        "extras": {},
        "notes": [f"not read: error[{fault.code}]: {fault.message}{where}"],
        "security": security,
    }


def _of_incomplete(src: str, reading: Reading, wanted: Inspection, fault: CkptError) -> dict[str, Any]:
    """The document of a checkpoint of which a part is missing. Raises `fault` if nothing of it can be read."""
    looked, parts = open_incomplete(src, reading)
    if looked is not None and parts.faults:
        opened = without_missing(looked.opened, parts) if wanted.stats else looked.opened
        document = _of_opened(opened, reading, wanted, columns=False)
        missing = describe_missing(fault, parts, opened.format, opened.catalog.mesh.to_json())
    else:
        document = _of_files_alone(src, reading, wanted)
        if not (document["tensors"] or parts.files or parts.tensors):
            raise fault
        if document["tensors"]:  # from single files it can't be determined which tensors are complete
            parts.tensors.clear()
        missing = describe_missing(fault, parts, None, {})
    document["missing"] = {**missing, "lenient": reading.lenient}
    return document


def _of_files_alone(src: str, reading: Reading, wanted: Inspection) -> dict[str, Any]:
    """The document of files that were read one by one, since the checkpoint could not be read as a whole."""
    alone = read_files_alone(src, reading)
    names = Names(row["name"] for row in alone.rows).matched(wanted.match)[0] if wanted.match else None
    is_wanted = state_filter(wanted.states, [row["state"] for row in alone.rows]) if wanted.states else None
    rows = [
        row
        for row in alone.rows
        if (names is None or row["name"] in names) and (is_wanted is None or is_wanted(row["state"]))
    ]
    tally = Counter((row["state"], (row["dtype"], tuple(row["shape"]), row["bytes"])) for row in rows)
    by_state = _by_state(tally)
    notes = ["names and shapes are those of each file alone: without what is missing the files can't be put together"]
    notes += alone.notes
    if any(row["state"] == UNKNOWN for row in rows):
        notes.append("names are lost with the metadata: an item is called by its file and its number in it")
    if alone.unread:
        shown = ", ".join(alone.unread[:5]) + (f" and {len(alone.unread) - 5} more" if alone.unread[5:] else "")
        notes.append(f"these files can't be read alone: {shown}")

    return {
        "schema_version": 1,
        "format": alone.format,
        "path": src,
        "resolved": "",
        "mesh": {},
        "total": {
            "tensors": len(rows),
            "bytes": sum(entry["bytes"] for entry in by_state.values()),
            "parameters": 0,
        },
        "states": by_state,
        "tensors": rows,
        "extras": {},
        "notes": agree_all(notes),
        **({"security": {"unsafe": alone.unsafe, "globals": []}} if alone.unsafe else {}),
    }


def _of_delta(src: str, reading: Reading) -> dict[str, Any] | None:
    """The document for a delta, which lists its compressed frames as tensors; None if the source is no delta."""
    from ckpt_tool.deltas.folder import is_delta, read_delta
    from ckpt_tool.storage.opening import open_tree

    tree = open_tree(src, follow_symlinks=reading.follow_symlinks)
    if not is_delta(tree):
        return None
    delta = read_delta(tree)
    rows = [
        {"name": name, "state": MODEL, "dtype": frame.dtype.name, "shape": list(frame.shape), "bytes": frame.nbytes}
        for name, frame in delta.frames.items()
    ]
    nbytes = sum(frame.nbytes for frame in delta.frames.values())
    return {
        "schema_version": 1,
        "format": "delta",
        "path": src,
        "resolved": "",
        "mesh": {},
        "total": {"tensors": len(rows), "bytes": nbytes, "parameters": 0},
        "states": {MODEL: {"tensors": len(rows), "bytes": nbytes}} if rows else {},
        "tensors": rows,
        "extras": {},
        "notes": [f"compressed changes, not a model: ckpt patch BASE {src} OUT applies them"],
        "delta": delta.about(),
    }


def _by_state(tally: Tally) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (state, (_, _, nbytes)), count in tally.items():
        entry = found.setdefault(state, {"tensors": 0, "bytes": 0})
        entry["tensors"] += count
        entry["bytes"] += count * nbytes
    return found


def _add_quantisation(document: dict[str, Any], opened: Opened, reading: Reading, *, narrowed: bool) -> None:
    """Add `quantization`, and count the parameters that are encoded as codes. narrowed: not all tensors are listed."""
    from ckpt_tool.quantised.weight_counts import summary

    names = {row["name"] for row in document["tensors"] if row["state"] == MODEL} if narrowed else None
    found = summary(opened, reading, names)
    if found is not None:
        document["total"]["parameters"] += found.pop("more_parameters")
        document["quantization"] = found


def _add_statistics(opened: Opened, rows: Sequence[dict[str, Any]]) -> None:
    """Read the values of the listed tensors and add the statistics of each as `stats`."""
    from ckpt_tool.run.stats import statistics

    keys = [TensorKey(row["name"], row["state"]) for row in rows]
    found = statistics(opened.catalog, opened.tree, keys)
    for row, key in zip(rows, keys, strict=True):
        row["stats"] = found.get(key)


def _rows(catalog: Catalog, match: Sequence[str], states: Sequence[str]) -> Iterator[dict[str, Any]]:
    found = Names(row.name for row in catalog.rows()).matched(match)[0] if match else None
    wanted = state_filter(states, catalog.states()) if states else None
    for name, state, dtype, shape, nbytes in catalog.rows():
        if (wanted is not None and not wanted(state)) or (found is not None and name not in found):
            continue
        yield {"name": name, "state": state, "dtype": dtype.name, "shape": list(dtype.elements(shape)), "bytes": nbytes}


def _masters_alone(rows: Sequence[dict[str, Any]]) -> int:
    """Elements of parameters that are stored as fp32 master weights only (ZeRO 3 keeps no other)."""
    model = {row["name"] for row in rows if row["state"] == MODEL}
    return sum(prod(row["shape"]) for row in rows if row["state"] == MASTER and row["name"] not in model)


def _add_chunks(opened: Opened, rows: Sequence[dict[str, Any]]) -> None:
    from ckpt_tool.report.holdings import whose

    catalog = opened.catalog
    rank_of = whose(catalog, ranks_of(opened.format, catalog.mesh.to_json()))
    for row in rows:
        tensor = catalog.tensors[TensorKey(row["name"], row["state"])]
        row["chunks"] = [
            {
                "file": chunk.array.file,
                "offset": list(chunk.box.offset),
                "shape": list(chunk.box.shape),
                "rank": dict(rank_of(chunk.array.file) or {}),
            }
            for chunk in tensor.chunks
        ]
