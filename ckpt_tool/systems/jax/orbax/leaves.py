"""The path of each leaf of an output in its tree.

A leaf that was read from Orbax keeps its path. Any other goes below `params`, or next to `mu` and `nu` of the
optimizer, at the source's path or at that of `optax.adamw`; the dots of its name are levels, unless the first part of
it is the name of another parameter:

    layers.0.w, layers.0.w [exp_avg]    ("params", "layers", "0", "w"), ("opt_state", 0, "mu", "layers", "0", "w")
    a, a.b                              ("params", "a"), ("params", "a.b")

Step counters of parameters become one count; they are compared while they are read. Plain values become scalars and
texts, lists become sequences; `optax.adamw`'s other two states, which are empty, are `None`, as Orbax has them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.target import Wanted
from ckpt_tool.core.tensor import EXTRAS, MODEL, STEP, Chunk, LogicalTensor, Path, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import Fitted
from ckpt_tool.systems.jax.orbax.items import EMPTY, STRING
from ckpt_tool.systems.jax.orbax.names import BARE, MAXTEXT, OPTAX, Trees, name_leaves
from ckpt_tool.systems.jax.orbax.read import CUSTOM, METRICS, PLAIN

CLASH = "E2757"
UNLIKE_STEPS = "E2758"
_ARRAY = "np.ndarray"
_SCALAR = "scalar"
_GONE = object()  # marks a missing value, as None is a value


class PlainLeaf(NamedTuple):
    """A scalar as it is stored."""

    dtype: DType
    raw: bytes


class LeafRow(NamedTuple):
    """A leaf of an output's tree."""

    path: Path
    kind: str  # its value_type
    # The index of the wanted tensor, a scalar, a text, or None for an empty leaf.
    value: int | PlainLeaf | str | None

    @property
    def stored(self) -> str:
        """The name of its array in the store."""
        return ".".join(map(str, self.path))


@dataclass(slots=True)
class LaidLeaf:
    """The content of each item of an Orbax checkpoint."""

    hint: Trees
    items: dict[str, list[LeafRow]] = field(default_factory=dict)  # leaves by item, "" for the folder itself
    json: dict[str, Any] = field(default_factory=dict)  # values of the JSON items
    step: dict[str, Any] = field(default_factory=dict)  # metadata of the step
    notes: tuple[str, ...] = ()


def fitted(tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints) -> Fitted:
    """The tensors with one count of steps in place of a counter for each parameter.

    If the extras have the optimizer's count already, the counters are dropped. Raises UsageError E2758 for counters of
    several shapes or dtypes.
    """
    rows = list(enumerate(tensors))
    scalars = [tensor for tensor in tensors if tensor.key.state == EXTRAS and _is_scalar(tensor.shape, tensor.dtype)]
    unlisted = tuple(tensor.key for tensor in scalars)
    dropped = list[dict[str, Any]]()

    if scalars:
        nbytes = sum(tensor.nbytes for tensor in scalars)
        reason = "scalars, which are read back as plain values"
        dropped.append({"state": EXTRAS, "tensors": len(scalars), "bytes": nbytes, "reason": reason})

    steps = [(i, tensor) for i, tensor in rows if tensor.key.state == STEP]
    if not steps:
        return Fitted(tuple(rows), dropped=tuple(dropped), unlisted=unlisted)

    rest = [row for row in rows if row[1].key.state != STEP]
    nbytes = sum(tensor.nbytes for _, tensor in steps)
    count = (hints.get(Trees) or OPTAX).count
    entry = {"state": STEP, "tensors": len(steps), "bytes": nbytes}
    if _value_at(extras, count) is not _GONE:
        dropped.append({**entry, "reason": "the optimizer's own count says it for all"})
        return Fitted(tuple(rest), dropped=tuple(dropped), unlisted=unlisted)

    index, first = steps[0]
    odd = next((each for _, each in steps if each.numel != 1 or each.dtype != first.dtype), None)
    if odd is not None:
        raise UsageError(
            "the step counters of the parameters have several shapes or dtypes",
            code=UNLIKE_STEPS,
            key=str(odd.key),
            hint="leave them out with --drop step, or write another format",
        )

    # All counters become replicas of one chunk, so that they are compared while they are read.
    of_each = (
        Chunk(chunk.box, chunk.array, chunk.within, n) for n, (_, row) in enumerate(steps) for chunk in row.chunks
    )
    key = TensorKey(".".join(map(str, count)), STEP)
    made = LogicalTensor(key, first.shape, first.dtype, tuple(of_each), count)
    reason = "one count of the optimizer for all parameters; they are compared while they are read"
    dropped.append({**entry, "reason": reason})
    casts = {key: DTYPES["I32"]} if first.dtype.is_float else {}  # optax counts in int32
    return Fitted((*rest, (index, made)), casts, tuple(dropped), (*unlisted, key))


