"""AOA: Paddle's any-to-any statements, compiled to what each tensor of the other naming is made of.

One statement says how tensors are renamed, cut, joined, turned or cast; a program is a list of them, run in order:

    model.layers.$LAYER_ID.mlp.gate_proj.weight^T, model.layers.$LAYER_ID.mlp.up_proj.weight^T
        -> model.layers.$LAYER_ID.mlp.up_gate_proj.weight, fused_ffn
    lm_head.weight -> _

| statement | meaning |
|---|---|
| `a -> b` | `b` is `a` |
| `a -> _`, `_ -> b` | `a` is dropped; `b` has no source (it is not written) |
| `a -> b, c, axis=1` | equal parts along a dim |
| `a, b -> c, axis=0` | end to end along a dim |
| `a^T -> b` | all dims reversed |
| `a -> b, permute='[2, 0, 1]'` | dim i of `b` is dim `permute[i]` of `a`; `'[]'` reverses all |
| `a -> b, dtype='float32'` | model weights are cast (float16, bfloat16, float32); states keep their dtype |
| `q, k, v -> qkv, fused_qkv, num_heads=H, num_key_value_groups=G` | and `fused_qkv_old`, `fused_ffn`: see `aoa_steps` |
| `$LAYER_ID`, `$EXPERT_ID`, `$LAYER_ID_OFFSET`, `*`, `NAME[s:e]` | many names in one: see `aoa_names`, `aoa_statement`
|

Names of parameters are meant; the states of a parameter follow it. What no statement names passes as it is. `reverse`
runs the statements from right to left, the last one first (a cast must then say both dtypes).

Source: PaddlePaddle 3.3.1, `python/paddle/distributed/flex_checkpoint/aoa/`. Where Paddle is silent and a tensor could
be lost or doubled, this is strict; each fault names its statement, and all faults of a pass come at once:

E1200 no statement, E1201 E1202 the file, E1203 attribute, E1204 value, E1205 several names on both sides, E1206 name,
E1207 `A -> B^T`, E1208 a pattern without a match, E1209 unlike placeholders, E1210 numbers that can't be written out,
E1211 form of a fusion, E1212 heads and shards that don't divide, E1213 shards that can't be told, E1214 `dtype` in
reverse, E1215 unequal split, E1216 shape, axis or permutation, E1217 casts, E1218 a name that nothing has made, E1219 a
source that is lost, E1220 a wanted tensor without a source, E1221 dropped and read, E1222 made and not wanted, E1223
elements read twice, E1224 another shape than wanted.

Cost: linear in the written-out statements, some 20 us each; no tensor is built. What it does not do: know files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckpt_tool.algebra.aoa_faults import Faults
from ckpt_tool.algebra.aoa_names import Forms, expand
from ckpt_tool.algebra.aoa_run import Run
from ckpt_tool.algebra.aoa_slices import Value, pieces_of
from ckpt_tool.algebra.aoa_statement import AoaText, Statement, parse, read_aoa
from ckpt_tool.algebra.aoa_steps import Shards, Step, steps_of
from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.errors import UsageError

__all__ = ["AoaText", "Shards", "compile_aoa", "read_aoa", "steps_for"]

Shape = tuple[int, ...]
Wanted = Mapping[str, Shape] | Iterable[str]


def compile_aoa(
    statements: Sequence[str],
    shapes: Mapping[str, Shape],
    *,
    reverse: bool = False,
    shards: Shards | None = None,
    wanted: Wanted | None = None,
    skip_unmatched: bool = False,
) -> Mapped:
    """What the statements make of the tensors of `shapes`.

    Args:
        shapes: name -> shape of every tensor of the source, in its order.
        reverse: run them from right to left; `shapes` is then what the right sides name.
        shards: how many shards the tensors of fusions have where they lie and where they go; 1 where nothing is said.
        wanted: the names of the destination, or name -> shape; None where it is not known: then every value that
            nothing reads is an output, and so is `x` of `x -> x` where others merely rename it.
        skip_unmatched: a pattern that fits no tensor makes nothing, as in Paddle; otherwise it is an error.
    Returns: each output with the pieces that tile it (`src` in the source, `dst` in it; merged where they are regular),
        in the order of `wanted`, else of the source (by the first tensor that each is made of). `dropped`: sources of
        which nothing is left, in their order.
    Raises: UsageError, E1200 to E1224, with all faults of the pass: those of reading and running the statements, then
        those of what is left over.
    """
    faults = Faults(statements)
    goal = None if wanted is None else _goal(wanted)
    steps = _steps(statements, shapes, goal, shards or Shards(), faults, reverse=reverse, skip=skip_unmatched)
    run = Run(shapes, faults, doubtful=bool(faults.found))
    run.steps(steps)
    faults.check()
    outputs = run.outputs(goal)
    faults.check()
    names = list(outputs) if goal is not None else _in_source_order(outputs, shapes)
    made = [
        Made(name, outputs[name].shape, pieces_of(name, outputs[name], shapes), outputs[name].dtype) for name in names
    ]
    used = {piece.source for value in outputs.values() for piece in value.slices}
    dropped = {piece.source for value in run.left_out for piece in value.slices} - used
    return Mapped(tuple(made), tuple(name for name in shapes if name in dropped), tuple(run.unfilled))


def steps_for(
    statements: Sequence[str],
    shapes: Mapping[str, Shape],
    *,
    reverse: bool = False,
    shards: Shards | None = None,
    wanted: Wanted | None = None,
    skip_unmatched: bool = False,
) -> list[Step]:
    """The steps that the statements come to, in the order in which they run. Arguments and errors as `compile_aoa`."""
    faults = Faults(statements)
    goal = None if wanted is None else _goal(wanted)
    steps = _steps(statements, shapes, goal, shards or Shards(), faults, reverse=reverse, skip=skip_unmatched)
    faults.check()
    return steps


def _steps(
    statements: Sequence[str],
    shapes: Mapping[str, Shape],
    goal: Mapping[str, Shape | None] | None,
    shards: Shards,
    faults: Faults,
    *,
    reverse: bool,
    skip: bool,
) -> list[Step]:
    parsed: list[Statement] = []
    for number, text in enumerate(statements, start=1):
        for line in filter(str.strip, text.splitlines()):
            try:
                parsed.append(parse(line, number))
            except UsageError as e:
                faults.take(number, e)
    destination = None if goal is None else Forms(goal)
    concrete = expand(parsed, Forms(shapes), destination, faults, reverse=reverse, skip=skip)
    return steps_of(concrete, shards, (shapes, goal or ()), faults, reverse=reverse)


def _goal(wanted: Wanted) -> dict[str, Shape | None]:
    return dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted)


def _in_source_order(outputs: Mapping[str, Value], shapes: Mapping[str, Shape]) -> list[str]:
    order = {name: place for place, name in enumerate(shapes)}
    return sorted(outputs, key=lambda name: min(order[piece.source] for piece in outputs[name].slices))
