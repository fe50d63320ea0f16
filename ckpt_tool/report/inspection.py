"""`ckpt inspect` as a page: what is there, its states and dtypes, and its tensors folded into a tree.

Reads the document that `--json` prints: `format`, `path`, `mesh`, `total`, `states`, `tensors`, `extras`;
`quantization`; `metadata`; `delta`; `missing` (files and tensors that are not there); `resolved` (why another folder
than the given one was taken), `notes`, `security` ({unsafe: [...], globals: [...]}), a tensor's `chunks`
(`--placement`) and `stats` (`--stats`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.core.listing import Listing
from ckpt_tool.report.folding import Folding
from ckpt_tool.report.page import STATE, Block, Cell, Column, Facts, Lines, Page, PageTable, Styled, Verdict
from ckpt_tool.report.text import count, more, parameters, plural, shape, size
from ckpt_tool.report.tree import FoldedTree

Document = Mapping[str, Any]
EXTRAS_SHOWN = 16
METADATA_SHOWN = 32
TEXT_SHOWN = 80
FILES_SHOWN = 40
MISSING_SHOWN = 20
STATS = ("min", "max", "mean", "std", "zeros", "nan", "inf")


def inspection(document: Document, *, depth: int | None = None, everything: bool = False) -> Page:
    """The page. depth: levels of the tree, None for what is best seen. everything: list files and extras uncut."""
    blocks: list[Block] = [_head(document)]
    security = _security(document)
    if security:
        blocks.append(security)
    if document.get("missing"):
        blocks += _missing(document, everything=everything)
    tensors = document.get("tensors") or ()
    blocks += _states_and_dtypes(document, tensors)
    if isinstance(tensors, Listing):
        blocks.append(_fold_names(tensors, depth))
    elif any("stats" in tensor for tensor in tensors):
        blocks.append(_stats(tensors))
    elif tensors:
        blocks.append(_tree(tensors, depth))
    if not isinstance(tensors, Listing):
        if any("chunks" in tensor for tensor in tensors[:1]):
            from ckpt_tool.report.ranks import grids  # --placement alone

            blocks += grids(tensors, document.get("mesh") or {})
        blocks += _files(tensors, everything=everything)
    if document.get("metadata"):
        blocks.append(_metadata(document["metadata"], everything=everything))
    if document.get("extras"):
        blocks.append(_extras(document["extras"], everything=everything))
    if document.get("notes"):
        blocks.append(Lines("notes", tuple(note_text(note) for note in document["notes"])))
    return Page(f"ckpt inspect {document.get('path', '')}", tuple(blocks))


def mesh_text(mesh: Mapping[str, int] | None) -> str:
    """`tp 2 x pp 4`; "one rank" where nothing is cut."""
    dims = [f"{name} {degree}" for name, degree in (mesh or {}).items() if degree != 1]
    return " x ".join(dims) or "one rank"


def delta_text(delta: Document) -> str:
    """`version 2 on version 1, xor, zstd, xxh3-128`."""
    kind = f", the files of a {delta['archive']} step" if delta.get("archive") else ""
    words = (delta["encoding"], delta["compression"], delta["checksum"])
    return f"version {delta['version']} on version {delta['base_version']}, {', '.join(words)}{kind}"


def note_text(note: Any) -> str:
    """A note of the catalog or a plain line."""
    if not isinstance(note, Mapping):
        return str(note)
    place = ", ".join(str(note[key]) for key in ("path", "file", "tensor", "key") if note.get(key))
    message = str(note.get("message", ""))
    return f"{message} ({place})" if place else message


def _head(document: Document) -> Facts:
    total = document.get("total") or {}
    rows: list[tuple[str, Cell]] = [("path", Styled(str(document.get("path", "")), "strong"))]
    if document.get("resolved"):
        rows.append(("", f"({document['resolved']})"))
    rows.append(("format", str(document.get("format", "?"))))
    rows.append(("mesh", mesh_text(document.get("mesh"))))
    numbers = [plural(int(total.get("tensors", 0)), "tensor"), size(total.get("bytes", 0))]
    if total.get("parameters"):
        numbers.insert(1, f"{parameters(total['parameters'])} parameters")
    rows.append(("total", ", ".join(numbers)))
    if document.get("delta"):
        rows.append(("delta", delta_text(document["delta"])))
    if document.get("quantization"):
        rows.append(("quantized", _describe_quantised(document["quantization"])))
    return Facts(tuple(rows))


def _missing(document: Document, *, everything: bool) -> Iterator[Block]:
    """What is not there: its files, with rank, tensors and bytes where these are known, then its tensors."""
    missing = document["missing"]
    files = missing["files"]
    tensors = missing["tensors"]
    counts = [plural(len(rows), noun) for rows, noun in ((files, "file"), (tensors, "tensor")) if rows]
    size_text = f", {size(missing['bytes'])}" if missing["bytes"] else ""
    missing_text = f"{' and '.join(counts)}{size_text}" if counts else missing["error"]["message"]
    remark = "below is what is there" if document["tensors"] else "nothing else says anything"
    yield Verdict(False, f"missing: {missing_text}; {remark}")

    shown_files = files if everything else files[:MISSING_SHOWN]
    if files:
        columns = (
            Column("missing file"),
            Column("rank", drop=1),
            Column("tensors", right=True, drop=2),
            Column("bytes", right=True, drop=3),
        )
        rows = tuple(map(_missing_file_row, shown_files))
        yield PageTable("", columns, rows, more=more(len(files) - len(rows), "file"))

    shown_tensors = tensors if everything else tensors[:MISSING_SHOWN]
    if tensors:
        yield PageTable(
            "",
            (Column("missing of these tensors"), STATE, Column("bytes", right=True, drop=2)),
            tuple(
                (row["name"], row["state"], "" if row["bytes"] is None else size(row["bytes"])) for row in shown_tensors
            ),
            more=more(len(tensors) - len(shown_tensors), "tensor"),
        )


def _missing_file_row(file: Document) -> tuple[str, ...]:
    return (
        file["path"],
        " ".join(f"{dim} {index}" for dim, index in file["rank"].items()),
        "" if file["tensors"] is None else count(file["tensors"]),
        "" if file["bytes"] is None else size(file["bytes"]),
    )


def _describe_quantised(found: Document) -> str:
    """`fp8: 1,024 weights of 8 bits, a scale for each 128 x 128`."""
    text = str(found.get("scheme"))
    bits = " and ".join(map(str, found.get("bits") or ()))
    blocks: Sequence[Sequence[int]] = found.get("blocks") or []
    if found.get("weights"):
        text += f": {plural(int(found['weights']), 'weight')} of {bits} bits"
        text += f", a scale for each {blocks[0][0]} x {blocks[0][1]}" if len(blocks) == 1 else ""
    text += "" if found.get("dequantizes") else "; --dequantize does not know it"
    return text + (f"; {plural(len(found['faults']), 'fault')}" if found.get("faults") else "")


def _security(document: Document) -> Lines | None:
    """Every global that the pickles name, those that would run code in red and first."""
    if "security" not in document:
        return None
    unsafe = [str(entry) for entry in document["security"].get("unsafe") or ()]
    lines: list[Cell] = [Styled(f"UNSAFE global {text}", "bad") for text in unsafe]
    lines += [text for entry in document["security"].get("globals") or () if (text := str(entry)) not in unsafe]
    files = document["security"].get("files") or ()
    unseen = [file for file in files if file["unseen"]]
    lines += [Styled(f"not looked into: {file['file']} {file['member']}: {file['unseen']}", "bad") for file in unseen]
    with_pickles = list(dict.fromkeys(file["file"] for file in files))
    if with_pickles:
        lines.append(f"pickles in {plural(len(with_pickles), 'file')}: {', '.join(with_pickles[:FILES_SHOWN])}")
    return Lines("security", tuple(lines) or ("no pickle names a global",))


def _states_and_dtypes(document: Document, tensors: Sequence[Document]) -> Iterator[PageTable]:
    by_state: dict[str, dict[str, None]] = {}
    by_dtype: dict[str, list[int]] = {}
    for state, dtype, number, nbytes in _kinds(tensors):
        by_state.setdefault(state, {})[dtype] = None
        row = by_dtype.setdefault(dtype, [0, 0])
        row[0] += number
        row[1] += nbytes
    states = document.get("states") or {}
    numbers = (Column("tensors", right=True), Column("bytes", right=True))
    yield PageTable(
        "",
        (STATE, *numbers, Column("dtypes")),
        tuple(
            (name, count(row["tensors"]), size(row["bytes"]), " ".join(by_state.get(name, ())))
            for name, row in states.items()
        ),
    )
    if len(by_dtype) > 1:
        ordered = sorted(by_dtype.items(), key=lambda item: -item[1][1])
        yield PageTable(
            "",
            (Column("dtype"), *numbers),
            tuple((name, count(number), size(nbytes)) for name, (number, nbytes) in ordered),
        )


def _kinds(tensors: Sequence[Document]) -> Iterator[tuple[str, str, int, int]]:
    """(state, dtype, tensors, bytes), of single tensors or of many alike."""
    if isinstance(tensors, Listing):
        for (state, (dtype, _, nbytes)), number in tensors.tally().items():
            yield state, dtype.name, number, number * nbytes
        return
    for tensor in tensors:
        yield tensor["state"], tensor["dtype"], 1, tensor["bytes"]


def _fold_names(listing: Listing, depth: int | None) -> PageTable:
    """The names as a tree, from columns. Names of several states are joined row by row."""
    if len({block.state for block in listing.blocks}) > 1:
        return _tree(listing, depth)
    folding = Folding()
    for (state, names, kinds), distinct in zip(listing.blocks, listing.distinct, strict=True):
        numbers = {id(kind): folding.leaf((state, kind[0].name, kind[1], ""), kind[2]) for kind, _ in distinct}
        folding.add(names(), map(numbers.__getitem__, map(id, kinds)))
    return _table(FoldedTree(folding), depth, placed=False, title="")


def _tree(tensors: Sequence[Document], depth: int | None) -> PageTable:
    """The names as a tree; a tensor's states share its line."""
    has_chunks = any("chunks" in tensor for tensor in tensors)
    states = list(dict.fromkeys(tensor["state"] for tensor in tensors))
    rows = (
        (
            t["name"],
            (t["state"], t["dtype"], tuple(t["shape"]), _cut(t) if has_chunks else ""),
            t["bytes"],
        )
        for t in tensors
    )
    title = "" if len(states) == 1 else f"each name with its states: {', '.join(states)}"
    return _table(FoldedTree(rows if len(states) == 1 else _join_states(rows)), depth, placed=has_chunks, title=title)