def _is_scalar(shape: tuple[int, ...], dtype: DType) -> bool:
    """Whether a reader takes an array for a plain value, unless its path makes it a tensor."""
    return shape == () and dtype.name in PLAIN


def laid_out(wanted: Wanted) -> LaidLeaf:
    """Every leaf of the output, by item. Raises UsageError E2757 if two leaves need the same path."""
    hint = wanted.hints.get(Trees)
    laid = LaidLeaf(hint or _system_trees(wanted))
    extras: dict[str, Any] = dict(wanted.extras)
    if hint is not None:
        laid.json = {name: extras.pop(name) for name in hint.json if name in extras and hint.items}
        laid.step = {name: extras.pop(name) for name in (METRICS, CUSTOM) if isinstance(extras.get(name), Mapping)}
    rows, left_out = _rows(wanted, laid.hint, extras, known=hint is not None)
    _check(rows, wanted)
    items = laid.hint.items
    for row in rows:
        item = items[0] if items else ""
        if len(items) > 1:
            item, row = (
                (str(row.path[0]), row._replace(path=row.path[1:])) if row.path[0] in items else (items[-1], row)
            )
        laid.items.setdefault(item, []).append(row)
    if left_out:
        laid.notes = (f"left out, because no leaf of a tree holds it: {', '.join(left_out[:20])}",)
    return laid


def _system_trees(wanted: Wanted) -> Trees:
    """The tree that the system with these names uses: of Gemma's library, of MaxText, or of flax with optax."""
    system = (wanted.hints.dialect or "").partition("-")[0]
    if system == "gemma" and all(tensor.key.state == MODEL for tensor in wanted.tensors):
        return BARE
    return MAXTEXT if system == "maxtext" else OPTAX


def _rows(wanted: Wanted, hint: Trees, extras: Mapping[str, Any], *, known: bool) -> tuple[list[LeafRow], list[str]]:
    """The leaves of the output, and the names of plain values that no leaf can hold.

    known: `hint` describes the source's own trees.
    """
    known_rows = {tuple(path): (kind, dtype) for path, kind, dtype in hint.rows}
    places = {tensor.path: n for n, tensor in enumerate(wanted.tensors) if tensor.path in known_rows}
    rows: list[LeafRow] = []
    used = set[Path]()

    # The source's leaves come first, in their order, so that an unchanged tree is written as it was.
    for path, (kind, dtype) in known_rows.items():
        if path in places:
            rows.append(LeafRow(path, _ARRAY, places[path]))
        elif kind in EMPTY:
            rows.append(LeafRow(path, kind, None))
        else:
            value = _value_at(extras, path)
            row = None if value is _GONE else _plain(path, value, dtype, kind)
            if row is not None:
                rows.append(row)
                used.add(path)

    placed = set(places.values())
    names = {(tensor.key.state, tensor.key.name) for tensor in wanted.tensors}
    moments = False

    for number, tensor in enumerate(wanted.tensors):
        if number in placed:
            continue
        path = hint.count if tensor.key.state == STEP else _path(tensor.key, hint, names)
        moments |= path[: len(hint.optimizer)] == hint.optimizer
        rows.append(LeafRow(path, _ARRAY, number))

    left_out: list[str] = []
    spelled = {tuple(map(str, path)) for path in used}
    for path, value in _leaves(extras, ()):
        if tuple(map(str, path)) in spelled:
            continue
        counts = tuple(map(str, path)) == tuple(map(str, hint.count))
        row = _plain(hint.count, value, "I32", _ARRAY) if counts else _plain(path, value)
        if row is None:
            left_out.append(".".join(map(str, path)))
        else:
            rows.append(row)

    # `optax.adamw` is a chain of three states; Orbax stores the two without arrays as `None`.
    if moments and not known:
        hung = {tuple(map(str, row.path[:2])) for row in rows}
        empty = ((hint.optimizer[0], n) for n in (1, 2))
        rows += [LeafRow(path, "None", None) for path in empty if tuple(map(str, path)) not in hung]

    return rows, left_out


