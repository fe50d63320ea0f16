"""Writing Paddle's files of ranks: model, optimizer and average of every rank, their pickles known before a value
moves.

`paddle.layout` decides what every rank keeps, `paddle.stored_names` what Paddle calls it, and a file is a dict of
holes:

    --tp 2 --dp 2    model_state.tp00_shard00.pdparams  {structured name: part}              and the names of names
                     optimizer.tp00_shard00.pdopt
                           {static_fp32_master_0_moment1_0: part, ..., "master_weights": {static:
                                                          part}, "LR_Scheduler": {...}}
                     model_meta.json                    degrees, names, shapes and owners of all

Kinds. `sharding_io` (the states are shared: `model_meta.json`, a model file a rank): every parameter is on one
sharding rank, by owner (v1) or place in the list modulo the ranks (v2), as Paddle does for fp32 jobs. Of bf16 jobs
Paddle leaves the weights out and rounds the masters again when it loads; we write the weights that there are: its
loader ignores them, and no bit is lost that is not the rounding. `plain` (states are not sharded, or the source was
plain): a model file a tensor and expert rank.

The tensors that are written hold the same training state as the source's, some of them made of others (`fit`):

    tied embeddings  one tensor in a process, and its states once: under the embedding; with pipeline stages the first
                     and the last hold one each, so states are stored under both names
    float32 weights  of a bf16 model have no master in a job; a unified checkpoint's copies of them are left out
    bf16 weights     a source of `sharding_io` may have none: if states are not sharded they are the fp32 masters
                     rounded to bf16, as Paddle's loader rounds them; the dtype of other sources with masters alone is
                     unknown

Not in the source: static names are generated; the scheduler is written if it is Paddle's; other systems' plain values
go to `ckpt_extras.json`, which Paddle ignores. Accumulators that Paddle does not know keep their name:
`<static>_NAME_0`.
Sources: PaddleFormers 1.2.0 `trainer/trainer.py`, `trainer/training_args.py` (suffixes),
`trainer/utils/sharding_io.py` (`_recover_params_from_master_weights`), `nn/pp_model.py` (`SharedLayerDesc`), runs of
tied models; paddlepaddle 3.3.1 `optimizer/optimizer.py` (`state_dict`). Code: E1254 a state that can't be cut. Cost:
some ten us a parameter, rank and state. What it does not do: decide degrees (`paddle.layout`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.flat_line import Boxes, FlatLine
from ckpt_tool.core.hints import Degrees, Hints
from ckpt_tool.core.target import LayoutWish, Target, TargetFile, Wanted, WantedTensor, whole_file
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import Fitted
from ckpt_tool.formats.state_dict.composer import StoragePart
from ckpt_tool.systems.paddle.extras import extras_files
from ckpt_tool.systems.paddle.job import V1, PaddleRank
from ckpt_tool.systems.paddle.layout import Block, BlockShare, LaidParameter, Parameter, config_of, paddle_hints, settle
from ckpt_tool.systems.paddle.pickle_file import NamedTensor, PaddleArray, PaddleComposer
from ckpt_tool.systems.paddle.ranks import EMA_FILE, MODEL_FILE, OPTIMIZER_FILE, Param, StageMeta, file_name, meta_json
from ckpt_tool.systems.paddle.ranks import NAME as META
from ckpt_tool.systems.paddle.rules import HEADS, text_config
from ckpt_tool.systems.paddle.stored_names import (
    ACCUMULATORS,
    EMBEDDINGS,
    HEAD,
    MASTER_WEIGHTS,
    SCHEDULER,
    static_key,
    static_names,
)

# -- the whole output --------------------------------------------------------------------------------------------------

UNCUT = "E1254"
PLAIN = "plain"
IO = "sharding_io"


def paddle_target(wanted: Wanted) -> Target:
    """The files of every rank. Raises UsageError as `paddle.layout.settle` does, and E1254."""
    return _PaddleWriting(wanted).target()


def kind_of(laid: LaidParameter, wanted: Wanted) -> str:
    """`sharding_io` where ranks share states, but for a source that did without; `plain` else."""
    if laid.degrees.sharding == 1:
        return PLAIN
    own = paddle_hints(wanted)
    return PLAIN if own.kind == PLAIN and (own.sharding_degree or 1) > 1 else IO


class _PaddleWriting:
    """One target in the making."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.laid = settle(wanted)
        self.at = {(t.key.state, t.key.name): number for number, t in enumerate(wanted.tensors)}
        self.notes = list(self.laid.notes)
        nameless = [p.name for p in self.laid.parameters.values() if p.trained and self._number(MODEL, p) is None]
        self.kind = IO if nameless and self.laid.degrees.sharding > 1 else kind_of(self.laid, wanted)
        self.meta = self.kind == IO or bool(nameless)
        if nameless and self.kind == PLAIN:
            self.notes.append(
                f"{len(nameless)} parameters have no weights but their fp32 masters, and no model file holds them: "
                "a Paddle job"
                " that shares no states does not load that (--as-model master --dtype bf16 writes them as the model)"
            )
        present = dict.fromkeys(tensor.key.state for tensor in wanted.tensors)
        order = [*ACCUMULATORS, *(s for s in present if s not in (*ACCUMULATORS, MODEL, MASTER, EMA, EXTRAS))]
        self.states = [state for state in order if state in present]
        self.optimizes = bool(self.states) or MASTER in present
        self.averages = EMA in present
        self.kept = self._kept_names()
        self.statics: dict[tuple[int, int, int], dict[str, str]] = {}
        paddle = wanted.hints.dialect == "paddle"
        stated = wanted.extras.get(SCHEDULER, wanted.extras.get("scheduler")) if paddle else None
        self.scheduler = stated if isinstance(stated, Mapping) else None

    def target(self) -> Target:
        """All files of the output."""
        files: list[TargetFile] = []
        for rank in self.laid.degrees.ranks():
            if self._writes_model(rank):
                files.append(self._model_file(rank))
            if self.optimizes:
                files.append(self._optimizer_file(rank))
            if self.averages:
                files.append(self._average_file(rank))
        if self.meta:
            files.append(whole_file(META, self._meta()))
        if self.optimizes:  # a rank's mark that its optimizer's file is whole
            files += [whole_file(f"saved_signal_{rank.number}", b"1") for rank in self.laid.degrees.ranks()]
        files += self._extras()
        copies = list(self.wanted.side_file_copies())
        taken = {file.path for file in files}
        # Files that are generated replace the source's side files of the same name.
        copies = [file for file in copies if file.path not in taken]
        config = config_of(self.wanted)
        if config and not any(file.path == "config.json" for file in copies):
            stated = {key: value for key, value in config.items() if key != HEADS}
            files += (
                [whole_file("config.json", json.dumps(stated, indent=2, default=str).encode("ascii"))] if stated else []
            )
        self._say()
        return Target("paddle", (*files, *copies), notes=tuple(dict.fromkeys(self.notes)))

    # -- names ---------------------------------------------------------------------------------------------------------

    def _kept_names(self) -> Mapping[str, str]:
        """The source's static names, where every stage and expert rank holds what it held; {} else."""
        own = paddle_hints(self.wanted)
        before = self.wanted.hints.get(Degrees)
        names = own.names
        if not names or before is None:
            return {}
        d = self.laid.degrees
        same = (before.at("pp"), before.at("ep")) == (d.pp, d.ep)
        same = same and (not self.laid.by_tensor or before.at("tp") == d.tp)
        # Counters run in each process, so static names stay right only if every process has the same parameters.
        if not same or (d.pp > 1 and (own.counts or ()) != self.laid.stages.counts):
            return {}
        if not all(name in names for name in self.laid.parameters):
            return {}
        for rank in self.laid.degrees.ranks():  # one name, one tensor; tied ones aside
            here = [block.parameter for block in self.laid.blocks(rank)]
            present = {p.name for p in here}
            if len({names[p.name] for p in here}) < sum(p.alias not in present for p in here):
                return {}
        return names

    def _static(self, rank: PaddleRank) -> Mapping[str, str]:
        """Structured name -> static name of a rank's parameters."""
        key = rank.pp, rank.tp if self.laid.by_tensor else 0, rank.ep
        if key not in self.statics:
            names = [block.parameter.name for block in self.laid.blocks(rank)]
            if self.kept:
                self.statics[key] = {name: self.kept[name] for name in names}
            else:
                parameters = (self.laid.parameters[name] for name in names)
                aliases = {p.name: p.alias for p in parameters if p.alias}
                self.statics[key] = static_names(names, aliases, pipeline=self.laid.degrees.pp > 1)
        return self.statics[key]

    def _path(self, stem: str, kind: str, rank: PaddleRank, *, shard: bool, expert: bool = False) -> str:
        d = self.laid.degrees
        at = {"tp": (rank.tp, d.tp), "pp": (rank.pp, d.pp)}
        at |= {"shard": (rank.shard, d.sharding)} if shard else {}
        at |= {"moe_sharding": (rank.ep, d.ep)} if expert else {}
        return file_name(stem, kind, {token: number for token, (number, degree) in at.items() if degree > 1})

    # -- the model -----------------------------------------------------------------------------------------------------

    def _number(self, state: str, parameter: Parameter) -> int | None:
        """The wanted tensor that is the parameter's state, or the one of the parameter that it is tied to."""
        number = self.at.get((state, parameter.name))
        if number is not None or state == MODEL:
            return number
        tied = [p.name for p in self.laid.parameters.values() if p.alias == parameter.name] if parameter.trained else []
        others = [*tied] if parameter.alias is None else [parameter.alias]
        return next((self.at[state, name] for name in others if (state, name) in self.at), None)

    def _writes_model(self, rank: PaddleRank) -> bool:
        if self.kind == IO:
            return True
        return rank.moe_shard == 0 if self.laid.degrees.ep > 1 else rank.shard == 0

    def _model_blocks(self, rank: PaddleRank) -> list[Block]:
        """The parameters that are stored in the rank's model file."""
        blocks = self.laid.blocks(rank)
        if self.kind == PLAIN:
            return list(blocks)
        d = self.laid.degrees
        listed = self.laid.optimized(rank)
        owner: dict[str, int] = {}
        if d.version == V1:
            owner = dict(self.laid.owner_of(rank))
        else:
            for colour in self.laid.colours(listed):
                ranks = self.laid.group_size(colour[0])
                owner |= {block.parameter.name: i % ranks for i, block in enumerate(colour)}
        out = []
        for block in blocks:
            name = block.parameter.alias or block.parameter.name
            if owner.get(name, owner.get(block.parameter.name, 0)) == self.laid.group_rank(block, rank):
                out.append(block)
        return out

    def _model_file(self, rank: PaddleRank) -> TargetFile:
        composer = PaddleComposer()
        state: dict[str, PaddleArray] = {}
        for block in self._model_blocks(rank):
            number = self._number(MODEL, block.parameter)
            if number is not None:
                state[block.parameter.name] = self._array(composer, BlockShare(block, None), number)
        static = self._static(rank)
        path = self._path(self._stem(), MODEL_FILE, rank, shard=self.kind == IO, expert=self.kind == PLAIN)
        return composer.file(path, state, {name: static[name] for name in state})

    def _stem(self) -> str:
        stated = paddle_hints(self.wanted).stem  # a unified checkpoint's is another format's word
        if type(stated) is str and stated.isidentifier() and stated.endswith("model_state"):
            return stated
        return "model_state"

    # -- the optimizer and the average ---------------------------------------------------------------------------------

    def _array(self, composer: PaddleComposer, share: BlockShare, number: int) -> PaddleArray:
        """A rank's part of a wanted tensor: a share of its parameter, or the whole where it is a number of its own."""
        tensor = self.wanted.tensors[number]
        block = share.block
        if tensor.shape != block.parameter.shape:
            if prod(tensor.shape) == 1:
                return composer.tensor(tensor.shape, tensor.dtype, [StoragePart(number, whole(tensor.shape), 0)])
            if block.of > 1 or share.span is not None:
                raise UsageError(
                    f"the state {tensor.key.state} has shape {list(tensor.shape)}, its parameter "
                    f"{list(block.parameter.shape)}: how ranks share it is not known",
                    code=UNCUT,
                    key=tensor.key.name,
                    hint="write it with --tp 1 and --zero 0 or --sharding v1, with --dequantize if it is quantised, or "
                    "--drop optimizer",
                )
            return composer.tensor(tensor.shape, tensor.dtype, [StoragePart(number, whole(tensor.shape), 0)])
        shape = block.shape if share.span is None else (share.span.length,)
        span = share.span and (share.span.start, share.span.stop)
        return composer.tensor(shape, tensor.dtype, parts_of(number, block.shape, block.boxes, span))

    def _optimizer_file(self, rank: PaddleRank) -> TargetFile:
        composer = PaddleComposer()
        static = self._static(rank)
        shares = self.laid.shares(rank)
        masters: dict[str, NamedTensor] = {}
        for share in shares:
            number = self._number(MASTER, share.block.parameter)
            if number is not None:
                name = static[share.block.parameter.name]
                masters[name] = NamedTensor(static_key(name, MASTER), self._array(composer, share, number))
        arrays: dict[str, PaddleArray] = {}
        for state in self.states:
            for share in shares:
                number = self._number(state, share.block.parameter)
                if number is not None:
                    name = static[share.block.parameter.name]
                    key = static_key(name, state, mastered=name in masters)
                    arrays[key] = self._array(composer, share, number)
        scheduler = {} if self.scheduler is None else {SCHEDULER: dict(self.scheduler)}
        path = self._path("optimizer", OPTIMIZER_FILE, rank, shard=True)
        # Without masters the file is in encoding A, which has a name table; with them in encoding B.
        if not masters:
            return composer.file(path, {**arrays, **scheduler}, {key: key for key in arrays})
        named = {key: NamedTensor(key, ref) for key, ref in arrays.items()}
        return composer.file(path, {**named, MASTER_WEIGHTS: masters, **scheduler}, None)

    def _average_file(self, rank: PaddleRank) -> TargetFile:
        """Averages of parameters with a master as the masters are, others whole where their weight is stored."""
        composer = PaddleComposer()
        static = self._static(rank)
        state: dict[str, Any] = {}
        masters: dict[str, NamedTensor] = {}
        for share in self.laid.shares(rank):
            parameter = share.block.parameter
            number = self._number(EMA, parameter)
            if number is not None and self._number(MASTER, parameter) is not None:
                name = static[parameter.name]
                masters[name] = NamedTensor(static_key(name, MASTER), self._array(composer, share, number))
        blocks = self._model_blocks(rank)
        if self.kind == PLAIN:
            blocks = [block for block in blocks if self.laid.group_rank(block, rank) == 0]
        for block in blocks:
            parameter = block.parameter
            number = self.at.get((EMA, parameter.name))
            if number is not None and self._number(MASTER, parameter) is None:
                name = static[parameter.name]
                state[parameter.name] = NamedTensor(name, self._array(composer, BlockShare(block, None), number))
        path = self._path("ema", EMA_FILE, rank, shard=True)
        return composer.file(path, {MASTER_WEIGHTS: masters, **state}, None)

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _meta(self) -> bytes:
        """`model_meta.json`."""
        d = self.laid.degrees
        stages: dict[tuple[int, int, int], StageMeta] = {}
        for rank in d.ranks():
            if (at := (rank.tp, rank.pp, rank.ep)) not in stages:
                static = self._static(rank)
                blocks = self.laid.blocks(rank)
                owner = self.laid.owner_of(rank) if d.version == V1 else {}
                owners = {static[name]: to for name, to in sorted(owner.items(), key=lambda item: item[1])}
                names = {block.parameter.name: static[block.parameter.name] for block in blocks}
                params = {block.parameter.name: self._describe_param(block) for block in blocks}
                stages[at] = StageMeta(names, params, owners, d.version or V1)
        return meta_json(d, stages)

    def _describe_param(self, block: Block) -> Param:
        expert = block.parameter.expert is not None
        no_sync = expert and not self.laid.by_tensor
        apart = block.cut.dim is not None or expert or block.parameter.name.endswith(".e_score_correction_bias")
        return Param(block.shape, block.parameter.dtype, apart, no_sync)

    def _extras(self) -> list[TargetFile]:
        """Files of plain values and of tensors that are no parameter's."""
        extras = {key: value for key, value in self.wanted.extras.items() if key != SCHEDULER or self.scheduler is None}
        if self.scheduler is not None and "scheduler" not in extras:
            extras["scheduler"] = dict(self.scheduler)
        return extras_files(self.wanted, extras)

    def _say(self) -> None:
        """What a user should know of what was written."""
        trained = [p for p in self.laid.parameters.values() if p.trained]
        rounded = [p.name for p in trained if (MODEL, p.name) in self.at and self._number(MASTER, p) is not None]
        if self.kind == IO and rounded:
            self.notes.append(
                f"{len(rounded)} weights are written next to their fp32 masters: Paddle's sharding_io leaves them out "
                "and rounds the masters again when it loads; it does not look at them"
            )
        if self.laid.degrees.version == V1 and self.laid.degrees.ep > 1:
            self.notes.append(
                "PaddleFormers 1.2.0 runs expert ranks with sharding v2 alone: --sharding v2 is what it loads"
            )
        powers = {"beta1_pow_acc", "beta2_pow_acc"}
        if {"exp_avg", "exp_avg_sq"} <= set(self.states) and not powers <= set(self.states):
            self.notes.append(
                "the source has no beta1_pow_acc and beta2_pow_acc, which Paddle's Adam asks for: they are left "
                "out, not guessed"
            )


