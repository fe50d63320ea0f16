"""`ckpt diff A B`: are two checkpoints equal in value, whatever their formats and layouts?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.conversion.on_device import MEMORY, device_of, threads_of
from ckpt_tool.conversion.renaming import apply_rules, refuse_unmatched, renamed_keys
from ckpt_tool.conversion.unused_options import refuse_unused_reading
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.plurals import agree_all
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import STEP, LogicalTensor, TensorKey, first_replica
from ckpt_tool.core.wrapper_words import find_unwrapped
from ckpt_tool.errors import CorruptFile, ReplicasDiffer, UsageError, wrap_os_error
from ckpt_tool.formats.base import ranks_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Comparison
from ckpt_tool.options.writing import Writing
from ckpt_tool.report.difference_groups import group_differences, measure_layers
from ckpt_tool.report.holdings import RankOf, rank_name, whose
from ckpt_tool.sources.opening import Opened, open_source, unchanged_sources
from ckpt_tool.sources.select import left_by_word, state_filter
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts.strict_json import parse

if TYPE_CHECKING:
    from ckpt_tool.device.library import Device


BIT_FOR_BIT = Comparison()


def diff(a: str, b: str, reading: Reading, wanted: Comparison = BIT_FOR_BIT, *, progress: Progress) -> dict[str, Any]:
    """The document of `diff --json`.

    Names: first `wanted.rename` is applied to the names of A; then the map, a JSON object or lines `LEFT RIGHT`, gives
    the name in B for a name of A. With a dialect, both checkpoints are compared under the names and the structure that
    `convert --dialect` would write.

    Values: without tolerances two values are equal if their bits are (NaN payloads included); with tolerances, if
    |a - b| <= atol + rtol |b|. Without tolerances, tensors of two dtypes always differ, and the entry states by how
    much their numbers differ.
    """
    on = device_of(wanted.device)
    left_out = left_by_word(wanted.states)
    left, right = (open_source(path, reading).refuse_unsafe(left_out) for path in (a, b))
    refuse_unused_reading(reading, left, right)
    left.catalog.check()
    right.catalog.check()
    names = _names(wanted.map_file) if wanted.map_file else {}
    listed = state_filter(wanted.states, (*left.catalog.states(), *right.catalog.states()))
    here = {
        TensorKey(names.get(key.name, key.name), key.state): side
        for key, side in _sides(left, reading, wanted.dialect, wanted.rename).items()
        if listed(key.state)
    }
    there = {key: side for key, side in _sides(right, reading, wanted.dialect).items() if listed(key.state)}
    notes: list[str] = []
    if wanted.dialect is None:
        here, there, notes = _without_wrappers(here, there)
    matched = _paired(here, there, (left, right), wanted, first=reading.replica_policy == "first")
    found, pairs, counted = matched.differing, matched.pairs, matched.counted

    with unchanged_sources(left, right):
        try:
            found += _compared(pairs, wanted, on, progress)
            found += _compared_as_numbers(matched.retyped, progress)
        except ReplicasDiffer as e:
            raise _replicas_error([*pairs, *matched.retyped]) or e from e

    found += _other_steps(counted)
    summary, by_layer = _summaries_of(pairs, counted, found)
    extras = _extras_differ(left.catalog.extras, right.catalog.extras) if not wanted.states else []
    return {
        "schema_version": 1,
        "equal": not found,
        "compared": len(pairs) + len(counted),
        "differences": found,
        "summary": summary,
        "by_layer": by_layer,
        **({"by_rank": _by_rank(pairs, found, (left, right), wanted)} if wanted.rank else {}),
        "suggestion": _suggestion(here, there, (left, right), reading),
        "left": left.path,
        "right": right.path,
        "extras_differ": extras,
        "notes": agree_all(notes),
    }


def _without_wrappers(here: _Sides, there: _Sides) -> tuple[_Sides, _Sides, list[str]]:
    """Both sides without the prefixes of trainers' wrappers, if more names match then, and notes that report this.

    Such prefixes are `module.` of a DDP module and `_orig_mod.` of a compiled one. `convert` recognises them by the
    names of known model families; here the names of the other side suffice.
    """
    notes: list[str] = []
    sides = [here, there]
    for number, which in enumerate(("first", "second")):
        mine = {key.name: key.name for key in sides[number]}
        others = {key.name for key in sides[1 - number]}
        unwrapped = find_unwrapped(list(mine), others)
        if unwrapped is None:
            continue
        example = next(old for old, new in unwrapped.items() if old != new)
        sides[number] = {key._replace(name=unwrapped[key.name]): side for key, side in sides[number].items()}
        count = sum(old != new for old, new in unwrapped.items())
        notes.append(
            f"{count} names of the {which} are compared without their wrapper's parts, such as {example}: "
            "--dialect keep compares them as they are"
        )
    return sides[0], sides[1], notes


def _summaries_of(
    pairs: Sequence[tuple[_Side, _Side]], counted: Mapping[TensorKey, Any], found: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The summaries by state and module, and by layer.

    The entries in `found` carry partial sums for the norms of these summaries; they are removed from the entries here.
    """
    from ckpt_tool.run.compare import NORMS

    differing = {(difference["name"], difference["state"]) for difference in found}
    compared = [*(theirs.tensor.key for _, theirs in pairs), *counted]
    equal = [key for key in compared if (key.name, key.state) not in differing]
    summary = group_differences(equal, found, NORMS)
    by_layer = measure_layers(found, NORMS)
    for difference in found:
        difference.pop(NORMS, None)
    return summary, by_layer


