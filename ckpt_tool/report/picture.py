"""Picture: the data of a report's figures, from what a command gave on its way and from the document it returned.

    picture("inspect", document, seen)    {"rows": "0.3.17 1.3.17 ...", "templates": [["model.layers.", ...], ...], ...}

Everything is plain values, for one JSON text in the page. 92,000 names are some hundred templates and the numbers that
fill them; tensors alike in all but those are one kind; tensors cut alike share a cut. Text of a checkpoint is shown as
a terminal shows it (`report.text.show_text`), so nothing in here can be more than text. Cost: 10 us a tensor.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.plurals import agree
from ckpt_tool.core.report_data import ReportData
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.report import palette
from ckpt_tool.report.comparison import place_of
from ckpt_tool.report.holdings import Checkpoint, CutShown, Holder, Holdings, Rewriting, Tensor, list_catalog_holdings
from ckpt_tool.report.text import show_text

Document = Mapping[str, Any]
NAME_LIMIT = 400  # characters of a name
FILES_LISTED = 12  # of one holder
BOXES_LISTED = 4096  # of one cut
FINDINGS_LISTED = 5000
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.|$)|^(?:0|[1-9][0-9]{0,8})(?=\.)")
_WRITERS = ("reshard", "convert", "merge", "apply")
_TWO_SIDES = {"diff": ("first", "second")}
NONE = -1


class PictureSide(NamedTuple):
    """Who holds what on one side."""

    title: str
    holdings: Holdings
    cuts: Sequence[int]  # by row, NONE where the side lacks the tensor


def picture(verb: str, document: Document, seen: ReportData) -> dict[str, Any]:
    """The data of the figures; {} for a verb that looks at no tensors."""
    if verb in _WRITERS and seen.get("rewriting"):
        return _draw_rewriting(document, seen["rewriting"][-1])
    opened = {checkpoint.path: checkpoint for checkpoint in seen.get("checkpoint", ())}
    if verb == "diff" and {document.get("left"), document.get("right")} <= opened.keys():
        return _draw_pair(document, opened[document["left"]], opened[document["right"]])
    if verb in ("inspect", "verify", "audit") and document.get("path") in opened:
        return _draw_one(document, opened[document["path"]])
    return {}


def _draw_one(document: Document, checkpoint: Checkpoint) -> dict[str, Any]:
    holdings = list_catalog_holdings(checkpoint.catalog, checkpoint.rank_of)
    rows = [Tensor(row.name, row.state, row.dtype, row.shape) for row in checkpoint.catalog.rows()]
    cuts = holdings.tensors
    total = (document.get("total") or {}).get("tensors", len(rows))
    if total != len(rows):  # `--match`, `--state`: what is not listed is not drawn
        listed_names = {(row["name"], row["state"]) for row in document["tensors"]}
        row_numbers = [number for number, row in enumerate(rows) if (row.name, row.state) in listed_names]
        rows = [rows[number] for number in row_numbers]
        cuts = [cuts[number] for number in row_numbers]
    return {**_columns(rows, (PictureSide("", holdings, cuts),)), **_findings(document, rows)}


def _draw_pair(document: Document, left: Checkpoint, right: Checkpoint) -> dict[str, Any]:
    """Of two checkpoints, under the names of the second."""
    sides = []
    keys = dict[TensorKey, Tensor]()
    for checkpoint in (right, left):
        for row in checkpoint.catalog.rows():
            keys.setdefault(TensorKey(row.name, row.state), Tensor(row.name, row.state, row.dtype, row.shape))
    for title, checkpoint in zip(_TWO_SIDES["diff"], (left, right), strict=True):
        holdings = list_catalog_holdings(checkpoint.catalog, checkpoint.rank_of)
        cuts = dict(zip(checkpoint.catalog.tensors, holdings.tensors, strict=True))
        sides.append(PictureSide(title, holdings, [cuts.get(key, NONE) for key in keys]))
    numbers = {key: number for number, key in enumerate(keys)}
    differences = [
        [
            numbers.get(TensorKey(difference["name"], difference.get("state", "")), NONE),
            difference["kind"],
            difference.get("max_ulp"),
            _finite(difference.get("max_abs")),
            difference.get("elements"),
            _finite(difference.get("rel_l2")),
        ]
        for difference in document.get("differences") or ()
    ]
    return {**_columns(list(keys.values()), sides), "differences": differences}


def _draw_rewriting(document: Document, what: Rewriting) -> dict[str, Any]:
    sides = (
        PictureSide("before", what.before, what.before.tensors),
        PictureSide("after", what.after, what.after.tensors),
    )
    texts: dict[str, list[int]] = {}
    for number, text in what.fallbacks.items():
        texts.setdefault(text, []).append(number)
    return {**_columns(what.tensors, sides), "flow": _flow(what), "fallbacks": list(texts.items())}


# ----------------------------------------------------------------------------------------------------
# Tensors in columns.


class _Numbers(dict[Any, int]):
    """Values numbered as they come."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def _columns(rows: Sequence[Tensor], sides: Sequence[PictureSide]) -> dict[str, Any]:
    """rows: for each tensor its kind and the numbers of its name. kinds: (template, state, dtype, shape, a cut a
    side)."""
    templates, states, dtypes, shapes, kinds = (_Numbers() for _ in range(5))
    texts = []
    for number, row in enumerate(rows):
        name = show_text(row.name, NAME_LIMIT)
        kind = (
            templates[tuple(_NUMBER.split(name))],
            states[show_text(row.state)],
            dtypes[row.dtype.name, row.dtype.bits],
            shapes[row.shape],
            *(side.cuts[number] for side in sides),
        )
        texts.append(".".join([str(kinds[kind]), *_NUMBER.findall(name)]))

    return {
        "count": len(rows),
        "rows": " ".join(texts),
        "templates": list(templates),
        "states": list(states),
        "dtypes": list(dtypes),
        "shapes": list(shapes),
        "kinds": list(kinds),
        "palette": {
            "states": palette.state_fills(list(states)),
            "dtypes": palette.dtype_fills([bits for _, bits in dtypes]),
            "modules": palette.MODULES,
            "rest": palette.REST,
        },
        "sides": [_side(side) for side in sides],
    }


