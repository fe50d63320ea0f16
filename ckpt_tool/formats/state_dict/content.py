"""One torch file as data: its tensors with their paths and its plain values.

Formats that keep their state in several `torch.save` files (Megatron's `mp_rank_*`, DeepSpeed, per-rank DTensors) read
each with `read_content` and write each with a `TorchComposer` (`state_dict.composer`):

    {"model": {"w": T}, "iteration": 7}   ->   leaves [(("model", "w"), StoredArray)], extras {"iteration": 7}

Cost: as the pickle and the directory. What it does not do: names and states (`formats.state_dict.paths` and each
format's own).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpt_tool.core.tensor import Path, StoredArray
from ckpt_tool.errors import InputError
from ckpt_tool.formats.state_dict.sharded_tensors import is_sharded
from ckpt_tool.formats.state_dict.tree import SLOT, dotted, part
from ckpt_tool.formats.state_dict.unread import hidden_in, with_shapes
from ckpt_tool.storage.pickles.pickle_values import TensorRef, WrapperRef
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.torch_stream import TorchStream, is_stream, is_tar, refuse_tar
from ckpt_tool.storage.torch_files.torchzip import TorchZip

DTENSOR = "E0399"


class TorchContent(NamedTuple):
    """The content of one torch file."""

    # (path, array), in the pickle's order; tensors inside foreign objects, and tensors that are not dense, have the
    # path `Nowhere` (`formats.state_dict.unread`)
    leaves: list[tuple[Path, StoredArray]]
    extras: Any  # everything that is not a tensor (`formats.state_dict.tree.part`)
    unsafe: list[str]  # a line for each use of a name that unpickling would execute, and each foreign object
    globals: list[str]  # every name that the pickle mentions
    ordered: list[tuple[Path, Any]]  # the attributes of OrderedDicts
    # the DTensors among the leaves, whose array is the rank's own part (`systems.torch.torch_save.ranks` places it)
    wrapped: Mapping[Path, WrapperRef] = MappingProxyType({})
    # returns the stored array of a tensor inside a DTensor (its mesh)
    find: Callable[[TensorRef], StoredArray] | None = None


def read_content(tree: Tree, name: str, *, dtensors: bool = False) -> TorchContent:
    """Read the content of file `name`, from its pickle and directory alone.

    dtensors: accept DTensors (one rank's part of a distributed state); otherwise they raise InputError E0399.

    Raises also what containers and pickles raise.
    """
    shown = tree.display(name)
    head = tree.head(name, 512)
    if is_tar(head):
        refuse_tar(shown)

    opened: TorchZip | TorchStream
    if is_stream(head):
        opened = TorchStream.open(tree, name)
        pickled = opened.pickled
    else:
        opened = TorchZip.open(tree, name)
        pickled = opened.pickled()

    unsafe = [f"{use} at {shown}, opcode {use.position}" for use in pickled.unsafe]
    value = pickled.value
    parted = part(value if isinstance(value, dict) else {"value": value})
    lines, hidden = hidden_in(value, parted, shown, shown)
    unsafe += lines
    leaves = []
    wrapped = {}

    for path, ref in parted.leaves:
        if not isinstance(ref, WrapperRef):
            leaves.append((path, opened.array(ref)))
        elif dtensors and is_sharded(ref) and ref.local is None:
            wrapped[path] = ref  # a rank that has nothing of it
        elif dtensors and isinstance(ref.local, TensorRef):
            wrapped[path] = ref
            leaves.append((path, opened.array(ref.local)))
        else:
            what = "its part is no tensor" if dtensors else "a part of a distributed state"
            raise InputError(
                f"a {ref.name}: {what}",
                code=DTENSOR,
                path=shown,
                key=dotted(path)[:200],
                hint="save with torch.distributed.checkpoint",
            )

    for one in reversed(hidden):
        leaves.insert(one.at, (one.path, one.array(name)))
    if hidden:
        leaves = with_shapes(leaves, wrapped)

    extras = {} if parted.extras in ({"value": SLOT}, SLOT) else parted.extras
    unsafe += [f"{line} ({shown})" for line in parted.hanging]
    return TorchContent(
        leaves, extras, unsafe, [str(use) for use in pickled.globals], parted.ordered, wrapped, opened.array
    )
