"""Dequantising states against what PaddleFormers' own functions made of the same bytes (`fixtures/paddle-quant`), in
any pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.core.box import whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InternalError
from ckpt_tool.quantised.codecs.paddle_moments import find_paddle_states
from ckpt_tool.run.computed import ComputedTree
from ckpt_tool.storage.safetensors_files.safetensors_file import read_header
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.unified.files import optimizer_key
from ckpt_tool.weight_schemes.paddle_states import recipes_of

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle-quant"


class View:
    """The states that are made, and the tree they lie in."""

    def __init__(self, tensors: list[LogicalTensor], source: Tree) -> None:
        found = find_paddle_states(tensors, source)
        self.used = found.used
        self.tree = ComputedTree("dequantised", found.recipes) if found.recipes else source
        self.tensors = self.tree.tensors if isinstance(self.tree, ComputedTree) else ()


view = View
KEYS = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}


def opened(folder: Path, stage: str) -> tuple[Tree, list[LogicalTensor], dict[str, np.ndarray]]:
    every = load_file(FIXTURES / f"{stage}.safetensors")
    stored = {key[7:]: value for key, value in every.items() if key.startswith("stored/")}
    save_file(stored, folder / "optimizer.safetensors")
    tree = Tree(folder)
    header = read_header(tree, "optimizer.safetensors")
    tensors = []
    for row, name in enumerate(header.names):
        array = header.stored(row)
        chunk = Chunk(whole(array.shape), array, whole(array.shape))
        tensors.append(LogicalTensor(optimizer_key(name, array.dtype, path="x"), array.shape, array.dtype, (chunk,)))
    return tree, tensors, {key[5:]: value for key, value in every.items() if key.startswith("made/")}


@pytest.mark.parametrize(("stage", "made"), [("o1", 4), ("o2", 2)])
def test_the_values_are_those_of_paddle(stage: str, made: int, tmp_path: Path) -> None:
    tree, tensors, want = opened(tmp_path, stage)
    found = view(tensors, tree)
    assert len(found.tensors) == made  # in O2 vectors stay as they are
    for tensor in found.tensors:
        array = tensor.chunks[0].array
        got = np.frombuffer(found.tree.read(array.path, 0, tensor.nbytes), "<f4").reshape(tensor.shape)
        theirs = want[f"{tensor.key.name}/{KEYS[tensor.key.state]}"]
        apart = np.abs(got.view(np.int32).astype(np.int64) - theirs.view(np.int32)).max()
        assert apart <= (0 if tensor.key.state == "exp_avg" else 4), tensor.key  # units in the last place
        assert found.tree.size(array.path) == tensor.nbytes


@pytest.mark.parametrize("stage", ["o1", "o2"])
def test_any_piece_is_a_piece_of_the_whole(stage: str, tmp_path: Path) -> None:
    tree, tensors, _ = opened(tmp_path, stage)
    found = view(tensors, tree)
    for tensor in found.tensors:
        path = tensor.chunks[0].array.path
        every = found.tree.read(path, 0, tensor.nbytes)
        for step in (1, 7, 48, 333):
            pieces = [found.tree.read(path, at, min(step, len(every) - at)) for at in range(0, len(every), step)]
            assert b"".join(pieces) == every
        assert found.tree.read(path, len(every), 0) == b""


def test_what_is_not_quantised_is_left_alone(tmp_path: Path) -> None:
    tree, tensors, _ = opened(tmp_path, "o2")
    found = view(tensors, tree)
    left = {tensor.key for tensor in tensors} - found.used
    assert {key.state for key in left} == {"beta1_pow_acc", "exp_avg", "exp_avg_sq"}
    assert {key.name for key in left if key.state == "exp_avg"} == {"norm.weight"}
    assert view([], tree).tensors == ()


def test_scales_that_are_missing_or_odd(tmp_path: Path) -> None:
    tree, tensors, _ = opened(tmp_path, "o1")
    with pytest.raises(Incomplete) as lone:
        view([tensor for tensor in tensors if not tensor.key.state.endswith("@max_scales")], tree)
    assert lone.value.code == "E1363"
    array = StoredArray("optimizer.safetensors", 0, DTYPES["F32"], (3,))
    odd = LogicalTensor(
        TensorKey("fc.weight", "exp_avg@scales"), (3,), array.dtype, (Chunk(whole((3,)), array, whole((3,))),)
    )
    with pytest.raises(InconsistentCheckpoint) as shape:
        view([odd if tensor.key == odd.key else tensor for tensor in tensors], tree)
    assert shape.value.code == "E1362"


def test_the_view_has_no_descriptors_and_no_other_files(tmp_path: Path) -> None:
    tree, tensors, _ = opened(tmp_path, "o1")
    found = view(tensors, tree)
    path = found.tensors[0].chunks[0].array.path
    assert not found.tree.local and found.tree.identity(path) == View(tensors, tree).tree.identity(path)
    for call in (found.tree.open, found.tree.fd):
        with pytest.raises(InternalError):
            call(path)
    with pytest.raises(InternalError):
        found.tree.read(path, 0, 1 << 40)
    assert sorted(found.tree.listing()) == sorted(t.chunks[0].array.path for t in found.tensors)


def test_recipes_by_states() -> None:
    assert [each.made for each in recipes_of(["exp_avg@int8", "exp_avg@scales"])] == ["exp_avg"]
    assert recipes_of(["exp_avg@int8"]) == ()