def _table(tree: FoldedTree, depth: int | None, *, placed: bool, title: str) -> PageTable:
    lines = tree.lines(depth=depth)
    columns = [Column("tensor"), Column("count", right=True, drop=3), Column("dtype"), Column("shape")]
    columns += [Column("cut", drop=1)] if placed else []
    columns.append(Column("bytes", right=True, drop=2))
    table: list[tuple[Cell, ...]] = []
    for line in lines:
        dtype, extents, cut = _leaf(line.what) if line.what is not None else ("", "", "")
        label: Cell = f"{line.label} (as {line.twin})" if line.twin else line.label
        if line.what is None:
            label = Styled(str(label), "name")
        table.append((label, count(line.tensors), dtype, extents, *([cut] if placed else []), size(line.nbytes)))
    levels = tuple(line.level for line in lines)
    return PageTable(title, tuple(columns), tuple(table), levels, drawn=True)


def _join_states(rows: Iterator[tuple[str, tuple[Any, ...], int]]) -> Iterator[tuple[str, tuple[Any, ...], int]]:
    """One row a name: its states' facts as a tuple, its bytes as their sum."""
    whats: dict[str, tuple[Any, ...]] = {}
    sizes: dict[str, int] = {}
    for name, facts, nbytes in rows:
        whats[name] = (*whats.get(name, ()), facts)
        sizes[name] = sizes.get(name, 0) + nbytes
    for name, states in whats.items():
        yield name, states, sizes[name]


