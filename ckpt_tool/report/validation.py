"""`ckpt validate` as a page: what was run, which checks hold, the two curves, the planted faults, who holds what.

Reads the document of `commands.validate`: `cases` (each as `harness.evidence.gather` gives it), `ok`, `matrix`,
`elapsed_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.report.page import (
    STATE,
    Block,
    Cell,
    Column,
    Curves,
    Facts,
    Lines,
    Page,
    PageTable,
    Styled,
    Tiles,
    Verdict,
)
from ckpt_tool.report.text import count, duration, plural

Document = Mapping[str, Any]
RANKS_DRAWN = 64


def validation(document: Document, *, everything: bool = False) -> Page:
    """The page of `ckpt validate`: a table of pairs, then every case (of a matrix, only those that failed, and the
    first)."""
    cases: Sequence[Document] = document["cases"]
    blocks: list[Block] = []
    if len(cases) > 1:
        blocks.append(_pairs(cases))
        listed_cases = [c for i, c in enumerate(cases) if everything or not c["ok"] or i == 0]
    else:
        listed_cases = list(cases)
    for case in listed_cases:
        blocks += _case(case)
    failed = sum(not case["ok"] for case in cases)
    ran = f"{plural(len(cases), 'pair')} of layouts in {duration(document['elapsed_s'])}"
    if failed:
        blocks.append(Verdict(False, f"not proved: {count(failed)} of {ran} failed"))
    else:
        blocks.append(Verdict(True, f"proved: {ran}, every check holds"))
    return Page("ckpt validate", tuple(blocks))


def _pairs(cases: Sequence[Document]) -> PageTable:
    rows = tuple(
        (
            case["from"],
            case["to"],
            case["format"],
            case["mode"],
            _good(case["ok"]),
            _summary(case),
            f"{case['elapsed_s']:.1f}",
        )
        for case in cases
    )
    columns = (
        Column("from"),
        Column("to"),
        Column("format"),
        Column("mode", drop=3),
        Column("holds"),
        Column("what", drop=2),
        Column("s", right=True, drop=1),
    )
    return PageTable("pairs", columns, rows)


def _summary(case: Document) -> str:
    bad = [check["check"] for check in case["checks"] if not check["ok"]]
    return "failed: " + ", ".join(bad) if bad else "; ".join(check["check"] for check in case["checks"])


def _good(ok: bool) -> Cell:
    return Styled("yes", "good") if ok else Styled("NO", "bad")


def _case(case: Document) -> Iterator[Block]:
    yield Facts(
        (
            ("layouts", f"{case['from']} -> {case['to']}, saved as {case['format']}"),
            (
                "job",
                f"{case['mode']}, on {case['device']}, seed {case['seed']}, {case['before']} steps before and "
                f"{case['after']} after",
            ),
            ("killed", case.get("killed", "")),
            *((("reshard", line)) for line in case.get("commands", ())),
        ),
        f"{case['from']} -> {case['to']}",
    )
    yield PageTable(
        "checks",
        (Column("check"), Column("holds"), Column("what was seen")),
        tuple((check["check"], _good(check["ok"]), check["text"]) for check in case["checks"]),
    )
    if case.get("curve"):
        yield from _curve(case)
    if case.get("states"):
        yield _states(case)
    if case.get("controls"):
        yield _controls(case)
    for side, title in (("from", "layout before"), ("to", "layout after")):
        if case.get("layouts"):
            yield _picture(case["layouts"][side], f"{title}: {case[side]}")

    if case.get("notes"):
        yield Lines("notes", tuple(case["notes"]))


def _curve(case: Document) -> Iterator[Block]:
    rows = case["curve"]
    steps = tuple(int(row["step"]) for row in case["curve"])
    for key, title in (("loss", "loss"), ("norm", "gradient norm")):
        series = (
            ("uninterrupted", tuple(row[key] for row in rows)),
            ("resharded, resumed", tuple(row.get(f"resumed_{key}") for row in rows)),
        )
        yield Curves(title, steps, series, ((case["before"], "kill, reshard"),))

    columns = (
        Column("step", right=True),
        Column("loss", right=True),
        Column("resumed", right=True),
        Column("gradient norm", right=True, drop=1),
        Column("resumed", right=True, drop=1),
        Column("same bits"),
    )

    yield PageTable(
        "the curve, uninterrupted and resumed",
        columns,
        tuple(
            (
                str(row["step"]),
                f"{row['loss']:.9f}",
                _number(row, "resumed_loss"),
                f"{row['norm']:.9f}",
                _number(row, "resumed_norm"),
                _equality(row, is_canonical=case["mode"] == "canonical"),
            )
            for row in rows
        ),
    )


def _number(row: Document, key: str) -> str:
    return f"{row[key]:.9f}" if key in row else ""


def _states(case: Document) -> PageTable:
    rows = tuple(
        (check["what"], row["state"], f"{row['equal']} of {row['tensors']}")
        for check in case["states"]
        if check["counted"]
        for row in check["states"]
    )
    return PageTable("tensors with the same digest", (Column("when"), STATE, Column("tensors", right=True)), rows)


def _equality(row: Document, *, is_canonical: bool) -> Cell:
    """Is the loss of the resumed run the uninterrupted one's? Only a canonical run promises it."""
    if "equal" not in row:
        return ""
    if is_canonical:
        return _good(row["equal"])
    return "yes" if row["equal"] else "no"


def _controls(case: Document) -> PageTable:
    """The loss column shows how blind the curve is: 0 is a fault that it does not see."""
    rows: list[tuple[Cell, ...]] = []
    for row in case["controls"]:
        seen_by = [name for name, is_seen in row["seen_by"].items() if is_seen]
        rows.append(
            (
                row["what"],
                f"{row['loss_first']:.1e}" if row["loss_first"] else "0",
                f"{row['loss_max']:.1e}" if row["loss_max"] else "0",
                ", ".join(seen_by) or "nothing",
                _good(row["ok"]),
            )
        )
    columns = (
        Column("planted fault"),
        Column("loss, first step", right=True, drop=2),
        Column("loss, at most", right=True, drop=1),
        Column("seen by"),
        Column("as it should"),
    )
    return PageTable("negative controls", columns, tuple(rows))


def _picture(ranks: Sequence[Document], title: str) -> Tiles:
    """A row of tiles a pipeline stage; the colour is the TP rank."""
    stages: dict[int, list[tuple[str, tuple[str, ...], int]]] = {}
    for row in ranks[:RANKS_DRAWN]:
        layers = " + ".join(",".join(map(str, chunk)) for chunk in row["layers"])
        experts = ",".join(map(str, row["experts"]))
        lines = (f"tp{row['tp']} pp{row['pp']} dp{row['dp']}", f"layers {layers}", f"experts {experts}")
        stages.setdefault(row["pp"], []).append((f"rank {row['rank']}", lines, row["tp"]))
    return Tiles(title, tuple(map(tuple, stages.values())))
