"""Steps that concrete statements expand to: split, concat, permute, cast, rename, drop, add; fusions and `^T` expanded.

    q^T, k^T, v^T -> qkv, fused_qkv, num_heads=2, num_key_value_groups=1

    q -> ~q_transpose_tmp, permute='[]'                        and k, v
    ~q_transpose_tmp -> ~q_transpose_tmp0, ~q_transpose_tmp1, axis=1      and k, v in one part each
    ~q_.._tmp0, ~q_.._tmp1, ~k_.._tmp0, ~v_.._tmp0 -> qkv, axis=1

Fusions (default axis 1, for 1-D tensors say axis=0), H = num_heads, G = num_key_value_groups, which is the number of
key-value heads whatever its name says:

- `fused_qkv`, `q, k, v -> qkv` or back: for each of G groups its H/G query heads, then its key head, its value head;
- `fused_qkv_old`, those and `qkv -> qkv`: for each of t shards [its query heads | key heads | value heads];
- `fused_ffn`, `g, u -> gu`, back, and `gu -> gu`: for each of t shards [its part of gate | of up].

t is how many shards the tensor of that name has where it is stored (`Shards`); a name made on the way has the count of
the one it comes from or goes to. Names of steps' own begin with `~`, so none meets a name of a checkpoint. Source:
PaddlePaddle 3.3.1, `aoa/macros.py` (transposes, fusions), `aoa_engine.py` (steps, reverse). Where heads don't divide
into shards Paddle silently loses some; here it is an error. Reversed fusions count the shards of the side that each
name really belongs to (Paddle: 1 for `g, u -> gu`). What it does not do: know shapes (`slices`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.systems.paddle.aoa.faults import Faults
from ckpt_tool.systems.paddle.aoa.statement import (
    CASTS,
    FFN,
    MAX_NAMES,
    NOTHING,
    QKV,
    TRANSPOSED,
    WORDS,
    Statement,
    permutation,
)

TEMPORARY = "~"


class Shards(NamedTuple):
    """How many shards a tensor has where it is stored, by name; 1 where nothing is said."""

    source: Mapping[str, int] = {}
    destination: Mapping[str, int] = {}


class AoaStep(NamedTuple):
    """One step of the sequence that a statement expands to."""

    number: int  # of the statement that it comes from
    kind: str  # split, concat (along `axis`), permute (`dims`, () = all reversed), cast (to `dtype`), rename, drop, add
    left: tuple[str, ...]
    right: tuple[str, ...]
    axis: int = 0
    dims: tuple[int, ...] = ()
    dtype: DType | None = None
    why: str = ""  # the reason for a split, for messages
    even: bool = False  # the parts of a concatenation must have the same length


def steps_of(
    statements: Sequence[Statement],
    shards: Shards,
    leaves: tuple[Collection[str], Collection[str]],
    faults: Faults,
    *,
    reverse: bool,
) -> list[AoaStep]:
    """The steps in the order in which they run. `statements` have no placeholders and stars any more.

    Args:
        leaves: the names of the source, and those of the destination, at which a chain of names ends.
    Faults: E1203 what a form can't have, E1211 a fusion of another form, E1212 heads and shards that don't divide,
    E1213 shards that are not known, E1214 `dtype` in reverse.
    """
    counts = _Counts(statements, shards, leaves, reverse)
    out: list[AoaStep] = []
    for statement in statements:
        try:
            out += _steps(statement, counts, reverse)
        except UsageError as e:
            faults.take(statement.number, e)
    return out[::-1] if reverse else out


def _steps(statement: Statement, counts: _Counts, reverse: bool) -> list[AoaStep]:
    plain, steps = _move_transposes(statement)
    steps += _fuse_steps(plain, counts) if plain.word else [_plain(plain, reverse)]
    return [_reverse_step(step) for step in steps] if reverse else steps


def _move_transposes(statement: Statement) -> tuple[Statement, list[AoaStep]]:
    """The statement that reads transposed copies, and the steps that make them."""
    names = [name.removesuffix(TRANSPOSED) for name in statement.left if name.endswith(TRANSPOSED)]
    steps = [AoaStep(statement.number, "permute", (name,), (_transposed_name(name),)) for name in dict.fromkeys(names)]
    left = tuple(
        _transposed_name(name.removesuffix(TRANSPOSED)) if name.endswith(TRANSPOSED) else name
        for name in statement.left
    )
    return statement._replace(left=left), steps


def _transposed_name(name: str) -> str:
    return f"{TEMPORARY}{name}_transpose_tmp"


def shown(name: str) -> str:
    """A step's internal name in a form for messages."""
    text = name.removeprefix(TEMPORARY).replace("_transpose_tmp", TRANSPOSED)
    return text.replace(TEMPORARY, " part ").replace("_tmp.", " part ") if name.startswith(TEMPORARY) else name


