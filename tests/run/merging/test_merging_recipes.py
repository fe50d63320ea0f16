"""The recipes of merges against whole tensors in torch: values, any range, any number of threads, whatever the
tiles."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.merging import task_vectors, tiles
from ckpt_tool.merging.averages import Linear, ModelStock, NuSlerp, Slerp
from ckpt_tool.merging.task_vectors import TaskVectors, Trim, magnitudes_of

sys.path.insert(0, str(Path(__file__).resolve().parent))
import whole_merges as oracle

KEY = TensorKey("w")
SHAPES = [(37, 53), (1000,), (3, 5, 28), (1, 7), (64, 1)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and segments smaller than the tensors."""
    for module in (tiles, task_vectors):
        monkeypatch.setattr(module, "TILE", 64)
    monkeypatch.setattr(tiles, "SEGMENT", 256)


def models(shape: Sequence[int], count: int, seed: int = 0, dtype: str = "f32") -> list[torch.Tensor]:
    """Models that grew from one: arange-like, so that a wrong place shows, with noise of their own."""
    rng = np.random.default_rng(seed)
    n = int(np.prod(shape))
    start = np.linspace(-1, 1, n, dtype=np.float32)
    out = [start, *(start + rng.normal(0, 0.1, n).astype(np.float32) for _ in range(count - 1))]
    kind: Any = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}[dtype]
    return [torch.from_numpy(each.astype(kind).astype(np.float32)).reshape(*shape) for each in out]


def made(recipe: Any, tensors: Sequence[torch.Tensor], *, threads: int = 1, step: int = 0) -> np.ndarray[Any, Any]:
    """The whole line, in ranges of `step` elements on `threads` threads."""
    lines = [tensor.numpy().reshape(-1) for tensor in tensors]

    def read(number: int, low: int, high: int) -> Any:
        assert 0 <= low < high <= lines[number].size
        return lines[number][low:high].copy()

    n = lines[0].size
    edges = [*range(0, n, step or n), n]
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(lambda pair: recipe.values(read, *pair), pairwise(edges)))
    return np.concatenate(parts)


def ulps(got: np.ndarray[Any, Any], want: torch.Tensor) -> int:
    """The largest distance in units of the last place of fp32."""
    a, b = (
        np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64) for x in (got, want.numpy().reshape(-1))
    )
    order_a, order_b = (np.where(x < 0, -(x & 0x7FFFFFFF), x) for x in (a, b))
    return int(np.abs(order_a - order_b).max(initial=0))


def inputs(count: int) -> Any:
    return (None,) * count


def trims(kind: Any, count: int, density: float, gamma: float = 0.0, epsilon: float = 0.0) -> tuple[Trim, ...]:
    return tuple(Trim(kind, density, gamma, epsilon, task_vectors.stream(7, k, "w")) for k in range(count))


def vectors(shape: Any, count: int, kept: Any, weights: Any, **flags: Any) -> TaskVectors:
    known = {"consensus": False, "normalize": False, "rescale": False, **flags}
    return TaskVectors(KEY, tuple(shape), inputs(count + 1), "", tuple(weights), kept, **known)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", [True, False])
