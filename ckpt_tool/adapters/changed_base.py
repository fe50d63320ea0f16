"""A base with what adapters change in place of its own tensors: recipes, and tensors that they bring whole.

    changed(base, [adapter], [match(...)], writing, option="...")    base with q_proj computed (`Folded`)

A folded tensor takes the place of the base's and is rounded once to its dtype; a tensor that an adapter brings whole
(`modules_to_save`, trained biases) is another source's, and is cast to the base's dtype. Moves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ckpt_tool.adapters.adapter import Adapter
from ckpt_tool.adapters.targets import Bias, Change, Low, Matched, ReplacedTensor, Tokens
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, with_computed

if TYPE_CHECKING:
    from ckpt_tool.adapters.arithmetic import RunCache
    from ckpt_tool.run.computed import Input, Recipe

WEIGHTS = "E1421"
NO_FLOATS = "E1427"
CONFLICT = "E1429"
_SUMS = ("F32", "F16", "BF16")


def apply_changes(
    kept: Chosen, adapters: Sequence[Adapter], found: Sequence[Matched], writing: Writing, *, option: str
) -> Chosen:
    """`kept`, the base under the adapters' names, with what they change in place of its own. option: for messages.

    Raises UsageError E1421 (a weight on what is no sum), E1427 (no floats), InconsistentCheckpoint E1429 (adapters that
    exclude each other)."""
    changes: dict[str, list[tuple[Adapter, Change]]] = {}
    for adapter, each in zip(adapters, found, strict=True):
        for name, of_tensor in each.changes.items():
            changes.setdefault(name, []).extend((adapter, change) for change in of_tensor)
    _refuse_conflicts(changes)
    recipes = []
    dtypes = dict[TensorKey, DType]()
    replaced = dict[TensorKey, Stored]()
    from ckpt_tool.adapters.arithmetic import RunCache
    from ckpt_tool.run.computed import Input

    shared = RunCache()
    left = set(changes)
    for row in kept.stored:
        key = row.tensor.key
        tensor = row.tensor
        if key.name not in changes:
            continue
        left.discard(key.name)
        source = kept.input(row)
        rest = list[tuple[Adapter, Change]]()
        for adapter, change in changes[key.name]:
            if isinstance(change, ReplacedTensor):
                source = Input(change.tensor, adapter.opened.tree)
                number = len(kept.sources) + [each is adapter for each in adapters].index(True)
                number = 0 if adapter.inside else number
                replaced[key] = Stored(number, change.tensor._replace(key=key, path=tensor.path))
            else:
                rest.append((adapter, change))
        dtypes[key] = kept.casts.get(key, tensor.dtype)
        if rest:
            _refuse_without_floats(key, tensor, [change for _, change in rest])
            recipes.append(_recipe(key, source, rest, shared))
    stored = tuple(replaced.get(row.tensor.key, row) for row in kept.stored)
    casts = {}  # what an adapter brings whole is rounded to the base's dtype, unless `--dtype` names another
    if not writing.dtypes.keys() & {"", MODEL}:
        casts = {key: dtypes[key] for key, row in replaced.items() if row.tensor.dtype != dtypes[key]}
    out = replace(
        kept,
        sources=(*kept.sources, *(adapter.opened for adapter in adapters if not adapter.inside)),
        stored=stored,
        renewed=kept.renewed | set(replaced),
        casts={**kept.casts, **casts},
        notes=(*kept.notes, *_list_notes(adapters, found, left)),
    )
    paths = ["the adapter inside" if adapter.inside else adapter.opened.path for adapter in adapters]
    shown = f"{kept.sources[0].path} with {', '.join(paths)}"
    return with_computed(out, recipes, shown, writing, option=option, dtypes=dtypes)


def _recipe(key: TensorKey, base: Input, changes: Sequence[tuple[Adapter, Change]], shared: RunCache) -> Recipe:
    """What computes the tensor. base: input 0."""
    from ckpt_tool.adapters.arithmetic import Biased, Folded, MatrixRows, ProductTerm
    from ckpt_tool.run.computed import Input

    shape = base.tensor.shape
    inputs = [base]

    def number(adapter: Adapter, tensor: LogicalTensor) -> int:
        """Add an input to the recipe and return its number."""
        inputs.append(Input(tensor, adapter.opened.tree))
        return len(inputs) - 1

    text = "; ".join(_text(change) for _, change in changes)
    first_change = changes[0][1]
    if isinstance(first_change, Tokens):
        number(changes[0][0], first_change.values)
        rows = tuple(sorted((row, k) for k, row in enumerate(first_change.rows)))
        return MatrixRows(key, shape, tuple(inputs), text, rows)
    if isinstance(first_change, Bias):
        scalings = []
        for adapter, change in changes:
            if isinstance(change, Bias):
                number(adapter, change.added)
                scalings.append(change.scaling)
        return Biased(key, shape, tuple(inputs), text, tuple(scalings))
    terms = []
    experts = 1
    for adapter, change in changes:
        if isinstance(change, Low):
            experts = change.experts
            a = number(adapter, change.a)
            b = number(adapter, change.b)
            magnitude = number(adapter, change.magnitude) if change.magnitude is not None else None
            terms.append(ProductTerm(a, b, change.rank, change.scaling, change.turned, magnitude))
    return Folded(key, shape, tuple(inputs), text, tuple(terms), experts, shared)


def _text(change: Change) -> str:
    """All that the values depend on but the files, in words: for the identity of the computed source."""
    if isinstance(change, Low):
        dora = change.magnitude.key.name if change.magnitude is not None else ""
        return (
            f"{change.a.key.name} {change.b.key.name} {dora} {change.rank} {change.scaling!r} "
            f"{change.turned} {change.experts}"
        )
    if isinstance(change, Bias):
        return f"{change.added.key.name} {change.scaling!r}"
    return f"{change.values.key.name} {change.rows}" if isinstance(change, Tokens) else change.tensor.key.name


def _refuse_without_floats(key: TensorKey, tensor: LogicalTensor, changes: Iterable[Change]) -> None:
    used = [tensor]
    for change in changes:
        parts: Sequence[object] = (change.a, change.b, change.magnitude) if isinstance(change, Low) else change
        used += [part for part in parts if isinstance(part, LogicalTensor)]
    unsupported = next((each for each in used if each.dtype.name not in _SUMS), None)
    if unsupported is not None:
        raise UsageError(
            f"{unsupported.key} is {unsupported.dtype.name}: adapters are folded in fp32, into {', '.join(_SUMS)}",
            code=NO_FLOATS,
            key=str(key),
            hint="--dequantize converts a quantised base to floats first; convert an fp64 base with --dtype fp32 first",
        )


def _refuse_conflicts(changes: Mapping[str, Sequence[tuple[Adapter, Change]]]) -> None:
    """Raise InconsistentCheckpoint E1429 where two changes of a tensor exclude each other; UsageError E1421 for a
    weight on what is no sum."""
    faults = []
    for name, found in changes.items():
        kinds = [type(change) for _, change in found]
        if kinds.count(Tokens) > 1 or (kinds.count(ReplacedTensor) > 1 and not _all_the_same(found)):
            faults.append(f"{name}: two adapters replace it")
        elif Tokens in kinds and len(set(kinds)) > 1:
            faults.append(f"{name}: rows of it are replaced and it is changed as a whole")
        elif len({change.experts for _, change in found if isinstance(change, Low)}) > 1:
            faults.append(f"{name}: one adapter takes it for stacked experts, another does not")

    if faults:
        raise InconsistentCheckpoint(
            f"the adapters can't be folded together: {faults[0]}",
            code=CONFLICT,
            faults=faults[1:],
            hint="fold them one after another, each into the output of the last, and look at what comes out",
        )

    for name, found in changes.items():
        for adapter, change in found:
            absolute = not isinstance(change, Low | Bias) or (isinstance(change, Low) and change.magnitude is not None)
            if absolute and adapter.settings.weight != 1:
                what = "a DoRA magnitude" if isinstance(change, Low) else "a tensor that replaces the base's"
                raise UsageError(
                    f"--weight {adapter.settings.weight}: {name} has {what}, which no weight can be put on",
                    code=WEIGHTS,
                    key=name,
                    path=adapter.opened.path,
                    hint="leave the weight of this adapter off",
                )


def _all_the_same(found: Sequence[tuple[Adapter, Change]]) -> bool:
    """Do all adapters that bring the tensor whole bring the same? PEFT saves the base's own weight of a targeted
    embedding or head in each. Reads them."""
    from ckpt_tool.run.scan import digests_of

    wholes = [(adapter.opened.tree, change.tensor) for adapter, change in found if isinstance(change, ReplacedTensor)]
    digests = (digests_of(Catalog("peft", {tensor.key: tensor}), tree)[tensor.key] for tree, tensor in wholes)
    return len(set(digests)) == 1


def _list_notes(adapters: Sequence[Adapter], found: Sequence[Matched], left: set[str]) -> list[str]:
    notes = []
    for adapter, matched in zip(adapters, found, strict=True):
        counts = Counter(map(type, chain.from_iterable(matched.changes.values())))
        parts = [
            f"{counts[kind]} {word if counts[kind] == 1 else words}"
            for kind, word, words in (
                (Low, "weight folded", "weights folded"),
                (Bias, "bias folded", "biases folded"),
                (Tokens, "embedding with rows replaced", "embeddings with rows replaced"),
                (ReplacedTensor, "tensor replaced", "tensors replaced"),
            )
            if counts[kind]
        ]
        weight = f", weight {adapter.settings.weight}" if adapter.settings.weight != 1 else ""
        notes.append(f"{adapter.opened.path}: {', '.join(parts) or 'nothing to fold'}{weight}")
        notes += matched.notes
        own = [
            name for name in adapter.opened.catalog.sidefiles if not name.startswith(("README", "LICENSE", "config"))
        ]
        if own and not adapter.paddle and not adapter.inside:
            notes.append(f"next to the base stay the base's files; the adapter's own are not copied: {', '.join(own)}")

    if left:
        notes.append(
            "removed by name, though an adapter changes it: "
            f"{', '.join(sorted(left)[:3])}{', ...' if len(left) > 3 else ''}"
        )

    return notes
