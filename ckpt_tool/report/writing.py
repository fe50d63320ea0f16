"""What a writer (`reshard`, `convert`, `merge`, `apply`) is about to do, and what it did, as pages.

Reads the document of cli.md: `plan`, `fallbacks`, `removed`, `removed_bytes`, `dropped`, `elapsed_s`,
`digest_checked`; and `overflows`, `source`, `target`, `states`, `layout_source`, `notes`, `plan_file`, `job_file`,
`part`, `committed`, `quantized`. A run and a dry run show the same in the same order, on stdout: the plan (`before`, as
soon as it is known), then what came of it (`after`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.report.inspection import mesh_text, note_text
from ckpt_tool.report.page import STATE, Block, Cell, Column, Facts, Lines, Page, PageTable, Styled, Verdict
from ckpt_tool.report.text import count, duration, more, plural, ranges, shape, size

Document = Mapping[str, Any]
_SEALS = {"signed": "signature", "attested": "attestation"}  # word -> its key in the document
WORST = 5  # quantised weights that are listed without -v
LISTED = 12  # fallbacks, removed tensors and dropped names that are listed without -v


def before(document: Document, *, everything: bool = False) -> Page:
    """The plan: from where to where, how much, and what will not be as requested."""
    blocks: list[Block] = [Facts(tuple(_plan_rows(document)))]
    blocks += _travelling(document)
    blocks += _list_replaced(document, everything=everything)
    blocks += warnings_of(document, everything=everything)
    blocks += list_names(document, everything=everything)
    return Page("ckpt plan", tuple(blocks))


def list_names(document: Document, *, everything: bool) -> list[Block]:
    """With -v, and in a report: what each name of the source becomes, layers folded into patterns."""
    names = document.get("names") or ()
    if not everything or not names:
        return []
    columns = (Column("name in the source"), Column("name in the output"), Column("tensors", right=True))
    rows = [(row["source"], ", ".join(row["target"]) or "-", count(row["tensors"])) for row in names]
    return [PageTable("names", columns, tuple(rows))]


def after(document: Document, *, everything: bool = False, shown: bool = False) -> Page:
    """The result: the plan, what it lost, and one line that says it is done. shown: the plan has been shown already."""
    blocks = () if shown else before(document, everything=everything).blocks
    if "elapsed_s" not in document:
        return Page("ckpt plan", (*blocks, Verdict(None, _describe_unmoved(document))))
    lossy = document.get("overflows") or {}
    texts = [f"{name}: {plural(int(number), 'value')}" for name, number in lossy.items()]
    lost_text = (
        [_list_lines("beyond the range of the dtype they were cast to", texts, "tensor", everything, style=True)]
        if lossy
        else []
    )
    return Page("ckpt", (*blocks, *_errors(document, everything=everything), *lost_text, _done(document)))


def _errors(document: Document, *, everything: bool) -> list[Block]:
    """How far quantised weights are from what they were, the worst first; all of them with -v."""
    quantized = document.get("quantized") or {}
    rows = sorted(quantized.get("errors") or (), key=lambda row: -float(row["relative_norm"]))
    if not rows:
        return []
    listed = rows if everything else rows[:WORST]
    columns = (Column("tensor"), Column("largest error", right=True), Column("relative norm", right=True))
    cells = tuple((row["name"], f"{row['max_abs_error']:.3g}", f"{row['relative_norm']:.3g}") for row in listed)
    title = f"quantised as {quantized['scheme']}, {plural(len(rows), 'weight')}"
    return [PageTable(title if len(listed) == len(rows) else f"{title}, the worst", columns, cells)]


def _describe_unmoved(document: Document) -> str:
    """What came of a run that moved no byte."""
    saved = document.get("plan_file")
    job = document.get("job_file")
    if job:
        return f"{'plan and ' if saved else ''}job file saved; its first lines say how to start it: {job}"
    return f"plan saved; run it with ckpt apply {saved}" if saved else "dry run: nothing was written"


def _plan_rows(document: Document) -> list[tuple[str, Cell]]:
    plan, source, target = (document.get(key) or {} for key in ("plan", "source", "target"))
    rows: list[tuple[str, Cell]] = []
    if source:
        paths = source.get("paths") or [source.get("path") or ""]
        rows.append(("from", f"{', '.join(map(str, paths))}  ({_kind(source)})"))
        if source.get("resolved"):
            rows.append(("", f"({source['resolved']})"))
    if target:
        rows.append(("to", f"{target.get('path') or ''}  ({_kind(target)})"))
    if document.get("layout_source"):
        rows.append(("layout", str(document["layout_source"])))
    if plan:
        rows.append(("reads", size(plan.get("bytes_read", 0))))
        files = f" in {plural(int(plan['files']), 'file')}" if plan.get("files") else ""
        pieces = f", copied in {plural(int(plan['copies']), 'piece')}" if plan.get("copies") else ""
        rows.append(("writes", f"{size(plan.get('bytes_written', 0))}{files}{pieces}"))
        if plan.get("peak_memory"):
            rows.append(("memory", f"at most {size(plan['peak_memory'])}"))
    return rows + _device_rows(document.get("device") or {})


def _device_rows(device: Document) -> list[tuple[str, Cell]]:
    """The device that does the work, and what it leaves to the CPU."""
    if not device:
        return []
    used = f" ({size(device['device_memory'])} of its memory)" if device.get("device_memory") else ""
    rows: list[tuple[str, Cell]] = [("device", f"{device.get('name', '?')}{used}")]
    for cast in device.get("left_to_cpu") or ():
        number = plural(int(cast["tensors"]), "tensor")
        rows.append(
            ("", Styled(f"the CPU casts {number} from {cast['from']} to {cast['to']}: the kernels do not", "warn"))
        )
    return rows


def _list_replaced(document: Document, *, everything: bool) -> list[Block]:
    """The files that `--force` removes once the new output is in place."""
    replaced = document.get("replaces")
    if not replaced:
        return []
    title = f"--force replaces {plural(int(replaced['files']), 'file')}, {size(replaced['bytes'])}"
    return [_list_lines(title, list(map(str, replaced["names"])), "file", everything, style=True)]


def _kind(side: Document) -> str:
    """`megatron-dist, tp 2 x pp 4`."""
    parts = [str(side["format"])] if side.get("format") else []
    if side.get("mesh") is not None:
        parts.append(mesh_text(side["mesh"]))
    return ", ".join(parts) or "?"


def _travelling(document: Document) -> list[Block]:
    states = document.get("states") or {}
    if len(states) < 2:
        return []
    columns = (STATE, Column("tensors", right=True), Column("bytes", right=True))
    return [
        PageTable("", columns, tuple((name, count(row["tensors"]), size(row["bytes"])) for name, row in states.items()))
    ]


def warnings_of(document: Document, *, everything: bool) -> list[Block]:
    """What is not as requested, stays behind, or is worth a line."""
    blocks: list[Block] = []
    fallbacks = document.get("fallbacks") or ()
    if fallbacks:
        blocks.append(
            _list_lines("fallbacks", [fallback_text(f) for f in fallbacks], "fallback", everything, style=True)
        )
    removed = document.get("removed") or ()
    if removed:
        blocks.append(_describe_removed(document, removed, everything=everything))
    dropped = document.get("dropped") or ()
    gone = [entry for entry in dropped if entry.get("tensors") or entry.get("bytes") or entry.get("names")]
    if gone:
        blocks.append(_list_lines("left out", [_describe_dropped(entry) for entry in gone], "entry", everything))
    others = [f"{entry.get('state', '')}: {entry.get('reason', '')}" for entry in dropped if entry not in gone]
    if others:
        blocks.append(_list_lines("made again", others, "entry", everything))
    stays = (document.get("quantized") or {}).get("stays") or {}
    if stays:
        texts = [f"{plural(int(number), 'tensor')}: {reason}" for reason, number in stays.items()]
        blocks.append(_list_lines("not quantised", texts, "reason", everything))
    if document.get("notes"):
        blocks.append(Lines("notes", tuple(note_text(note) for note in document["notes"])))
    return blocks


def _list_lines(title: str, texts: list[str], noun: str, everything: bool, *, style: bool = False) -> Lines:
    listed = texts if everything else texts[:LISTED]
    lines: list[Cell] = [Styled(text, "warn") if style else text for text in listed]
    if len(texts) > len(listed):
        lines.append(more(len(texts) - len(listed), noun))
    return Lines(title, tuple(lines))


def fallback_text(fallback: Document) -> str:
    """A fallback in a line: `12 tensors such as w [10, 4]: requested dp x tp, cut by dp; 4.1 MB more on disk`."""
    number = int(fallback.get("tensors", 1))
    which = (
        str(fallback.get("example", "?")) if number == 1 else f"{count(number)} tensors such as {fallback['example']}"
    )
    requested, used, better = (" x ".join(fallback.get(key) or ()) for key in ("requested", "used", "better"))
    text = f"{which} {shape(fallback.get('shape') or ())}: requested {requested}, "
    text += cut_text(str(fallback.get("reason")), used)
    if fallback.get("extra_bytes"):
        text += f"; {size(fallback['extra_bytes'])} more on disk"
    if better:
        return f"{text}; --on-indivisible best-subset would cut by {better}"
    copied = fallback.get("reason") in ("replicated", "fallback")
    return text + (f"; --on-indivisible dtensor would cut by {requested} into uneven parts" if copied else "")


def cut_text(reason: str, used: str) -> str:
    """How a dim is cut that could not be cut as requested. reason: of a `core.fallback.Choice`."""
    texts = {"padded": f"cut by {used}, padded with zeros", "uneven": f"cut by {used} into uneven parts"}
    return texts.get(reason, f"cut by {used}" if used else "replicated")


def _describe_removed(document: Document, removed: Sequence[Document], *, everything: bool) -> Block:
    """By state: how many tensors and bytes went. With -v their names."""
    states: dict[str, list[int]] = {}
    for tensor in removed:
        row = states.setdefault(tensor.get("state", ""), [0, 0])
        row[0] += 1
        row[1] += tensor.get("bytes", 0)
    total = document.get("removed_bytes", sum(row[1] for row in states.values()))
    lines: list[Cell] = [f"{state}: {plural(row[0], 'tensor')}, {size(row[1])}" for state, row in states.items()]
    if everything:
        lines += [f"{tensor['name']} [{tensor.get('state', '')}] {size(tensor.get('bytes', 0))}" for tensor in removed]
    return Lines(f"removed {plural(len(removed), 'tensor')}, {size(total)}", tuple(lines))


def _describe_dropped(entry: Document) -> str:
    """`exp_avg: 291 tensors, 26.0 GB (safetensors holds the model only)`."""
    parts = [plural(int(entry["tensors"]), "tensor")] if entry.get("tensors") else []
    parts += [size(entry["bytes"])] if entry.get("bytes") else []
    names = entry.get("names") or ()
    parts += [", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")] if names else []
    reason = f" ({entry['reason']})" if entry.get("reason") else ""
    return f"{entry.get('state', '?')}: {', '.join(parts) or 'nothing'}{reason}"


def _done(document: Document) -> Verdict:
    plan = document.get("plan") or {}
    target = document.get("target") or {}
    seconds = float(document["elapsed_s"])
    nbytes = plan.get("bytes_written", 0)
    if document.get("committed") is False:
        part, part_count = document.get("part") or (1, 1)
        others = (
            f"{state}: {ranges(numbers)}" for state, numbers in document.get("parts", {}).items() if state != "done"
        )
        left_text = f" ({'; '.join(others)})" if document.get("parts") else ""
        return Verdict(
            None, f"part {part} of {part_count} is done; the output appears when the last part is{left_text}"
        )
    if document.get("already_committed"):
        return Verdict(True, f"{target['path']} is already committed, by others that ran this plan")
    destination = f" to {target['path']}" if target.get("path") else ""
    files = f" in {plural(int(plan['files']), 'file')}" if plan.get("files") else ""
    speed = f" ({size(nbytes / seconds)}/s)" if seconds >= 0.1 and nbytes >= 10**6 else ""
    checked = "; digests checked" if document.get("digest_checked") else ""
    sealed = "".join(f"; {word}" for word in ("signed", "attested") if document.get(_SEALS[word]))
    return Verdict(True, f"wrote {size(nbytes)}{files}{destination} in {duration(seconds)}{speed}{checked}{sealed}")
