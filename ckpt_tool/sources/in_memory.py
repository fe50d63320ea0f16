"""Derives a model's parameters as the trainer had them in memory, which is the order that an optimizer numbers.

    Trainer, transformers 5:  model.safetensors has experts one by one, the optimizer moments of (experts, 2 m, h)
    torchtune:                the hub's names and rows, the optimizer's are torchtune's

The family gives the dialect of the names in memory (`families.experts.memory_dialect`), and its equations map the
optimizer's states to the names in the files, as strided pieces of what is stored. Cost: nothing unless an optimizer is
stored next to the model; then a mapping each way, some 45 us a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.errors import InconsistentCheckpoint, InputError, UsageError
from ckpt_tool.formats.base import WalkedModel

if TYPE_CHECKING:
    from ckpt_tool.algebra.mapped import Mapped
    from ckpt_tool.families.base import Family

Shapes = Mapping[str, tuple[int, ...]]


def in_memory(config: Mapping[str, Any], shapes: Shapes) -> WalkedModel | None:
    """The model in the dialect that transformers 5 has in memory; None where the files are in that, or where no family
    takes them for its own. config: its config.json. shapes: of what is stored."""
    from ckpt_tool.families.experts import memory_dialect
    from ckpt_tool.families.registry import find

    try:
        family, dialect = find(config, shapes)
        memory = memory_dialect(family)
        return None if memory == dialect else _walked(family, dialect, memory, shapes, config)
    except (InputError, UsageError):  # of no family, or not whole: the names in the files are all that there is
        return None


def in_torchtune(config: Mapping[str, Any], shapes: Shapes, stated: str | None) -> WalkedModel | None:
    """The model in torchtune's names and tensors; None where the files are in those. stated: `--family`, which says
    which of its versions' names are meant where they differ.

    Raises InputError, UsageError: those of `families.registry.find` (E1233 also where two versions of torchtune have
    names that mean other tensors), E1231 where torchtune's names for the family are not known here."""
    from ckpt_tool.families.registry import find

    name, _, own = (stated or "").partition(":")
    family, dialect = find(config, shapes, family=name or None)
    theirs = [each for each in family.dialects if each.partition("-")[0] == "torchtune"]
    if dialect in theirs:
        return None
    if own not in theirs and len(theirs) > 1:
        raise UsageError(
            f"{' and '.join(theirs)} mean other tensors of {family.name} by the same names: nothing says which it is",
            code="E1233",
            hint=f"say which with {' or '.join(f'--family {family.name}:{each}' for each in theirs)}",
        )
    there = own if own in theirs else "torchtune"
    return _walked(family, dialect, there, shapes, config)


def _walked(family: Family, dialect: str, memory: str, shapes: Shapes, config: Mapping[str, Any]) -> WalkedModel:
    """A model of the files in the dialect of memory. Raises InputError, UsageError of `families.rewrite.mapping`."""
    from ckpt_tool.families.rewrite import mapping

    there = mapping(family, dialect, memory, shapes, config)
    known = {piece.src.name for made in there.made for piece in made.pieces}.union(there.dropped)
    walked = {name: shape for name, shape in shapes.items() if name not in known}
    walked |= {made.name: made.shape for made in there.made}
    back = mapping(family, memory, dialect, walked, config)
    return WalkedModel(walked, lambda tensors: _under(back, walked, tensors))


def _under(
    mapped: Mapped, shapes: Shapes, tensors: Sequence[LogicalTensor]
) -> tuple[list[LogicalTensor], dict[str, tuple[str, ...]]]:
    """The tensors under the mapping's names, and {parameter: what is made of it}. shapes: of the parameters. Raises
    InconsistentCheckpoint E2303 for a state that has neither its parameter's shape nor one element (factors of
    Adafactor's)."""
    from ckpt_tool.plan.mapping import apply_mapping
    from ckpt_tool.plan.moves import Stored

    for tensor in tensors:
        if tensor.numel != 1 and tensor.shape != shapes[tensor.key.name]:
            raise InconsistentCheckpoint(
                f"{tensor.key}: its shape {list(tensor.shape)} is not its parameter's {list(shapes[tensor.key.name])}",
                code="E2303",
                key=tensor.key.name,
                hint="--state model writes the model alone",
            )
    names: dict[str, tuple[str, ...]] = {}
    for made in mapped.made:
        for source in dict.fromkeys(piece.src.name for piece in made.pieces):
            names[source] = (*names.get(source, ()), made.name)
    held = {tensor.key.name for tensor in tensors}
    filled = []
    for each in mapped.made:
        if held & {piece.src.name for piece in each.pieces}:
            filled.append(each)
    mapped = mapped._replace(made=tuple(filled))
    applied = apply_mapping([Stored(0, tensor) for tensor in tensors], mapped)
    return [row.tensor for row in applied.stored], names