def _side(side: PictureSide) -> dict[str, Any]:
    holdings = side.holdings
    holders = []
    for number, holder in enumerate(holdings.holders):
        colour = palette.rank_colour(number, len(holdings.holders))
        holders.append(_describe_holder(holder, colour))
    return {
        "title": side.title,
        "ranks": holdings.of_ranks,
        "mesh": dict(holdings.mesh),
        "holders": holders,
        "cuts": [_cut(cut) for cut in holdings.cuts],
    }


def _describe_holder(holder: Holder, colour: str) -> dict[str, Any]:
    return {
        "name": show_text(holder.name),
        "colour": colour,
        "at": {show_text(dim): coordinate for dim, coordinate in holder.coords.items()},
        "files": [show_text(file) for file in holder.files[:FILES_LISTED]],
        "more": max(0, len(holder.files) - FILES_LISTED),
        "states": {show_text(state): list(numbers) for state, numbers in holder.states.items()},
    }


def _cut(cut: CutShown) -> list[Any]:
    """[boxes, holders of each]: a box as its offset and extents, one after the other; 0 for the whole tensor."""
    boxes = _group_by_box(cut)
    listed = list(boxes.items())[:BOXES_LISTED]
    plain = [0 if box.shape == cut.shape else [*box.offset, *box.shape] for box, _ in listed]
    return [plain, [_spans(holders) for _, holders in listed], len(boxes) - len(listed)]


def _group_by_box(cut: CutShown) -> dict[Box, list[int]]:
    holders_of: dict[Box, list[int]] = {}
    for holder, box in cut.parts:
        holders_of.setdefault(box, []).append(holder)
    return holders_of


