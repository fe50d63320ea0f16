"""Reads all files of a DeepSpeed checkpoint into one catalog: checks that none is missing and all belong to one save.

The module files list names and shapes in flat order, from which `deepspeed.job` derives the content of every rank's
flat tensors; a `ZeroReader` compares it with the optimizer files and makes chunks of it. At stage 3 every data rank
writes `param_shapes`, `frozen_param_shapes`, `buffer_names` of the whole model stage, and the flat tensors of all ranks
are cut by the first rank's: a rank with other lists has the flat tensors of another model, or was edited, and a listed
name that the rank's own module does not have is no parameter of this model.

    zero_pp_rank_1_..._states.pt: param_shapes[0] has w2 [23, 10] at place 3, but w1 [10, 23] in zero_pp_rank_0_...

Layout, names and source: `deepspeed.zero.format`. Cost: as the pickles, and a few microseconds for each parameter and
rank that holds a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from math import prod
from typing import Any

from ckpt_tool.core.catalog import Catalog, Note, mark_replicas
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.faults import read_by_file, read_each
from ckpt_tool.core.hints import Degrees, Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import MASTER, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import CorruptFile, Incomplete, InconsistentCheckpoint, InputError, UnknownFormat
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.deepspeed.described import HOME, OPTIMIZER, Described, Options
from ckpt_tool.systems.deepspeed.files import (
    MALFORMED,
    MODEL,
    SHOWN,
    FlatTensor,
    ModuleFile,
    OptimizerFile,
    ZeroFiles,
    disagree,
    lost,
    rank_files,
    read_module,
    read_optimizer,
    refused,
    sort_files,
)
from ckpt_tool.systems.deepspeed.job import Config, FlatArray, FlatGroup, Shape, ZeroJob, undeal
from ckpt_tool.systems.deepspeed.stored_names import expert_name_of, global_names
from ckpt_tool.systems.deepspeed.zero.module import Module
from ckpt_tool.systems.deepspeed.zero.plain_optimizer import PlainOptimizer, of_experts, of_modules

FILES = 1 << 20  # the most ranks of one checkpoint; more means a damaged file
# Values of a module file that must be equal on all ranks of one save.
COUNTERS = frozenset(
    {"global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version"}
)
_OF_A_RANK = frozenset({"module", "checkpoint_parallel_dimensions"})  # values that are not compared between ranks
_OF_THE_JOB = ("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions")


def read(tree: Tree) -> Catalog:
    """Return the catalog of the checkpoint. `deepspeed.zero.format` lists the errors."""
    files = sort_files(tree.names())
    if not files:
        raise UnknownFormat(
            "no file of DeepSpeed is directly in the folder",
            code="E0393",
            path=tree.display(),
            hint="pass the folder that holds mp_rank_00_model_states.pt, or the one above it with the file `latest`",
        )
    reader = ZeroReader(tree, files)
    reader.read_files()
    if reader.optimizers:
        reader.add_flat_tensors()
    module = Module(tree, files, reader.modules, reader.shapes, dp=reader.dp, pp=reader.pp, stage=reader.stage)
    module.read()
    reader.notes += module.notes
    reader.note_code(module)
    return reader.catalog(module)


@dataclass(slots=True)
class ZeroReader:
    """The files of one checkpoint and what was read of them so far."""

    tree: Tree
    files: ZeroFiles
    # (data rank, model rank) -> file
    modules: dict[tuple[int, int], ModuleFile] = field(default_factory=dict)
    optimizers: dict[tuple[int, int], OptimizerFile] = field(default_factory=dict)
    config: Config = Config()
    # of all parameters of flat tensors, in the order of first appearance
    shapes: dict[str, Shape] = field(default_factory=dict)
    chunks: dict[TensorKey, list[Chunk]] = field(default_factory=dict)
    states: dict[str, None] = field(default_factory=dict)
    # for each pipeline stage and parameter group, the names in the group's own order
    stages: list[list[list[str]]] = field(default_factory=list)
    tied: frozenset[str] = frozenset()
    notes: list[Note] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)
    globals: dict[str, None] = field(default_factory=dict)
    dp: int = 1
    pp: int = 1
    ep: int = 1
    stage: int = 0

    def note_code(self, file: ModuleFile | OptimizerFile | Module) -> None:
        """Note which code the pickles of a file name."""
        self.unsafe += file.unsafe
        self.globals.update(dict.fromkeys(file.globals))

    # -- which files ---------------------------------------------------------------------------------------------------

    def read_files(self) -> None:
        """Read every file's pickle. Raises Incomplete E0302 naming the missing ones, InputError E0356 for kinds that
        are not read, InconsistentCheckpoint E0359 for ranks of two saves."""
        if self.files.refused:
            name, why = self.files.refused[0]
            hint = "save it with tensor parallel 1, or as a universal checkpoint"
            others = [name for name, _ in self.files.refused[1:SHOWN]]
            raise refused(f"{why} are not read", self.tree.display(name), hint, others)

        names = {**{(0, mp): name for mp, name in self.files.model.items()}, **self.files.model3}
        if not names:
            raise self._missing_error([MODEL.format(model=0)])
        first = self._read_first_module(names)
        self.config = Config.of(first.values.get("ds_config"))

        self.dp = first.count("dp_world_size")
        models = self._count_model_ranks(first)
        self.stage = 3 if self.files.model3 else 0
        if self.dp * models > FILES:
            raise CorruptFile(
                f"dp_world_size {self.dp} and mp_world_size {models} make more ranks than there can be files",
                code=MALFORMED,
                path=first.path,
                hint="the file is damaged",
            )

        trains = bool(self.files.optim) or first.shapes is not None
        expected = rank_files(self.stage or int(trains), min(self.files.prefixes, default=""), self.dp, models)
        absent_names = [name for rank, name in expected.modules.items() if rank not in names]
        absent_names += [name for rank, name in expected.optimizers.items() if rank not in self.files.optim]
        if absent_names:
            fault = self._missing_error(absent_names)
            report_missing(fault, files=absent_names)
            raise fault  # even for a partial read: where the parts of a flat group begin depends on all of them

        self._refuse_other_files(models)
        self._read_all(names, {names[min(names)]: first})
        for module in self.modules.values():
            self.note_code(module)
        for optimizer in self.optimizers.values():
            self.note_code(optimizer)
        self._check_one_save()

    def _read_first_module(self, names: Mapping[tuple[int, int], str]) -> ModuleFile:
        """Return the first module file, which states the number of ranks.

        If it can't be read, the other files are read too, so that the error lists all damaged files.
        """
        try:
            return read_module(self.tree, names[min(names)])
        except InputError:
            self._read_all(names, {})
            raise

    def _read_all(self, names: Mapping[tuple[int, int], str], known: Mapping[str, ModuleFile]) -> None:
        """Read every module and optimizer file; one error lists all files that can't be read."""
        modules = {name: rank for rank, name in sorted(names.items())}
        optimizers = {name: rank for rank, name in sorted(self.files.optim.items())}

        def read(name: str) -> None:
            if name not in modules:
                self.optimizers[optimizers[name]] = read_optimizer(self.tree, name)
                return
            file = known.get(name) or read_module(self.tree, name)
            if file.values.get("ds_autoep_layers"):
                raise refused("AutoEP experts (ds_autoep_layers): fused experts are not read yet", file.path)
            self.modules[modules[name]] = file

        read_each((*modules, *optimizers), read)

    def _count_model_ranks(self, first: ModuleFile) -> int:
        """Return the number of model ranks, all of them pipeline stages. Tensor parallel ranks raise InputError
        E0356."""
        models = first.count("mp_world_size")
        dims = first.values.get("checkpoint_parallel_dimensions")
        tp = dims.get("tp_degree") if isinstance(dims, dict) else None
        if tp is None:
            tp = 1 if self.files.layers else models
        if type(tp) is not int or tp != 1:
            raise refused(
                f"tensor parallel {tp}: how each weight is cut is stated nowhere in these files",
                first.path,
                "convert it with its own project to a universal checkpoint, and read that",
            )
        self.pp = models
        return models

    def _refuse_other_files(self, models: int) -> None:
        """Raise InconsistentCheckpoint E0359 for files of ranks that this save does not have."""
        ranked = [*self.files.optim.items(), *self.files.model3.items()]
        strangers = [name for (data, model), name in ranked if data >= self.dp or model >= models]
        strangers += [name for model, name in self.files.model.items() if model >= models or self.stage == 3]
        if strangers or len(self.files.prefixes) > 1:
            raise disagree(
                f"{len(strangers) or len(self.files.optim)} files come from another save: "
                f"{', '.join(sorted(strangers)[:8]) or 'with and without bf16_'}",
                self.tree.display(),
                hint=f"the module says {self.dp} data ranks and {models} model ranks: move the files of the other save "
                "away",
                faults=sorted(strangers)[8:],
            )

    def _missing_error(self, names: Sequence[str]) -> Incomplete:
        return lost(
            f"{len(names)} files are missing: {', '.join(names[:8])}",
            self.tree.display(),
            "every rank writes its own file: fetch them from all machines of the job",
            faults=names[8:],
        )

    # -- of one save ---------------------------------------------------------------------------------------------------

    def _check_one_save(self) -> None:
        """Raise InconsistentCheckpoint E0359 if ranks disagree in a counter, an option or a scalar.

        Such ranks belong to different steps, or to different runs.
        """
        modules = list(self.modules.values())

        # Each rank is compared with the first; what only one rank knows may differ.
        for other in modules[1:]:
            for key, value, other_value in _differing_values(modules[0].values, other.values):
                if key in COUNTERS:
                    raise _difference_error(other.path, key, other_value, value, modules[0].path)
                if key not in _OF_A_RANK:
                    what = f"{key} of {other.path.rpartition('/')[2]} differs from rank 0's, which is kept"
                    self.notes.append(Note("W-ranks-differ", what, other.path))

        optimizers = list(self.optimizers.values())
        for file in optimizers[1:]:
            first = optimizers[0]
            forms = [
                (rank_file.stage, rank_file.plain_bf16, len(rank_file.param_groups)) for rank_file in (first, file)
            ]
            if forms[0] != forms[1]:
                raise _difference_error(file.path, "zero_stage or its groups", file.stage, first.stage, first.path)
            for group, other_group in zip(first.param_groups, file.param_groups, strict=True):
                for key, value, other_value in _differing_values(group, other_group):
                    raise _difference_error(file.path, f"param_groups {key}", other_value, value, first.path)
            for key, value, other_value in _differing_values(first.rest, file.rest):
                raise _difference_error(file.path, key, other_value, value, first.path)
        self._check_lists()
        self._check_steps()

    def _check_lists(self) -> None:
        """Raise InconsistentCheckpoint E0359 for data ranks that list other parameters than rank 0 of their stage, and
        for lists that contradict the module in the same file."""
        faults: list[tuple[str, str]] = []
        for (_, mp), file in sorted(self.modules.items()):
            first = self.modules[0, mp]
            if file is not first:
                name = first.path.rpartition("/")[2]
                faults += ((file.path, f"{what} in {name}") for what in _list_differences(file, first))
            faults += ((file.path, what) for what in _find_contradictions(file, stage3=self.stage == 3))

        if faults:
            others = [f"{path.rpartition('/')[2]}: {what}" for path, what in faults[1:]]
            hint = "the files come from two runs, or one was edited: fetch one save whole"
            raise disagree(faults[0][1], faults[0][0], hint=hint, faults=others)

    def _check_steps(self) -> None:
        """Raise InconsistentCheckpoint E0359 unless all ranks, groups and stages have one step counter."""
        steps = []
        for file in self.optimizers.values():
            for number, group in enumerate(file.groups):
                if "step" in group.scalars:
                    steps.append((file.path, number, group.scalars["step"]))

        for path, number, step in steps:
            first_path, first_number, first_step = steps[0]
            if step != first_step:
                name = first_path.rpartition("/")[2]
                raise disagree(
                    f"step {step} in flat group {number}, but {first_step} in group {first_number} of {name}", path
                )

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def add_flat_tensors(self) -> None:
        """Add every rank's flat tensors as chunks of the parameters, at the places that the job determines."""
        stages = [list(self._build_groups(mp)) for mp in range(self.pp)]
        job = ZeroJob(self.stage, self.dp, self.config.data_first, stages)
        self.tied = frozenset(job.borders)

        for mp in range(self.pp):
            for dp in range(self.dp):
                file = self.optimizers[dp, mp]
                for stored, array in zip(file.groups, job.arrays(dp, mp), strict=True):
                    self._check_array(stored, array, file.path)
                    self._add_chunks(stored, array)

    def _add_chunks(self, stored: FlatTensor, array: FlatArray) -> None:
        """Add the parts of the parameters in one flat group of a rank, for every state."""
        for state, part in {MASTER: stored.master, **stored.states}.items():
            self.states[state] = None
            for name, chunk in array.line.chunks(part):
                self.chunks.setdefault(TensorKey(name, state), []).append(chunk)

    def _build_groups(self, mp: int) -> Iterator[FlatGroup]:
        """Yield the flat groups of a pipeline stage, as its module file lists them, and record their names and
        shapes."""
        module = self.modules[0, mp]
        shapes = module.shapes or []
        ranks = [self.optimizers[dp, mp] for dp in range(self.dp)]
        if any(len(rank.groups) != len(shapes) for rank in ranks):
            counts = [len(rank.groups) for rank in ranks][:8]
            raise disagree(f"param_shapes lists {len(shapes)} groups, the optimizer has {counts}", module.path)

        self.stage = ranks[0].stage
        self.stages.append([[] for _ in ranks[0].param_groups])
        for number, listed in enumerate(shapes):
            group = self._build_group(listed, [rank.groups[number] for rank in ranks], ranks[0], module.path)
            self.ep = max(self.ep, group.ep)

            # A flat group lists expert rank 0's parameters: the names of the other ranks follow.
            for expert in range(group.ep):
                names = global_names(listed, expert)
                for name, shape in zip(names, listed.values(), strict=True):
                    if self.shapes.setdefault(name, shape) != shape:
                        what = f"shape {list(shape)}, but {list(self.shapes[name])} in another stage"
                        raise disagree(what, module.path, name)

                # Round robin reorders the parameters for the ranks; `undeal` restores the group's own order.
                is_dealt = self.config.round_robin and self.stage != 3
                self.stages[mp][group.number] += undeal(names, self.dp // group.ep) if is_dealt else names
            yield group

    def _build_group(
        self, shapes: Mapping[str, Shape], ranks: Sequence[FlatTensor], file: OptimizerFile, shown: str
    ) -> FlatGroup:
        """Return a flat group. Raises InconsistentCheckpoint E0359 if its partitions don't fit the data ranks.

        Args:
            shapes: the entry of `param_shapes`.
            ranks: the flat tensors of all data ranks.
            file: the optimizer file of the first of them.
            shown: the module file's path for messages.
        """
        number = ranks[0].options
        if self.stage == 3:
            return FlatGroup(shapes, number)

        # Experts are cut over the data ranks that hold them: so many partitions, so many expert ranks.
        count = ranks[0].count
        ep = self.dp // count if count and self.dp % count == 0 else 0
        has_experts = bool(file.param_groups[number].get("moe")) or any(expert_name_of(name) for name in shapes)
        if ep < 1 or (ep > 1 and not has_experts):
            raise disagree(f"partition_count is {count} of {self.dp} data ranks", shown)

        gaps = ranks[0].gaps
        size = max(array.numel for rank in ranks for array in (rank.master, *rank.states.values()))
        if len(gaps) != len(shapes):
            gaps = (0,) * len(shapes)
        return FlatGroup(shapes, number, ep, size, gaps)

    def _check_array(self, stored: FlatTensor, array: FlatArray, path: str) -> None:
        """Raise InconsistentCheckpoint E0359 if a flat tensor has another length than the job computes, or if the
        rank's own record places parameters differently."""
        numel = stored.master.numel
        if self.stage == 3 and numel != array.size:
            raise disagree(
                f"a flat group of {numel} elements, its parameters over {self.dp} ranks take {array.size}", path
            )
        if array.line.end > numel:
            raise disagree(f"the fp32 partition has {numel} elements, its parameters take {array.line.end}", path)

        # With round robin the record has the places before parameters are dealt to ranks: it proves nothing.
        if stored.mapping is None or self.config.round_robin:
            return
        stated = stored.mapping
        computed = array.slices()
        for name in (*computed, *stated):
            if stated.get(name) == computed.get(name):
                continue
            raise disagree(
                f"param_slice_mappings puts {name} at {stated.get(name)} (elements, start), its shape and order at "
                f"{computed.get(name)}",
                path,
                name,
                "files of two runs are mixed, or a version of DeepSpeed cuts its groups in a way not known here",
            )

    def build_flat_tensors(self) -> dict[TensorKey, LogicalTensor]:
        """The parameters of the flat tensors, state by state; gaps are left to the catalog's check. Parameters without
        elements are stored nowhere; they have the states that the others have."""
        tensors = {}
        empty = {}
        for state in self.states:
            dtype = next((c[0].array.dtype for key, c in self.chunks.items() if key.state == state), DTYPES["F32"])
            for name, shape in self.shapes.items():
                key = TensorKey(name, state)
                chunks = self.chunks.get(key)
                if chunks:
                    marked = mark_replicas(chunks) if name in self.tied else tuple(chunks)
                    tensors[key] = LogicalTensor(key, shape, chunks[0].array.dtype, marked)
                elif not prod(shape):
                    empty[key] = LogicalTensor(key, shape, dtype, ())
        return tensors | empty

    # -- the catalog ---------------------------------------------------------------------------------------------------

    def catalog(self, module: Module) -> Catalog:
        """Everything that was found."""
        tensors = module.tensors() | self.build_flat_tensors()
        options: Options | None
        if self.optimizers:
            options = self._collect_options()
        else:
            plain = self._read_plain_optimizer(module)
            options = plain.options
            tensors = tensors | plain.tensors
            self.notes += plain.notes
            self.stages = plain.stages

        tensors, unread = set_apart(tensors | module.clients)

        values = self.modules[min(self.modules)].values
        extras = {key: item for key, item in values.items() if key not in _OF_THE_JOB}
        if options is not None:
            extras[OPTIMIZER] = options.to_extras()
        extras[HOME] = self._describe(module).to_extras()

        degrees = Degrees(tp=1, pp=self.pp, vpp=1, ep=self.ep, etp=1, dp=self.dp, cp=1)
        return Catalog(
            "deepspeed",
            tensors=tensors,
            extras=extras,
            mesh=Mesh.of_degrees(degrees.stated()),
            files=self.files.all(),
            notes=(*self.notes, *self._list_notes(module), *notes_of(unread)),
            unsafe=tuple(self.unsafe),
            hints=Hints.of(degrees, Globals.each(self.globals)),
            unread=unread,
        )

    def _read_plain_optimizer(self, module: Module) -> PlainOptimizer:
        """The optimizer without ZeRO: in the module files, or one for each expert rank."""
        if not self.files.expp:
            return of_modules([file for _, file in sorted(self.modules.items())], module.parameters())

        expert_files = sorted(self.files.expp.items())
        file_by_name = read_by_file((name for _, name in expert_files), lambda name: read_module(self.tree, name))
        for file in file_by_name.values():
            self.note_code(file)
        for module_file in self.modules.values():
            module_file.values.pop("optimizer", None)  # a copy of expert rank 0's
        files = {rank: file_by_name[name] for rank, name in expert_files}
        plain = of_experts(files, module.parameters(), module.experts(), self.tree.display())
        self.ep = len(files)
        if self.dp % self.ep:
            raise disagree(f"{self.ep} expert ranks among {self.dp} data ranks", self.tree.display())
        return plain

    def _collect_options(self) -> Options:
        """The optimizer's options and scalars, once for each parameter group. Raises InconsistentCheckpoint E0359 where
        ranks or sub-groups disagree in a scalar."""
        files = list(self.optimizers.values())
        scalars: list[dict[str, Any]] = [{} for _ in files[0].param_groups]
        dtypes: dict[str, str] = {}
        for file in files:
            for group in file.groups:
                scalars_so_far = scalars[group.options]
                dtypes |= group.dtypes
                for key, value in group.scalars.items():
                    if not same(scalars_so_far.setdefault(key, value), value):
                        raise disagree(f"{key} is {value!r}, but {scalars_so_far[key]!r} on another rank", file.path)

        names_by_group: list[dict[str, None]] = [{} for _ in files[0].param_groups]
        for stage in self.stages:
            for group_names, names in zip(names_by_group, stage, strict=False):
                group_names |= dict.fromkeys(names)
        groups = []
        for options, group_names in zip(files[0].param_groups, names_by_group, strict=True):
            groups.append({**options, "params": [*group_names]})

        # The version is stated once: with the module's.
        version = self.modules[min(self.modules)].values.get("ds_version")
        rest = {key: item for key, item in files[0].rest.items() if key != "ds_version" or item != version}
        return Options(groups, scalars, dtypes, rest)

    def _describe(self, module: Module) -> Described:
        optimizer = next(iter(self.optimizers.values()), None)
        stages: list[tuple[tuple[str, ...], ...]] = []
        if self.files.layers:  # a pipeline
            for stage in self.stages:
                stages.append(tuple(tuple(group) for group in stage))

        return Described(
            zero_stage=self.stage if optimizer else 0,
            plain_bf16=bool(optimizer and optimizer.plain_bf16),
            prefix=min(self.files.prefixes, default=""),
            dtype=module.dtypes.most_common(1)[0][0] if module.dtypes else "",
            aligned=self.config.aligned,
            round_robin=self.config.round_robin,
            module=tuple(module.order),
            buffers=tuple(module.buffers),
            shared=module.shared,
            frozen=tuple(module.frozen()) if optimizer else (),
            stages=tuple(stages),
            tied=module.layers,
            moe=tuple(prefix for _, prefix in sorted(module.moe.items())),
        )

    def _list_notes(self, module: Module) -> Iterator[Note]:
        if module.shared:
            shown = ", ".join(f"{alias} = {kept}" for alias, kept in list(module.shared.items())[:8])
            yield Note("N-tied", f"{len(module.shared)} names share another parameter: {shown}")
        if self.stage == 3:
            yield Note(
                "N-zero3",
                "ZeRO 3 keeps no 16-bit weights: DeepSpeed rounds them from the fp32 `master`; the state `model` holds "
                "buffers and frozen parameters alone (write the weights as a model with --as-model master)",
            )


# -- what must be equal ------------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Return whether two values from pickles are equal, in type too; NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def _differing_values(values: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, other value) of the values that differ."""
    for key in sorted(values.keys() | others.keys(), key=str):
        if not same(values.get(key), others.get(key)):
            yield str(key), values.get(key), others.get(key)


def _difference_error(path: str, what: str, value: Any, first_value: Any, first_path: str) -> InconsistentCheckpoint:
    first_name = first_path.rpartition("/")[2]
    return disagree(f"{what} is {str(value)[:80]}, but {str(first_value)[:80]} in {first_name}", path)


def _list_differences(file: ModuleFile, first: ModuleFile) -> Iterator[str]:
    """Yield how a data rank's module file differs from the first one of its stage."""
    shapes = file.shapes
    first_shapes = first.shapes
    if shapes is None or first_shapes is None or len(shapes) != len(first_shapes):
        if shapes != first_shapes:
            yield f"param_shapes has {_count_groups(shapes)}, but {_count_groups(first_shapes)}"
    else:
        for number, (group, other) in enumerate(zip(shapes, first_shapes, strict=True)):
            yield from _first_difference(f"param_shapes[{number}]", group.items(), other.items())

    config = asdict(Config.of(file.values.get("ds_config")))
    other_config = asdict(Config.of(first.values.get("ds_config")))
    if config != other_config:
        yield f"ds_config cuts by {config}, but by {other_config}"
    yield from _first_difference("frozen_param_shapes", file.frozen.items(), first.frozen.items())
    yield from _first_difference("buffer_names", file.buffers, first.buffers)
    yield from _first_difference("frozen_param_fragments", _fragment_dtypes(file), _fragment_dtypes(first))
    yield from _first_difference("module", file.module, first.module)
    for alias, kept in file.shared.items():  # rank 0's file may be the only one that lists them
        if first.shared.get(alias, kept) != kept:
            yield f"shared_params has {alias} as {kept}, but as {first.shared[alias]}"


def _fragment_dtypes(file: ModuleFile) -> list[tuple[str, str]]:
    return [(name, array.dtype.name) for name, array in file.fragments.items()]


def _first_difference(what: str, items: Iterable[Any], others: Iterable[Any]) -> Iterator[str]:
    """Yield the first difference between two lists, if there is one."""
    for place, (a, b) in enumerate(zip_longest(items, others)):
        if a != b:
            yield f"{what} has {_show_entry(a)} at place {place}, but {_show_entry(b)}"
            return


def _find_contradictions(file: ModuleFile, *, stage3: bool) -> Iterator[str]:
    """Yield the names that a file lists in two roles, or that its module does not have."""
    trained = {name: None for group in file.shapes or () for name in group}
    buffers = set(file.buffers)

    for what, names in (("param_shapes", trained), ("frozen_param_shapes", file.frozen)):
        for name in names:
            if stage3 and file.module and name not in file.module:
                yield f"{what} lists {name}, which the module next to it does not have"
            if name in buffers:
                yield f"{name} is in {what}, and in buffer_names"
    yield from (f"{name} is in param_shapes, and in frozen_param_shapes" for name in trained if name in file.frozen)

    for name in file.fragments:
        if name not in file.frozen:
            yield f"a share of frozen {name}, which frozen_param_shapes lacks"


def _count_groups(shapes: Sequence[Mapping[str, Shape]] | None) -> str:
    return "none" if shapes is None else f"{len(shapes)} groups"


def _show_entry(item: Any) -> str:
    """An entry of a list in a message: `w [3, 4]`."""
    if not isinstance(item, tuple):
        return "nothing" if item is None else str(item)[:120]
    return f"{item[0]} {list(item[1]) if isinstance(item[1], tuple) else item[1]}"[:160]
