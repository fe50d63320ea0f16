"""The grid of ranks that a terminal shows of `inspect --placement`: every rank, what it holds, in any window."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.commands.inspect import inspect
from ckpt_tool.options.reading import Inspection, Reading
from ckpt_tool.report.inspection import inspection
from ckpt_tool.report.page import Page
from ckpt_tool.report.plain import Look, render
from ckpt_tool.report.ranks import ROWS, grids

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def tensors(ranks: list[dict[str, int]], *, uneven: bool = False) -> list[dict[str, Any]]:
    """One tensor of 4 bytes a rank, one of all ranks; uneven: another of the last rank alone."""
    files = {f"r{number}": rank for number, rank in enumerate(ranks)}

    def row(name: str, parts: list[tuple[str, int]]) -> dict[str, Any]:
        chunks = [{"file": file, "rank": files[file], "offset": [at], "shape": [1]} for file, at in parts]
        return {"name": name, "state": "model", "dtype": "F32", "shape": [len(parts)], "bytes": 1, "chunks": chunks}

    found = [row("all", list(zip(files, range(len(files)), strict=True)))]
    return [*found, row("last", [(list(files)[-1], 0)])] if uneven else found


def drawn(rows: list[dict[str, Any]], width: int = 80) -> list[str]:
    return render(Page("", tuple(grids(rows, {}))), Look(width=width, terminal=True)).splitlines()


def test_a_mesh_of_three_dims() -> None:
    ranks = [{"tp": tp, "pp": pp, "dp": dp} for pp in range(2) for dp in range(2) for tp in range(2)]
    assert drawn(tensors(ranks, uneven=True)) == [
        "what each rank holds (tp 2 x pp 2 x dp 2)",
        "                 tp 0        tp 1",
        "            +-----------+-----------+",
        *("pp 0, dp 0  |       4 B |       4 B |", "            |  1 tensor |  1 tensor |"),
        "            +-----------+-----------+",
        *("pp 0, dp 1  |       4 B |       4 B |", "            |  1 tensor |  1 tensor |"),
        "            +-----------+-----------+",
        *("pp 1, dp 0  |       4 B |       4 B |", "            |  1 tensor |  1 tensor |"),
        "            +-----------+-----------+",
        *("pp 1, dp 1  |       4 B |       8 B |", "            |  1 tensor | 2 tensors |"),
        "            +-----------+-----------+",
    ]


def test_a_rank_without_a_file_is_an_empty_place() -> None:
    lines = drawn(tensors([{"tp": 0, "ep": 0}, {"tp": 1, "ep": 1}]))
    assert "ep 0  |      4 B |          |" in lines and "ep 1  |          |      4 B |" in lines


@pytest.mark.parametrize("width", [80, 40, 30])
def test_every_rank_has_its_place_in_any_window(width: int) -> None:
    lines = drawn(tensors([{"tp": tp, "pp": pp} for tp in range(8) for pp in range(3)]), width)
    assert max(map(len, lines)) <= width
    assert re.findall(r"tp \d", "".join(lines[1:])) == [f"tp {tp}" for tp in range(8)]
    assert sum(line.count("4 B") for line in lines) == 24


def test_of_very_many_rows_those_that_are_alike_are_one() -> None:
    ranks = [{"tp": tp, "pp": pp} for pp in range(64) for tp in range(2)]
    lines = drawn(tensors(ranks, uneven=True))
    assert [line.split()[:2] for line in lines if line.startswith(("pp", "to"))] == [
        ["pp", "0"],
        ["to", "pp"],
        ["pp", "63"],
    ]
    assert "to pp 62" in "\n".join(lines) and len(lines) < 3 * ROWS


def test_ranks_that_other_dims_count_have_a_grid_of_their_own() -> None:
    found = [*grids(tensors([{"tp": 0}, {"tp": 1}, {"tp": 0, "dp": 0}, {"tp": 0, "dp": 1}]), {})]
    assert [(grid.title, grid.across) for grid in found] == [
        ("what each rank holds (tp 2)", ("tp 0", "tp 1")),
        ("what each rank holds (dp 2)", ("dp 0", "dp 1")),
    ]


def test_a_real_checkpoint_on_a_terminal_and_in_a_pipe() -> None:
    wanted = Inspection(placement=True)
    document = inspect(str(FIXTURES / "deepspeed" / "z2_align_dp4"), Reading(), wanted)
    page = inspection(document)
    terminal = render(page, Look(width=80, terminal=True))
    pipe = render(page, Look())
    assert "|   4.82 kB |   4.78 kB |   4.87 kB |   4.73 kB |" in terminal
    assert "what each rank holds" not in pipe and "+--" not in pipe
    files = {chunk["file"]: chunk["rank"] for row in document["tensors"] for chunk in row["chunks"]}
    assert {"dp": 3, "mp": 0} in files.values()
