"""Decides which NumPy arrays in a nested training state are weights or states, and which are a trainer's own values.

    {"model": {"w": array, "b": T}}                     w is a tensor like b
    {"head.weight": array, "head.bias": array}          a model of arrays
    {"model": {...}, "rng": {"numpy": ("MT19937", array, 624, 0, 0.0)}}      no tensor
    {"model": {...}, "class_weights": array}            no tensor: it is outside the model

Libraries that convert between frameworks save arrays in place of torch's tensors, and the pickle does not show which is
meant. So the path decides: an array is a tensor below a level with the usual name of a model, average, master or
optimizer, and in a dict of tensors. Random states and an optimizer's groups stay values. Cost: a look at a dict's
values, if it contains an array.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.tensor import Path
from ckpt_tool.formats.state_dict.words import MASTER_ROOTS, MODEL_ROOTS, OPTIMIZER_ROOTS, is_average
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_numpy import is_text, tensor_dtype
from ckpt_tool.storage.pickles.pickle_values import ArrayRef, NumpyArray, TensorRef, WrapperRef

_ROOTS = frozenset(MODEL_ROOTS) | MASTER_ROOTS | OPTIMIZER_ROOTS
_VALUES = re.compile(r"(?:^|[._])(?:rng|random|seed|param_groups)(?:[._]|$)")
_TENSORS = (TensorRef, WrapperRef, ArrayRef)


def is_tensor_place(path: Path, siblings: Iterable[tuple[Any, Any]] = ()) -> bool:
    """Is a NumPy array at `path` a weight or a state? siblings: the items of the dict that holds it, with itself."""
    words = ".".join(map(str, path)).lower()
    if _VALUES.search(words):
        return False
    if any(map(_is_root, words.split(".")[:-1])):
        return True
    items = list(siblings)
    among_tensors = any(isinstance(item, _TENSORS) for _, item in items)
    if len(path) > 1:
        return among_tensors
    if any(_is_root(str(key).lower()) and isinstance(item, Mapping) for key, item in items):
        return False
    dotted_names = "." in str(path[-1]) if path else False
    return among_tensors or dotted_names or (bool(items) and all(isinstance(item, NumpyArray) for _, item in items))


def _is_root(word: str) -> bool:
    """Is it the name of a level that holds a model, averages, masters or an optimizer?"""
    return word in _ROOTS or is_average(word)


def as_tensor(array: NumpyArray) -> ArrayRef | Opaque | None:
    """The array as a tensor. The record of an unreadable tensor if tensors have no such dtype; None if it holds text,
    which is never a weight."""
    dtype = tensor_dtype(array.dtype) if array.dtype else None
    if dtype is not None and type(array.data) is bytes:
        return ArrayRef(array, dtype)
    if is_text(array.dtype):
        return None
    return Opaque(pickles.ARRAY, (array.dtype, array.shape, array.fortran, None))