def _by_rank(
    pairs: Sequence[tuple[_Side, _Side]],
    found: Sequence[Mapping[str, Any]],
    opened: tuple[Opened, Opened],
    wanted: Comparison,
) -> list[dict[str, Any]]:
    """`by_rank` of the document: an entry for each file with differing values, of both sides, most elements first."""
    from ckpt_tool.run.compare_by_file import FileDifference, Side, differing_files

    changed = {(difference["name"], difference["state"]) for difference in found if difference["kind"] == "value"}
    by_trees: dict[tuple[int, int], list[tuple[_Side, _Side]]] = {}
    for mine, theirs in pairs:
        if tuple(theirs.tensor.key) in changed:
            by_trees.setdefault((id(mine.tree), id(theirs.tree)), []).append((mine, theirs))

    files: dict[tuple[Side, str], FileDifference] = {}
    for group in by_trees.values():
        tensors = [(mine.tensor, theirs.tensor) for mine, theirs in group]
        trees = group[0][0].tree, group[0][1].tree
        files |= differing_files(tensors, *trees, rtol=wanted.rtol, atol=wanted.atol)

    rank_of = dict(zip(("first", "second"), map(_ranks_of_files, opened), strict=True))
    rows = [
        {
            "side": side,
            "file": file,
            "rank": rank_name(rank_of[side](file) or {}),
            "tensors": len(entry.tensors),
            "elements": entry.elements,
            "max_abs": entry.max_abs,
        }
        for (side, file), entry in files.items()
    ]
    return sorted(rows, key=lambda row: (row["side"], -row["elements"]))


def _ranks_of_files(opened: Opened) -> RankOf:
    return whose(opened.catalog, ranks_of(opened.format, opened.catalog.mesh.to_json()))


def _suggestion(
    here: Mapping[TensorKey, _Side],
    there: Mapping[TensorKey, _Side],
    opened: tuple[Opened, Opened],
    reading: Reading,
) -> str | None:
    """A suggestion that would make the names match, None if at least half of the names of one side match."""
    left = {key.name: None for key in here}
    right = {key.name: None for key in there}
    if not left or not right or 2 * len(left.keys() & right.keys()) >= min(len(left), len(right)):
        return None
    from ckpt_tool.conversion.name_suggestion import suggest_names

    return suggest_names(left, right, opened, reading)


class _Side(NamedTuple):
    """A tensor of one side, and the tree from which its arrays are read."""

    tensor: LogicalTensor
    tree: Tree


_Sides = dict[TensorKey, _Side]
_Counted = dict[TensorKey, tuple[Opened, _Side]]


class _Matched(NamedTuple):
    """The tensors of both sides, grouped by how they are compared."""

    differing: list[dict[str, Any]]  # an entry for each tensor that differs by its header alone
    pairs: list[tuple[_Side, _Side]]  # tensors whose values are compared
    retyped: list[tuple[_Side, _Side]]  # tensors of two dtypes: they differ, and their numbers are compared as well
    counted: _Counted  # per-parameter steps of one side, if the other's optimizer keeps one count for all parameters


