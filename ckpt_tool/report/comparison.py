"""`ckpt diff` and `ckpt verify` as pages: the findings by tensor, and a verdict in one line.

Fields that are read from the documents of the two verbs:

    diff     `equal`, `compared`, `differences`, `summary`, `by_rank`, `suggestion`; if given `left`, `right`,
             `extras_differ`
    verify   `ok`, `findings`, `digests`; if given `path`, `format`, `mode`, `nonfinite` ({tensor: number}), `uncovered`
             (files with bytes that no checksum covers), `signature` and `attestation` (`signing.checked`)
    both     if given `notes`, `elapsed_s`
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median_low
from typing import Any

from ckpt_tool.core.tensor import EMA, MASTER, MODEL, STEP
from ckpt_tool.report.difference_groups import numbers_of, severity
from ckpt_tool.report.inspection import note_text
from ckpt_tool.report.page import STATE, Block, Cell, Column, Facts, Lines, Page, PageTable, Styled, Verdict
from ckpt_tool.report.text import count, duration, more, plural, size

Document = Mapping[str, Any]
LISTED = 40  # lines of a list without -v
FIRST_STATE_ROWS = 20  # groups of the first state that has any, without -v
OTHER_STATE_ROWS = 5  # groups of each further state, without -v
LAYERS_LISTED = 10
CANDIDATES_SHOWN = 4  # files named by a finding that is in one of several files
ALIKE = 2.0  # layers count as changed alike if the largest relative norm is at most so many times the median
SMALL_ULP = 16  # up to this distance, units in the last place are more informative than the absolute difference
SHOWN_ULP = 1024  # larger distances in units in the last place are not shown, since they carry no information
KINDS = {
    "value": "values differ",
    "shape": "shapes differ",
    "dtype": "dtypes differ",
    "missing_left": "only in the second",
    "missing_right": "only in the first",
}

_AMOUNT_COLUMNS = (
    Column("rel. L2", right=True),
    Column("cosine", right=True, drop=5),
    Column("max abs", right=True, drop=4),
)
_WORST = Column("worst", right=True)  # the number (such as the layer) of the tensor to which the amounts belong
_ULP = Column("ulp", right=True, drop=8)
_CHANGED_COLUMNS = (
    Column("module"),
    Column("changed", right=True),
    _WORST,
    *_AMOUNT_COLUMNS,
)
_TENSOR_COLUMNS = (
    Column("tensor"),
    STATE,
    *_AMOUNT_COLUMNS,
    _ULP,
    Column("elements", right=True, drop=6),
    Column("first at", right=True, drop=7),
)


def comparison(document: Document, *, everything: bool = False) -> Page:
    """The page of `ckpt diff`: the summary by state and module, with -v every tensor, then the verdict."""
    differences = document.get("differences") or ()
    summary = document.get("summary") or ()
    blocks: list[Block] = []

    sides = [
        (label, str(document[key])) for key, label in (("left", "first"), ("right", "second")) if document.get(key)
    ]
    if sides:
        blocks.append(Facts(tuple(sides)))

    if differences:
        blocks += _changed_groups(summary, everything=everything)
        blocks += _list_layers(document.get("by_layer") or ())
        blocks += _other_kinds(summary, everything=everything)
        blocks += _one_sided_groups(summary, everything=everything)
        blocks += _equal_states(summary)
        blocks += _list_holders(document.get("by_rank") or (), everything=everything)
        if everything or not summary:
            blocks += _each_difference(differences, everything=everything)
        blocks.append(_count_kinds(differences))

    blocks += _notes(document)
    if document.get("extras_differ"):
        blocks.append(Lines("extras that differ (shown, not counted)", tuple(map(str, document["extras_differ"]))))
    if document.get("suggestion"):
        blocks.append(Lines("", (Styled(str(document["suggestion"]), "warn"),)))
    blocks.append(_verdict_of(document, differences))
    return Page("ckpt diff", tuple(blocks))


def _verdict_of(document: Document, differences: Sequence[Document]) -> Verdict:
    compared = int(document.get("compared", 0))
    if document.get("equal"):
        return Verdict(True, f"equal: {plural(compared, 'tensor')} compared{_format_duration(document)}")
    names = len({(difference["name"], difference.get("state")) for difference in differences})
    total = count(max(compared, names))
    return Verdict(False, f"not equal: {plural(names, 'tensor')} of {total} differ{_format_duration(document)}")


def _changed_groups(summary: Sequence[Document], *, everything: bool) -> list[Block]:
    """For each state, a table of the groups whose values differ, worst first. The model comes first."""
    by_state: dict[str, list[Document]] = {}
    for group in summary:
        if group["changed"]:
            by_state.setdefault(group["state"], []).append(group)
    states = sorted(by_state, key=_order_of_state)

    blocks: list[Block] = []
    for state in states:
        groups = sorted(by_state[state], key=_severity_of_group)
        limit = FIRST_STATE_ROWS if state == states[0] else OTHER_STATE_ROWS
        listed = groups if everything else groups[:limit]
        title = f"{state}: what differs, worst first"
        if any(group["changed"] > 1 for group in listed):
            title += " (amounts of each row's worst tensor)"
        rows = tuple(_changed_row(group) for group in listed)
        hidden = more(len(groups) - len(listed), "group")
        table = PageTable(title, _CHANGED_COLUMNS, rows, more=hidden, one_line=True)
        blocks.append(_without_empty(table, _CHANGED_COLUMNS.index(_WORST)))

    left_out = sum(int(group["nonfinite"]) for groups in by_state.values() for group in groups)
    if left_out:
        line = f"{plural(left_out, 'element')} with NaN or Inf on either side: not in the norms and cosines"
        blocks.append(Lines("", (line,)))
    return blocks


def _order_of_state(state: str) -> int:
    """The sort key of states: weights first, step counts last, the optimizer's other states between them."""
    weights = (MODEL, MASTER, EMA)
    if state in weights:
        return weights.index(state)
    return len(weights) + (state == STEP)


