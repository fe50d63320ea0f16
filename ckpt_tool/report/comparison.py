"""`ckpt diff` and `ckpt verify` as pages: what was found, by tensor, and one line that says how it stands.

Reads the documents of the two verbs: `equal`, `compared`, `differences`, `summary`, `by_rank`, `suggestion`; `ok`,
`findings`, `digests`; and, where given, the
`left`, `right` and `extras_differ`, `path`, `format`, `mode`, `nonfinite` ({tensor: number}), `uncovered` (files with
bytes that no checksum covers), `signature` and `attestation` (`signing.checked`), `notes`, `elapsed_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.report.inspection import note_text
from ckpt_tool.report.page import STATE, Block, Cell, Column, Facts, Lines, Page, PageTable, Styled, Verdict
from ckpt_tool.report.text import count, duration, more, plural, size

Document = Mapping[str, Any]
LISTED = 40  # lines of a list without -v
SMALL_ULP = 16  # a distance in units in the last place that says more than the absolute difference
KINDS = {
    "value": "values differ",
    "shape": "shapes differ",
    "dtype": "dtypes differ",
    "missing_left": "only in the second",
    "missing_right": "only in the first",
}


def comparison(document: Document, *, everything: bool = False) -> Page:
    """The page of `ckpt diff`: the summary by state and module, with -v every tensor, then how it stands."""
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
        blocks += _one_sided_groups(summary, everything=everything)
        blocks += _equal_states(summary)
        blocks += _by_holder(document.get("by_rank") or (), everything=everything)
        if everything or not summary:
            blocks.append(_each_difference(differences, everything=everything))
        blocks.append(_by_kind(differences))

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
        return Verdict(True, f"equal: {plural(compared, 'tensor')} compared{_in(document)}")
    names = len({(difference["name"], difference.get("state")) for difference in differences})
    total = count(max(compared, names))
    return Verdict(False, f"not equal: {plural(names, 'tensor')} of {total} differ{_in(document)}")


def _changed_groups(summary: Sequence[Document], *, everything: bool) -> list[Block]:
    """The groups of which both sides have tensors that differ, worst first."""
    groups = [group for group in summary if group["changed"] or group["other_shape"] or group["other_dtype"]]
    if not groups:
        return []

    listed = groups if everything else groups[:LISTED]
    columns = (
        Column("module"),
        STATE,
        Column("changed", right=True),
        Column("relative L2", right=True),
        Column("cosine", right=True, drop=1),
        Column("max abs", right=True),
    )
    rows = tuple(_changed_row(group) for group in listed)
    blocks: list[Block] = [
        PageTable("what differs, worst first", columns, rows, more=more(len(groups) - len(listed), "group"))
    ]

    left_out = sum(int(group["nonfinite"]) for group in groups)
    if left_out:
        line = f"{plural(left_out, 'element')} with NaN or Inf on either side: not in the norms and cosines"
        blocks.append(Lines("", (line,)))
    return blocks


def _changed_row(group: Document) -> tuple[Cell, ...]:
    both_sides = int(group["tensors"]) - int(group["only_left"]) - int(group["only_right"])
    differing = int(group["changed"]) + int(group["other_shape"]) + int(group["other_dtype"])
    changed = f"{count(differing)} of {count(both_sides)}"
    names = group["names"]
    if not group["changed"]:
        kind = "other_shape" if group["other_shape"] else "other_dtype"
        return names[kind], group["state"], changed, kind.replace("_", " "), "", ""
    relative = _number(group["rel_l2"])
    cosine = "" if group["cosine"] is None else f"{float(group['cosine']):.6f}"
    return names["changed"], group["state"], changed, relative, cosine, _greatest(group)


def _greatest(group: Document) -> str:
    """The greatest absolute difference; with its distance in units in the last place where that is small."""
    gap = _number(group["max_abs"])
    ulp = group["max_ulp"]
    return f"{gap} ({ulp} ulp)" if ulp is not None and 0 < int(ulp) <= SMALL_ULP else gap


def _number(value: Any) -> str:
    """A difference, always in one notation, so that the numbers of a column stand under each other: `3.81e-06`."""
    return "" if value is None else f"{float(value):.2e}"


def _one_sided_groups(summary: Sequence[Document], *, everything: bool) -> list[Block]:
    """The groups of which one side lacks tensors, a table for each side."""
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
    """How many tensors of each state are equal."""
    equal: dict[str, int] = {}
    for group in summary:
        equal[group["state"]] = equal.get(group["state"], 0) + int(group["equal"])
    lines = tuple(f"{state}: {plural(number, 'tensor')}" for state, number in equal.items() if number)
    return [Lines("equal", lines)] if lines else []


def _by_holder(rows: Sequence[Document], *, everything: bool) -> list[Block]:
    """Which rank's files of which side hold what differs (`--rank`), most elements first."""
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


def _each_difference(differences: Sequence[Document], *, everything: bool) -> PageTable:
    listed = differences if everything else differences[:LISTED]
    columns = (Column("tensor"), STATE, Column("what"), Column("where, how much"))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (d["name"], d.get("state", ""), KINDS.get(d["kind"]) or d["kind"], _detail(d)) for d in listed
    )
    return PageTable("", columns, rows, more=more(len(differences) - len(listed), "difference"), drawn=True)


