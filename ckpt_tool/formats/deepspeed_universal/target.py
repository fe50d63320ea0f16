"""A universal checkpoint of DeepSpeed as files, for `load_universal_checkpoint`. Layout: `deepspeed_universal`.

The one idea: DeepSpeed resumes from `zero/` alone (fp32 weights, moments, step) and from the counters of the module
file; so those are made from whatever the source calls them, and everything else goes where DeepSpeed does not look (the
record).

    w [master], w [exp_avg], ...   -> zero/w/fp32.pt, zero/w/exp_avg.pt, ...
    w without a master             -> zero/w/fp32.pt repeats the model's values
    w [step], or the group's step  -> zero/w/step.pt
    w [model], w [ema]             -> mp_rank_00_model_states.pt: module, ckpt_states

Both `mp_rank_00_...` (ZeRO 1 and 2, pipelines) and `zero_pp_rank_0_mp_rank_00_...` (ZeRO 3, no tensors) are written,
and both spellings of the optimizer's options, so that the stage may change. Cost: a small pickle for each parameter and
state.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.target import Target, TargetFile, Wanted, WantedTensor, whole_file
from ckpt_tool.core.tensor import EXTRAS, MASTER, MODEL, STEP
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.deepspeed.described import HOME, OPTIMIZER, Described
from ckpt_tool.formats.deepspeed.files import model3_name, model_name
from ckpt_tool.formats.deepspeed.moe import expert_name_of
from ckpt_tool.formats.deepspeed_universal.record import CUTS, KEY, OWN_KEYS, STATES, TENSORS, Recorded
from ckpt_tool.formats.state_dict.nesting import writable
from ckpt_tool.formats.state_dict.paths import OPTIMIZER_ROOTS
from ckpt_tool.formats.torch.content import Part, TorchComposer
from ckpt_tool.storage.pickle_values import OrderedMap, TensorRef
from ckpt_tool.storage.pickle_writer import TorchSize

NO_DTYPE = "E0242"
VERSION = "0.19.8"  # of DeepSpeed, where the source says none
SHOWN = 20
_STATE = re.compile(r"[A-Za-z_]\w*")
_BESIDE = frozenset({MODEL, EXTRAS, "ema"})  # states that DeepSpeed's optimizer would take for its own
_COUNTERS = ("skipped_steps", "global_steps", "global_samples")
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"


@dataclass(slots=True)
class _Layout:
    """What is where. folders: parameter -> file (state) -> row of the wanted tensors. beside: rows of the states that
    get no folder. groups: options of each parameter group; names: of its parameters; steps: its step, None if
    unknown."""

    folders: dict[str, dict[str, int]] = field(default_factory=dict)
    beside: list[int] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    steps: list[float | int | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def target(wanted: Wanted) -> Target:
    """Every file, a parameter's in a folder of its name. Raises UsageError E0242 for dtypes that torch lacks."""
    _check(wanted.tensors)
    extras, left_out = writable(wanted.extras)
    layout = _lay_out(wanted, extras)
    if left_out:
        layout.notes.append(f"left out, because no plain value holds it: {', '.join(left_out[:SHOWN])}")
    files = []
    own_steps = any(STEP in files_of for files_of in layout.folders.values())
    for name, rows in layout.folders.items():
        files += _folder(wanted, name, rows, None if own_steps else _step_of(layout, name))
    record = _record(wanted, extras, layout, own_steps=own_steps)
    top = _top(extras, layout)
    files.append(_optimizer_state(wanted, extras, layout, record))
    files.append(_module(wanted, top, layout))
    small = TorchComposer()
    files.append(small.file(model3_name(0, 0), {**top, "module": OrderedMap(), **_lists(layout, wanted)}))
    steps = extras.get("global_steps", extras.get("iteration"))
    tag = f"global_step{steps}_universal" if type(steps) is int and 0 <= steps < 1 << 62 else "universal"
    placed = [TargetFile(f"{tag}/{f.path}", f.size, f.literals, f.arrays, f.patches) for f in files]
    copies = [TargetFile(path, size, copy_of=path) for path, size in wanted.sidefiles]
    pointer = whole_file("latest_universal", tag.encode())
    return Target("deepspeed-universal", (*placed, pointer, *copies), notes=tuple(layout.notes))