def parts_of(
    number: int, shape: tuple[int, ...], boxes: Boxes, span: tuple[int, int] | None = None
) -> list[StoragePart]:
    """Wanted tensor `number` as it fills a block, or the span of its line that begins at element 0 of an array."""
    start, stop = span or (0, prod(shape))
    return [StoragePart(*part) for part in FlatLine.of_block(number, shape, boxes).window(start, stop).parts()]


# -- which tensors -----------------------------------------------------------------------------------------------------

Rows = list[tuple[int, LogicalTensor]]


def fit(tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish) -> Fitted:
    """The tensors to write. Raises UsageError as `paddle.layout.settle` does."""
    rows: Rows = list(enumerate(tensors))
    dropped: list[dict[str, Any]] = []
    casts: dict[TensorKey, DType] = {}
    requested = Wanted((), extras, hints, wish=wish)
    _, laid = _settle_parameters(rows, requested)
    rows = _without_copies(with_head(rows, laid, dropped), dropped)
    wanted, laid = _settle_parameters(rows, requested)
    rows = _add_tied_states(rows, laid, dropped)
    own = paddle_hints(wanted)
    if kind_of(laid, wanted) == PLAIN and own.kind == IO:  # such weights are bf16; of other sources it is unknown
        rows = with_weights(rows, wish, casts, dropped)
    return Fitted(tuple(rows), casts, tuple(dropped))