def _plain(statement: Statement, reverse: bool) -> AoaStep:
    """A statement without a fusion."""
    number, left, right, attributes, _ = statement
    requested = set(attributes)
    if NOTHING in (*left, *right):
        return AoaStep(number, "drop" if right == (NOTHING,) else "add", left, right)

    if len(left) > 1 or len(right) > 1:
        if requested != {"axis"}:
            wants = "a split" if len(right) > 1 else "a concatenation"
            near = near_misses(right[-1], WORDS) if len(right) > 1 else ""
            raise UsageError(
                f"{wants} wants axis=N and nothing else, found {', '.join(sorted(requested)) or 'nothing'}",
                code="E1203",
                hint=near or "axis=1 joins columns, axis=0 rows",
            )
        return AoaStep(number, "split" if len(right) > 1 else "concat", left, right, int(attributes["axis"]))

    if requested <= {"axis"}:  # `a -> b, axis=0`: what a star or a range of one name leaves over
        return AoaStep(number, "rename", left, right)
    if requested == {"permute"}:
        return AoaStep(number, "permute", left, right, dims=permutation(str(attributes["permute"])))

    if requested == {"dtype"} and reverse:
        raise UsageError(
            "dtype= can't be run in reverse", code="E1214", hint="say both ends: src_dtype='...', dst_dtype='...'"
        )

    if requested in ({"dtype"}, {"src_dtype", "dst_dtype"}):
        attribute = "src_dtype" if reverse else "dst_dtype"
        if "dtype" in requested:
            attribute = "dtype"
        return AoaStep(number, "cast", left, right, dtype=CASTS[str(attributes[attribute])])

    raise UsageError(
        f"{', '.join(sorted(requested))} in one statement",
        code="E1203",
        hint="one of permute=, dtype=, or src_dtype= with dst_dtype=",
    )


_BACK = {"split": "concat", "concat": "split", "drop": "add", "add": "drop"}


def _reverse_step(step: AoaStep) -> AoaStep:
    """The inverse of a step. A cast's `dtype` is that of the reverse direction already (`_plain`)."""
    dims = tuple(sorted(range(len(step.dims)), key=step.dims.__getitem__))
    return step._replace(kind=_BACK.get(step.kind, step.kind), left=step.right, right=step.left, dims=dims)


# -- fusions -----------------------------------------------------------------------------------------------------------