def _paired(
    here: Mapping[TensorKey, _Side],
    there: Mapping[TensorKey, _Side],
    opened: tuple[Opened, Opened],
    wanted: Comparison,
    *,
    first: bool,
) -> _Matched:
    """Match the tensors of both sides by key. first: compare only the first replica of each."""
    found = list[dict[str, Any]]()
    pairs = list[tuple[_Side, _Side]]()
    retyped = list[tuple[_Side, _Side]]()
    counted = _Counted()
    for key in {**here, **there}:
        base = {"name": key.name, "state": key.state}
        mine = here.get(key)
        theirs = there.get(key)
        if mine is None or theirs is None:
            lacking, side = (opened[0], theirs) if mine is None else (opened[1], mine)
            if key.state == STEP and side is not None and lacking.catalog.count is not None:
                counted[key] = lacking, side
            else:
                found.append({**base, "kind": "missing_left" if mine is None else "missing_right"})
            continue
        (a, tree), (b, other) = mine, theirs
        if a.shape != b.shape:
            found.append({**base, "kind": "shape", "left": list(a.shape), "right": list(b.shape)})
            continue

        has_other_dtype = a.dtype != b.dtype and not (wanted.rtol or wanted.atol)
        if has_other_dtype and not (_is_of_numbers(a) and _is_of_numbers(b)):
            found.append(_dtype_entry(key, a, b))
            continue
        a, b = (first_replica(a), first_replica(b)) if first else (a, b)
        (retyped if has_other_dtype else pairs).append((_Side(a, tree), _Side(b, other)))
    return _Matched(found, pairs, retyped, counted)


def _is_of_numbers(tensor: LogicalTensor) -> bool:
    """Can its values be compared as numbers? Quantised codes and elements smaller than a byte can't."""
    return not tensor.dtype.coded and tensor.dtype.bits >= 8


def _dtype_entry(key: TensorKey, a: LogicalTensor, b: LogicalTensor) -> dict[str, Any]:
    return {"name": key.name, "state": key.state, "kind": "dtype", "left": a.dtype.name, "right": b.dtype.name}


def _compared_as_numbers(pairs: Sequence[tuple[_Side, _Side]], progress: Progress) -> Iterator[dict[str, Any]]:
    """Yield an entry for each pair of two dtypes, with the difference of their numbers (none after an exact cast)."""
    from ckpt_tool.run.compare import NORMS, compare

    if pairs:
        progress.start(sum(mine.tensor.nbytes + theirs.tensor.nbytes for mine, theirs in pairs), "comparing")
    for group in _by_trees(pairs):
        tensors = [(mine.tensor, theirs.tensor) for mine, theirs in group]
        differences = compare(tensors, group[0][0].tree, group[0][1].tree, progress=progress)
        for (mine, theirs), difference in zip(tensors, differences, strict=True):
            entry = {**_dtype_entry(theirs.key, mine, theirs), "values_equal": difference is None}
            if difference is not None:
                amounts = {name: value for name, value in difference.items() if name not in (NORMS, "max_ulp")}
                entry |= amounts
            yield entry
    if pairs:
        progress.finish()


def _by_trees(pairs: Sequence[tuple[_Side, _Side]]) -> list[list[tuple[_Side, _Side]]]:
    """The pairs, grouped by the two trees that they are read from."""
    groups: dict[tuple[int, int], list[tuple[_Side, _Side]]] = {}
    for mine, theirs in pairs:
        groups.setdefault((id(mine.tree), id(theirs.tree)), []).append((mine, theirs))
    return list(groups.values())


def _replicas_error(pairs: Sequence[tuple[_Side, _Side]]) -> ReplicasDiffer | None:
    """The error that names every tensor whose replicas differ, not only the first; None if there are none."""
    from ckpt_tool.run import replicas

    held_in: dict[int, tuple[list[LogicalTensor], Tree]] = {}
    for side in (each for pair in pairs for each in pair):
        held_in.setdefault(id(side.tree), ([], side.tree))[0].append(side.tensor)
    apart = replicas.among(held_in.values())
    return replicas.error_of(apart) if apart else None


