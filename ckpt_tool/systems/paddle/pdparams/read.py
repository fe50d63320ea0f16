"""Reading a path that holds files of paddle.save: ranks' files in a folder, or one file alone, as one catalog.

    checkpoint-100/  model_state.tp0{0,1}.pdparams  optimizer.tp0{0,1}.pdopt  scheduler.pdparams  config.json
                     training_args.bin  rng_state_0.pth                              named in a note, never unpickled
    fc.pdparams      a state dict;   train.pd   {"model": {...}, "epoch": 3}: names by the tensors' paths

Three passes over values that are small: pickles of all files give names and shapes of a rank's parts; tables of names
(of the model files, or model_meta.json) show whose the optimizer's tensors are; then parts are gathered.

Specification: `systems.paddle.pdparams.format`. How parts are gathered: `systems.paddle.pdparams.gather`. Cost: a
pickle a file, some us a tensor and file; values are read only where they decide how ranks share a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.dtype import DTYPES, DType, from_name
from ckpt_tool.core.faults import read_by_file
from ckpt_tool.core.hints import Degrees, Dialect, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InputError, Unexplained, UnknownFormat
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.formats.hub_folder.model_files import is_sidefile
from ckpt_tool.formats.state_dict.paths import Leaf, name_leaves
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.extras import lies_beside, read_config, read_extras
from ckpt_tool.systems.paddle.job import PaddleHints, PaddleRank
from ckpt_tool.systems.paddle.pdparams.gather import FileShare, Numbering, PaddleGathering, differ, number_experts
from ckpt_tool.systems.paddle.pickle_file import PaddleContent, Saved, chunks_of, read_paddle
from ckpt_tool.systems.paddle.ranks import (
    CONTRADICTION,
    CONTRADICTS,
    EMA_FILE,
    MISSING,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RankFile,
    StageMeta,
    check_whole,
    degrees_of,
    rank_file,
    rank_files,
    rank_of,
    read_meta,
    two_jobs,
)
from ckpt_tool.systems.paddle.rules import HEADS, is_expert, text_config
from ckpt_tool.systems.paddle.stored_names import MASTER_WEIGHTS, SCHEDULER, NameTable, Owner, without_master

# -- files of ranks ----------------------------------------------------------------------------------------------------

NO_NAME = "E1313"
NO_DTYPE = "E1314"
NESTED = "E1318"
STATIC_NAMES = "N1301"
FROZEN = "N1302"
BY_VALUES = "N1304"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,9})\.")
_NAMES_KEPT = 1 << 17  # static names that the hints carry


class PaddleReading:
    """One read of rank files."""

    def __init__(self, tree: Tree, files: list[RankFile], config: Mapping[str, Any], extra: Iterable[str] = ()) -> None:
        """Read all pickles and the tables of names.

        Args:
            tree: the checkpoint.
            files: those of its ranks.
            config: of the model.
            extra: files whose tables of names are read, but no tensors (the model's of a lone optimizer).
        """
        self.tree = tree
        self.files = files
        self.meta = read_meta(tree)
        self.degrees = degrees_of(tree, files, self.meta.degrees)
        if tree.single is None:
            check_whole(tree, files, self.degrees)
        self.where = {file.name: rank_of(file, self.degrees) for file in files}
        self.contents = read_by_file((file.name for file in files), lambda name: read_paddle(tree, name))
        self.notes: list[Note] = []
        self.config = config
        self._names: dict[tuple[int, int, int], dict[str, str]] = {}
        self._collect_names(extra)
        self.numbering = self._number_experts()
        self.gathering = PaddleGathering(
            self.degrees,
            self._complete_config(),
            sliced=self._is_sliced(),
            apart=self.numbering.is_apart,
            differ=self._compare_values,
        )
        self.bf16 = self._has_bf16()

    def catalog(self, extras: dict[Any, Any], sidefiles: Iterable[str], beside: Iterable[str]) -> Catalog:
        """The catalog.

        Args:
            extras: of the other files, which take precedence over those of the ranks' files.
            sidefiles: files that are copied.
            beside: other files that were read.
        """
        self._add_meta_shapes()

        # Model files first: they say which parameters there are and how they are cut.
        for file in self.files:
            if file.kind == MODEL_FILE:
                self._add_model(file, self.contents[file.name])
        self._check_same_names()
        for file in self.files:
            if file.kind != MODEL_FILE:
                self._add_states(file, self.contents[file.name])
        self._check_completeness()

        tensors = self.gathering.tensors(self._order_names())
        contents = list(self.contents.values())
        split_heads = self.gathering.parted_heads()
        head_facts = {} if split_heads is None else {HEADS: {"tensor_ranks": self.degrees.tp, "parted": split_heads}}
        catalog = Catalog(
            "paddle",
            tensors=tensors,
            extras=self._collect_extras() | head_facts | extras,
            mesh=Mesh.of_degrees(self.degrees.to_json()),
            files=(*self.contents, *self.meta.files, *beside),
            sidefiles=tuple(sidefiles),
            notes=tuple(self.notes),
            unsafe=tuple(dict.fromkeys(line for content in contents for line in content.unsafe)),
            hints=self._build_hints(),
        )
        catalog.check()
        return catalog

    # -- names --------------------------------------------------------------------------------------------------------

    def _stage_key(self, where: PaddleRank) -> tuple[int, int, int]:
        return (where.tp, where.pp, where.ep)

    def _find_meta(self, where: PaddleRank) -> StageMeta | None:
        stages = self.meta.stages
        return stages.get((where.tp, where.pp, where.ep)) or stages.get((where.tp, where.pp, 0))

    def _collect_names(self, extra: Iterable[str]) -> None:
        """Collect the name tables by (tp, pp, ep): the metas' first, then the model files', which must agree."""
        for where in self.where.values():
            stage = self._find_meta(where)
            if stage is not None:
                self._names.setdefault(self._stage_key(where), dict(stage.names))
        for file in self.files:
            if file.kind == MODEL_FILE:
                self._add_names(self.where[file.name], self.contents[file.name], self.tree.display(file.name))
        for name in extra:
            self._add_names(self.degrees.rank(0, 0, 0), read_paddle(self.tree, name), self.tree.display(name))

    def _add_names(self, where: PaddleRank, content: PaddleContent, shown: str) -> None:
        names = self._names.setdefault(self._stage_key(where), {})
        for saved in content.leaves:
            if len(saved.path) != 1 or not saved.name:
                continue
            name = str(saved.path[0])
            if names.setdefault(name, saved.name) != saved.name:
                raise two_jobs(
                    CONTRADICTS,
                    f"model_meta.json calls it {names[name][:100]}, the model file {saved.name[:100]}",
                    shown,
                    name,
                )

    def _find_table(self, where: PaddleRank) -> NameTable | None:
        """The name table for a rank's optimizer; None if there is none of its tensor rank and stage."""
        names = self._names.get(self._stage_key(where))
        if names is None and self.degrees.ep > 1:  # data ranks without a model file of their own
            candidates = (table for stage, table in self._names.items() if stage[:2] == (where.tp, where.pp))
            names = next(candidates, None)
        return NameTable(names) if names else None

    def _number_experts(self) -> Numbering:
        """How numbers of experts in each rank's names are converted to global ones."""
        names_by_stage: dict[tuple[int, int, int], set[str]] = {
            stage: set(names) for stage, names in self._names.items()
        }
        for file in self.files:
            if file.kind == MODEL_FILE:
                stage_names = names_by_stage.setdefault(self._stage_key(self.where[file.name]), set())
                stage_names.update(str(saved.path[0]) for saved in self.contents[file.name].leaves)

        # If the metas state that all experts are synchronised, ranks hold copies of them instead of parts.
        flags = set()
        for meta in self.meta.stages.values():
            flags |= {param.no_sync for name, param in meta.params.items() if is_expert(name)}
        return number_experts(names_by_stage, self.degrees, self.config, parted=flags != {False})

    def _logical_name(self, name: str, where: PaddleRank) -> str:
        return self.numbering.logical(name, where.ep)

    def _order_names(self) -> list[str]:
        """Logical names in the order of the model."""
        ordered_names = []
        for (_, _, ep), names in self._sorted_tables():
            ordered_names += [self.numbering.logical(name, ep) for name in names]
        return ordered_names

    def _sorted_tables(self) -> list[tuple[tuple[int, int, int], dict[str, str]]]:
        """Tables of names by (tp, pp, ep): stages first, then expert ranks, then tensor ranks."""
        return sorted(self._names.items(), key=lambda item: (item[0][1], item[0][2], item[0][0]))

    # -- what files hold ----------------------------------------------------------------------------------------------

    def _add_meta_shapes(self) -> None:
        for (_, _, ep), stage in self.meta.stages.items():
            for name, param in stage.params.items():
                logical = self.numbering.logical(name, ep)
                self.gathering.shape(logical, param.shape, stage.shown)
                self.gathering.distributed[logical] = param.distributed

    def _add_model(self, file: RankFile, content: PaddleContent) -> None:
        where = self.where[file.name]
        stage = self._find_meta(where)
        for saved in content.leaves:
            if len(saved.path) != 1:
                raise InputError(
                    f"a tensor at {dotted(saved.path)[:120]}: a rank's model file is a flat dict",
                    code=NESTED,
                    path=self.tree.display(file.name),
                    hint="pass the file itself: a single one may nest",
                )
            name = str(saved.path[0])
            param = stage.params.get(name) if stage else None
            if param is not None and param.shape != saved.shape:
                raise two_jobs(
                    CONTRADICTS,
                    f"stored with shape {list(saved.shape)}, the meta states {list(param.shape)}",
                    self.tree.display(file.name),
                    name,
                )

            logical = self._logical_name(name, where)
            self.gathering.shape(logical, saved.shape, self.tree.display(file.name))
            dtype = self.dtype(saved, param.dtype if param else None)
            self.gathering.hold(TensorKey(logical, MODEL), FileShare(where, saved, dtype, False))

    def _add_states(self, file: RankFile, content: PaddleContent) -> None:
        """Add the tensors of an optimizer's file, or of an average's.

        Raises Unexplained E1313 for tensors whose parameters no table names.
        """
        where = self.where[file.name]
        table = self._find_table(where)
        unnamed: list[str] = []
        self._refuse_others_shares(file, content, table)

        for saved in content.leaves:
            key = self._find_key(file, saved, table, where)
            if key is None:
                unnamed.append(dotted(saved.path))
                continue
            buffered = saved.path[0] == MASTER_WEIGHTS or file.kind != EMA_FILE
            self.gathering.hold(key, FileShare(where, saved, self.dtype(saved, None), buffered))

        if unnamed:
            raise Unexplained(
                f"{len(unnamed)} of {len(content.leaves)} tensors belong to parameters that no table names: "
                f"{unnamed[0][:120]}",
                code=NO_NAME,
                path=self.tree.display(file.name),
                faults=[f"no name: {key[:200]}" for key in unnamed[1:50]],
                hint="Paddle's own names change with the job: put the model's file of the same rank "
                "(model_state...pdparams)"
                " or model_meta.json of the same save next to it",
            )

        if table is None and content.leaves:
            self._add_note(
                STATIC_NAMES,
                "no model file or meta states the names of the parameters: Paddle's own (static) ones are shown",
                file.name,
            )

    def _refuse_others_shares(self, file: RankFile, content: PaddleContent, table: NameTable | None) -> None:
        """Raise InconsistentCheckpoint E0305 for a file with states that the meta assigns to other sharding ranks.

        Experts are not checked: they are assigned within a group of their own.
        """
        where = self.where[file.name]
        stage = self._find_meta(where)
        if stage is None or not stage.owners or table is None:
            return
        misplaced = []
        for saved in content.leaves:
            path = [str(step) for step in saved.path]
            owner = table.owner(path[0]) if len(path) == 1 and file.kind != EMA_FILE else None
            if path[0] == MASTER_WEIGHTS and len(path) == 2:
                static = path[1]
            else:
                static = owner.static if owner else ""
            rank = stage.owners.get(static, where.shard)
            is_number = prod(saved.shape) == 1  # a number of a parameter may be on every rank
            if rank != where.shard and not is_number and not is_expert(table.structured.get(static, "")):
                misplaced.append(f"{dotted(saved.path)[:200]} is sharding rank {rank}'s")
        if misplaced:
            raise InconsistentCheckpoint(
                f"{len(misplaced)} of {len(content.leaves)} tensors belong to other sharding ranks: {misplaced[0]}",
                code=CONTRADICTION,
                path=self.tree.display(file.name),
                faults=misplaced[1:50],
                hint=f"{stage.shown} says who owns what: another rank's file is here, or it comes from another save",
            )

    def _find_key(self, file: RankFile, saved: Saved, table: NameTable | None, where: PaddleRank) -> TensorKey | None:
        """The logical key of a stored state, None if its parameter can't be identified."""
        path = [str(step) for step in saved.path]
        is_average = file.kind == EMA_FILE
        if path[0] == MASTER_WEIGHTS and len(path) == 2:
            owner: Owner | None = Owner(path[1], EMA if is_average else MASTER)
        elif len(path) != 1:
            return None
        elif is_average:
            return TensorKey(self._logical_name(path[0], where), EMA)
        else:
            owner = table.owner(path[0]) if table else NameTable({}).guess(path[0])
        if owner is None or (table is None and self.tree.single is None):
            return None
        name = table.structured.get(owner.static) if table else owner.static
        return None if name is None else TensorKey(self._logical_name(name, where), owner.state)

    # -- dtypes -------------------------------------------------------------------------------------------------------

    def _has_bf16(self) -> bool:
        """Whether 16-bit integers are bfloat16: the meta or the config says so, or there are master weights."""
        if any(p.dtype is DTYPES["BF16"] for stage in self.meta.stages.values() for p in stage.params.values()):
            return True
        if says_bf16(self.config):
            return True
        return any(
            saved.path[0] == MASTER_WEIGHTS
            for file in self.files
            if file.kind != MODEL_FILE
            for saved in self.contents[file.name].leaves
        )

    def dtype(self, saved: Saved, stated: DType | None) -> DType:
        """The dtype of a stored array's bits. Raises InputError E1314 if it is unknown, E1312 if the meta contradicts
        it."""
        return element_type(saved, stated, bf16=self.bf16)

    def _compare_values(self, name: str, lists: list[list[StoredArray]]) -> bool | None:
        differing = differ(self.tree, lists)
        if differing is not None:
            what = "the ranks' differ, so they are parts" if differing else "the ranks' are equal, so they are copies"
            self.notes.append(Note(BY_VALUES, f"how ranks share it is derived from its values: {what}", key=name))
        return differing

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_same_names(self) -> None:
        """Raise InconsistentCheckpoint E0305 if tensor ranks of a stage have different parameters, experts excepted."""
        names_by_rank: dict[int, dict[int, set[str]]] = {}
        for key in self.gathering.keys():
            if key.state == MODEL and not self.numbering.is_apart(key.name):
                for pp, tp in self.gathering.holders(key):
                    names_by_rank.setdefault(pp, {}).setdefault(tp, set()).add(key.name)

        for pp, ranks in names_by_rank.items():
            stage_names = set().union(*ranks.values())
            for tp in range(self.degrees.tp):
                missing = sorted(stage_names - ranks.get(tp, set()))
                if missing:
                    raise InconsistentCheckpoint(
                        f"tensor rank {tp} of stage {pp} lacks {len(missing)} parameters that others have",
                        code=CONTRADICTION,
                        path=self.tree.display(),
                        key=missing[0],
                        faults=missing[1:50],
                        hint="a file was cut short, or files of two jobs are mixed",
                    )

    def _check_completeness(self) -> None:
        """Report parameters that a meta assigns to a rank and that no file has (Incomplete E0302).

        Others that a meta names may be frozen: they get a note.
        """
        stored_names = {key.name for key in self.gathering.keys() if key.state in (MODEL, MASTER)}
        if not stored_names:
            return
        frozen: dict[str, None] = {}
        for (_, _, ep), stage in self.meta.stages.items():
            canonical_names = set(NameTable(stage.names).structured.values())
            for name, static in stage.names.items():
                if self.numbering.logical(name, ep) in stored_names or name not in canonical_names:
                    continue
                if static in stage.owners:
                    fault = Incomplete(
                        f"sharding rank {stage.owners[static]} should hold it, no file does",
                        code=MISSING,
                        path=stage.shown,
                        key=name,
                        hint="a file was cut short, or comes from another save",
                    )
                    report_missing(fault)
                frozen[self.numbering.logical(name, ep)] = None

        if frozen:
            self._add_note(
                FROZEN,
                f"{len(frozen)} parameters that model_meta.json names are in no file (frozen ones are not saved):"
                f" {', '.join(sorted(frozen)[:3])}",
                self.meta.files[0],
            )

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _collect_extras(self) -> dict[Any, Any]:
        """The plain values of the ranks' files. Raises InconsistentCheckpoint E0305 if their schedulers differ."""
        out: dict[Any, Any] = {}
        for file in self.files:
            extras = self.contents[file.name].extras
            for key, value in (extras if isinstance(extras, dict) else {}).items():
                if out.setdefault(key, value) != value and key == SCHEDULER:
                    raise InconsistentCheckpoint(
                        f"{SCHEDULER} is {str(value)[:80]}, another rank's {str(out[key])[:80]}",
                        code=CONTRADICTION,
                        path=self.tree.display(file.name),
                        hint="files of two saves are mixed: keep those of one step",
                    )
        return out

    def _complete_config(self) -> Mapping[str, Any]:
        """The config, with `hidden_size` taken from the embedding's columns if it is missing."""
        facts = text_config(self.config)
        if "hidden_size" in facts:
            return facts
        for content in self.contents.values():
            for saved in content.leaves:
                if str(saved.path[0]).endswith("embed_tokens.weight") and len(saved.shape) == 2:
                    return {**facts, "hidden_size": saved.shape[1]}
        return facts

    def _is_sliced(self) -> bool | None:
        strategy = self.meta.strategy
        if strategy:
            return strategy == "v2"
        return None if self.degrees.sharding > 1 else False

    def _add_note(self, code: str, message: str, path: str) -> None:
        if not any(note.code == code for note in self.notes):
            self.notes.append(Note(code, message, path))

    def _build_hints(self) -> Hints:
        degrees = self.degrees
        names = {}
        for (_, _, ep), table in self._sorted_tables():
            for name, static in table.items():
                names[self.numbering.logical(name, ep)] = static

        sharded = any("shard" in file.at for file in self.files if file.kind == MODEL_FILE)
        version = ""
        if degrees.sharding > 1:
            version = "v2" if self.gathering.saw_slices else "v1"
        stem = next((file.stem for file in self.files if file.kind == MODEL_FILE), "")
        return Hints.of(
            Dialect("paddle"),
            Degrees(**degrees.to_json()),
            PaddleHints(
                kind="sharding_io" if sharded or self.meta.stages else "plain",
                sharding=self.meta.strategy or version,
                sharding_degree=degrees.sharding,
                names=names if len(names) <= _NAMES_KEPT else {},
                counts=tuple(self._count_layers()),
                config=plain_config(self.config),
                stem=stem,
            ),
        )

    def _count_layers(self) -> list[int]:
        """The number of decoder layers of each stage; [] for a single stage."""
        if self.degrees.pp == 1:
            return []
        layers_by_stage: dict[int, set[int]] = {}
        for (_, pp, _), names in self._names.items():
            stage_layers = layers_by_stage.setdefault(pp, set())
            for name in names:
                match = _LAYER.search(name)
                if match:
                    stage_layers.add(int(match[1]))
        return [len(layers_by_stage.get(pp, ())) for pp in range(self.degrees.pp)]


def element_type(saved: Saved, stated: DType | None, *, bf16: bool) -> DType:
    """The dtype of a stored array's bits: bfloat16 is stored as U16, float8 as I8.

    A tensor that has a name of its own was one of Paddle's, which has no unsigned 16-bit integers.

    Args:
        saved: the array.
        stated: the dtype that the meta states.
        bf16: arrays of U16 without a name are known to be bfloat16.

    Raises:
        InputError: E1314, nothing says what U16 is.
        InconsistentCheckpoint: E1312, the meta contradicts the file.
    """
    path = saved.parts[0].path
    key = dotted(saved.path)[:200]
    if stated is not None and stated != saved.dtype:
        marked = {"U16": ("BF16",), "I8": ("F8_E4M3", "F8_E5M2")}.get(saved.dtype.name, ())
        if stated.name not in marked:
            raise two_jobs(CONTRADICTS, f"stored as {saved.dtype.name}, the meta states {stated.name}", path, key)
        return stated
    if stated is not None or saved.dtype.name != "U16":
        return saved.dtype
    if not bf16 and not saved.name:
        raise InputError(
            "unsigned 16-bit integers, which is how Paddle stores bfloat16 too, and nothing says which they are",
            code=NO_DTYPE,
            path=path,
            key=key,
            hint='pass the model\'s config.json with --config, or a file with {"torch_dtype": "bfloat16"}',
        )
    return DTYPES["BF16"]


def says_bf16(config: Mapping[str, Any]) -> bool:
    """Whether a config states that the model is bfloat16."""
    stated = [config.get("torch_dtype"), config.get("dtype"), text_config(config).get("torch_dtype")]
    return any(isinstance(name, str) and from_name(name) is DTYPES["BF16"] for name in stated)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a config, for the hints."""
    plain_values: dict[str, Any] = {
        k: v for k, v in config.items() if v is None or isinstance(v, str | int | float | bool)
    }
    for key in ("architectures", "text_config", "moe_layer_start_index", "moe_num_experts"):
        if key in config:
            plain_values[key] = config[key]
    return plain_values


# -- a folder ----------------------------------------------------------------------------------------------------------

JOB = "N1303"
UNREAD = "N1305"
_JOB_FILES = re.compile(
    r"training_args\.bin|trainer_state\.(?:bin|json)|rng_state.*\.pth|static_name_to_dyg_name\.json|\.saving_info"
)
_SIDE = re.compile(r"(?:lora|vera|lokr|reft|prefix)_config\.json")
_DATA = (".pdparams", ".pdopt", ".pd", ".safetensors", ".distcp")
_SIGNAL = re.compile(r"saved_signal_\d+")
_MODEL_STEM = {"optimizer": "model_state", "ema": "model_state"}


def read_tree(tree: Tree, options: ReadOptions) -> Catalog:
    """Read a folder of ranks' files, or one file, into one catalog.

    Raises what `read` of `systems.paddle.pdparams.format` lists.
    """
    config = read_config(tree, options)
    if tree.single is not None:
        return _read_one(tree, tree.single, config, lenient=options.lenient)

    names = tree.names()
    files = rank_files(names, prefer=options.prefer)
    if not files:
        raise UnknownFormat(
            "no model_state*.pdparams or optimizer*.pdopt",
            code="E0393",
            path=tree.display(),
            hint="pass the folder of a checkpoint, or a file; of models with different names say which with "
            "--prefer STEM",
        )
    if not options.lenient:
        _refuse_lost_optimizer(tree, names, files)
    beside = read_extras(tree)
    tensors = {k: t if isinstance(t, LogicalTensor) else simple_tensor(k, t.array()) for k, t in beside.tensors.items()}

    reading = PaddleReading(tree, files, config)
    job_files = [name for name in names if _JOB_FILES.fullmatch(name)]
    if job_files:
        message = f"the job's own files, not read and not copied: {', '.join(job_files[:8])}"
        reading.notes.append(Note(JOB, message + (f" and {len(job_files) - 8} more" if len(job_files) > 8 else "")))
    sidefiles = [name for name in names if is_sidefile(name) or _SIDE.fullmatch(name)]
    read = {*(file.name for file in files), *beside.files}
    unread = [name for name in tree.seen(names) if name.endswith(_DATA) and name not in read]
    if unread:
        reading.notes.append(Note(UNREAD, f"not part of the checkpoint, not read: {', '.join(unread[:8])}"))

    catalog = reading.catalog(beside.extras, sidefiles, beside.files)
    if not options.lenient and not catalog.unsafe:  # a pickle that asks for code is reported first
        _refuse_lost_masters(tree, reading)
    return replace(catalog, tensors={**catalog.tensors, **tensors}, unsafe=(*catalog.unsafe, *beside.unsafe))


def _refuse_lost_optimizer(tree: Tree, names: list[str], files: list[RankFile]) -> None:
    """Raise Incomplete E0302 if markers show that ranks saved their optimizer, and there is no file of it."""
    signals = [name for name in names if _SIGNAL.fullmatch(name)]
    if signals and not any(file.kind == OPTIMIZER_FILE for file in files):
        fault = Incomplete(
            f"{signals[0]} says that a rank saved its optimizer, but there is no optimizer*.pdopt",
            code=MISSING,
            path=tree.display(signals[0]),
            hint="fetch it; without it, remove the saved_signal files or pass --lenient",
        )
        report_missing(fault)


def _refuse_lost_masters(tree: Tree, reading: PaddleReading) -> None:
    """Raise Incomplete E0302 if the names of an optimizer's tensors imply masters that its file lacks."""
    _refuse_lost_averages(tree, reading)
    for file in reading.files:
        if file.kind == OPTIMIZER_FILE:
            leaves = reading.contents[file.name].leaves
            missing = without_master((saved.path, saved.shape) for saved in leaves)

            if missing:
                fault = Incomplete(
                    f"moments of {len(missing)} master weights that the file does not hold",
                    code=MISSING,
                    path=tree.display(file.name),
                    key=missing[0][:200],
                    faults=[f"no master: {key[:200]}" for key in missing[1:50]],
                    hint="the file was edited or cut: fetch it again; --lenient takes it as it is",
                )
                report_missing(fault)


def _refuse_lost_averages(tree: Tree, reading: PaddleReading) -> None:
    """Raise Incomplete E0302 for a file of averages that lacks parameters of which the same rank has masters."""

    def find_masters(file: RankFile) -> set[str]:
        """The static names of the master weights in a file."""
        leaves = reading.contents[file.name].leaves
        return {str(saved.path[1]) for saved in leaves if saved.path[0] == MASTER_WEIGHTS and len(saved.path) == 2}

    if not any(find_masters(file) for file in reading.files if file.kind == EMA_FILE):
        return  # averages of fp32 parameters alone
    optimizers = {
        (*sorted(file.at.items()),): find_masters(file) for file in reading.files if file.kind == OPTIMIZER_FILE
    }
    for file in reading.files:
        if file.kind != EMA_FILE:
            continue
        optimizer_masters = optimizers.get((*sorted(file.at.items()),), set())
        missing = sorted(optimizer_masters - find_masters(file))
        if missing:
            fault = Incomplete(
                f"averages of {len(missing)} master weights are not in the file",
                code=MISSING,
                path=tree.display(file.name),
                key=missing[0][:200],
                hint="the file was edited or cut: fetch it again; --lenient takes it as it is",
            )
            report_missing(fault)


# -- one file ----------------------------------------------------------------------------------------------------------


def _read_one(tree: Tree, name: str, config: dict[str, Any], *, lenient: bool) -> Catalog:
    """The catalog of one file alone. Raises Incomplete E0302 for one rank's file of several."""
    file = rank_file(name)
    content = read_paddle(tree, name)
    if file is None or not _is_flat(file, content):
        return _read_nested(tree, name, config, content)
    if (file.at or file.of > 1) and not lenient:
        raise Incomplete(
            f"{name} is one rank's file of several",
            code=MISSING,
            path=tree.display(name),
            hint="pass the folder: a rank's file alone is a part of every tensor; --lenient shows the "
            "parts as they are",
        )
    file = file._replace(at={}, part=1, of=1)
    extra = []
    if file.kind != MODEL_FILE:
        model = f"{_MODEL_STEM.get(file.stem, file.stem)}.pdparams"
        extra = [model] if lies_beside(tree, model) else []
    reading = PaddleReading(tree, [file], config, extra)
    catalog = reading.catalog({}, (), ())
    if not lenient and not catalog.unsafe:
        _refuse_lost_masters(tree, reading)
    return catalog


def _is_flat(file: RankFile, content: PaddleContent) -> bool:
    """Is it a state dict, or an optimizer's?"""
    if file.kind == MODEL_FILE:
        return all(len(saved.path) == 1 for saved in content.leaves)
    return all(len(saved.path) == 1 or saved.path[0] == MASTER_WEIGHTS for saved in content.leaves)


def _read_nested(tree: Tree, name: str, config: Mapping[str, Any], content: PaddleContent) -> Catalog:
    """Any other state: names and states by the paths of its tensors."""
    bf16 = says_bf16(config) or any(MASTER_WEIGHTS in saved.path for saved in content.leaves)
    extras = content.extras if isinstance(content.extras, dict) else {"value": content.extras}
    named = name_leaves([Leaf(saved.path, saved.shape) for saved in content.leaves], extras, path=name)
    tensors = {}
    for key, saved in zip(named.keys, content.leaves, strict=True):
        dtype = element_type(saved, None, bf16=bf16)
        chunks = chunks_of(saved, whole(saved.shape), dtype=dtype)
        tensors[key] = LogicalTensor(key, saved.shape, dtype, chunks, saved.path)
    tensors, unread = set_apart(tensors, named.faults)
    paddle_hints = PaddleHints(kind="nested", config=plain_config(config))
    hints = Hints.of(named.roots, Dialect("paddle"), paddle_hints)
    return Catalog(
        "paddle",
        tensors=tensors,
        extras=extras,
        files=(name,),
        notes=(*named.notes, *notes_of(unread)),
        unsafe=tuple(content.unsafe),
        hints=hints,
        unread=unread,
    )