def _severity_of_group(group: Document) -> tuple[float, float]:
    return severity(group.get("worst") or group)


def _changed_row(group: Document) -> tuple[Cell, ...]:
    both_sides = int(group["tensors"]) - int(group["only_left"]) - int(group["only_right"])
    changed = f"{count(group['changed'])} of {count(both_sides)}"
    worst = group.get("worst") or group
    number = ".".join(map(str, numbers_of(worst["name"]))) if "name" in worst and group["changed"] > 1 else ""
    return group["names"]["changed"], changed, number, *_amounts(worst)


def _amounts(entry: Document) -> tuple[str, str, str]:
    """The cells of the relative L2 norm, the cosine and the greatest absolute difference."""
    cosine = entry.get("cosine")
    return _number(entry.get("rel_l2")), "" if cosine is None else f"{float(cosine):.6f}", _greatest(entry)


def _greatest(entry: Document) -> str:
    """The greatest absolute difference, with the distance in units in the last place if that is small."""
    gap = _number(entry.get("max_abs"))
    ulp = entry.get("max_ulp")
    return f"{gap} ({ulp} ulp)" if ulp is not None and 0 < int(ulp) <= SMALL_ULP else gap


def _other_kinds(summary: Sequence[Document], *, everything: bool) -> list[Block]:
    """The groups whose shapes or dtypes differ, a table for each."""
    blocks: list[Block] = []
    for key, kind in (("other_shape", "shape"), ("other_dtype", "dtype")):
        groups = sorted((group for group in summary if group[key]), key=lambda group: _order_of_state(group["state"]))
        if groups:
            listed = groups if everything else groups[:FIRST_STATE_ROWS]
            columns = [Column("module"), STATE, Column("tensors", right=True)]
            rows = [[group["names"][key], group["state"], count(int(group[key]))] for group in listed]
            if kind == "dtype":
                columns += [Column("first / second"), Column("as numbers")]
                for row, group in zip(rows, listed, strict=True):
                    row += [", ".join(group["dtypes"]), _as_numbers(group)]
            cells = tuple(map(tuple, rows))
            hidden = more(len(groups) - len(listed), "group")
            blocks.append(PageTable(KINDS[kind], tuple(columns), cells, more=hidden, one_line=True))
    return blocks


def _as_numbers(group: Document) -> str:
    """The difference of the numbers in a group's tensors of two dtypes; "" if they can't be compared as numbers."""
    worst = group["dtype_worst"]
    if worst is not None:
        relative = worst.get("rel_l2")
        amount = f"relative L2 {_number(relative)}" if relative is not None else f"max abs {_number(worst['max_abs'])}"
        return f"{amount} (worst)" if int(group["other_dtype"]) > 1 else amount
    return "equal" if group["equal_values"] == group["other_dtype"] else ""