def _check(tensors: Sequence[WantedTensor]) -> None:
    without = [tensor for tensor in tensors if tensor.dtype.torch is None]
    if without:
        raise UsageError(
            f"torch has no {without[0].dtype.name}",
            code=NO_DTYPE,
            key=str(without[0].key),
            faults=[str(tensor.key) for tensor in without[1:SHOWN]],
            hint="cast it with --dtype, or write safetensors",
        )


# -- what goes where ---------------------------------------------------------------------------------------------------


def _lay_out(wanted: Wanted, extras: Mapping[str, Any]) -> _Layout:
    out = _Layout()
    model: dict[str, int] = {}
    shapes = {tensor.key.name: tensor.shape for tensor in wanted.tensors if tensor.key.state in (MODEL, MASTER)}
    for row, tensor in enumerate(wanted.tensors):
        name, state = tensor.key
        if state == MODEL:
            model[name] = row
        odd = state != STEP and tensor.shape != shapes.get(name, tensor.shape)  # Paddle's powers of beta: [1]
        if odd or state in _BESIDE or not _STATE.fullmatch(state):
            out.beside.append(row)
        else:
            out.folders.setdefault(name, {})["fp32" if state == MASTER else state] = row
    if not out.folders:  # weights alone: what is a parameter can't be told from a buffer
        described = Described.from_extras(extras)
        known = set(described.buffers) | set(described.shared) | set(described.frozen) if described else set()
        out.folders = {name: {} for name in model if name not in known}
    bare = []
    for name, rows in out.folders.items():
        if "fp32" not in rows and name in model:
            rows["fp32"] = model[name]
            out.repeats.append(name)
        elif "fp32" not in rows:
            bare.append(name)
    if bare:
        raise UsageError(
            f"{len(bare)} parameters have optimizer states, but no weights; the first: {bare[0]}",
            code="E0291",
            key=bare[0],
            faults=bare[1:SHOWN],
            hint="take the model or the master weights along (--state), or drop these states",
        )
    for rows in out.folders.values():
        rows |= {"fp32": rows.pop("fp32"), **rows}
    _options(out, wanted, extras)
    if not _cuts(wanted) and wanted.source_format != "deepspeed-universal":
        out.notes.append(
            "cat_dim is 0 throughout: a job with tensor parallel ranks must know its own cuts (AutoTP does)"
        )
    if any(expert_name_of(name) for name in out.folders):
        out.notes.append(
            "experts stand under their global numbers: DeepSpeed's own loader looks for local ones, so it "
            "resumes them with "
            "expert parallel size 1 alone (for others write --to deepspeed)"
        )
    return out