def _leaf(what: Any) -> tuple[str, str, str]:
    """(dtypes, shape, cut) of a tensor, or of one in several states: the shape is the parameter's, scalars aside."""
    states = what if isinstance(what[0], tuple) else (what,)
    main = max(states, key=lambda state: len(state[2]))
    return " ".join(dict.fromkeys(state[1] for state in states)), shape(main[2]), main[3]


def _cut(tensor: Document) -> str:
    """How the chunks tile the tensor: `4x1`, with the number of replicas where there are any."""
    chunks = tensor.get("chunks") or ()
    offsets = [tuple(chunk["offset"]) for chunk in chunks]
    boxes = len(set(offsets))
    if not chunks or not tensor["shape"]:
        return f"{len(chunks)} replicas" if len(chunks) > 1 else ""
    grid = [len(set(starts)) for starts in zip(*offsets, strict=True)]
    text = "x".join(map(str, grid)) if prod(grid) == boxes else f"{boxes} boxes"
    if len(chunks) != boxes:
        return f"{text}, {len(chunks)} chunks"
    return text if boxes > 1 else "whole"


def _stats(tensors: Sequence[Document]) -> PageTable:
    columns = (
        Column("tensor"),
        STATE,
        Column("dtype", drop=1),
        *(Column(s, right=True) for s in STATS),
    )
    rows = []
    for tensor in tensors:
        stats = tensor.get("stats") or {}
        cells: list[Cell] = []
        for key in STATS:
            value = stats.get(key)
            text = "" if value is None else str(value)
            if isinstance(value, float):
                text = f"{value:.4g}"
            cells.append(Styled(text, "bad") if key in ("nan", "inf") and value else text)
        rows.append((tensor["name"], tensor["state"], tensor["dtype"], *cells))
    return PageTable("values", columns, tuple(rows))


