"""A listing says what its rows say, whatever it was made from."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from ckpt_tool.core import listing as module
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.listing import Kind, Listing, RowBlock

BF16 = DTYPES["BF16"]
F32 = DTYPES["F32"]
MATRIX: Kind = (BF16, (2, 3), 12)
VECTOR: Kind = (F32, (3,), 12)


def listing() -> Listing:
    first = RowBlock("model", lambda: [b"a", b"b.\xc3\xa9", b"c"], [MATRIX, VECTOR, (BF16, (2, 3), 12)])
    return Listing([first, RowBlock("ema", lambda: [b"a"], [MATRIX])])


def test_rows_are_what_json_shows() -> None:
    rows = list(listing())
    assert [(row["state"], row["name"]) for row in rows] == [
        ("model", "a"),
        ("model", "b.é"),
        ("model", "c"),
        ("ema", "a"),
    ]
    assert rows[0] == {"name": "a", "state": "model", "dtype": "BF16", "shape": [2, 3], "bytes": 12}
    assert len(listing()) == 4 and listing()[-1] == rows[3] and listing()[1:3] == rows[1:3]


def test_the_tally_counts_equal_kinds_together() -> None:
    rows = Counter((row["state"], (row["dtype"], tuple(row["shape"]), row["bytes"])) for row in listing())
    tally = {(state, (kind[0].name, *kind[1:])): count for (state, kind), count in listing().tally().items()}
    assert tally == rows and tally["model", ("BF16", (2, 3), 12)] == 2


@pytest.mark.parametrize("rows", [1, 2, 4096])
def test_the_text_is_that_of_its_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a name holds, and wherever a piece ends."""
    monkeypatch.setattr(module, "ROWS", rows)
    names = ["a", 'b", "c', "d\n\\", "e\x7f\u2028\U0001f600", 'f", ', ""]
    odd = RowBlock("model", lambda: [name.encode() for name in names], [MATRIX, VECTOR] * 3)
    for made in (
        Listing([]),
        Listing([RowBlock("model", list, [])]),
        listing(),
        Listing([odd, *listing().blocks, odd]),
    ):
        assert "".join(made.json()) == json.dumps(list(made))