def _path(key: TensorKey, hint: Trees, names: set[tuple[str, str]]) -> Path:
    """The path of a tensor that was not in the source's trees."""
    path = hint.path(key)
    parts = key.name.split(".")
    if any((key.state, ".".join(parts[:n])) in names for n in range(1, len(parts))):
        return (*path[: len(path) - len(parts)], key.name)
    return path


def _check(rows: Sequence[LeafRow], wanted: Wanted) -> None:
    """Raise UsageError E2757 if two leaves need the same path, E0243 if a path would be read as another name."""
    seen: dict[Path, LeafRow] = {}
    branches = {row.path[:n]: row for row in rows for n in range(1, len(row.path))}
    stored: dict[str, LeafRow] = {}

    for row in rows:
        other = seen.get(row.path) or branches.get(row.path) or stored.get(row.stored)
        if other is not None:
            raise UsageError(
                f"{row.stored} and {other.stored} want one place in the tree",
                code=CLASH,
                key=row.stored[:200],
                hint="rename one of them, or leave it out with --remove-keys",
            )
        seen[row.path] = stored[row.stored] = row

    # Name the leaves as a reader will: each has to get its own key back.
    leaves = [row for row in rows if isinstance(row.value, int | PlainLeaf)]
    tensors = [wanted.tensors[row.value] if isinstance(row.value, int) else None for row in leaves]
    plain = [tensor is None or _is_scalar(tensor.shape, tensor.dtype) for tensor in tensors]
    keys = name_leaves([row.path for row in leaves], plain).keys
    for row, tensor, key, scalar in zip(leaves, tensors, keys, plain, strict=True):
        want = None if tensor is None or (tensor.key.state in (STEP, EXTRAS) and scalar) else tensor.key
        if key != want:
            raise UsageError(
                f"no place in a tree gives {tensor.key if tensor else row.stored} its name back",
                code="E0243",
                key=str(tensor.key if tensor else row.stored)[:200],
                hint="rename it, leave it out with --remove-keys, or write --to sharded",
            )


def _value_at(extras: Any, path: Path) -> Any:
    """The plain value at a path, `_GONE` if there is none."""
    for step in path:
        if isinstance(extras, Mapping) and (step in extras or str(step) in extras):
            extras = extras[step if step in extras else str(step)]
        elif isinstance(extras, list | tuple) and isinstance(step, int) and step < len(extras):
            extras = extras[step]
        else:
            return _GONE
    return extras


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every plain value in nested extras, and every empty container, with its path."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list | tuple) and value:
        for n, inner in enumerate(value):
            yield from _leaves(inner, (*path, n))
    else:
        yield path, value


def _empty_kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict):
        return "Dict"
    return "List" if isinstance(value, list) else "Tuple"


def _plain(path: Path, value: Any, dtype: str = "", was: str = _SCALAR) -> LeafRow | None:
    """The leaf that stores a plain value, None if none can.

    Args:
        path: Of the leaf.
        value: The plain value.
        dtype: The dtype in the source, tried first; "" if it had none.
        was: The value_type in the source.
    """
    if isinstance(value, str):
        return LeafRow(path, STRING, value) if value.isprintable() or value.isascii() else None
    if value is None or value in ({}, [], ()):
        return LeafRow(path, _empty_kind(value), None)
    if not isinstance(value, bool | int | float):
        return None
    if isinstance(value, bool):
        kind = "BOOL"
    else:
        kind = "I64" if isinstance(value, int) else "F64"
    for each in (dtype, kind):
        if (
            each in PLAIN
            and (isinstance(value, float) or each[0] != "F")
            and (isinstance(value, bool) == (each == "BOOL"))
        ):
            try:
                return LeafRow(
                    path,
                    _SCALAR if was == _SCALAR else _ARRAY,
                    PlainLeaf(DTYPES[each], struct.pack(PLAIN[each], value)),
                )
            except (struct.error, OverflowError):
                continue
    return None