def _files(tensors: Sequence[Document], *, everything: bool) -> Iterator[PageTable]:
    """Which file holds how much, and for which rank (with `--placement` alone)."""
    files: dict[str, list[Any]] = {}
    for tensor in tensors:
        numel = prod(tensor["shape"])
        for chunk in tensor.get("chunks") or ():
            row = files.setdefault(chunk["file"], [chunk.get("rank") or {}, 0, 0.0])
            row[1] += 1
            row[2] += tensor["bytes"] * prod(chunk["shape"]) / numel if numel else 0
    if not files:
        return
    columns = (Column("file"), Column("rank", drop=1), Column("chunks", right=True), Column("bytes", right=True))
    names = sorted(files)
    listed = names if everything else names[:FILES_SHOWN]
    rows = []
    for name in listed:
        rank, chunks, nbytes = files[name]
        coords = (
            " ".join(f"{dim} {coordinate}" for dim, coordinate in rank.items())
            if isinstance(rank, Mapping)
            else str(rank)
        )
        rows.append((name, coords, count(chunks), size(nbytes)))
    yield PageTable("", columns, tuple(rows), more=more(len(names) - len(listed), "file"), drawn=True)


def _metadata(stated: Mapping[str, Any], *, everything: bool) -> Facts:
    """What the files' header states; of long texts the beginning."""
    names = list(stated) if everything else list(stated)[:METADATA_SHOWN]
    rows: list[tuple[str, Cell]] = []
    for name in names:
        text = " ".join(_extra(stated[name]).split())
        rows.append((name, text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}..."))
    if len(stated) > len(names):
        rows.append(("...", f"{len(stated) - len(names)} more; -v lists all"))
    return Facts(tuple(rows), title="metadata")


def _extras(extras: Mapping[str, Any], *, everything: bool) -> Facts:
    names = list(extras) if everything else list(extras)[:EXTRAS_SHOWN]
    rows: list[tuple[str, Cell]] = [(str(name), _extra(extras[name])) for name in names]
    if len(extras) > len(names):
        rows.append(("...", f"{len(extras) - len(names)} more; -v lists all"))
    return Facts(tuple(rows), title="extras")


def _extra(value: Any) -> str:
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, list(value)[:4]))
        return f"{{{keys}{', ...' if len(value) > 4 else ''}}} ({plural(len(value), 'entry')})"
    if isinstance(value, list | tuple):
        return (
            str(list(value))
            if len(value) <= 8 and all(not isinstance(v, list | Mapping) for v in value)
            else f"[{len(value)} items]"
        )
    return str(value)