def _fuse_steps(statement: Statement, counts: _Counts) -> list[AoaStep]:
    attributes = statement.attributes
    word = statement.word
    allowed = {"axis"} if word == FFN else {"axis", "num_heads", "num_key_value_groups"}
    if set(attributes) - allowed:
        raise UsageError(
            f"{word} takes no {', '.join(sorted(set(attributes) - allowed))}",
            code="E1203",
            hint=f"it takes {', '.join(sorted(allowed))}",
        )
    fused, parts = (statement.left, statement.right) if len(statement.left) == 1 else (statement.right, statement.left)
    many = 2 if word == FFN else 3
    if NOTHING in (*fused, *parts) or len(parts) not in ((many,) if word == QKV else (many, 1)):
        raise UsageError(
            f"{word} of {len(statement.left)} -> {len(statement.right)} names",
            code="E1211",
            hint=f"{'gate, up' if word == FFN else 'q, k, v'} -> fused or "
            f"back{'' if word == QKV else ', or fused -> fused'}",
        )
    if word == FFN:
        return list(_fuse_by_shards(statement, counts))
    heads, groups = _heads(statement)
    if word == QKV:
        return list(_fuse_by_groups(statement, heads, groups))
    return list(_fuse_by_shards(statement, counts, heads, groups))


def _heads(statement: Statement) -> tuple[int, int]:
    lacking = [name for name in ("num_heads", "num_key_value_groups") if name not in statement.attributes]
    if lacking:
        raise UsageError(
            f"{statement.word} wants {' and '.join(lacking)}",
            code="E1212",
            hint="num_key_value_groups is the number of key-value heads",
        )
    heads, groups = (int(statement.attributes[name]) for name in ("num_heads", "num_key_value_groups"))
    if heads % groups:
        raise UsageError(
            f"num_heads={heads} is no multiple of num_key_value_groups={groups}",
            code="E1212",
            hint="num_key_value_groups is the number of key-value heads",
        )
    return heads, groups


def _fuse_by_groups(statement: Statement, heads: int, groups: int) -> Iterator[AoaStep]:
    """The steps of `fused_qkv`: q, k, v to one tensor or back, group by group."""
    axis = int(statement.attributes.get("axis", 1))
    number = statement.number
    splitting = len(statement.left) == 1
    whole = statement.left[0] if splitting else statement.right[0]
    q, k, v = statement.right if splitting else statement.left
    if len({q, k, v}) < 3:
        raise UsageError("q, k and v are one name", code="E1211")
    head_names = {
        q: _number_names(q.removeprefix(TEMPORARY) + "~", heads),
        k: _number_names(k.removeprefix(TEMPORARY) + "~", groups),
        v: _number_names(v.removeprefix(TEMPORARY) + "~", groups),
    }

    # Group by group: its query heads, then the key and the value that they share.
    queries = heads // groups
    order: list[str] = []
    for group in range(groups):
        order += head_names[q][group * queries : (group + 1) * queries]
        order += [head_names[k][group], head_names[v][group]]

    if splitting:
        yield _split(number, whole, order, axis, f"{heads} + 2 x {groups} heads")
        yield from (_concat(number, parts, name, axis) for name, parts in head_names.items())
    else:
        for name, parts in head_names.items():
            yield _split(number, name, parts, axis, f"{len(parts)} heads")
        yield _concat(number, order, whole, axis)


def _number_names(stem: str, count: int) -> list[str]:
    """Names of temporary tensors: `stem` with 0 to count - 1 behind it."""
    return [f"{TEMPORARY}{stem}{i}" for i in range(count)]


