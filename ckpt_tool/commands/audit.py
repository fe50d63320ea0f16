"""`ckpt audit`: is a checkpoint complete and plausible for its own config?

Headers and side files are always looked at; the values with `--values`. A checkpoint that does not open is a finding
too, so that a report comes of it: only what is no checkpoint at all, and what asks for code, is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt_tool.auditing import config_match, exporters, fused, names, values
from ckpt_tool.auditing.findings import NOTHING, FoundFault, rows_of
from ckpt_tool.auditing.subject import Subject, subject_of
from ckpt_tool.conversion.unused_options import refuse_unused_reading
from ckpt_tool.core.plurals import agree_all
from ckpt_tool.core.progress import Progress
from ckpt_tool.errors import InputError, UnknownFormat, UsageError
from ckpt_tool.formats.adapters.inside import find_inside
from ckpt_tool.formats.base import WEIGHT_SUFFIXES
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Auditing
from ckpt_tool.report import files, junit, sarif
from ckpt_tool.sources.config import config_in
from ckpt_tool.sources.opening import open_source, unchanged_sources
from ckpt_tool.sources.sound import UNSOUND, cut_short, finding, findings_of
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.output.destination import check_beside
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes.quantised_weights import has_codes

_NO_TENSORS = "E1642"
_EMPTY_INDEX = "E0336"
_BAD_CONFIG = "E0239"
_TORN = ("E0307", "E0308", "E0309")  # tensors whose values can't be read whole


def audit(src: str, reading: Reading, wanted: Auditing, *, progress: Progress) -> dict[str, Any]:
    """Findings, the worst first; `ok` where there are none. Raises UnknownFormat, UnsafeInput, StorageError,
    UsageError."""
    files.check_apart({"--sarif": wanted.sarif, "--junit": wanted.junit})
    for option, path, kind in (("--sarif", wanted.sarif, sarif), ("--junit", wanted.junit, junit)):
        if path:
            check_beside(path, option, (src,), ())
            files.check_target(path, option, kind.is_ours)

    subject = None
    found = list[FoundFault]()
    try:
        opened = open_source(src, reading)
        refuse_unused_reading(reading, opened)
        subject = subject_of(opened, reading)
        found += _of_headers(subject)
    except UnknownFormat:
        found += _nothing(src, reading)
        if not found:
            raise
    except UsageError as e:
        if e.code != _BAD_CONFIG or reading.config:
            raise
        found.append(_of_error(e))
    except InputError as e:
        nothing = _nothing(src, reading) if e.code in (_NO_TENSORS, _EMPTY_INDEX) else []
        if e.code == _NO_TENSORS and not nothing:
            raise
        found += nothing or [_of_error(e)]

    if subject is not None:
        with unchanged_sources(subject.opened):  # the headers too are those of one save
            if wanted.values and not any(each.code in _TORN for each in found):
                found += values.findings(subject, progress)
                found += fused.findings(subject)

    found += exporters.signatures(subject, found, subject.opened.path if subject else src)
    rows = rows_of(found)
    document = {
        "schema_version": 1,
        "ok": not rows,
        "path": subject.opened.path if subject else src,
        "format": subject.opened.catalog.format if subject else None,
        "family": subject.found.family.name if subject and subject.found else None,
        "tensors": len(subject.kinds) if subject else 0,
        "values": wanted.values,
        "findings": rows,
        "notes": agree_all(_notes(subject)) if subject else [],
    }
    if wanted.sarif:
        files.save(wanted.sarif, sarif.sarif(document), "--sarif", sarif.is_ours)
    if wanted.junit:
        files.save(wanted.junit, junit.junit(document), "--junit", junit.is_ours)
    return document


def _adapter_inside(subject: Subject) -> Iterator[FoundFault]:
    """A model for the hub whose names are those of a job that wrapped it: no library would load its weights."""
    if subject.opened.format.holds.dialect != "hf" or subject.opened.format.holds.adapter:
        return
    inside = find_inside(subject.kinds.keys())
    if inside is not None:
        count = len(inside.adapter) or len(inside.others)
        message = f"an adapter is inside the model ({count} tensors): libraries do not know these names"
        yield FoundFault("E2933", message, next(iter(inside.adapter), None))


def _of_headers(subject: Subject) -> Iterator[FoundFault]:
    opened = subject.opened
    for row in findings_of(opened)[0]:
        yield FoundFault(row["code"], row["message"], row["tensor"], row["file"])
    for fault in cut_short(opened.tree, {opened.tree.display(file) for file in opened.catalog.files}):
        yield _of_error(fault)
    yield from _adapter_inside(subject)
    yield from names.findings(subject)
    yield from _of_parts(subject)
    yield from config_match.findings(subject)
    yield from values.head_differs(subject)


def _of_parts(subject: Subject) -> Iterator[FoundFault]:
    """What small tensors of quantised weights say, where names and shapes alone show nothing wrong."""
    if subject.quantised.faults or not has_codes(kind.dtype for kind in subject.kinds.values()):
        return
    from ckpt_tool.quantised.part_faults import faults_of

    yield from map(_of_error, faults_of(subject.opened, subject.model.config, values=True))


def _of_error(fault: Any) -> FoundFault:
    row = finding(fault)
    more = f"; {len(fault.faults)} more" if fault.faults else ""
    return FoundFault(row["code"], f"{row['message']}{more}", row["tensor"], row["file"], do=fault.hint or "")


def _nothing(src: str, reading: Reading) -> list[FoundFault]:
    """A folder of a model without any weights: what an exporter left that wrote none."""
    tree: Tree = open_tree(src, follow_symlinks=reading.follow_symlinks)
    config = config_in(tree)
    if not config or not (config.get("architectures") or config.get("model_type")):
        return []
    if any("/" in path or path.endswith(WEIGHT_SUFFIXES) for path in tree.listing()):  # a run's folder, a pipeline's
        return []
    return [FoundFault(NOTHING, "there is a config.json and no file of weights", file=tree.display("config.json"))]


def _notes(subject: Subject) -> Iterator[str]:
    if subject.opened.resolved:
        yield subject.opened.resolved
    if subject.found is None:
        yield f"the names were compared with no family's rules: {subject.why}"
    elif subject.model.config is None:
        yield "there is no config: sizes, numbers of layers and experts were taken from the tensors"
    promised, there = names.count_mtp_layers(subject)
    if promised and not there:
        yield f"multi-token prediction: the config promises {promised}, none is there; speculative decoding needs it"
    yield from subject.model.notes
    yield from (note.message for note in subject.opened.catalog.notes if note.code not in UNSOUND)