def _list_layers(layers: Sequence[Document]) -> list[Block]:
    """The layers of the first state, worst first; a single line if all of them changed alike."""
    if not layers:
        return []
    state = min((layer["state"] for layer in layers), key=_order_of_state)
    of_state = [layer for layer in layers if layer["state"] == state]
    if len(of_state) < 2:
        return []

    amounts = [inf if layer["rel_l2"] is None else float(layer["rel_l2"]) for layer in of_state]
    if amounts[0] <= ALIKE * median_low(amounts):
        least, largest = (_number(layer["rel_l2"]) for layer in (of_state[-1], of_state[0]))
        if not largest:
            return []
        line = f"{state}: all {len(of_state)} layers changed alike, relative L2 {least} to {largest}"
        return [Lines("", (line,))]

    columns = (
        Column("layer"),
        Column("tensors", right=True),
        *_AMOUNT_COLUMNS,
    )
    listed = of_state[:LAYERS_LISTED]
    rows = tuple((layer["layer"], count(layer["changed"]), *_amounts(layer)) for layer in listed)
    hidden = len(of_state) - len(listed)
    closing = f"... {plural(hidden, 'layer')} that changed less; --json lists all" if hidden else ""
    title = f"{state}: by layer, worst first (relative L2 of what changed in it)"
    return [PageTable(title, columns, rows, more=closing, one_line=True)]


def _number(value: Any) -> str:
    """A difference in scientific notation, `3.81e-06`, so that the numbers of a column align; "" for None."""
    return "" if value is None else f"{float(value):.2e}"


def _one_sided_groups(summary: Sequence[Document], *, everything: bool) -> list[Block]:
    """For each side, a table of the groups with tensors that only this side has."""
    blocks: list[Block] = []
    for key, title in (("only_left", "only in the first"), ("only_right", "only in the second")):
        groups = [group for group in summary if group[key]]
        if groups:
            listed = groups if everything else groups[:LISTED]
            rows = tuple((group["names"][key], group["state"], count(int(group[key]))) for group in listed)
            columns = (Column("module"), STATE, Column("tensors", right=True))
            blocks.append(PageTable(title, columns, rows, more=more(len(groups) - len(listed), "group")))
    return blocks


def _equal_states(summary: Sequence[Document]) -> list[Block]:
    """The number of equal tensors of each state."""
    equal: dict[str, int] = {}
    for group in summary:
        equal[group["state"]] = equal.get(group["state"], 0) + int(group["equal"])
    lines = tuple(f"{state}: {plural(number, 'tensor')}" for state, number in equal.items() if number)
    return [Lines("equal", lines)] if lines else []


def _list_holders(rows: Sequence[Document], *, everything: bool) -> list[Block]:
    """The files with differing values, with side and rank (`--rank`), most differing elements first."""
    if not rows:
        return []
    listed = rows if everything else rows[:LISTED]
    columns = (
        Column("file"),
        Column("side"),
        Column("rank"),
        Column("tensors", right=True),
        Column("elements", right=True),
        Column("max abs", right=True, drop=1),
    )
    table = tuple(
        (row["file"], row["side"], row["rank"], count(row["tensors"]), count(row["elements"]), _number(row["max_abs"]))
        for row in listed
    )
    return [PageTable("where it is stored", columns, table, more=more(len(rows) - len(listed), "file"))]


def _each_difference(differences: Sequence[Document], *, everything: bool) -> list[Block]:
    """The tensors whose values differ, by state and worst first, then those that differ otherwise."""
    changed = [difference for difference in differences if difference["kind"] == "value"]
    changed.sort(key=lambda difference: (_order_of_state(difference.get("state", "")), severity(difference)))
    others = [difference for difference in differences if difference["kind"] != "value"]
    blocks: list[Block] = []

    if changed:
        listed = changed if everything else changed[:LISTED]
        rows = tuple(_changed_tensor(difference) for difference in listed)
        hidden = more(len(changed) - len(listed), "difference")
        title = "tensors whose values differ, worst first"
        table = PageTable(title, _TENSOR_COLUMNS, rows, more=hidden, drawn=True, one_line=True)
        blocks.append(_without_empty(table, _TENSOR_COLUMNS.index(_ULP)))

    if others:
        listed = others if everything else others[:LISTED]
        columns = (Column("tensor"), STATE, Column("what"), Column("first / second"))
        other_rows: tuple[tuple[Cell, ...], ...] = tuple(
            (each["name"], each.get("state", ""), KINDS.get(each["kind"]) or each["kind"], _both_sides(each))
            for each in listed
        )
        hidden = more(len(others) - len(listed), "difference")
        blocks.append(PageTable("tensors that differ otherwise", columns, other_rows, more=hidden, drawn=True))
    return blocks