def _fuse_by_shards(statement: Statement, counts: _Counts, heads: int = 0, groups: int = 0) -> Iterator[AoaStep]:
    """The steps of `fused_ffn`, and with heads of `fused_qkv_old`: parts are ordered shard by shard."""
    axis = int(statement.attributes.get("axis", 1))
    number = statement.number
    word = statement.word
    left = statement.left
    right = statement.right
    here = counts.of(left[0], "left") if len(left) == 1 else 1
    there = counts.of(right[0], "right") if len(right) == 1 else 1
    if word == FFN:
        # Parts that are fine enough for the shards of both sides.
        letters = {"GATE": lcm(here, there), "UP": lcm(here, there)}
    else:
        letters = {"Q": heads, "K": groups, "V": groups}
        for shards in (here, there):
            if heads % shards or groups % shards:
                raise UsageError(
                    f"{heads} and {groups} heads don't divide into {shards} shards",
                    code="E1212",
                    hint="key-value heads that are repeated over ranks have to be merged first",
                )
    if sum(letters.values()) > MAX_NAMES:
        raise UsageError(f"{here} and {there} shards come to more than {MAX_NAMES} parts", code="E1212")
    names = {letter: _number_names(f"{word}_tmp.{letter}_", count) for letter, count in letters.items()}
    why = f"{word} of {here} and {there} shards" + (f", {heads} + 2 x {groups} heads" if heads else "")

    def order(shards: int) -> list[str]:
        """The parts in the order in which a tensor of so many shards has them: shard by shard."""
        return [
            name
            for rank in range(shards)
            for parts in names.values()
            for name in parts[rank * len(parts) // shards : (rank + 1) * len(parts) // shards]
        ]

    if len(left) == 1:
        yield _split(number, left[0], order(here), axis, why)
    else:
        for name, parts in zip(left, names.values(), strict=True):
            yield _split(number, name, parts, axis, why)
    if len(right) == 1:
        yield _concat(number, order(there), right[0], axis, even=True)
    else:
        for name, parts in zip(right, names.values(), strict=True):
            yield _concat(number, parts, name, axis)


def _split(number: int, name: str, parts: Sequence[str], axis: int, why: str) -> AoaStep:
    """A split; with one part a rename, so that no axis is required to exist."""
    kind = "split" if len(parts) > 1 else "rename"
    return AoaStep(number, kind, (name,), tuple(parts), axis, why=why)


def _concat(number: int, parts: Sequence[str], name: str, axis: int, *, even: bool = False) -> AoaStep:
    return AoaStep(number, "concat" if len(parts) > 1 else "rename", tuple(parts), (name,), axis, even=even)


class _Counts:
    """Finds the number of shards of the stored tensor that a name comes from or goes to, across intermediate names."""

    def __init__(
        self,
        statements: Iterable[Statement],
        shards: Shards,
        leaves: tuple[Collection[str], Collection[str]],
        reverse: bool,
    ) -> None:
        tables = (shards.source, shards.destination)
        order = (1, 0) if reverse else (0, 1)  # the left side is the source's, in reverse the destination's
        self.table = {side: tables[i] for side, i in zip(("left", "right"), order, strict=True)}
        self.leaves = {side: leaves[i] for side, i in zip(("left", "right"), order, strict=True)}
        self.links: dict[str, dict[str, tuple[str, ...]]] = {"left": {}, "right": {}}
        for statement in statements if any(tables) else ():
            bare = tuple(name.removesuffix(TRANSPOSED) for name in statement.left)
            self.links["left"].update(dict.fromkeys(statement.right, bare))
            self.links["right"].update(dict.fromkeys(bare, statement.right))

    def of(self, name: str, side: str) -> int:
        """The number of shards of a name. side: `left` follows where it comes from, `right` where it goes to.

        Raises UsageError E1213 if the stored tensors differ, E1204 for a count below 1.
        """
        found = self._of(shown(name).removesuffix(TRANSPOSED), side, frozenset())
        if len(found) > 1:
            raise UsageError(
                f"`{shown(name)}` belongs to tensors of {', '.join(map(str, sorted(found)))} shards",
                code="E1213",
                hint="fuse the stored tensors themselves, before they are joined",
            )
        (count,) = found or {1}
        if count < 1:
            raise UsageError(f"`{shown(name)}` has {count} shards", code="E1204")
        return count

    def _of(self, name: str, side: str, seen: frozenset[str]) -> set[int]:
        if name in self.table[side]:
            return {self.table[side][name]}
        if name in seen:  # names may be assigned in a circle: a -> b, b -> a
            return set()
        if name in self.leaves[side] or name not in self.links[side]:
            return {1}
        return {count for next_ in self.links[side][name] for count in self._of(next_, side, seen | {name})}
