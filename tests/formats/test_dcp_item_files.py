"""Files of items: tensors that are cut alike lie as they would one by one, and nothing is listed until it is read."""

from __future__ import annotations

import pytest

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.formats.dcp_container import dcp_item_files
from ckpt_tool.formats.dcp_container.dcp_item_files import ItemFiles, StoredItem, TensorShare

TENSORS = [WantedTensor(TensorKey(f"experts.{number}"), (6, 5), DTYPES["BF16"]) for number in range(8)]
CUT = (
    StoredItem(Box((0, 0), (1, 5)), (0, 0), (1, 5), 0),
    StoredItem(Box((1, 0), (3, 5)), (1, 0), (3, 5), 1),
    StoredItem(Box((4, 0), (2, 5)), (4, 0), (2, 5), 0),
)


def files(*, together: bool) -> ItemFiles:
    made = ItemFiles(TENSORS)
    shares = [TensorShare(number, CUT, (number,), number // 5) for number in range(8)]
    for several in [shares] if together else [[share] for share in shares]:
        made.tensor(f"w{several[0].tensor}", (), (8, 6, 5), several)
    made.known("last", (), (2,), DTYPES["F32"], b"\0" * 8)
    return made


def test_tensors_that_are_cut_alike_lie_as_they_would_one_by_one() -> None:
    one = files(together=True)
    other = files(together=False)
    listed = [
        [
            file._replace(literals=(*file.literals,), arrays=(*file.arrays,), patches=(*file.patches,))
            for file in made.finished()
        ]
        for made in (one, other)
    ]
    assert listed[0] == listed[1] and len(listed[0]) == 3
    for file in listed[0]:
        spans = sorted(
            [(at, at + len(data)) for at, data in file.literals]
            + [(a.offset, a.offset + 2 * a.box.numel) for a in file.arrays]
        )
        assert (
            all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
            and spans[-1][1] == file.size
        )
    (bands,) = [entry.bands for fqn, entry in one.entries.items() if fqn == "w0"]
    assert [at for band in bands for at in band.at] == [
        at for entry in [*other.entries.values()][:8] for at in entry.bands[0].at
    ]


def test_nothing_is_listed_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    put = []
    monkeypatch.setattr(dcp_item_files._ItemKind, "put", lambda *given: put.append(given))
    made = files(together=True)
    done = made.finished()
    places = made.places(done)
    assert {places.group(number) for number in range(8)} == {0} and places.groups() == {0: (8, 7)}
    assert not put and [file.size > 0 for file in done] == [True] * 3
    assert list(done[0].arrays) == [] and len(put) == 24