def _changed_tensor(difference: Document) -> tuple[Cell, ...]:
    ulp = difference.get("max_ulp")
    elements = difference.get("elements")
    index = difference.get("first_index")
    cosine = difference.get("cosine")
    return (
        difference["name"],
        difference.get("state", ""),
        _number(difference.get("rel_l2")),
        "" if cosine is None else f"{float(cosine):.6f}",
        _number(difference.get("max_abs")),
        count(int(ulp)) if ulp is not None and 0 < int(ulp) <= SHOWN_ULP else "",
        "" if elements is None else count(int(elements)),
        "" if index is None else str(list(index)),
    )


def _without_empty(table: PageTable, index: int) -> PageTable:
    """The table without one column if none of its rows has anything there."""
    if any(row[index] for row in table.rows):
        return table
    columns = table.columns[:index] + table.columns[index + 1 :]
    rows = tuple(row[:index] + row[index + 1 :] for row in table.rows)
    return table._replace(columns=columns, rows=rows)


def _both_sides(difference: Document) -> str:
    """The shapes or dtypes of both sides if they differ, for dtypes with the difference of the numbers; else ""."""
    if "left" not in difference or "right" not in difference:
        return ""
    sides = f"{difference['left']} / {difference['right']}"
    if "values_equal" not in difference:
        return sides
    if difference["values_equal"]:
        return f"{sides}, equal as numbers"
    relative = difference.get("rel_l2")
    amount = f"max abs {_number(difference['max_abs'])}" if relative is None else f"relative L2 {_number(relative)}"
    return f"{sides}, {amount}"


def verification(document: Document, *, everything: bool = False) -> Page:
    """The page of `ckpt verify`: the verdict, then the facts and findings behind it. Only -v lists digests."""
    findings = document.get("findings") or ()
    blocks: list[Block] = [_validity(document, findings)]

    facts: list[tuple[str, Cell]] = [
        (key, str(document[key])) for key in ("path", "format", "mode") if document.get(key)
    ]
    facts += [
        (name, _seal(document[name], str(document.get("mode"))))
        for name in ("signature", "attestation")
        if document.get(name)
    ]
    if facts:
        blocks.append(Facts(tuple(facts)))

    blocks += _findings(findings, everything=everything)
    blocks += _never_covered(document, everything=everything)
    blocks += _nonfinite(document.get("nonfinite") or {}, everything=everything)
    blocks += _list_uncovered(document.get("uncovered") or ())
    blocks += _notes(document)
    if everything:
        blocks += _digests(document.get("digests") or {})
    return Page(f"ckpt verify {document.get('path', '')}", tuple(blocks))


def _validity(document: Document, findings: Sequence[Document]) -> Verdict:
    tensors = sum(len(names) for names in (document.get("digests") or {}).values())
    checked = f", {plural(tensors, 'tensor')}" if tensors else ""
    if document.get("ok"):
        return Verdict(True, f"complete and valid: no findings{checked}{_format_duration(document)}")
    return Verdict(False, f"not valid: {plural(len(findings), 'finding')}{checked}{_format_duration(document)}")


def _findings(findings: Sequence[Document], *, everything: bool) -> list[Block]:
    if not findings:
        return []
    listed = findings if everything else findings[:LISTED]
    columns = (Column("code"), Column("tensor"), Column("file", drop=1), Column("finding"))
    rows = tuple(
        (
            Styled(finding.get("code") or "", "bad"),
            finding.get("tensor") or "",
            place_of(finding),
            finding.get("message") or "",
        )
        for finding in listed
    )
    has_long_messages = any(len(row[3]) > 60 for row in rows)
    blocks: list[Block] = [_as_lines(rows) if has_long_messages else PageTable("findings", columns, rows, drawn=True)]
    if len(findings) > len(listed):
        blocks.append(Lines("", (more(len(findings) - len(listed), "finding"),)))
    return blocks