def _sides(opened: Opened, reading: Reading, dialect: str | None, rename: Sequence[str] = ()) -> dict[TensorKey, _Side]:
    """The tensors of a checkpoint by key, under their own names or those of a dialect. rename: rules for own names."""
    if dialect in (None, "keep"):
        tensors = list(opened.catalog.tensors.values())
        keys = [tensor.key for tensor in tensors]
        if rename:
            renamed = apply_rules(rename, keys)
            refuse_unmatched(renamed, keys)
            keys = renamed_keys(keys, renamed)
        return {key: _Side(tensor, opened.tree) for key, tensor in zip(keys, tensors, strict=True)}
    from ckpt_tool.conversion.passes import NAMES, SELECTION, selected
    from ckpt_tool.sources.chosen import Conversion

    writing = Writing(to=opened.catalog.format, dialect=dialect, rename=tuple(rename))
    job = Conversion(reading, writing, opened.format)
    chosen = selected(opened, job, (*SELECTION, *NAMES))
    return {row.tensor.key: _Side(row.tensor, chosen.sources[row.source].tree) for row in chosen.stored}


def _other_steps(counted: Mapping[TensorKey, tuple[Opened, _Side]]) -> Iterator[dict[str, Any]]:
    """Yield an entry for each per-parameter step that differs from the single count of the other side's optimizer."""
    counts: dict[int, Any] = {}
    for key, (opened, side) in counted.items():
        if id(opened) not in counts and opened.catalog.count is not None:
            counts[id(opened)] = _number(_Side(opened.catalog.count, opened.tree))
        if side.tensor.numel != 1:
            yield {"name": key.name, "state": key.state, "kind": "shape", "left": list(side.tensor.shape), "right": []}
        elif _number(side) != counts[id(opened)]:
            yield {"name": key.name, "state": key.state, "kind": "value", "elements": 1}


def _number(side: _Side) -> Any:
    from ckpt_tool.run.lazy import OpenCatalog

    key = side.tensor.key
    return OpenCatalog(side.tree, Catalog("", {key: side.tensor}), key.state)[key.name].numpy().item()


def _compared(
    pairs: Sequence[tuple[_Side, _Side]], wanted: Comparison, on: Device | None, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Yield an entry for each pair whose values differ."""
    progress.start(sum(mine.tensor.nbytes + theirs.tensor.nbytes for mine, theirs in pairs), "comparing")
    for group in _by_trees(pairs):
        tensors = [(mine.tensor, theirs.tensor) for mine, theirs in group]
        left = group[0][0].tree
        right = group[0][1].tree
        differences = _differences(tensors, left, right, wanted, on, progress)
        for (_, theirs), difference in zip(group, differences, strict=True):
            if difference is not None:
                key = theirs.tensor.key
                yield {"name": key.name, "state": key.state, "kind": "value", **difference}
    progress.finish()


def _differences(
    tensors: Sequence[tuple[LogicalTensor, LogicalTensor]],
    left: Tree,
    right: Tree,
    wanted: Comparison,
    on: Device | None,
    progress: Progress,
) -> Sequence[Mapping[str, Any] | None]:
    """The difference of each pair, None for equal ones, computed on the CPU or on a device."""
    if on is not None:
        from ckpt_tool.device.compare import compared

        return compared(
            tensors,
            left,
            right,
            on,
            rtol=wanted.rtol,
            atol=wanted.atol,
            threads=threads_of(None),
            memory=MEMORY,
            advance=progress.advance,
        )
    from ckpt_tool.run.compare import compare

    return compare(tensors, left, right, rtol=wanted.rtol, atol=wanted.atol, progress=progress)


def _extras_differ(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """The names of extras that differ or that only one side has.

    They are reported but do not make the checkpoints unequal, because some formats can't store extras.
    """
    return sorted(str(name) for name in {**left, **right} if left.get(name) != right.get(name))


def _names(map_file: str) -> dict[str, str]:
    path = Path(map_file)
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as e:
        raise wrap_os_error(e, path, "reading the map") from e
    except UnicodeDecodeError as e:
        raise UsageError("the map is not UTF-8", code="E0268", path=path, offset=e.start) from e

    if text.lstrip().startswith("{"):
        try:
            document = parse(raw, path=map_file)
        except CorruptFile as e:
            raise UsageError(f"the map is not JSON: {e.message}", code="E0268", path=path, offset=e.offset) from e
        wrong = next((left for left, right in document.items() if not isinstance(right, str)), None)
        if wrong is not None:
            raise UsageError(
                f"the map has no name for {wrong[:200]}", code="E0268", path=path, hint="want two names: LEFT, RIGHT"
            )
        return dict(document)

    out = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise UsageError("want two names a line", code="E0268", path=path, place=f"line {number}")
        out[words[0]] = words[1]

    return out