def _settle_parameters(rows: Rows, requested: Wanted) -> tuple[Wanted, LaidParameter]:
    wanted = with_rows(requested, rows)
    return wanted, settle(wanted)


def with_rows(requested: Wanted, rows: Rows) -> Wanted:
    """What is asked for, with these tensors."""
    return replace(requested, tensors=tuple(WantedTensor(row.key, row.shape, row.dtype) for _, row in rows))


def with_head(rows: Rows, laid: LaidParameter, dropped: list[dict[str, Any]]) -> Rows:
    """Add the tied head to the embedding, as Paddle's files have it, if the config says that they are tied."""
    names = {row.key.name for _, row in rows if row.key.state == MODEL}
    has_head = any(name == HEAD or name.endswith(f".{HEAD}") for name in names)
    if text_config(laid.config).get("tie_word_embeddings") is not True or has_head:
        return rows
    found = [(i, row) for i, row in rows if row.key.state == MODEL and row.key.name.endswith(EMBEDDINGS)]
    if len(found) != 1 or len(found[0][1].shape) != 2:
        return rows
    index, row = found[0]
    dropped.append(made_of("the tied head is written in addition to the embedding, as Paddle's files have it"))
    return [*rows, (index, row._replace(key=TensorKey(HEAD, MODEL), path=()))]


