"""Each path of the compiled blocks gives the bits of NumPy, on any range and shape, and steps aside where it can't.

Needs the compiled loops (`tests/loops.py`); a path that this processor lacks is skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from loops import choice_of

from ckpt_tool.adapters.arithmetic import Folded, RunCache
from ckpt_tool.adapters.arithmetic import ProductTerm as Adapter
from ckpt_tool.adapters.chain import written_out
from ckpt_tool.cli import run
from ckpt_tool.compiled import library as compiled
from ckpt_tool.compiled.library import CompiledLibrary, CTerm
from ckpt_tool.compiled.loading import PATHS, Opened
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import StoredArray, TensorKey, simple_tensor
from ckpt_tool.merging.averages import Linear
from ckpt_tool.quantised import nearest_codes
from ckpt_tool.quantised.codecs import gguf_blocks
from ckpt_tool.quantised.codecs.gguf_blocks import BlocksOfFloats, FloatsOfBlocks
from ckpt_tool.quantised.nearest_codes import Error, ValuePlace, Values, codes_of, largest
from ckpt_tool.run.compute import cast
from ckpt_tool.run.computed import ComputedTree, Input
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes.ggml_types import of_name
from ckpt_tool.weight_schemes.written_schemes import SCHEMES

NUMPY = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@pytest.fixture(scope="module", params=PATHS)
def library(loops: Opened, request: pytest.FixtureRequest) -> CompiledLibrary:
    """The functions of a path."""
    choice = choice_of(loops, request.param)
    assert choice.library is not None
    functions = CompiledLibrary(choice.library, choice.path)
    assert compiled._trial(functions) == ""
    return functions


@pytest.fixture
def shelf(library: CompiledLibrary, monkeypatch: pytest.MonkeyPatch) -> compiled.BlocksShelf:
    """The process uses this path."""
    shelf = compiled.BlocksShelf()
    shelf.library = library
    shelf._is_decided = True
    monkeypatch.setattr(compiled, "_shelf", shelf)
    return shelf


def drawn(seed: int, shape: tuple[int, ...], dtype: str, scale: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(NUMPY[dtype])


def sums(inputs, weights, total):
    """Step by step in fp64, rounded to fp32 after each."""
    so_far = np.zeros(inputs[0].shape, np.float32)
    for values, weight in zip(inputs, weights, strict=True):
        so_far = (values.astype("f8") * np.float64(np.float32(weight)) + so_far).astype("f4")
    return so_far / np.float32(total)


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["F32", "BF16"])
@pytest.mark.parametrize("kinds", [("BF16", "BF16"), ("F32", "BF16"), ("BF16",), ("F32", "F32", "BF16")])
def test_sums(library: CompiledLibrary, kinds: tuple[str, ...], out: str) -> None:
    for numel in (1, 7, 511, 512, 513, 5000):
        inputs = [drawn(k, (numel,), kind) for k, kind in enumerate(kinds)]
        inputs[0][::3] = -0.0
        weights = [0.3, -1.7, 1e-3][: len(kinds)]
        for total in (1.0, 0.7):
            made = np.full(numel, 77, f"u{np.dtype(NUMPY[out]).itemsize}")
            wide = [float(np.float32(weight)) for weight in weights]
            assert library.linear(list(zip(inputs, kinds, strict=True)), wide, total, made, out)
            want = sums(inputs, weights, total).astype(NUMPY[out])
            np.testing.assert_array_equal(made, want.view(made.dtype))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3.4e38])
def test_sums_that_are_not_finite_are_left_to_numpy(library: CompiledLibrary, odd: float) -> None:
    x = drawn(0, (600,), "F32")
    x[555] = odd  # the last is finite, but no bf16: it rounds to infinity
    for dtype in ("F32", "BF16"):
        made = np.empty(600, f"u{np.dtype(NUMPY[dtype]).itemsize}")
        assert library.linear([(x, "F32")], [1.0], 1.0, made, dtype) == (dtype == "F32" and np.isfinite(odd))
    assert not library.linear([(x[:9].astype("f2"), "F16")], [1.0], 1.0, made[:9], "BF16")


def test_every_bf16_is_rounded_as_ml_dtypes_does(library: CompiledLibrary) -> None:
    upper = np.arange(0x7F7F, dtype="u4")
    bits = np.concatenate([upper << 16 | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = np.concatenate([bits, bits | np.uint32(1 << 31)]).view("f4")
    made = np.empty(len(values), "u2")
    assert library.linear([(values, "F32")], [1.0], 1.0, made, "BF16")
    np.testing.assert_array_equal(made, (values + np.float32(0)).astype(ml_dtypes.bfloat16).view("u2"))


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 16, 37, 321, 700])
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (7, 64), (25, 131), (13, 600)])
def test_products(library: CompiledLibrary, rank: int, rows: int, columns: int) -> None:
    if not library.pair:
        pytest.skip("this path has no fused multiply-add: NumPy makes its products")
    b = drawn(1, (rows, rank), "F32", 1)
    a = drawn(2, (rank, columns), "F32", 1)
    base = drawn(3, (rows, columns), "BF16", 1)
    numel = rows * columns
    delta = np.zeros((rows, columns), np.float32)
    for start in range(0, rank, 320):
        part = written_out(b[:, start : start + 320], a[start : start + 320])
        delta = delta + part if start else part
    want = (base.astype("f4") + delta * np.float32(1.7)).astype("f4")
    terms = [CTerm(b, library.panels(a), 1.7)]
    line = base.reshape(-1)
    ranges = np.sort(np.random.default_rng(rank).integers(0, numel + 1, (12, 2)), axis=1)
    for start, stop in [(0, numel), *((int(low), int(high)) for low, high in ranges if low < high)]:
        for dtype in ("F32", "BF16"):
            made = np.full(stop - start, 77, f"u{np.dtype(NUMPY[dtype]).itemsize}")
            assert library.folded((line[start:stop], "BF16"), (made, dtype), (start, stop, columns), terms)
            np.testing.assert_array_equal(made, want.reshape(-1)[start:stop].astype(NUMPY[dtype]).view(made.dtype))


# -- transposes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_transposes(library: CompiledLibrary, item: int) -> None:
    rng = np.random.default_rng(item)
    for rows, columns in [(1, 9), (8, 8), (3, 200), (129, 65), (64, 64), *rng.integers(2, 150, (8, 2))]:
        wide = np.zeros((rows, columns + 5), f"u{item}")
        wide[...] = rng.integers(0, 256, (rows, (columns + 5) * item), np.uint8).view(wide.dtype)
        target = np.full((columns, rows + 3), 7, wide.dtype)
        source = wide[:, :columns]
        if rows > 1 and columns > 1:
            assert library.turned(source, target[:, :rows].T)
            np.testing.assert_array_equal(target[:, :rows], source.T)
        assert (target[:, rows:] == 7).all()


def test_transposes_of_more_dims(library: CompiledLibrary) -> None:
    source = np.random.default_rng(0).integers(0, 1 << 16, (3, 40, 50), np.uint16)
    target = np.zeros((50, 3, 40), np.uint16)
    assert library.turned(source, target.transpose(1, 2, 0))
    np.testing.assert_array_equal(target, source.transpose(2, 0, 1))
    assert not library.turned(source, np.zeros_like(source))  # a plain copy
    assert not library.turned(source[:, :, ::2], target.transpose(1, 2, 0)[:, :, ::2])


# -- recipes -----------------------------------------------------------------------------------------------------------


def stored(folder: Path, name: str, values: np.ndarray, dtype: str) -> Input:
    (folder / name).write_bytes(values.tobytes())
    tensor = simple_tensor(TensorKey(name), StoredArray(name, 0, DTYPES[dtype], values.shape))
    return Input(tensor, Tree(folder))


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("experts", [1, 3])
def test_recipes_give_the_same_bits_by_both_roads(
    shelf: compiled.BlocksShelf, library: CompiledLibrary, tmp_path: Path, experts: int, odd: bool
) -> None:
    shape = (experts, 23, 40) if experts > 1 else (23, 40)
    base = drawn(0, shape, "BF16")
    if odd:
        base.reshape(-1)[100] = np.nan
    w = stored(tmp_path, "w", base, "BF16")
    y = stored(tmp_path, "y", drawn(1, shape, "BF16"), "BF16")
    a = stored(tmp_path, "a", drawn(2, (4 * experts, 40), "F32"), "F32")
    b = stored(tmp_path, "b", drawn(3, (23, 4 * experts), "F32"), "F32")
    terms = (Adapter(1, 2, 4, 1.7, turned=False), Adapter(1, 2, 4, 2.0, turned=False))
    linear = Linear(TensorKey("l"), shape, (w, y), "", (0.3, 0.9))
    folded = Folded(TensorKey("f"), shape, (w, a, b), "", terms, experts, RunCache())
    tree = ComputedTree("made", [linear, folded])
    for path in ("model/l", "model/f"):
        for start, stop in ((0, linear.numel), (0, 99), (101, 2 * 23 * 20 - 1), (37, 700)):
            wide = tree.view(path, 4 * start, 4 * (stop - start))
            want = bytes(cast(wide, DTYPES["F32"], DTYPES["BF16"])[0])
            out = memoryview(bytearray(2 * (stop - start)))
            finite = not (odd and start <= 100 < stop)
            is_made = finite and (path == "model/l" or library.pair > 0)  # products want a fused multiply-add
            assert tree.compute_rounded(path, start, DTYPES["BF16"], out) == is_made
            assert not is_made or bytes(out) == want
            assert not tree.compute_rounded(path, start, DTYPES["F16"], out)


def test_a_merge_is_the_same_file_by_both_roads(
    library: CompiledLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = str(FIXTURES / "convert" / "llama" / "hf")
    twin = str(tmp_path / "twin")
    calls = []
    shutil.copytree(hf, twin)
    line = ["merge", hf, twin, "--method", "linear", "--weight", "0.3", "--weight", "0.9", "-q", "--no-fsync"]
    turned = CompiledLibrary.turned
    summed = CompiledLibrary.linear
    monkeypatch.setattr(CompiledLibrary, "turned", lambda *a: (calls.append("turned"), turned(*a))[1])
    monkeypatch.setattr(CompiledLibrary, "linear", lambda *a: (calls.append("linear"), summed(*a))[1])
    for name in ("numpy", "compiled"):
        shelf = compiled.BlocksShelf()
        shelf.library = library if name == "compiled" else None
        shelf._is_decided = True
        monkeypatch.setattr(compiled, "_shelf", shelf)
        for to in ("safetensors", "paddle"):
            assert run([*line[:3], str(tmp_path / f"{name}-{to}"), *line[3:], "--to", to, "--dtype", "bf16"]) == 0
        assert bool(calls) == (name == "compiled")
    assert set(calls) == {"turned", "linear"}
    for to in ("safetensors", "paddle"):
        files = sorted(path for path in (tmp_path / f"numpy-{to}").rglob("*") if path.is_file())
        assert files
        for path in files:
            assert (
                path.read_bytes()
                == (tmp_path / f"compiled-{to}" / path.relative_to(tmp_path / f"numpy-{to}")).read_bytes()
            )


# -- codes -------------------------------------------------------------------------------------------------------------


def coded(
    values: np.ndarray, dtype: str, scheme: str, block: tuple[int, int, int], divisors: np.ndarray
) -> tuple[bytes, Error]:
    line = Values(values.view(NUMPY[dtype]), DTYPES[dtype])
    codes = np.empty(len(values), np.uint8)
    error = codes_of(line, ValuePlace(*block), divisors, SCHEMES[scheme], codes)
    return codes.tobytes(), error


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", NUMPY)
def test_codes(library: CompiledLibrary, monkeypatch: pytest.MonkeyPatch, dtype: str, scheme: str) -> None:
    """Every bf16 but those that are no numbers, by divisors from the least to the largest; ragged blocks."""
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    values = np.concatenate((every[np.isfinite(every)], drawn(3, (1 << 12,), "F32", 3.0).view(np.float32)))
    values = values[: len(values) // 600 * 600].astype(NUMPY[dtype])
    few = np.array([2.0**-140, 2.0**-126, 1e-4, 0.3, 1.0, 2.0**100], np.float32)
    divisors = few[np.arange(len(values) // 120 * 5) % len(few)].reshape(-1, 5)
    # the last one's blocks are longer than the loops of a known length
    cases = [((120, 7, 30), divisors), ((120, 0, 120), divisors[:1, 3:4]), ((600, 0, 290), divisors[:, :3])]
    cases = [(block, some[: len(values) // block[0]]) for block, some in cases]
    want = [coded(values, dtype, scheme, *case) for case in cases]
    sizes = [largest(Values(values, DTYPES[dtype]), 120, 32, of_all=both) for both in (False, True)]
    monkeypatch.setattr(nearest_codes, "ready", lambda nbytes: library)
    for each, case in zip(want, cases, strict=True):
        again = coded(values, dtype, scheme, *case)
        assert each[0] == again[0] and each[1].most == again[1].most
        assert np.allclose(each[1][1:], again[1][1:], rtol=1e-12)
    for found, both in zip(sizes, (False, True), strict=True):
        assert np.array_equal(found, largest(Values(values, DTYPES[dtype]), 120, 32, of_all=both))
    values[17] = np.nan
    assert not np.isfinite(largest(Values(values, DTYPES[dtype]), 120, 32)[0, 0])


# -- blocks of GGUF ----------------------------------------------------------------------------------------------------


def hard(seed: int) -> np.ndarray:
    """A block: ties, magnitudes from the least to the largest, zeros of both signs, any bits at all, mostly zeros."""
    rng = np.random.default_rng(seed)
    made = [
        rng.integers(-20, 21, 32) * 2.0 ** rng.integers(-30, 30),
        rng.standard_normal(32) * 2.0 ** rng.uniform(-150, 128),
        rng.choice([0.0, -0.0, 1.0, -1.0, 0.5, -0.5], 32),
        rng.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32).view(np.float32),
        np.abs(rng.standard_normal(32)) * rng.choice([0, 1], 32),
        np.append(rng.uniform(-1, 1, 31), 1) * np.nextafter(np.float32(2.0) ** rng.integers(-60, 60), np.float32(0)),
    ][seed % 6]
    with np.errstate(all="ignore"):
        return made.astype(np.float32)


@pytest.mark.parametrize("name", sorted(compiled.BLOCKS))
@pytest.mark.parametrize("dtype", NUMPY)
def test_blocks_of_gguf(
    shelf: compiled.BlocksShelf,
    library: CompiledLibrary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    name: str,
) -> None:
    """By themselves where the call takes them, and as a recipe makes them, with blocks that it does not take."""
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[name]

    def judged(values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            line = gguf.quants.quantize(values.astype(np.float32).reshape(1, -1), number)
        return line.reshape(values.size // 32, -1)

    calm = drawn(1, (1 << 16,), dtype)
    with np.errstate(all="ignore"):
        blocks = [hard(seed).astype(NUMPY[dtype]) for seed in range(300)]
    made = np.empty(judged(calm).shape, np.uint8)
    taken = 0
    assert library.blocks((calm, dtype), name, made) and np.array_equal(made, judged(calm))
    for seed, values in enumerate(blocks):
        if library.blocks((values, dtype), name, made[:1]):
            taken += 1
            np.testing.assert_array_equal(made[:1], judged(values), err_msg=f"{seed=}")
    assert taken > 150
    whole = np.concatenate([calm, *(values for values in blocks if np.isfinite(values.astype("f4")).all())])
    recipe = BlocksOfFloats(
        *(TensorKey("w"), (whole.size // 32,), (stored(tmp_path, "w", whole, dtype),), "", of_name(name))
    )
    tree = ComputedTree("made", [recipe])
    want = judged(whole).tobytes()
    monkeypatch.setattr(gguf_blocks, "_FEW", 3)
    for low, high in ((0, len(want)), (1000, 30001)):
        assert bytes(tree.view("model/w", low, high - low)) == want[low:high]


@pytest.mark.parametrize("name", sorted(compiled.FLOATS))
def test_floats_of_ggufs_blocks(
    shelf: compiled.BlocksShelf, library: CompiledLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Blocks of any bytes, block by block, and as a recipe makes them, with blocks that the call does not take."""
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[name]
    dtype = of_name(name)
    elements, nbytes = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(len(name)).integers(0, 256, (700, nbytes), np.uint8)
    blocks[:64] = 0
    blocks[:64, :2] = blocks[:64, -2:] = np.arange(64, dtype=np.uint8)[:, None] << 2  # scales of all exponents
    blocks[64:128] = 255
    blocks[64:128, :2] = blocks[64:128, -2:] = np.arange(64, dtype=np.uint8)[:, None]
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(blocks.reshape(1, -1), number).reshape(len(blocks), elements)
        half = want.astype(ml_dtypes.bfloat16)
    taken = np.zeros(len(blocks), bool)
    for kind, judged in (("F32", want), ("BF16", half)):
        bits = judged.view(f"u{judged.itemsize}")
        made = np.empty((len(blocks), elements), bits.dtype)
        for k, block in enumerate(blocks):
            taken[k] = library.floats(block[None], name, made[k], kind)
            assert not taken[k] or np.isfinite(judged[k].astype("f4")).all()
        assert taken.sum() > 500
        np.testing.assert_array_equal(made[taken], bits[taken])
        some = np.flatnonzero(taken)[:333]
        many = np.empty((len(some), elements), bits.dtype)
        assert library.floats(np.ascontiguousarray(blocks[some]), name, many.reshape(-1), kind)
        np.testing.assert_array_equal(many, bits[some])
    stored_as = simple_tensor(TensorKey("w"), StoredArray("w", 0, dtype, (len(blocks),)))
    (tmp_path / "w").write_bytes(blocks.tobytes())
    recipe = FloatsOfBlocks(TensorKey("w"), (want.size,), (Input(stored_as, Tree(tmp_path)),), "")
    tree = ComputedTree("made", [recipe])
    line = want.reshape(-1).view(np.uint8)
    monkeypatch.setattr(gguf_blocks, "_TILE", 8 * elements)
    for low, high in ((0, want.size), (3, 29 * elements + 1), (elements * 7, elements * 50)):
        np.testing.assert_array_equal(
            np.frombuffer(tree.view("model/w", 4 * low, 4 * (high - low)), "u1"), line[4 * low : 4 * high]
        )
        direct = np.empty(4 * (high - low), np.uint8)
        tree.fill("model/w", 4 * low, direct.data)
        np.testing.assert_array_equal(direct, line[4 * low : 4 * high])
        out = memoryview(bytearray(2 * (high - low)))
        whole = taken[low // elements : ceil_div(high, elements)].all()
        assert tree.compute_rounded("model/w", low, DTYPES["BF16"], out) == whole
        assert not whole or bytes(out) == half.reshape(-1)[low:high].tobytes()