def _cuts(wanted: Wanted) -> Mapping[str, Any]:
    """What the source says of how tensor parallel ranks cut its parameters."""
    home = wanted.extras.get(HOME)
    found = home.get(CUTS) if isinstance(home, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _options(out: _Layout, wanted: Wanted, extras: Mapping[str, Any]) -> None:
    """Parameter groups and their steps, from wherever the source keeps them."""
    homes = _homes(extras)
    groups = [dict(group) for home in homes for group in home["param_groups"] if isinstance(group, Mapping)] or [{}]
    said = homes[0].get("scalars") if len(homes) == 1 else None
    scalars = said if isinstance(said, list) and len(said) == len(groups) else [{}] * len(groups)
    taken: set[str] = set()
    for group, scalar in zip(groups, scalars, strict=True):
        params, named = group.get("params"), group.get("param_names")
        listed_names = named if isinstance(named, list) else params if isinstance(params, list) else []
        names = [name for name in listed_names if isinstance(name, str) and name in out.folders and name not in taken]
        taken.update(names)
        step = scalar.get(STEP) if isinstance(scalar, Mapping) else None
        step = group.get(STEP) if step is None else step
        out.names.append(names)
        out.groups.append({key: item for key, item in group.items() if key not in ("params", "param_names")})
        out.steps.append(step if type(step) in (int, float) else None)
    if not isinstance(extras.get("lr_scheduler"), Mapping):
        out.notes.append(
            "no lr_scheduler in the source: a job that has one must load with load_lr_scheduler_states=False"
        )
    rest = [name for name in out.folders if name not in taken]
    out.names[0] += rest
    if not homes:
        out.notes.append("no optimizer options in the source: the job's own configuration counts")
    elif len(groups) > 1 and rest and len(rest) == len(out.folders):
        out.notes.append(
            f"which of {len(groups)} parameter groups a parameter belongs to is unknown: DeepSpeed goes by order"
        )
    if not any(STEP in rows for rows in out.folders.values()) and all(step is None for step in out.steps):
        if any(len(rows) > 1 for rows in out.folders.values()):
            out.notes.append("no step counter in the source: Adam's bias correction starts anew, ZeRO 3 can't load it")


def _homes(extras: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of the extras that have an optimizer's groups: one, or several of a chained optimizer (Megatron's
    experts)."""
    if isinstance(extras.get("param_groups"), list):
        return [extras]
    for key in sorted(OPTIMIZER_ROOTS, key=lambda key: (key != OPTIMIZER, key)):
        found = extras.get(key)
        chain = found if isinstance(found, list | tuple) else [found]
        homes = list[Mapping[str, Any]]()
        for part in chain:
            for home in (part, part.get(OPTIMIZER)) if isinstance(part, Mapping) else ():
                if isinstance(home, Mapping) and isinstance(home.get("param_groups"), list):
                    homes.append(home)
                    break
        if homes:
            return homes
    return []


def _step_of(layout: _Layout, name: str) -> float | int | None:
    first = next((step for step in layout.steps if step is not None), None)
    for names, step in zip(layout.names, layout.steps, strict=True):
        if name in names:
            return step if step is not None else first
    return first


# -- files -------------------------------------------------------------------------------------------------------------


def _tensor(composer: TorchComposer, wanted: Wanted, row: int) -> TensorRef:
    tensor = wanted.tensors[row]
    return composer.tensor(tensor.shape, tensor.dtype, [Part(row, whole(tensor.shape), 0)])


def _folder(wanted: Wanted, name: str, rows: Mapping[str, int], step: float | int | None) -> list[TargetFile]:
    """A parameter's files. step: the group's, where no tensor is the parameter's own."""
    files = []
    said = _cuts(wanted).get(name)
    cut = writable(said)[0] if isinstance(said, Mapping) else {"cat_dim": 0}
    for state, row in rows.items():
        composer = TorchComposer()
        ref = _tensor(composer, wanted, row)
        files.append(composer.file(f"zero/{name}/{state}.pt", ref if state == STEP else {**cut, "param": ref}))
    if STEP not in rows and step is not None and len(rows) > 1:
        composer = TorchComposer()
        files.append(composer.file(f"zero/{name}/{STEP}.pt", _step_tensor(composer, step)))
    return files


def _step_tensor(composer: TorchComposer, step: float | int) -> TensorRef:
    return composer.value((), DTYPES["F32"], struct.pack("<f", float(step)))


def _record(wanted: Wanted, extras: Mapping[str, Any], layout: _Layout, *, own_steps: bool) -> Recorded:
    hidden = {key: item for key, item in extras.items() if key in OWN_KEYS}
    hints, _ = writable({key: item for key, item in wanted.hints.items() if key != "globals"})
    made = tuple(key for key in _made(extras) if key not in extras)
    folders: dict[tuple[str, ...], list[str]] = {}
    for name, rows in layout.folders.items():
        stepped = not own_steps and len(rows) > 1 and _step_of(layout, name) is not None
        folders.setdefault((*rows, *((STEP,) if stepped else ())), []).append(name)
    known = tuple((states, tuple(names)) for states, names in folders.items())
    return Recorded(hidden, made, hints, "tensor" if own_steps else "group", frozenset(layout.repeats), known)


def _made(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the module file that DeepSpeed asks for, from what the source has."""
    iteration = extras.get("iteration")
    steps = extras.get("global_steps", iteration)
    return {
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": steps if type(steps) is int else 0,
        "global_samples": extras.get("consumed_train_samples", 0),
        "ds_config": {},
        "ds_version": VERSION,
    }


def _top(extras: Mapping[str, Any], layout: _Layout) -> dict[str, Any]:
    """The module file's plain values: DeepSpeed's, then the client's."""
    return {**_made(extras), **{key: item for key, item in extras.items() if key not in OWN_KEYS}}


def _lists(layout: _Layout, wanted: Wanted) -> dict[str, Any]:
    """Shapes and sizes that DeepSpeed keeps in every module file."""
    shapes = [
        OrderedMap({name: TorchSize(wanted.tensors[layout.folders[name]["fp32"]].shape) for name in names})
        for names in layout.names
    ]
    described = Described.from_extras(wanted.extras) or Described()
    have = {tensor.key.name for tensor in wanted.tensors if tensor.key.state == MODEL}
    return {
        "buffer_names": [name for name in described.buffers if name in have],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {alias: kept for alias, kept in described.shared.items() if alias in have},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }


def _module(wanted: Wanted, top: Mapping[str, Any], layout: _Layout) -> TargetFile:
    composer = TorchComposer()
    module: OrderedMap = OrderedMap()
    tensors: dict[str, TensorRef] = {}
    states: dict[str, dict[str, TensorRef]] = {}
    for row in layout.beside:
        (name, state), ref = wanted.tensors[row].key, _tensor(composer, wanted, row)
        if state == MODEL:
            module[name] = ref
        elif state == EXTRAS:
            tensors[name] = ref
        else:
            states.setdefault(state, {})[name] = ref
    more = {**({TENSORS: tensors} if tensors else {}), **({STATES: states} if states else {})}
    return composer.file(model_name(0), {"module": module or None, **_lists(layout, wanted), **top, **more})


def _optimizer_state(wanted: Wanted, extras: Mapping[str, Any], layout: _Layout, record: Recorded) -> TargetFile:
    """`optimizer_state.pt`: options in both spellings, and the record."""
    composer = TorchComposer()
    groups = [{**group, "params": [i]} for i, group in enumerate(layout.groups)]
    own = extras.get(OPTIMIZER)
    layout_keys = ("param_groups", "scalars", "scalar_dtypes")
    rest: dict[str, Any] = {}
    if HOME in extras and isinstance(own, Mapping):
        rest = {key: _object(item) for key, item in own.items() if key not in layout_keys}
    described = Described.from_extras(extras)
    stage = Symbol(_STAGE, (described.zero_stage,)) if described is not None else 1
    state: dict[int, Any] = {}
    for i, names in enumerate(layout.names):
        rows = [layout.folders[name][STEP] for name in names if STEP in layout.folders[name]]
        step = _step_of(layout, names[0]) if names else None
        if rows:
            state[i] = {STEP: _tensor(composer, wanted, rows[0])}
        elif step is not None:
            state[i] = {STEP: _step_tensor(composer, step)}
    version = extras.get("ds_version")
    value = {
        "zero_stage": stage,
        **rest,
        "ds_version": version if isinstance(version, str) else VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
        KEY: record.to_value(),
    }
    return composer.file("zero/optimizer_state.pt", value)


def _object(value: Any) -> Any:
    """A loss scaler as the object that it was."""
    if isinstance(value, Mapping) and isinstance(value.get("class"), str) and value["class"].startswith("deepspeed."):
        return Opaque(value["class"], (), {key: item for key, item in value.items() if key != "class"})
    return value
