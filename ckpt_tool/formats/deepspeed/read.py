"""All files of a DeepSpeed checkpoint as one catalog: which must be there, that they are of one save, what they hold.

The one idea: the module files say names and shapes in flat order, the optimizer files hold the flat tensors; a `Reader`
walks stages, groups and ranks once and gives every piece to `deepspeed.shards.Flat`. Layout and names:
`deepspeed.format`. Cost: as the pickles, and a few microseconds for each parameter and rank that holds a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.faults import for_each
from ckpt_tool.core.tensor import MASTER
from ckpt_tool.errors import CorruptFile, Incomplete, InconsistentCheckpoint, InputError
from ckpt_tool.formats.deepspeed.agree import refuse_other_shapes
from ckpt_tool.formats.deepspeed.files import Files, model3_name, model_name, optim_name
from ckpt_tool.formats.deepspeed.flat import Piece, partition, shares, undeal
from ckpt_tool.formats.deepspeed.moe import expert_name_of, global_names, holders
from ckpt_tool.formats.deepspeed.rank import (
    DISAGREE,
    MALFORMED,
    REFUSED,
    FlatGroup,
    ModuleFile,
    OptimizerFile,
    read_module,
    read_optimizer,
)
from ckpt_tool.formats.deepspeed.shards import Flat, numels
from ckpt_tool.storage.source import Tree

SHOWN = 100
FILES = 1 << 20  # ranks of one checkpoint
COUNTERS = frozenset(
    {"global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version"}
)
_OF_A_RANK = frozenset({"module", "checkpoint_parallel_dimensions"})  # values that are not compared between ranks


@dataclass(slots=True)
class Reader:
    """The files of one checkpoint and what was found in them so far."""

    tree: Tree
    files: Files
    flat: Flat = field(default_factory=Flat)
    modules: dict[tuple[int, int], ModuleFile] = field(default_factory=dict)  # (data rank, model rank)
    optimizers: dict[tuple[int, int], OptimizerFile] = field(default_factory=dict)
    states: dict[str, None] = field(default_factory=dict)
    params: list[list[str]] = field(default_factory=list)  # of each parameter group, in the whole model's names
    stages: list[list[list[str]]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)
    globals: dict[str, None] = field(default_factory=dict)
    dp: int = 1
    pp: int = 1
    ep: int = 1
    stage: int = 0

    # -- which files ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read every file's pickle. Raises Incomplete E0302 naming the missing ones, InputError E0356 for kinds that
        are not read, InconsistentCheckpoint E0359 for ranks of two saves."""
        if self.files.refused:
            name, why = self.files.refused[0]
            raise InputError(
                f"{why} are not read",
                code=REFUSED,
                path=self.tree.display(name),
                hint="save it with tensor parallel 1, or as a universal checkpoint",
                faults=[name for name, _ in self.files.refused[1:SHOWN]],
            )
        names = {**{(0, mp): name for mp, name in self.files.model.items()}, **self.files.model3}
        if not names:
            raise self._missing([model_name(0)])
        first = self._first(names)
        self.dp, models = first.count("dp_world_size"), self._model_ranks(first)
        self.stage = 3 if self.files.model3 else 0
        if self.dp * models > FILES:
            raise CorruptFile(
                f"dp_world_size {self.dp} and mp_world_size {models} make more ranks than there can be files",
                code=MALFORMED,
                path=first.path,
                hint="the file is damaged",
            )
        wanted = [(dp, mp) for mp in range(models) for dp in range(self.dp)]
        if self.stage == 3:
            lost = [model3_name(dp, mp) for dp, mp in wanted if (dp, mp) not in names]
        else:
            lost = [model_name(mp) for mp in range(models) if (0, mp) not in names]
        prefix = min(self.files.prefixes, default="")
        if self.files.optim:
            lost += [optim_name(prefix, dp, mp) for dp, mp in wanted if (dp, mp) not in self.files.optim]
        elif first.shapes is not None:
            lost += [optim_name(prefix, dp, mp) for dp, mp in wanted]
        if lost:
            raise self._missing(lost)
        self._no_strangers(wanted, models)
        self._read_all(names, {names[min(names)]: first})
        read: list[ModuleFile | OptimizerFile] = [*self.modules.values(), *self.optimizers.values()]
        self.unsafe += [line for file in read for line in file.unsafe]
        self.globals.update(dict.fromkeys(line for file in read for line in file.globals))
        self._of_one_save()

    def _first(self, names: Mapping[tuple[int, int], str]) -> ModuleFile:
        """The first module file, which says how many there are. Where it does not read, the others are tried too."""
        try:
            return read_module(self.tree, names[min(names)])
        except InputError:
            self._read_all(names, {})
            raise

    def _read_all(self, names: Mapping[tuple[int, int], str], known: Mapping[str, ModuleFile]) -> None:
        """Every file of the module and of the optimizer; those that do not read are named at once."""
        modules = {name: rank for rank, name in sorted(names.items())}
        optimizers = {name: rank for rank, name in sorted(self.files.optim.items())}

        def read(name: str) -> None:
            if name in modules:
                self.modules[modules[name]] = known.get(name) or read_module(self.tree, name)
            else:
                self.optimizers[optimizers[name]] = read_optimizer(self.tree, name)

        for_each((*modules, *optimizers), read)

    def _model_ranks(self, first: ModuleFile) -> int:
        """Model ranks, all of them pipeline stages: tensor parallel ranks are refused."""
        models = first.count("mp_world_size")
        dims = first.values.get("checkpoint_parallel_dimensions")
        tp = dims.get("tp_degree") if isinstance(dims, dict) else None
        if tp is None:
            tp = 1 if self.files.layers else models
        if type(tp) is not int or tp != 1:
            raise InputError(
                f"tensor parallel {tp}: how each weight is cut stands nowhere in these files",
                code=REFUSED,
                path=first.path,
                hint="convert it with its own project to a universal checkpoint, and read that",
            )
        self.pp = models
        return models

    def _no_strangers(self, wanted: Sequence[tuple[int, int]], models: int) -> None:
        known = set(wanted)
        strangers = [
            name for kind in (self.files.optim, self.files.model3) for rank, name in kind.items() if rank not in known
        ]
        strangers += [name for mp, name in self.files.model.items() if mp >= models]
        if self.stage == 3 and self.files.model:
            strangers += [*self.files.model.values()]
        if strangers or len(self.files.prefixes) > 1:
            raise InconsistentCheckpoint(
                f"{len(strangers) or len(self.files.optim)} files are of another save: "
                f"{', '.join(sorted(strangers)[:8]) or 'with and without bf16_'}",
                code=DISAGREE,
                path=self.tree.display(),
                faults=sorted(strangers)[8:SHOWN],
                hint=f"the module says {self.dp} data ranks and {models} model ranks: move the files of the "
                "other save away",
            )

    def _missing(self, names: Sequence[str]) -> Incomplete:
        return Incomplete(
            f"{len(names)} files are missing: {', '.join(names[:8])}",
            code="E0302",
            path=self.tree.display(),
            faults=names[8:SHOWN],
            hint="every rank writes its own file: fetch them from all machines of the job",
        )

    def _of_one_save(self) -> None:
        """Ranks that disagree in a counter, an option or a scalar are of different steps, or of different runs."""
        modules = list(self.modules.values())
        for other in modules[1:]:
            for key in sorted(modules[0].values.keys() | other.values.keys(), key=str):
                mine, theirs = modules[0].values.get(key), other.values.get(key)
                if key in _OF_A_RANK or same(mine, theirs):
                    continue
                if key in COUNTERS:
                    raise self._other(other.path, str(key), theirs, mine, modules[0].path)
                self.notes.append(
                    Note(
                        "W-ranks-differ",
                        f"{key} of {other.path.rpartition('/')[2]} differs from rank 0's, which is kept",
                        other.path,
                    )
                )
        optimizers = list(self.optimizers.values())
        for file in optimizers[1:]:
            first = optimizers[0]
            if (file.stage, file.plain_bf16, len(file.param_groups)) != (
                first.stage,
                first.plain_bf16,
                len(first.param_groups),
            ):
                raise self._other(file.path, "zero_stage or its groups", file.stage, first.stage, first.path)
            for mine, group in zip(first.param_groups, file.param_groups, strict=True):
                for key in sorted(mine.keys() | group.keys(), key=str):
                    if not same(mine.get(key), group.get(key)):
                        raise self._other(file.path, f"param_groups {key}", group.get(key), mine.get(key), first.path)
            for key in sorted(first.rest.keys() | file.rest.keys(), key=str):
                if not same(first.rest.get(key), file.rest.get(key)):
                    raise self._other(file.path, key, file.rest.get(key), first.rest.get(key), first.path)
        refuse_other_shapes(self.modules, stage3=self.stage == 3)
        self._steps()

    def _steps(self) -> None:
        """One step counter for all (E10): ranks, groups and stages step together."""
        found = [
            (file.path, n, group.scalars["step"])
            for file in self.optimizers.values()
            for n, group in enumerate(file.groups)
            if "step" in group.scalars
        ]
        for path, number, step in found:
            if step != found[0][2]:
                raise InconsistentCheckpoint(
                    f"step {step} in flat group {number}, but {found[0][2]} in group {found[0][1]} of "
                    f"{found[0][0].rpartition('/')[2]}",
                    code=DISAGREE,
                    path=path,
                    hint="the files come from two steps: fetch one save whole",
                )

    def _other(self, path: str, what: str, theirs: Any, mine: Any, first: str) -> InconsistentCheckpoint:
        return InconsistentCheckpoint(
            f"{what} is {str(theirs)[:80]}, but {str(mine)[:80]} in {first.rpartition('/')[2]}",
            code=DISAGREE,
            path=path,
            hint="the files come from two steps or two runs: fetch one save whole",
        )

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def flat_tensors(self) -> None:
        """Every piece of every rank's flat groups."""
        for mp in range(self.pp):
            module = self.modules[0, mp]
            shapes = module.shapes or []
            ranks = [self.optimizers[dp, mp] for dp in range(self.dp)]
            if any(len(rank.groups) != len(shapes) for rank in ranks):
                raise InconsistentCheckpoint(
                    f"param_shapes lists {len(shapes)} groups, the optimizer has {[len(r.groups) for r in ranks][:8]}",
                    code=DISAGREE,
                    path=module.path,
                    hint="module and optimizer come from two saves",
                )
            self.stages.append([[] for _ in ranks[0].param_groups])
            self.stage = ranks[0].stage
            for number, group in enumerate(shapes):
                here = [rank.groups[number] for rank in ranks]
                if self.stage == 3:
                    self._stage3(mp, group, here)
                else:
                    self._stage12(mp, group, here, ranks[0].param_groups[here[0].options])
        self.params = [[] for _ in self.stages[0]]
        for stage in self.stages:
            for mine, names in zip(self.params, stage, strict=False):
                have = set(mine)
                mine += [name for name in names if name not in have]

    def _stage12(
        self, mp: int, shapes: Mapping[str, tuple[int, ...]], ranks: Sequence[FlatGroup], options: Mapping[str, Any]
    ) -> None:
        """One flat group of ZeRO 1 or 2. Experts' groups have a flat line for each expert rank."""
        count = ranks[0].count
        ep = self.dp // count if count and self.dp % count == 0 else 0
        moe = bool(options.get("moe")) or any(expert_name_of(name) for name in shapes)
        if ep < 1 or ep > 1 and not moe:
            raise InconsistentCheckpoint(
                f"partition_count is {count} of {self.dp} data ranks",
                code=DISAGREE,
                path=self.modules[0, mp].path,
                hint="the files come from two runs",
            )
        self.ep = max(self.ep, ep)
        local, sizes, gaps = list(shapes), numels(shapes), ranks[0].gaps
        gaps = gaps if gaps is not None and len(gaps) == len(sizes) else [0] * len(sizes)
        size = max([group.master.numel for group in ranks] + [a.numel for g in ranks for a in g.states.values()])
        for expert in range(ep):
            names = global_names(local, expert) if moe else local
            self._declare(names, shapes, mp)
            self.stages[mp][ranks[0].options] += self._natural(names, count)
            for index, rank in enumerate(holders(expert, ep, self.dp, data_first=self._data_first())):
                pieces = partition(sizes, gaps, size, index)
                self._check(ranks[rank], pieces, local, rank, mp)
                self._add(ranks[rank], names, pieces, mp)

    def _stage3(self, mp: int, shapes: Mapping[str, tuple[int, ...]], ranks: Sequence[FlatGroup]) -> None:
        """One sub-group of ZeRO 3."""
        names, sizes = list(shapes), numels(shapes)
        self._declare(names, shapes, mp)
        self.stages[mp][ranks[0].options] += names
        for rank, group in enumerate(ranks):
            pieces, length = shares(sizes, self.dp, rank)
            if group.master.numel != length:
                raise InconsistentCheckpoint(
                    f"a flat group of {group.master.numel} elements, its parameters over {self.dp} ranks take {length}",
                    code=DISAGREE,
                    path=self.optimizers[rank, mp].path,
                    hint="module and optimizer come from two runs, or a rank of another run lies among them",
                )
            self._add(group, names, pieces, mp)

    def _natural(self, names: list[str], count: int) -> list[str]:
        """Names in the order of the parameter group: undoes `round_robin_gradients`."""
        return undeal(names, count) if self.round_robin() and self.stage != 3 else names

    def _declare(self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], mp: int) -> None:
        for name, shape in zip(names, shapes.values(), strict=True):
            if not self.flat.declare(name, shape):
                raise InconsistentCheckpoint(
                    f"shape {list(shape)}, but {list(self.flat.shapes[name])} in another stage",
                    code=DISAGREE,
                    key=name,
                    path=self.modules[0, mp].path,
                    hint="the stages come from two runs",
                )

    def _add(self, group: FlatGroup, names: Sequence[str], pieces: Sequence[Piece], mp: int) -> None:
        self.flat.add(names, pieces, MASTER, group.master, mp)
        self.states[MASTER] = None
        for state, array in group.states.items():
            self.states[state] = None
            self.flat.add(names, pieces, state, array, mp)

    def _check(self, group: FlatGroup, pieces: Sequence[Piece], names: Sequence[str], rank: int, mp: int) -> None:
        """The pieces against the lengths and against what the rank itself says of them."""
        end = pieces[-1].at + pieces[-1].stop - pieces[-1].start if pieces else 0
        path = self.optimizers[rank, mp].path
        if end > group.master.numel:
            raise InconsistentCheckpoint(
                f"the fp32 partition has {group.master.numel} elements, its parameters take {end}",
                code=DISAGREE,
                path=path,
                hint="module and optimizer come from two runs",
            )
        said, ours = group.mapping, {names[p.param]: (p.stop - p.start, p.at) for p in pieces}
        if (
            said is not None and said != ours and not self.round_robin()
        ):  # dealt out, DeepSpeed states the undealt places
            wrong = next(name for name in (*ours, *said) if said.get(name) != ours.get(name))
            raise InconsistentCheckpoint(
                f"param_slice_mappings puts {wrong} at {said.get(wrong)} (elements, start), its shape and order at "
                f"{ours.get(wrong)}",
                code=DISAGREE,
                path=path,
                key=wrong,
                hint="files of two runs lie together, or a version of DeepSpeed cuts its groups in a way "
                "not known here",
            )

    def _config(self) -> Mapping[str, Any]:
        config = self.modules[min(self.modules)].values.get("ds_config")
        return config if isinstance(config, dict) else {}

    def zero_config(self) -> Mapping[str, Any]:
        zero = self._config().get("zero_optimization")
        return zero if isinstance(zero, dict) else {}

    def round_robin(self) -> bool:
        return bool(self.zero_config().get("round_robin_gradients"))

    def _data_first(self) -> bool:
        return bool(self._config().get("use_data_before_expert_parallelism"))


def same(a: Any, b: Any) -> bool:
    """Equal, NaN like NaN: values out of two pickles."""
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)
