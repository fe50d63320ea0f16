"""Two models in one folder, or in one file, where nothing says which is meant.

A file of a whole model next to other files of the same stem, with an index or without:

model.safetensors          transformers loads this one
model.safetensors.index.json -> model-00001-of-00002.safetensors, ...     other tools take these
model.fp16.safetensors     next to model.fp16-00001-of-00002.safetensors: the index of a variant has another name

One state with two levels that a model may be called by, and the same names on both with other shapes or values:

{"state_dict": {"w": T0}, "model": {"w": T1}}      of copies, the one that is read and its twin say the same

Cost of the latter: HEAD bytes of up to SAMPLE tensors and of their twins, where there are twins. What it does not do:
compare the rest of them, or tensors of two dtypes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import EXTRAS, LogicalTensor, TensorKey
from ckpt_tool.core.wrapper_words import clean
from ckpt_tool.errors import InconsistentCheckpoint

if TYPE_CHECKING:
    from ckpt_tool.core.catalog import Catalog
    from ckpt_tool.storage.source import Tree

TWO_MODELS = "E2874"
TWO_IN_ONE_STATE = "E3070"
HEAD = 64 << 10  # bytes of a tensor that are compared: two trained models differ at once
SAMPLE = 64  # tensors of which the bytes are compared


def refuse_file_next_to_index(tree: Tree, file: str, index: str, shards: Collection[str], *, most: int) -> None:
    """Raise InconsistentCheckpoint E2874 unless the file is one of the index's.

    Args:
        file: a file in the folder with the index's stem.
        shards: the files that the index lists.
        most: how many of them the error lists.
    """
    if file in shards:
        return
    raise InconsistentCheckpoint(
        f"{file} and {index} are two models in one folder: the index names {len(shards)} other files",
        code=TWO_MODELS,
        path=tree.display(),
        faults=[f"of the index: {shard}" for shard in sorted(shards)[:most]],
        hint=f"say which is meant: --prefer {file}, which transformers loads, or --prefer {index}; "
        "and remove the other",
    )


def refuse_file_next_to_numbered(
    tree: Tree, file: str, numbered: Sequence[str], without_index: str, *, most: int
) -> None:
    """Raise InconsistentCheckpoint E2874 if the folder of numbered files also contains the unnumbered file.

    Args:
        numbered: the files, which are read without an index.
        without_index: what `--prefer` calls them.
        most: how many of them the error lists.
    """
    if file not in tree.names():
        return
    raise InconsistentCheckpoint(
        f"{file} and {len(numbered)} numbered files of its name are two models in one folder, and no index that is read"
        " here names one of them",
        code=TWO_MODELS,
        path=tree.display(),
        faults=[f"numbered: {name}" for name in sorted(numbered)[:most]],
        hint=f"say which is meant: --prefer {file}, or --prefer {without_index} for the numbered files; "
        "and remove the other",
    )


def two_in_one_state(
    tree: Tree, catalog: Catalog, removed: Collection[TensorKey] = ()
) -> Iterator[InconsistentCheckpoint]:
    """InconsistentCheckpoint E3070 for each level of a state dict, other than the model's, that has the model's names
    with other shapes or values.

    Args:
        removed: tensors that the user leaves out. A level that is left out completely is no second model.
    """
    # A folder of safetensors files is looked at without any reader of pickles.
    from ckpt_tool.formats.state_dict.roots import Roots
    from ckpt_tool.formats.state_dict.tree import dotted
    from ckpt_tool.formats.state_dict.words import is_second_model

    roots = catalog.hints.get(Roots)
    if roots is None or not roots.model or roots.chosen:
        return
    levels: dict[str, dict[str, LogicalTensor]] = {}
    for key, tensor in catalog.tensors.items():
        if key.state == EXTRAS and key not in removed and is_second_model(tensor.path, roots.model):
            levels.setdefault(str(tensor.path[0]), {})[clean(dotted(tensor.path[1:]))] = tensor

    shown = dotted(roots.model)
    for level, tensors in levels.items():
        twins = {name: catalog.tensors.get(TensorKey(name)) for name in tensors}
        pairs = [(name, twin, tensors[name]) for name, twin in twins.items() if twin is not None]
        if len(pairs) < len(tensors):  # it has names that the model lacks, so it is not a second version of it
            continue
        other_shapes = [name for name, ours, theirs in pairs if ours.shape != theirs.shape]
        # At most SAMPLE pairs, evenly spread over all of them.
        stride = ceil_div(len(pairs), SAMPLE)
        differing = other_shapes
        if not differing:
            compared = pairs[::stride]
            differing = [name for name, ours, theirs in compared if _differ_in_value(tree, ours, theirs)]
        if differing:
            yield InconsistentCheckpoint(
                f"{shown} and {level} are two models in one file: {differing[0]} has"
                f" {'another shape' if other_shapes else 'other values'} in {level}",
                code=TWO_IN_ONE_STATE,
                path=tree.display(),
                key=differing[0],
                faults=[f"{name} too" for name in differing[1:50]],
                hint=f"say which is meant: --prefer {shown}, or --prefer {level}; the other is kept as extras, or left"
                " out where the target holds none",
            )


def _differ_in_value(tree: Tree, ours: LogicalTensor, theirs: LogicalTensor) -> bool:
    """Do the first bytes of two tensors of one shape differ? False for what can't be compared byte by byte."""
    if ours.dtype != theirs.dtype or len(ours.chunks) != 1 or len(theirs.chunks) != 1:
        return False
    first = ours.chunks[0].array
    second = theirs.chunks[0].array
    is_same_place = (first.path, first.offset) == (second.path, second.offset)
    if is_same_place or first.strides is not None or second.strides is not None or first.dtype != second.dtype:
        return False
    length = min(HEAD, first.dtype.nbytes(first.numel), second.dtype.nbytes(second.numel))
    return tree.read(first.path, first.offset, length) != tree.read(second.path, second.offset, length)
