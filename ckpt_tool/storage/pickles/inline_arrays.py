"""A view of the arrays of a pickle that stores their bytes as text.

Pickles of protocol 2 have no byte strings: NumPy arrays are stored as latin-1 text, encoded in UTF-8, where half of the
byte values take two bytes. So nothing can be copied from such a file in place. The view of a file `x.pdparams` is
called `x.pdparams//arrays` (no real file can have that name) and contains the bytes of those arrays, concatenated in
the order in which they appear in the value:

    {"a": 12 bytes, "b": 8 bytes}      a at 0, b at 12 of x.pdparams//arrays

A torch file has its pickle in the middle, and may have several: the view `x.pt//pickle@704+1200` holds the arrays of
the pickle that is 1200 bytes at 704.

`Tree` reads both alike, and counts the view's identity as the file's own. Cost: the file is read whole and decoded when
its first value is wanted; so files of more than LIMIT bytes are refused. Source: CPython `pickle.py`, `save_bytes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.inner_path import VIEW, base_of
from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.errors import InputError
from ckpt_tool.storage.pickles.pickle_values import ArrayRef, NumpyArray, Pickled

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree

INLINE = "//arrays"  # no file of a checkpoint can be called so: `safe_relative` refuses it, and no listing has it
LIMIT = 256 << 20  # bytes of the file
_RANGE = re.compile(r"pickle@(?P<at>\d{1,18})\+(?P<nbytes>\d{1,18})", re.ASCII)
_MAKERS = frozenset(("_reconstruct", "_frombuffer"))  # NumPy's functions that every array in a pickle names


def inline_arrays(value: Any) -> Iterator[NumpyArray]:
    """The arrays of a pickle's value whose bytes are at hand, in the value's order, each once."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, NumpyArray):
            if isinstance(item.data, bytes) and item.data and id(item) not in seen:
                seen.add(id(item))
                yield item
            continue
        if isinstance(item, dict | list | tuple):
            if id(item) in seen:
                continue
            seen.add(id(item))
            todo.extend(reversed(list(item.values()) if isinstance(item, dict) else item))


def refuse_large(tree: Tree, name: str, code: str) -> None:
    """Raise InputError if the file has pickle protocol 2 or older and is too large to be decoded in memory."""
    size = tree.size(name)
    if size > LIMIT and tree.read(name, 0, 2) < b"\x80\x03":
        raise InputError(
            f"a pickle of protocol 2 with {size} bytes, want at most {LIMIT}: its arrays are text and can't "
            "be copied in "
            "place",
            code=code,
            path=tree.display(name),
            offset=0,
            hint="save it again with the framework that wrote it: paddle.save(paddle.load(x), x, protocol=4)",
        )


def place_arrays(pickled: Pickled) -> None:
    """Set `at` of each array of a torch file's pickle: its offset in the view of that pickle's arrays (`array_in`)."""
    if not any(use.name in _MAKERS for use in pickled.globals):
        return
    at = 0
    for array in inline_arrays(pickled.value):
        array.at = at
        at += len(array.data)


def array_in(path: str, start: int, nbytes: int, ref: ArrayRef) -> StoredArray:
    """The tensor `ref` of the pickle that is bytes [start, start + nbytes) of file `path`, as a stored array.

    A BF16 tensor may be stored as F32: its values are then the upper halves of the numbers.
    """
    array = ref.array
    shape = ref.array.shape
    factor = 2 if ref.widened else 1
    steps = [factor] * len(shape)
    order = range(len(shape)) if array.fortran else range(len(shape) - 1, -1, -1)
    reach = factor
    for dim in order:
        steps[dim] = reach
        reach *= shape[dim]
    plain = factor == 1 and not (array.fortran and len(shape) > 1)
    where = f"{path}{VIEW}pickle@{start}+{nbytes}"
    return StoredArray(where, max(array.at, 0) + 2 * (factor - 1), ref.dtype, shape, None if plain else tuple(steps))


def read_view(tree: Tree, path: str) -> bytes | None:
    """The bytes of a view of arrays, of a file or of a pickle inside a file; None if the path is no such view."""
    base = base_of(path)
    if path == base + INLINE:
        return view(tree, base)
    found = _RANGE.fullmatch(path.removeprefix(base + VIEW))
    if found is None:
        return None
    from ckpt_tool.storage.pickles import pickle_reader as pickles

    value = pickles.load_file(tree, base, start=int(found["at"]), nbytes=int(found["nbytes"]), span_from=0).value
    return b"".join(array.data for array in inline_arrays(value) if isinstance(array.data, bytes))


def view(tree: Tree, name: str) -> bytes:
    """The bytes of the view of file `name`. Raises what `pickles.load_file` raises."""
    from ckpt_tool.storage.pickles import pickle_reader as pickles

    refuse_large(tree, name, "E1301")
    value = pickles.load_file(tree, name, span_from=512, places=True).value
    return b"".join(array.data for array in inline_arrays(value) if isinstance(array.data, bytes))
