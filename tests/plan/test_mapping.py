"""Tensors under another naming: where their elements lie, against NumPy's own reshapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.algebra.equation import equation
from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.algebra.piece import Piece, Side
from ckpt_tool.core.box import Box
from ckpt_tool.core.catalog import faults_of
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.plan.mapping import apply_mapping, parameter_shapes
from ckpt_tool.plan.moves import Stored

F32 = DTYPES["F32"]


class Disk:
    """Arrays laid into one buffer of float32, chunk by chunk, each perhaps column-major."""

    def __init__(self) -> None:
        self.words: list[np.ndarray] = []
        self.end = 0

    def lay(
        self, key: TensorKey, array: np.ndarray, cuts: tuple[int, ...] = (), *, columns: bool = False
    ) -> LogicalTensor:
        chunks = []
        bounds = [0, *sorted(c % (len(array) + 1) for c in cuts), len(array)] if array.ndim else [0, 1]
        for low, high in zip(bounds, bounds[1:], strict=False):
            part = array[low:high] if array.ndim else array
            strides = tuple(s // 4 for s in np.asfortranarray(part).strides) if columns else None
            chunks.append(
                Chunk(
                    Box((low,) + (0,) * (array.ndim - 1) if array.ndim else (), part.shape),
                    StoredArray("f", self.end * 4, F32, part.shape, strides),
                    Box((0,) * part.ndim, part.shape),
                )
            )
            self.words.append(part.ravel(order="F" if columns else "C"))
            self.end += part.size
        return LogicalTensor(key, array.shape, F32, tuple(chunks))

    def read(self, tensor: LogicalTensor) -> np.ndarray:
        disk = np.concatenate([np.zeros(0, np.float32), *self.words]).astype(np.float32)
        out = np.full(tensor.shape, np.nan, np.float32)
        for chunk in tensor.chunks:
            start, strides = chunk.region()
            where = np.full(chunk.box.shape, chunk.array.offset // 4 + start)
            for d, s in enumerate(strides):
                where += (np.arange(chunk.box.shape[d]) * s).reshape([-1 if k == d else 1 for k in range(where.ndim)])
            place = tuple(slice(o, o + n) for o, n in zip(chunk.box.offset, chunk.box.shape, strict=True))
            assert np.isnan(out[place]).all()
            out[place] = disk[where]
        assert not list(faults_of([tensor]))
        return out


def _mapped(text: str, sizes: dict[str, int]) -> Mapped:
    rule = equation(text)
    pieces = rule.pieces(sizes)
    return Mapped(
        tuple(
            Made(name, shape, tuple(p for p in pieces if p.dst.name == name))
            for name, shape in rule.shapes(sizes)[1].items()
        )
    )


def _apply(disk: Disk, rows: list[LogicalTensor], mapped: Mapped) -> dict[TensorKey, np.ndarray]:
    applied = apply_mapping([Stored(0, row) for row in rows], mapped)
    return {row.tensor.key: disk.read(row.tensor) for row in applied.stored}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.integers(0, 40), max_size=3),
    st.booleans(),
)
def test_grouped_qkv_comes_apart_transposed(g: int, r: int, d: int, h: int, cuts: list[int], columns: bool) -> None:
    qkv = np.arange(h * g * (r + 2) * d, dtype=np.float32).reshape(h, g, r + 2, d)
    disk = Disk()
    stored = disk.lay(TensorKey("qkv"), qkv.reshape(h, -1), tuple(cuts), columns=columns)
    mapped = _mapped(
        "qkv : h (g (r + 1 + 1) d) = q : (g r d) h ; k : (g d) h ; v : (g d) h", {"g": g, "r": r, "d": d, "h": h}
    )
    found = _apply(disk, [stored], mapped)
    assert np.array_equal(found[TensorKey("q")], qkv[:, :, :r].reshape(h, -1).T)
    assert np.array_equal(found[TensorKey("k")], qkv[:, :, r].reshape(h, -1).T)
    assert np.array_equal(found[TensorKey("v")], qkv[:, :, r + 1].reshape(h, -1).T)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.integers(0, 40), max_size=3),
    st.booleans(),
)
def test_grouped_qkv_is_put_together(g: int, r: int, d: int, h: int, cuts: list[int], columns: bool) -> None:
    disk = Disk()
    n = h * g * d
    q, k, v = (np.arange(n * m, dtype=np.float32).reshape(g * m * d, h) + 1000 * i for i, m in enumerate((r, 1, 1)))
    rows = [
        disk.lay(TensorKey(name), array, tuple(cuts), columns=columns)
        for name, array in zip("qkv", (q, k, v), strict=True)
    ]
    mapped = _mapped(
        "q : (g r d) h ; k : (g d) h ; v : (g d) h = qkv : h (g (r + 1 + 1) d)", {"g": g, "r": r, "d": d, "h": h}
    )
    found = _apply(disk, rows, mapped)[TensorKey("qkv")]
    want = np.concatenate([q.T.reshape(h, g, r, d), k.T.reshape(h, g, 1, d), v.T.reshape(h, g, 1, d)], 2)
    assert np.array_equal(found, want.reshape(h, -1))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 9), max_size=2))
def test_stacked_experts_and_a_rotary_permutation(e: int, f: int, h: int, cuts: list[int]) -> None:
    w = np.arange(e * f * 2 * h, dtype=np.float32).reshape(e, f, 2, h)
    disk = Disk()
    stored = disk.lay(TensorKey("w"), w.reshape(e, f * 2, h), tuple(cuts))
    found = _apply(disk, [stored], _mapped("w : e (f 2) h = x.{e}.w : h (2 f)", {"e": e, "f": f, "h": h}))
    for i in range(e):
        assert np.array_equal(found[TensorKey(f"x.{i}.w")], w[i].transpose(2, 1, 0).reshape(h, -1))


GATE_UP = "gate : f h ; up : f h = fc : h ((1 + 1) f)"


def test_states_follow_and_counters_are_compared() -> None:
    disk = Disk()
    sizes = {"f": 3, "h": 2}
    rows = []
    for state in ("model", "exp_avg"):
        for name in ("gate", "up"):
            rows.append(disk.lay(TensorKey(name, state), np.arange(6, dtype=np.float32).reshape(3, 2) + len(rows)))
    for name in ("gate", "up"):
        rows.append(disk.lay(TensorKey(name, "beta1_pow_acc"), np.array([0.81], np.float32)))
    rows.append(disk.lay(TensorKey("norm"), np.ones(2, np.float32)))
    applied = apply_mapping([Stored(0, row) for row in rows], _mapped(GATE_UP, sizes))
    by_key = {row.tensor.key: row.tensor for row in applied.stored}
    base = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert np.array_equal(disk.read(by_key[TensorKey("fc", "exp_avg")]), np.concatenate([base + 2, base + 3]).T)
    counter = by_key[TensorKey("fc", "beta1_pow_acc")]
    assert [chunk.replica for chunk in counter.chunks] == [0, 1]
    assert applied.kept == ("norm",)
    assert TensorKey("fc") in applied.renewed and TensorKey("norm") not in applied.renewed
    assert applied.names == {"gate": ("fc",), "up": ("fc",)}


def test_a_state_that_only_some_sources_have_is_an_error() -> None:
    disk = Disk()
    rows = [disk.lay(TensorKey(name), np.zeros((3, 2), np.float32)) for name in ("gate", "up")]
    rows.append(disk.lay(TensorKey("gate", "exp_avg"), np.zeros((3, 2), np.float32)))
    with pytest.raises(InconsistentCheckpoint, match="up has none"):
        apply_mapping([Stored(0, row) for row in rows], _mapped(GATE_UP, {"f": 3, "h": 2}))


def test_a_state_of_another_shape_is_an_error() -> None:
    disk = Disk()
    rows = [disk.lay(TensorKey(name), np.zeros((3, 2), np.float32)) for name in ("gate", "up")]
    rows += [disk.lay(TensorKey(name, "row_factor"), np.zeros(3, np.float32)) for name in ("gate", "up")]
    with pytest.raises(InconsistentCheckpoint, match="not its parameter's"):
        apply_mapping([Stored(0, row) for row in rows], _mapped(GATE_UP, {"f": 3, "h": 2}))


def test_a_name_that_stays_and_is_made_too_is_an_error() -> None:
    disk = Disk()
    rows = [disk.lay(TensorKey("a"), np.zeros(2, np.float32)), disk.lay(TensorKey("b"), np.zeros(2, np.float32))]
    with pytest.raises(UsageError, match="no rule takes"):
        apply_mapping([Stored(0, row) for row in rows], _mapped("a : h = b : h", {"h": 2}))


def test_a_rename_keeps_the_chunks_and_drops_are_named() -> None:
    disk = Disk()
    rows = [
        disk.lay(TensorKey("a"), np.arange(6, dtype=np.float32).reshape(3, 2), (1,)),
        disk.lay(TensorKey("gone"), np.zeros(2, np.float32)),
    ]
    mapped = _mapped("a : h f = b : h f", {"h": 3, "f": 2})._replace(dropped=("gone",))
    applied = apply_mapping([Stored(0, row) for row in rows], mapped)
    assert [row.tensor.key.name for row in applied.stored] == ["b"]
    assert applied.stored[0].tensor.chunks == rows[0].chunks
    assert [tensor.key.name for tensor in applied.dropped] == ["gone"]


def test_the_models_shape_is_the_parameters() -> None:
    disk = Disk()
    rows = [
        disk.lay(TensorKey("a", "step"), np.zeros((), np.float32)),
        disk.lay(TensorKey("a"), np.zeros((2, 3), np.float32)),
    ]
    assert parameter_shapes(Stored(0, row) for row in rows) == {"a": (2, 3)}


def test_a_tensor_without_elements_takes_its_new_name() -> None:
    disk = Disk()
    rows = [
        disk.lay(TensorKey("a"), np.zeros((0, 3), np.float32)),
        disk.lay(TensorKey("a", "exp_avg"), np.zeros((0, 3), np.float32)),
    ]
    piece = Piece((0, 3), Side("a", 0, (3, 1)), Side("b", 0, (3, 1)))
    applied = apply_mapping([Stored(0, row) for row in rows], Mapped((Made("b", (0, 3), (piece,)),)))
    assert [(str(row.tensor.key), row.tensor.shape) for row in applied.stored] == [
        ("b", (0, 3)),
        ("b [exp_avg]", (0, 3)),
    ]
