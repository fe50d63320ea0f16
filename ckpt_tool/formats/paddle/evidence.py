"""What only the values can tell: do tensor ranks hold parts of a tensor, or each the whole?

The one idea: where no config says how many key and value heads there are, ranks whose k_proj differ hold different heads, and
ranks whose k_proj are equal to the bit hold the same ones. A tensor of one value throughout (zeros, ones) tells nothing.

    k_proj of tp00 and tp01, their first MiB differs      parts: joined
    equal, and not all one value                          copies

All states of a tensor are asked: weights in few bits may be equal by chance, their moments are not. Cost: up to 1 MiB a rank
and state for one tensor of each kind; not at all where a config or a meta says it. What it does not do: say
along which axis a tensor of unknown name is parted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.storage.records import read_array
from ckpt_tool.storage.source import Tree

LOOKED_AT = 1 << 20  # bytes of each rank's array


def differ(tree: Tree, lists: Sequence[Sequence[StoredArray]]) -> bool | None:
    """Do ranks' arrays hold different values? lists: of each state of a tensor the ranks' arrays, of one shape and dtype.
    None: they can't tell."""
    found = [_differ(tree, arrays) for arrays in lists]
    return True if True in found else False if False in found else None


def _differ(tree: Tree, arrays: Sequence[StoredArray]) -> bool | None:
    if len(arrays) < 2 or any(array.strides is not None for array in arrays):
        return None
    first = arrays[0]
    width = max(first.dtype.bits // 8, 1)
    nbytes = min(first.dtype.nbytes(first.numel), LOOKED_AT // width * width)
    if not nbytes:
        return None
    seen = read_array(tree, first, nbytes)
    if any(read_array(tree, other, nbytes) != seen for other in arrays[1:]):
        return True
    return None if seen == seen[:width] * (nbytes // width) else False