def test_linear_is_equal_bit_for_bit(shape: Any, normalize: bool) -> None:
    tensors = models(shape, 4)
    weights = (0.3, 0.7, -0.1, 2.5)
    got = made(Linear(KEY, tuple(shape), inputs(4), "", weights, normalize), tensors)
    assert ulps(got, oracle.linear(tensors, weights, normalize=normalize)) == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_slerp(shape: Any, t: float) -> None:
    x, y = models(shape, 2)
    for other in (y, x * 2, -x, torch.zeros_like(x)):  # an arc, and the straight lines
        got = made(Slerp(KEY, tuple(shape), inputs(2), "", t), [x, other])
        np.testing.assert_allclose(got, oracle.slerp(t, x, other).reshape(-1), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", [None, -1, 0])
@pytest.mark.parametrize("of_base", [False, True])
def test_nuslerp(shape: Any, axis: int | None, of_base: bool) -> None:
    base, x, y = models(shape, 3)
    along = axis if len(shape) > 1 else None
    recipe = NuSlerp(KEY, tuple(shape), inputs(3), "", 0.4, of_base, along)
    got = made(recipe, [x, y, base], step=100)
    want = oracle.nuslerp(0.4, x, y, base if of_base else None, axis)
    np.testing.assert_allclose(got, want.reshape(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_model_stock(shape: Any, by_row: bool, count: int) -> None:
    base, *ends = models(shape, count + 1)
    got = made(ModelStock(KEY, tuple(shape), inputs(count + 1), "", by_row), [base, *ends], step=100)
    want = oracle.model_stock(base, ends, by_row=by_row)
    np.testing.assert_allclose(got, want.reshape(-1), rtol=1e-5, atol=1e-6)


FLAGS = [
    {"consensus": consensus, "normalize": normalize, "factor": factor}
    for consensus in (True, False)
    for normalize in (True, False)
    for factor in (1.0, 0.7)
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind", [None, "largest", "crumbs"])
def test_task_vectors_are_equal_bit_for_bit(flags: Any, dtype: str, kind: str | None) -> None:
    """bf16 models have many equal magnitudes: those at the threshold are taken by their place."""
    for shape in SHAPES:
        base, *ends = models(shape, 4, seed=3, dtype=dtype)
        weights = (0.5, 1.0, -0.25)
        gamma = 0.05 if kind == "crumbs" else 0.0
        kept = trims(kind, 3, 0.35, gamma) if kind else (None,) * 3
        trim = {None: None, "largest": oracle.largest(0.35), "crumbs": oracle.crumbs(0.35, gamma)}[kind]
        got = made(vectors(shape, 3, kept, weights, **flags), [base, *ends], step=130)
        want = oracle.task_vectors(base, ends, weights, trim, **flags)
        assert ulps(got, want) == 0, shape


@pytest.mark.parametrize("density", [0.0005, 0.2, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5])
def test_thresholds_are_exact_where_everything_is_equal(density: float, gamma: float) -> None:
    """Magnitudes of four values only, and of one."""
    base = torch.zeros(40, 25)
    for end in (torch.arange(1000).reshape(40, 25) % 4 - 1.5, torch.ones(40, 25)):
        for kind, trim in (("largest", oracle.largest(density)), ("crumbs", oracle.crumbs(density, gamma))):
            got = made(vectors((40, 25), 1, trims(kind, 1, density, gamma), (1.0,)), [base, end], step=77)
            want = end if density >= 1 else end * trim(0, end)
            np.testing.assert_array_equal(got, want.reshape(-1))


@pytest.mark.parametrize("kind", ["chance", "ranks"])
@pytest.mark.parametrize("flags", [{"consensus": True, "normalize": True}, {"rescale": True}], ids=str)
def test_given_the_same_mask_the_rest_is_the_same(kind: str, flags: Any) -> None:
    for shape in SHAPES[:4]:
        base, *ends = models(shape, 3)
        kept = trims(kind, 2, 0.6, 0.0, 0.2)
        masked = [mask_of(trim, end - base) for trim, end in zip(kept, ends, strict=True)]
        got = made(vectors(shape, 2, kept, (1.0, 0.5), **flags), [base, *ends], step=100)
        want = oracle.task_vectors(base, ends, (1.0, 0.5), lambda k, _, m=masked: m[k], **flags)
        np.testing.assert_allclose(got, want.reshape(-1), rtol=2e-6, atol=3e-7)


def mask_of(trim: Trim, delta: torch.Tensor) -> torch.Tensor:
    numbers = task_vectors.draws(trim.key, 0, delta.numel()).astype(np.float64) / 2**32
    limits: Any = trim.density
    if trim.kind == "ranks":
        limits = oracle.rank_limits(delta, trim.density, trim.epsilon).double().numpy().reshape(-1)
    return torch.from_numpy((numbers < limits).astype(np.float32)).reshape(delta.shape)


def test_chance_keeps_its_share() -> None:
    """Of 400 000 elements, within five standard deviations; of neighbours, pairs as often as independence says."""
    n = 400_000
    density = 0.3
    flags = task_vectors.draw_kept(task_vectors.draws(task_vectors.stream(1, 0, "w"), 0, n), density)
    assert abs(flags.mean() - density) < 5 * (density * (1 - density) / n) ** 0.5
    assert abs((flags[1:] & flags[:-1]).mean() - density**2) < 5 * (density**2 / n) ** 0.5


def test_ranks_keep_large_ones_more_often() -> None:
    rows = 4000
    columns = 101
    values = np.tile(np.linspace(-1, 1, columns, dtype=np.float32), rows)
    numbers = task_vectors.draws(task_vectors.stream(1, 0, "w"), 0, rows * columns)
    share = task_vectors.kept_by_rank(numbers, magnitudes_of(values), columns, 0.5, 0.3).reshape(rows, columns).mean(0)
    wanted = oracle.rank_limits(torch.from_numpy(values).reshape(rows, columns), 0.5, 0.3)[0].numpy()
    assert np.abs(share - wanted).max() < 5 * (0.25 / rows) ** 0.5


def test_draws_are_those_of_any_other_range() -> None:
    key = task_vectors.stream(42, 1, "model.norm.weight")
    full = task_vectors.draws(key, 0, 500)
    for low, high in [(0, 1), (7, 9), (8, 16), (13, 500), (499, 500)]:
        np.testing.assert_array_equal(task_vectors.draws(key, low, high), full[low:high])
    others = [
        task_vectors.stream(43, 1, "model.norm.weight"),
        task_vectors.stream(42, 0, "model.norm.weight"),
        task_vectors.stream(42, 1, "x"),
    ]
    assert all((task_vectors.draws(other, 0, 500) != full).any() for other in others)


RECIPES: dict[str, Callable[[], Any]] = {
    "linear": lambda: Linear(KEY, (37, 53), inputs(3), "", (1.0, 2.0, 3.0)),
    "slerp": lambda: Slerp(KEY, (37, 53), inputs(2), "", 0.3),
    "nuslerp": lambda: NuSlerp(KEY, (37, 53), inputs(3), "", 0.3, True, 0),
    "model-stock": lambda: ModelStock(KEY, (37, 53), inputs(3), "", False),
    "ties": lambda: vectors((37, 53), 2, trims("largest", 2, 0.4), (1.0, 1.0), consensus=True, normalize=True),
    "breadcrumbs": lambda: vectors((37, 53), 2, trims("crumbs", 2, 0.4, 0.1), (1.0, 1.0)),
    "dare": lambda: vectors((37, 53), 2, trims("chance", 2, 0.4), (1.0, 1.0), rescale=True),
    "della": lambda: vectors((37, 53), 2, trims("ranks", 2, 0.4, 0, 0.2), (1.0, 1.0), rescale=True, consensus=True),
}


@pytest.mark.parametrize("name", RECIPES)
def test_bits_do_not_depend_on_ranges_threads_or_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = models((37, 53), 3, dtype="bf16")
    want = made(RECIPES[name](), tensors)
    for threads, step in ((1, 1), (4, 17), (2, 500), (4, 1961)):
        np.testing.assert_array_equal(made(RECIPES[name](), tensors, threads=threads, step=step), want)
    if name in ("linear", "ties", "breadcrumbs"):  # sums of fp64 are rounded where their tiles end
        monkeypatch.setattr(tiles, "TILE", 1000)
        monkeypatch.setattr(task_vectors, "TILE", 1000)
        monkeypatch.setattr(tiles, "SEGMENT", 3000)
        np.testing.assert_array_equal(made(RECIPES[name](), tensors), want)


def test_a_thread_that_fails_fails_those_that_wait() -> None:
    total = tiles.WalkOutcome(10_000, 0, lambda a, b: a + b)

    def look(start: int, stop: int) -> int:
        if start >= 5_000:
            raise OSError("gone")
        return stop - start

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(total.get, look, tiles.same) for _ in range(4)]
        assert all(isinstance(each.exception(20), OSError) for each in found)
    assert tiles.WalkOutcome(10_000, 0, lambda a, b: a + b).get(lambda start, stop: stop - start, tiles.same) == 10_000


def test_counts_are_not_kept() -> None:
    """A model has hundreds of tensors, and each is counted in tables of a megabyte: none outlives its walk."""
    tensors = models((37, 53), 3)
    recipes = [RECIPES["ties"]() for _ in range(8)]
    tracemalloc.start()
    for recipe in recipes:
        made(recipe, tensors)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 500_000
