"""What the module files of a DeepSpeed checkpoint must say alike: names, shapes and order of the flat groups.

The one idea: at stage 3 every data rank writes `param_shapes`, `frozen_param_shapes`, `buffer_names` of the whole model
stage, and the flat tensors of all ranks are cut by one of them. A rank that says otherwise has a flat tensor of another
model, or was edited; a name that its own module does not have is no parameter of this model.

    zero_pp_rank_1_..._model_states.pt: param_shapes[0] has w2 [23, 10] at place 3, but w1 [10, 23] in
        zero_pp_rank_0_...

Source: DeepSpeed 0.19.8 `runtime/engine.py` (`_get_zero_param_shapes`, `_get_zero_frozen_param_attributes`,
`_get_buffer_names`). Cost: a comparison of some thousand names a rank. What it does not do: compare counters
(`deepspeed.read`), or optimizer files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.formats.deepspeed.rank import DISAGREE, ModuleFile

SHOWN = 50


def refuse_other_shapes(modules: Mapping[tuple[int, int], ModuleFile], *, stage3: bool) -> None:
    """Raise InconsistentCheckpoint E0359 for data ranks of one stage that list other parameters, and for lists that
    contradict the module beside them; all at once. modules: by (data rank, model rank)."""
    faults: list[tuple[str, str]] = []
    for (_, mp), file in sorted(modules.items()):
        first = modules[0, mp]
        if file is not first:
            faults += ((file.path, f"{what} in {_name(first)}") for what in _unlike(file, first))
        faults += ((file.path, what) for what in _contradictions(file, stage3=stage3))
    if faults:
        path, what = faults[0]
        raise InconsistentCheckpoint(
            what,
            code=DISAGREE,
            path=path,
            faults=[f"{path.rpartition('/')[2]}: {what}" for path, what in faults[1:SHOWN]],
            hint="the files come from two runs, or one was edited: fetch one save whole",
        )


def _unlike(file: ModuleFile, first: ModuleFile) -> Iterator[str]:
    mine, theirs = file.shapes, first.shapes
    if mine is None or theirs is None or len(mine) != len(theirs):
        if mine != theirs:
            yield f"param_shapes has {_count(mine)}, but {_count(theirs)}"
    else:
        for number, (group, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from _first(f"param_shapes[{number}]", group.items(), other.items())
    config, other_config = (_layout_options(each) for each in (file, first))
    if config != other_config:
        yield f"ds_config cuts by {config}, but by {other_config}"
    yield from _first("frozen_param_shapes", file.frozen.items(), first.frozen.items())
    yield from _first("buffer_names", file.buffers, first.buffers)
    yield from _first(
        "frozen_param_fragments",
        ((name, a.dtype.name) for name, a in file.fragments.items()),
        ((name, a.dtype.name) for name, a in first.fragments.items()),
    )
    yield from _first("module", file.module, first.module)
    for alias, kept in file.shared.items():  # rank 0's file may be the only one that lists them
        if first.shared.get(alias, kept) != kept:
            yield f"shared_params has {alias} as {kept}, but as {first.shared[alias]}"


def _layout_options(file: ModuleFile) -> dict[str, Any]:
    """What of the configuration decides how flat tensors are cut."""
    config = file.values.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    zero = zero if isinstance(zero, dict) else {}
    options = {
        key: zero.get(key) for key in ("stage", "round_robin_gradients", "parameter_alignment", "sub_group_size")
    }
    return options | {
        "use_data_before_expert_parallelism": isinstance(config, dict)
        and config.get("use_data_before_expert_parallelism")
    }


def _first(what: str, mine: Iterable[Any], theirs: Iterable[Any]) -> Iterator[str]:
    """Where two lists begin to differ."""
    for place, (a, b) in enumerate(zip_longest(mine, theirs)):
        if a != b:
            yield f"{what} has {_shown(a)} at place {place}, but {_shown(b)}"
            return


def _contradictions(file: ModuleFile, *, stage3: bool) -> Iterator[str]:
    """Names that a file lists as what they are not."""
    trained = {name: None for group in file.shapes or () for name in group}
    lists = (("param_shapes", trained), ("frozen_param_shapes", file.frozen))
    if stage3 and file.module:
        for what, names in lists:
            for name in names:
                if name not in file.module:
                    yield f"{what} lists {name}, which the module beside it does not have"
    buffers = set(file.buffers)
    for what, names in lists:
        yield from (f"{name} is in {what}, and in buffer_names" for name in names if name in buffers)
    yield from (f"{name} is in param_shapes, and in frozen_param_shapes" for name in trained if name in file.frozen)
    yield from (
        f"a share of frozen {name}, which frozen_param_shapes lacks"
        for name in file.fragments
        if name not in file.frozen
    )


def _count(shapes: list[dict[str, tuple[int, ...]]] | None) -> str:
    return "none" if shapes is None else f"{len(shapes)} groups"


def _shown(item: Any) -> str:
    """An entry of a list in a message: `w [3, 4]`."""
    if item is None:
        return "nothing"
    return (
        f"{item[0]} {list(item[1]) if isinstance(item[1], tuple) else item[1]}"[:160]
        if isinstance(item, tuple)
        else str(item)[:120]
    )


def _name(file: ModuleFile) -> str:
    return file.path.rpartition("/")[2]
