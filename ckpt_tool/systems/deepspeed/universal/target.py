"""Plans the files of a universal checkpoint, for `load_universal_checkpoint`. Layout: `deepspeed.universal`.

The one idea: DeepSpeed resumes only from `zero/` (fp32 weights, moments, step) and from the counters of the module
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import Symbol
from ckpt_tool.core.hints import Globals
from ckpt_tool.core.target import Target, TargetFile, Wanted, whole_file
from ckpt_tool.core.tensor import EXTRAS, MASTER, MODEL, STEP
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.state_dict.composer import StoragePart, TorchComposer
from ckpt_tool.formats.state_dict.nesting import writable
from ckpt_tool.storage.pickles.pickle_values import OrderedMap, TensorRef
from ckpt_tool.storage.pickles.pickle_writer import TorchSize
from ckpt_tool.systems.deepspeed.described import HOME, Described, Options, names_of, stated_groups
from ckpt_tool.systems.deepspeed.files import MODEL as MODULE_FILE
from ckpt_tool.systems.deepspeed.files import MODEL3, opaque
from ckpt_tool.systems.deepspeed.stored_names import expert_name_of
from ckpt_tool.systems.deepspeed.universal.record import CUTS, KEY, OWN_KEYS, STATES, TENSORS, Recorded
from ckpt_tool.systems.deepspeed.zero.write import STAGE, VERSION

NO_DTYPE = "E0242"
SHOWN = 20
_STATE = re.compile(r"[A-Za-z_]\w*")
_BESIDE = frozenset({MODEL, EXTRAS, "ema"})  # states that get no folder: DeepSpeed's optimizer would load them
_COUNTERS = ("skipped_steps", "global_steps", "global_samples")


@dataclass(slots=True)
class _Group:
    """A parameter group of the optimizer."""

    options: dict[str, Any] = field(default_factory=dict)  # without names
    names: list[str] = field(default_factory=list)
    step: float | int | None = None  # None if unknown


def target(wanted: Wanted) -> Target:
    """Return the files of the new checkpoint. Raises UsageError E0242 for dtypes that torch lacks."""
    without = [tensor for tensor in wanted.tensors if tensor.dtype.torch is None]
    if without:
        raise UsageError(
            f"torch has no {without[0].dtype.name}",
            code=NO_DTYPE,
            key=str(without[0].key),
            faults=[str(tensor.key) for tensor in without[1:SHOWN]],
            hint="cast it with --dtype, or write safetensors",
        )
    extras, left_out = writable(wanted.extras)
    writer = _UniversalWriter(wanted, extras)
    if left_out:
        writer.notes.append(f"left out, because no plain value holds it: {', '.join(left_out[:SHOWN])}")
    steps = extras.get("global_steps", extras.get("iteration"))
    tag = f"global_step{steps}_universal" if type(steps) is int and 0 <= steps < 1 << 62 else "universal"
    placed = [TargetFile(f"{tag}/{f.path}", f.size, f.literals, f.arrays, f.patches) for f in writer.files()]
    copies = list(wanted.side_file_copies())
    pointer = whole_file("latest_universal", tag.encode())
    return Target("deepspeed-universal", (*placed, pointer, *copies), notes=tuple(writer.notes))


class _UniversalWriter:
    """Assigns every tensor to a file.

    folders: parameter -> file (state) -> row of the wanted tensors; states that get no folder are in a list of their
    own. repeats: parameters whose `fp32` is the model's. steps: parameter -> its group's step, None if unknown.
    """

    def __init__(self, wanted: Wanted, extras: Mapping[str, Any]) -> None:
        self.wanted = wanted
        self.extras = extras
        self.described = Described.from_extras(extras)
        self.folders: dict[str, dict[str, int]] = {}
        self.beside: list[int] = []
        self.repeats: list[str] = []
        self.notes: list[str] = []
        self._place()
        home = wanted.extras.get(HOME)
        cuts = home.get(CUTS) if isinstance(home, Mapping) else None
        self.cuts: Mapping[str, Any] = cuts if isinstance(cuts, Mapping) else {}
        self.groups = self._groups()
        self.own_steps = any(STEP in rows for rows in self.folders.values())
        first = next((group.step for group in self.groups if group.step is not None), None)
        self.steps = {n: first if g.step is None else g.step for g in self.groups for n in g.names}
        self._note_gaps()

    # -- what goes where -----------------------------------------------------------------------------------------------

    def _place(self) -> None:
        tensors = self.wanted.tensors
        model = {tensor.key.name: row for row, tensor in enumerate(tensors) if tensor.key.state == MODEL}
        shapes = {tensor.key.name: tensor.shape for tensor in tensors if tensor.key.state in (MODEL, MASTER)}

        for row, tensor in enumerate(tensors):
            name, state = tensor.key
            odd = state != STEP and tensor.shape != shapes.get(name, tensor.shape)  # Paddle's powers of beta: [1]
            if odd or state in _BESIDE or not _STATE.fullmatch(state):
                self.beside.append(row)
            else:
                self.folders.setdefault(name, {})["fp32" if state == MASTER else state] = row

        if not self.folders:  # only weights: nothing states which of them are parameters and which are buffers
            described = self.described or Described()
            known = {*described.buffers, *described.shared, *described.frozen}
            self.folders = {name: {} for name in model if name not in known}

        self.repeats = [name for name, rows in self.folders.items() if "fp32" not in rows and name in model]
        bare = [name for name, rows in self.folders.items() if "fp32" not in rows and name not in model]
        if bare:
            raise UsageError(
                f"{len(bare)} parameters have optimizer states, but no weights; the first: {bare[0]}",
                code="E0291",
                key=bare[0],
                faults=bare[1:SHOWN],
                hint="take the model or the master weights along (--state), or drop these states",
            )

        for name, rows in self.folders.items():
            rows["fp32"] = rows.pop("fp32") if "fp32" in rows else model[name]

    def _groups(self) -> list[_Group]:
        """Return the parameter groups and their steps, wherever the source stores them.

        Parameters that no group lists are added to the first one.
        """
        out = list[_Group]()
        taken = set[str]()
        for stated, scalars in stated_groups(self.extras):
            names = [name for name in names_of(stated) if name in self.folders and name not in taken]
            taken.update(names)
            step = scalars.get(STEP, stated.get(STEP))
            options = {key: item for key, item in stated.items() if key not in ("params", "param_names")}
            out.append(_Group(options, names, step if type(step) in (int, float) else None))

        rest = [name for name in self.folders if name not in taken]
        if not isinstance(self.extras.get("lr_scheduler"), Mapping):
            self.notes.append(
                "no lr_scheduler in the source: a job that has one must load with load_lr_scheduler_states=False"
            )

        if not out:
            self.notes.append("no optimizer options in the source: the job's own configuration counts")
        elif len(out) > 1 and rest and not taken:
            self.notes.append(
                f"which of {len(out)} parameter groups a parameter belongs to is unknown: "
                "DeepSpeed assigns them by their order"
            )
        elif taken and rest:
            self.notes.append(
                f"{len(rest)} parameters are in no param_groups of the source, such as {rest[0]}: they are listed in "
                "the first group; a job gives each the options of its own group of that number"
            )

        out = out or [_Group()]
        out[0].names += rest
        return out

    def _note_gaps(self) -> None:
        """Add notes on values that the source lacks, and on limits of DeepSpeed's own loader."""
        trains = any(len(rows) > 1 for rows in self.folders.values())
        if not self.own_steps and trains and all(group.step is None for group in self.groups):
            self.notes.append(
                "no step counter in the source: Adam's bias correction starts again, ZeRO 3 can't load it"
            )
        if not self.cuts and self.wanted.source_format != "deepspeed-universal":
            self.notes.append(
                "cat_dim is 0 throughout: a job with tensor parallel ranks must know its own cuts (AutoTP does)"
            )
        if any(expert_name_of(name) for name in self.folders):
            self.notes.append(
                "experts have their global numbers: DeepSpeed's own loader looks for local ones, so it resumes "
                "them with expert parallel size 1 alone (for others write --to deepspeed)"
            )

    # -- files ---------------------------------------------------------------------------------------------------------

    def files(self) -> Iterator[TargetFile]:
        """Yield every file below the step's folder."""
        for name, rows in self.folders.items():
            yield from self._folder(name, rows)
        top = {**self._required_keys(), **{key: item for key, item in self.extras.items() if key not in OWN_KEYS}}
        yield self._optimizer_state()
        yield self._module(top)
        skeleton = {**top, "module": OrderedMap(), **self._lists()}
        yield TorchComposer().file(MODEL3.format(data=0, model=0), skeleton)

    def _tensor(self, composer: TorchComposer, row: int) -> TensorRef:
        tensor = self.wanted.tensors[row]
        return composer.tensor(tensor.shape, tensor.dtype, [StoragePart(row, whole(tensor.shape), 0)])

    def _folder(self, name: str, rows: Mapping[str, int]) -> Iterator[TargetFile]:
        """Yield the files of a parameter's folder, one for each state."""
        stated = self.cuts.get(name)
        cut = writable(stated)[0] if isinstance(stated, Mapping) else {"cat_dim": 0}
        for state, row in rows.items():
            composer = TorchComposer()
            ref = self._tensor(composer, row)
            yield composer.file(f"zero/{name}/{state}.pt", ref if state == STEP else {**cut, "param": ref})
        step = self._made_step(name)
        if step is not None:
            composer = TorchComposer()
            yield composer.file(f"zero/{name}/{STEP}.pt", _step_tensor(composer, step))

    def _made_step(self, name: str) -> float | int | None:
        """Return the group's step for a parameter that has states but no step of its own, else None."""
        return self.steps[name] if not self.own_steps and len(self.folders[name]) > 1 else None

    def _record(self) -> Recorded:
        hidden = {key: item for key, item in self.extras.items() if key in OWN_KEYS}
        hints, _ = writable(self.wanted.hints.without(Globals).plain)
        made = tuple(key for key in self._required_keys() if key not in self.extras)
        folders: dict[tuple[str, ...], list[str]] = {}
        for name, rows in self.folders.items():
            step = () if self._made_step(name) is None else (STEP,)
            folders.setdefault((*rows, *step), []).append(name)
        known = tuple((states, tuple(names)) for states, names in folders.items())
        step_of = "tensor" if self.own_steps else "group"
        return Recorded(hidden, made, hints, step_of, frozenset(self.repeats), known)

    def _required_keys(self) -> dict[str, Any]:
        """Return the keys of the module file that DeepSpeed requires, with the source's values or defaults."""
        extras = self.extras
        steps = extras.get("global_steps", extras.get("iteration"))
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

    def _lists(self) -> dict[str, Any]:
        """Return the shapes and sizes that DeepSpeed stores in every module file."""
        tensors = self.wanted.tensors
        described = self.described or Described()
        have = {tensor.key.name for tensor in tensors if tensor.key.state == MODEL}
        shapes: list[OrderedMap] = []
        for group in self.groups:
            masters = [(name, tensors[self.folders[name]["fp32"]]) for name in group.names]
            shapes.append(OrderedMap((name, TorchSize(master.shape)) for name, master in masters))

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

    def _module(self, top: Mapping[str, Any]) -> TargetFile:
        composer = TorchComposer()
        module = OrderedMap()
        tensors = dict[str, TensorRef]()
        states = dict[str, dict[str, TensorRef]]()
        for row in self.beside:
            name, state = self.wanted.tensors[row].key
            ref = self._tensor(composer, row)
            if state == MODEL:
                module[name] = ref
            elif state == EXTRAS:
                tensors[name] = ref
            else:
                states.setdefault(state, {})[name] = ref

        skeleton = {"module": module or None, **self._lists(), **top}
        if tensors:
            skeleton[TENSORS] = tensors
        if states:
            skeleton[STATES] = states
        return composer.file(MODULE_FILE.format(model=0), skeleton)

    def _optimizer_state(self) -> TargetFile:
        """Return `optimizer_state.pt`: the options under the keys of ZeRO 1 and 2 and under those of 3, and the
        record."""
        composer = TorchComposer()
        groups = [{**group.options, "params": [i]} for i, group in enumerate(self.groups)]
        own = Options.from_extras(self.extras).rest if HOME in self.extras else {}
        rest = {key: opaque(item) for key, item in own.items()}
        state: dict[int, Any] = {}
        for i, group in enumerate(self.groups):
            rows = [self.folders[name][STEP] for name in group.names if STEP in self.folders[name]]
            step = self.steps[group.names[0]] if group.names else None
            if rows:
                state[i] = {STEP: self._tensor(composer, rows[0])}
            elif step is not None:
                state[i] = {STEP: _step_tensor(composer, step)}
        version = self.extras.get("ds_version")
        value = {
            "zero_stage": 1 if self.described is None else Symbol(STAGE, (self.described.zero_stage,)),
            **rest,
            "ds_version": version if isinstance(version, str) else VERSION,
            "param_groups": groups,
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            KEY: self._record().to_value(),
        }
        return composer.file("zero/optimizer_state.pt", value)


def _step_tensor(composer: TorchComposer, step: float | int) -> TensorRef:
    return composer.value((), DTYPES["F32"], struct.pack("<f", float(step)))