def _without_copies(rows: Rows, dropped: list[dict[str, Any]]) -> Rows:
    """Without masters of the float32 weights of a bf16 model (router gates): unified checkpoints copy these weights
    among the masters, jobs keep none, and a job whose optimizer file has one refuses it."""
    kinds = {row.key.name: row.dtype.name for _, row in rows if row.key.state == MODEL}
    if set(kinds.values()) <= {"F32"}:
        return rows
    copies = [row for _, row in rows if row.key.state == MASTER and kinds.get(row.key.name) == "F32"]
    if not copies:
        return rows
    reason = "copies of float32 weights, of which Paddle's jobs keep no master"
    dropped.append(
        {"state": MASTER, "tensors": len(copies), "bytes": sum(row.nbytes for row in copies), "reason": reason}
    )
    gone = {row.key for row in copies}
    return [(index, row) for index, row in rows if row.key not in gone]


def _add_tied_states(rows: Rows, laid: LaidParameter, dropped: list[dict[str, Any]]) -> Rows:
    """States of a tied pair under the names that their stages have."""
    head = next((p for p in laid.parameters.values() if p.alias is not None), None)
    if head is None or head.alias is None:
        return rows

    first = head.alias
    last = head.name
    apart = laid.parameters[first].stages != head.stages
    held: dict[str, dict[str, tuple[int, LogicalTensor]]] = {}
    for index, row in rows:
        if row.key.name in (first, last) and row.key.state not in (MODEL, EXTRAS):
            held.setdefault(row.key.state, {})[row.key.name] = (index, row)

    out: Rows = []
    for index, row in rows:
        own = held.get(row.key.state, {}) if row.key.name in (first, last) and row.key.state != MODEL else {}
        if not own or apart or row.key.name == first:
            out.append((index, row))
        if apart and len(own) == 1:
            other = last if row.key.name == first else first
            out.append((index, row._replace(key=TensorKey(other, row.key.state), path=())))
            dropped.append(made_of(f"of the tied {first} it is on the first and on the last stage", row.key.state))
        elif own and not apart and row.key.name == last and len(own) == 1:
            out.append((index, row._replace(key=TensorKey(first, row.key.state), path=())))
            dropped.append(made_of(f"of {last} it is stored under {first}, to which it is tied", row.key.state))
        elif own and not apart and row.key.name == last:
            reason = f"{last} is tied to {first}: Paddle keeps it once"
            dropped.append(made_of(reason, row.key.state) | {"tensors": 1, "bytes": row.nbytes})

    return out


def with_weights(rows: Rows, wish: LayoutWish, casts: dict[TensorKey, DType], dropped: list[dict[str, Any]]) -> Rows:
    """Add weights of the model for masters without one, rounded to bf16; not for weights that the user removed."""
    have = {row.key.name for _, row in rows if row.key.state == MODEL}
    have |= {key.name for key in wish.removed if key.state == MODEL}
    made: Rows = []
    for index, row in rows:
        if row.key.state == MASTER and row.key.name not in have:
            key = TensorKey(row.key.name, MODEL)
            made.append((index, row._replace(key=key, path=())))
            casts[key] = DTYPES["BF16"]
    if not made:
        return rows
    dropped.append(made_of(f"{len(made)} weights are the fp32 masters rounded to BF16, as Paddle's loader rounds them"))
    return made + rows


def made_of(reason: str, state: str = MODEL) -> dict[str, Any]:
    """A row of the report for tensors that are derived from others: nothing is lost."""
    return {"state": state, "tensors": 0, "bytes": 0, "reason": reason}