def verification(document: Document, *, everything: bool = False) -> Page:
    """The page of `ckpt verify`: the verdict, then what it rests on. Digests are listed with -v alone."""
    findings = document.get("findings") or ()
    blocks: list[Block] = [_validity(document, findings)]

    facts: list[tuple[str, Cell]] = [
        (key, str(document[key])) for key in ("path", "format", "mode") if document.get(key)
    ]
    facts += [
        (what, _seal(document[what], str(document.get("mode"))))
        for what in ("signature", "attestation")
        if document.get(what)
    ]
    if facts:
        blocks.append(Facts(tuple(facts)))

    blocks += _findings(findings, everything=everything)
    blocks += _never_covered(document, everything=everything)
    blocks += _nonfinite(document.get("nonfinite") or {}, everything=everything)
    blocks += _uncovered(document.get("uncovered") or ())
    blocks += _notes(document)
    if everything:
        blocks += _digests(document.get("digests") or {})
    return Page(f"ckpt verify {document.get('path', '')}", tuple(blocks))


def _validity(document: Document, findings: Sequence[Document]) -> Verdict:
    tensors = sum(len(names) for names in (document.get("digests") or {}).values())
    checked = f", {plural(tensors, 'tensor')}" if tensors else ""
    if document.get("ok"):
        return Verdict(True, f"complete and valid: no findings{checked}{_in(document)}")
    return Verdict(False, f"not valid: {plural(len(findings), 'finding')}{checked}{_in(document)}")


def _findings(findings: Sequence[Document], *, everything: bool) -> list[Block]:
    if not findings:
        return []
    listed = findings if everything else findings[:LISTED]
    columns = (Column("code"), Column("tensor"), Column("file", drop=1), Column("finding"))
    rows = tuple(
        (Styled(each.get("code") or "", "bad"), each.get("tensor") or "", place_of(each), each.get("message") or "")
        for each in listed
    )
    has_long_messages = any(len(row[3]) > 60 for row in rows)
    blocks: list[Block] = [_as_lines(rows) if has_long_messages else PageTable("findings", columns, rows, drawn=True)]
    if len(findings) > len(listed):
        blocks.append(Lines("", (more(len(findings) - len(listed), "finding"),)))
    return blocks


def _never_covered(document: Document, *, everything: bool) -> list[Block]:
    """The files that a signature or an attestation leaves out by its own rules."""
    blocks: list[Block] = []
    for what in ("signature", "attestation"):
        ignored = (document.get(what) or {}).get("ignored")
        if ignored:
            listed = ignored if everything else ignored[:LISTED]
            lines = (*listed, more(len(ignored) - len(listed), "file"))
            blocks.append(Lines(f"never covered by the {what}", lines))
    return blocks


def _nonfinite(numbers: Mapping[str, int], *, everything: bool) -> list[Block]:
    if not numbers:
        return []
    lines = [f"{name}: {count(number)}" for name, number in numbers.items()]
    listed = lines if everything else lines[:LISTED]
    title = "NaN or Inf values (shown, not counted)"
    return [Lines(title, (*listed, more(len(lines) - len(listed), "tensor")))]


def place_of(finding: Document) -> str:
    """The file of a finding, with its rank, the byte and the finer place (a zip's member) where they are known."""
    offset = finding.get("offset")
    at_byte = None if offset is None else f"byte {offset}"
    rank = f"rank {finding['rank']}" if finding.get("rank") else None
    parts = [finding.get("file"), rank, at_byte, finding.get("place")]
    return ", ".join(str(part) for part in parts if part)


def _uncovered(rows: Sequence[Document]) -> list[Block]:
    """What damage can't be seen in: whole files, and of others what is around their checksummed records."""
    whole = [int(row["size"]) for row in rows if row["bytes"] == row["size"]]
    parts = [int(row["bytes"]) for row in rows if row["bytes"] != row["size"]]
    lines = [f"{plural(len(whole), 'file')}, {size(sum(whole))}"] if whole else []
    if parts:
        lines.append(f"{size(sum(parts))} around the records of {plural(len(parts), 'other' if whole else 'file')}")
    return [Facts((("no checksum covers", "; ".join(lines)),))] if lines else []


def _detail(difference: Document) -> str:
    parts = []
    if difference.get("first_index") is not None:
        parts.append(f"first at {list(difference['first_index'])}")
    if difference.get("max_ulp") is not None:
        parts.append(f"max {count(int(difference['max_ulp']))} ulp")
    if difference.get("elements") is not None:
        parts.append(plural(int(difference["elements"]), "element"))
    if difference.get("max_abs") is not None:
        parts.append(f"max abs {_number(difference['max_abs'])}")
    parts += [f"{difference['left']} / {difference['right']}"] if "left" in difference and "right" in difference else []
    return ", ".join(parts)


def _by_kind(differences: Any) -> Lines:
    kinds: dict[str, int] = {}
    for difference in differences:
        kinds[difference["kind"]] = kinds.get(difference["kind"], 0) + 1
    return Lines("", tuple(f"{KINDS.get(kind, kind)}: {count(number)}" for kind, number in kinds.items()))


def _as_lines(rows: tuple[tuple[Cell, ...], ...]) -> Lines:
    """Long findings, one each: code, message, then where."""
    lines = []
    for code, tensor, file, message in rows:
        where = ", ".join(str(part) for part in (file, tensor) if part)
        lines.append(f"{code.text if isinstance(code, Styled) else code}: {message}{f' ({where})' if where else ''}")
    return Lines("findings", tuple(lines), drawn=True)


def _seal(said: Mapping[str, Any], mode: str) -> str:
    """What a signature or an attestation is worth: whose it is, and of what."""
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


def _in(document: Document) -> str:
    return f" in {duration(document['elapsed_s'])}" if document.get("elapsed_s") is not None else ""