def _spans(numbers: Iterable[int]) -> list[Any]:
    """Numbers as they are, runs of them as [first, last]."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [begin if begin == end else [begin, end] for begin, end in runs]


# ----------------------------------------------------------------------------------------------------
# The flow of bytes.


def _flow(what: Rewriting) -> list[tuple[int, int, int]]:
    """(holder before, holder after, bytes as they are written) of all that is moved."""
    alike = Counter(
        zip(what.before.tensors, what.after.tensors, (tensor.dtype.bits for tensor in what.tensors), strict=True)
    )
    bits: Counter[tuple[int, int]] = Counter()
    for (before, after, size), count in alike.items():
        for source, output, numel in _list_shared(what.before.cuts[before], what.after.cuts[after]):
            bits[source, output] += numel * size * count
    return [(source, output, number // 8) for (source, output), number in sorted(bits.items())]


def _list_shared(before: CutShown, after: CutShown) -> Iterable[tuple[int, int, int]]:
    """(holder, holder, elements) of all pairs of parts that share any. Replicas before are one source each.

    The boxes before are looked up along the dim that cuts them most, so the cost is that of the pairs that are found.
    """
    sources = list(_group_by_box(before).items())
    if not sources:
        return
    dims = len(before.shape)
    dim = max(range(dims), key=lambda d: len({box.offset[d] for box, _ in sources}), default=NONE)
    if dim != NONE:
        sources.sort(key=lambda pair: pair[0].offset[dim])
    starts = [box.offset[dim] if dim != NONE else 0 for box, _ in sources]
    longest = max(box.shape[dim] for box, _ in sources) if dim != NONE else 1
    for after_box, outputs in _group_by_box(after).items():
        low = bisect_left(starts, after_box.offset[dim] - longest + 1) if dim != NONE else 0
        high = bisect_left(starts, after_box.end[dim]) if dim != NONE else len(starts)
        for box, holders in sources[low:high]:
            numel = prod(
                max(0, min(a + n, b + m) - max(a, b))
                for a, n, b, m in zip(box.offset, box.shape, after_box.offset, after_box.shape, strict=True)
            )
            if numel:
                for output in outputs:
                    yield holders[0], output, numel


# ----------------------------------------------------------------------------------------------------
# Findings and their tensors.


def _findings(document: Document, rows: Sequence[Tensor]) -> dict[str, Any]:
    """[code, severity, message, tensor's number or NONE, its name, its place, what to do, title, URLs of the same
    cause]; those of `verify` are errors."""
    findings = list(document.get("findings") or ())[:FINDINGS_LISTED]
    nonfinite = document.get("nonfinite") or {}
    if not findings and not nonfinite:
        return {}

    numbers = {str(TensorKey(row.name, row.state)): number for number, row in enumerate(rows)}
    rows_listed = []
    for finding in findings:
        urls = [show_text(report["url"]) for report in finding.get("seen") or ()]
        rows_listed.append(
            [
                show_text(finding.get("code") or ""),
                finding.get("severity", "error"),
                show_text(finding.get("message") or "", 2000),
                numbers.get(finding.get("tensor") or "", NONE),
                show_text(finding.get("tensor") or ""),
                show_text(place_of(finding)),
                show_text(finding.get("do") or "", 2000),
                show_text(finding.get("title") or ""),
                urls,
            ]
        )

    rows_listed += [
        [
            "",
            "note",
            agree(f"{count:,} values are NaN or Inf (shown, not counted)"),
            numbers.get(name, NONE),
            show_text(name),
            "",
            "",
            "",
            [],
        ]
        for name, count in list(nonfinite.items())[:FINDINGS_LISTED]
    ]
    return {"findings": rows_listed}


def _finite(value: Any) -> Any:
    """A number that JSON has; infinities and NaN by name."""
    return (
        repr(value)
        if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf")))
        else value
    )