def _never_covered(document: Document, *, everything: bool) -> list[Block]:
    """The files that a signature or an attestation leaves out by its own rules, or because they are next to its
    folder."""
    blocks: list[Block] = []
    for name in ("signature", "attestation"):
        entry = document.get(name) or {}
        titles = {
            "ignored": f"never covered by the {name}",
            "outside": f"not covered by the {name}, next to the signed folder",
        }
        for field, title in titles.items():
            files = entry.get(field)
            if files:
                listed = files if everything else files[:LISTED]
                lines = (*listed, more(len(files) - len(listed), "file"))
                blocks.append(Lines(title, lines))
    return blocks


def _nonfinite(numbers: Mapping[str, int], *, everything: bool) -> list[Block]:
    if not numbers:
        return []
    lines = [f"{name}: {count(number)}" for name, number in numbers.items()]
    listed = lines if everything else lines[:LISTED]
    title = "NaN or Inf values (shown, not counted)"
    return [Lines(title, (*listed, more(len(lines) - len(listed), "tensor")))]


def place_of(finding: Document) -> str:
    """The place of a finding: its file and, if known, the rank, the byte offset and the member of a zip archive."""
    offset = finding.get("offset")
    at_byte = None if offset is None else f"byte {offset}"
    rank = finding.get("rank") or None
    if rank is not None and not rank.startswith("rank "):  # a rank is `tp 1, pp 0`, or `rank 2` without coordinates
        rank = f"rank {rank}"
    file = finding.get("file") or _name_candidates(finding.get("files") or ())
    parts = [file, rank, at_byte, finding.get("place")]
    return ", ".join(str(part) for part in parts if part)


def _name_candidates(files: Sequence[str]) -> str:
    """`one of a.safetensors, b.safetensors` for a finding that is in one of several files; "" without any."""
    if not files:
        return ""
    names = [os.path.basename(file) for file in files]
    hidden = len(names) - CANDIDATES_SHOWN
    return "one of " + ", ".join(names[:CANDIDATES_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")


def _list_uncovered(rows: Sequence[Document]) -> list[Block]:
    """The bytes in which damage can't be detected: files without checksums, and headers and padding of other files."""
    uncovered_sizes = [int(row["size"]) for row in rows if row["bytes"] == row["size"]]
    parts = [int(row["bytes"]) for row in rows if row["bytes"] != row["size"]]
    lines = [f"{plural(len(uncovered_sizes), 'file')}, {size(sum(uncovered_sizes))}"] if uncovered_sizes else []
    if parts:
        files = plural(len(parts), "other file" if uncovered_sizes else "file")
        lines.append(f"{size(sum(parts))} of headers and padding in {files}")
    return [Facts((("not covered by a checksum", "; ".join(lines)),))] if lines else []


def _count_kinds(differences: Any) -> Lines:
    kinds: dict[str, int] = {}
    for difference in differences:
        kinds[difference["kind"]] = kinds.get(difference["kind"], 0) + 1
    return Lines("differences", tuple(f"{KINDS.get(kind, kind)}: {count(number)}" for kind, number in kinds.items()))


def _as_lines(rows: tuple[tuple[Cell, ...], ...]) -> Lines:
    """Findings with long messages as lines in place of a table: code, message, place."""
    lines = []
    for code, tensor, file, message in rows:
        named = f"tensor {tensor}" if tensor else ""
        place = ", ".join(str(part) for part in (file, named) if part)
        lines.append(f"{code.text if isinstance(code, Styled) else code}: {message}{f' ({place})' if place else ''}")
    return Lines("findings", tuple(lines), drawn=True)


def _seal(said: Mapping[str, Any], mode: str) -> str:
    """What a signature or an attestation proves: which files it covers, and whether the given key made it."""
    whose = {True: "by the key given", False: "not by the key given", None: "not checked against a key: --key PUB"}
    signed = whose[said["authentic"]] if said["signed"] else "not signed"
    looked = "" if mode == "full" else ", whose contents were not looked at"
    return f"{plural(said['files'], 'file')} in {said['file']}{looked}; {signed}"


def _digests(digests: Mapping[str, Mapping[str, str]]) -> list[Block]:
    rows = [(name, state, digest) for state, names in digests.items() for name, digest in names.items()]
    columns = (Column("tensor"), STATE, Column("digest"))
    return [PageTable("digests", columns, tuple(rows), drawn=True)] if rows else []


def _notes(document: Document) -> list[Block]:
    notes = document.get("notes") or ()
    return [Lines("notes", tuple(note_text(note) for note in notes))] if notes else []


def _format_duration(document: Document) -> str:
    return f" in {duration(document['elapsed_s'])}" if document.get("elapsed_s") is not None else ""
