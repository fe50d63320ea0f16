"""Writing Paddle's files of ranks: model, optimizer and average of every rank, their pickles known before a value moves.

The one idea: `paddle.layout` says what every rank keeps, `paddle.static` what Paddle calls it, and a file is a dict of holes:

    --tp 2 --dp 2    model_state.tp00_shard00.pdparams   {structured name: part}              and the names of names
                     optimizer.tp00_shard00.pdopt        {static_fp32_master_0_moment1_0: part, ..., "master_weights": {static:
                                                          part}, "LR_Scheduler": {...}}
                     model_meta.json                     degrees, names, shapes and owners of all

Kinds. `sharding_io` (the states are shared: `model_meta.json`, a model file a rank): every parameter lies on one sharding rank,
by owner (v1) or place in the list modulo the ranks (v2), as Paddle does for fp32 jobs. Of bf16 jobs Paddle leaves the weights
out and rounds the masters again when it loads; we write the weights that there are: its loader does not look at them, and no bit
is lost that is not the rounding. `plain` (nobody shares, or the source was so): a model file a tensor and expert rank.

What the source lacks: static names are made; the scheduler is written if it is Paddle's; foreign plain values lie in
`ckpt_extras.json`, which Paddle does not look at. Accumulators under their own name keep it: `<static>_NAME_0`.
Sources: PaddleFormers 1.2.0 `trainer/trainer.py`, `trainer/training_args.py` (suffixes), `trainer/utils/sharding_io.py`;
paddlepaddle 3.3.1 `optimizer/optimizer.py` (`state_dict`). Code: E1254 a state that can't be cut. Cost: some ten us a parameter,
rank and state. What it does not do: decide degrees (`paddle.layout`), make what is missing (`paddle.fit`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.core.box import Box, contiguous_strides, flat_boxes, whole
from ckpt_tool.core.target import Target, TargetFile, Wanted, whole_file
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.paddle.accumulators import MASTER_WEIGHTS, SCHEDULER, STATES
from ckpt_tool.formats.paddle.degrees import V1, config_of, paddle_hints
from ckpt_tool.formats.paddle.extras import extras_files
from ckpt_tool.formats.paddle.file import ArrayRef, Named, PaddleComposer
from ckpt_tool.formats.paddle.layout import Block, Laid, Rank, Share, settle
from ckpt_tool.formats.paddle.meta import NAME as META
from ckpt_tool.formats.paddle.parameters import Parameter
from ckpt_tool.formats.paddle.rules import HEADS
from ckpt_tool.formats.paddle.slices import Span
from ckpt_tool.formats.paddle.static import static_names
from ckpt_tool.formats.torch.content import Part

UNCUT = "E1254"
PLAIN, IO = "plain", "sharding_io"
INFIX = "_fp32_master_0"
_ACCUMULATORS = {state: name for name, state in STATES.items()}
_CODES = {
    "BOOL": 1, "U8": 2, "I8": 3, "I16": 5, "U32": 6, "I32": 7, "U64": 8, "I64": 9, "F32": 10, "F64": 11, "C64": 12,
    "C128": 13, "F16": 15, "BF16": 16,
}  # fmt: skip


def paddle_target(wanted: Wanted) -> Target:
    """The files of every rank. Raises UsageError as `paddle.layout.settle` does, and E1254."""
    return _Writing(wanted).target()


def kind_of(laid: Laid, wanted: Wanted) -> str:
    """`sharding_io` where ranks share states, but for a source that did without; `plain` else."""
    if laid.degrees.sharding == 1:
        return PLAIN
    own = paddle_hints(wanted)
    return PLAIN if own.get("kind") == PLAIN and own.get("sharding_degree", 1) > 1 else IO


class _Writing:
    """One target in the making."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.laid = wanted, settle(wanted)
        self.at = {(t.key.state, t.key.name): number for number, t in enumerate(wanted.tensors)}
        self.notes = list(self.laid.notes)
        nameless = [p.name for p in self.laid.parameters.values() if p.trained and self._number(MODEL, p) is None]
        self.kind = IO if nameless and self.laid.degrees.sharding > 1 else kind_of(self.laid, wanted)
        self.meta = self.kind == IO or bool(nameless)
        if nameless and self.kind == PLAIN:
            self.notes.append(
                f"{len(nameless)} parameters have no weights but their fp32 masters, and no model file holds them: a Paddle job"
                " that shares no states does not load that (--as-model master --dtype bf16 writes them as the model)"
            )
        present = dict.fromkeys(tensor.key.state for tensor in wanted.tensors)
        order = [*_ACCUMULATORS, *(s for s in present if s not in (*_ACCUMULATORS, MODEL, MASTER, EMA, EXTRAS))]
        self.states = [state for state in order if state in present]
        self.optimizes = bool(self.states) or MASTER in present
        self.averages = EMA in present
        self.kept = self._kept_names()
        self.statics: dict[tuple[int, int, int], dict[str, str]] = {}
        paddle = wanted.hints.get("dialect") == "paddle"
        said = wanted.extras.get(SCHEDULER, wanted.extras.get("scheduler")) if paddle else None
        self.scheduler = said if isinstance(said, Mapping) else None

    def target(self) -> Target:
        files: list[TargetFile] = []
        for rank in self.laid.ranks():
            if self._writes_model(rank):
                files.append(self._model_file(rank))
            if self.optimizes:
                files.append(self._optimizer_file(rank))
            if self.averages:
                files.append(self._average_file(rank))
        if self.meta:
            files.append(whole_file(META, json.dumps(self._meta()).encode("ascii")))
        if self.optimizes:  # a rank's mark that its optimizer's file is whole
            files += [whole_file(f"saved_signal_{rank.number}", b"1") for rank in self.laid.ranks()]
        files += self._extras()
        copies = [TargetFile(path, size, copy_of=path) for path, size in self.wanted.sidefiles]
        taken = {file.path for file in files}
        copies = [file for file in copies if file.path not in taken]
        config = config_of(self.wanted)
        if config and not any(file.path == "config.json" for file in copies):
            said = {key: value for key, value in config.items() if key != HEADS}
            files += (
                [whole_file("config.json", json.dumps(said, indent=2, default=str).encode("ascii"))] if said else []
            )
        self._say()
        return Target("paddle", (*files, *copies), notes=tuple(dict.fromkeys(self.notes)))

    # -- names -----------------------------------------------------------------------------------------------------------

    def _kept_names(self) -> Mapping[str, str]:
        """The source's static names, where every stage and expert rank holds what it held; {} else."""
        own, before = paddle_hints(self.wanted), self.wanted.hints.get("degrees")
        names = own.get("names")
        if not isinstance(names, Mapping) or not isinstance(before, Mapping) or not names:
            return {}
        d = self.laid.degrees
        same = (before.get("pp", 1), before.get("ep", 1)) == (d.pp, d.ep)
        same = same and (not self.laid.by_tensor or before.get("tp", 1) == d.tp)
        counts = own.get("counts")
        if not same or d.pp > 1 and tuple(counts or ()) != self.laid.stages.counts:
            return {}
        if not all(type(names.get(name)) is str for name in self.laid.parameters):
            return {}
        for rank in self.laid.ranks():  # one name, one tensor; tied ones aside
            here = [block.parameter for block in self.laid.blocks(rank)]
            present = {p.name for p in here}
            if len({names[p.name] for p in here}) < sum(p.alias not in present for p in here):
                return {}
        return names

    def _static(self, rank: Rank) -> Mapping[str, str]:
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

    def _suffix(self, rank: Rank, *, shard: bool, expert: bool = False) -> str:
        d = self.laid.degrees
        tokens = [f"tp{rank.tp:02d}"] if d.tp > 1 else []
        tokens += [f"pp{rank.pp:02d}"] if d.pp > 1 else []
        tokens += [f"shard{rank.shard:02d}"] if shard and d.sharding > 1 else []
        tokens += [f"moe_sharding{rank.ep:02d}"] if expert and d.ep > 1 else []
        return f".{'_'.join(tokens)}" if tokens else ""

    # -- the model -------------------------------------------------------------------------------------------------------

    def _number(self, state: str, parameter: Parameter) -> int | None:
        """The wanted tensor that is the parameter's state, or the one of the parameter that it is tied to."""
        number = self.at.get((state, parameter.name))
        if number is not None or state == MODEL:
            return number
        tied = [p.name for p in self.laid.parameters.values() if p.alias == parameter.name] if parameter.trained else []
        others = [*tied] if parameter.alias is None else [parameter.alias]
        return next((self.at[state, name] for name in others if (state, name) in self.at), None)

    def _writes_model(self, rank: Rank) -> bool:
        if self.kind == IO:
            return True
        return rank.moe_shard == 0 if self.laid.degrees.ep > 1 else rank.shard == 0

    def _model_blocks(self, rank: Rank) -> list[Block]:
        """The parameters that lie in the rank's model file."""
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

    def _model_file(self, rank: Rank) -> TargetFile:
        composer = PaddleComposer()
        state: dict[str, ArrayRef] = {}
        for block in self._model_blocks(rank):
            number = self._number(MODEL, block.parameter)
            if number is not None:
                state[block.parameter.name] = self._array(composer, Share(block, None), number)
        static = self._static(rank)
        suffix = self._suffix(rank, shard=self.kind == IO, expert=self.kind == PLAIN)
        return composer.file(f"{self._stem()}{suffix}.pdparams", state, {name: static[name] for name in state})

    def _stem(self) -> str:
        said = paddle_hints(self.wanted).get("stem")  # a unified checkpoint's is another format's word
        return said if type(said) is str and said.isidentifier() and said.endswith("model_state") else "model_state"

    # -- the optimizer and the average -------------------------------------------------------------------------------------

    def _array(self, composer: PaddleComposer, share: Share, number: int) -> ArrayRef:
        """A rank's part of a wanted tensor: a share of its parameter, or the whole where it is a number of its own."""
        tensor, block = self.wanted.tensors[number], share.block
        if tensor.shape != block.parameter.shape:
            if prod(tensor.shape) == 1:
                return composer.tensor(tensor.shape, tensor.dtype, [Part(number, whole(tensor.shape), 0)])
            if block.of > 1 or share.span is not None:
                raise UsageError(
                    f"the state {tensor.key.state} has shape {list(tensor.shape)}, its parameter {list(block.parameter.shape)}: "
                    "how ranks share it is not known", code=UNCUT, key=tensor.key.name,
                    hint="write it with --tp 1 and --zero 0 or --sharding v1, with --dequantize if it is quantised, or --drop optimizer",
                )  # fmt: skip
            return composer.tensor(tensor.shape, tensor.dtype, [Part(number, whole(tensor.shape), 0)])
        shape = block.shape if share.span is None else (share.span.length,)
        return composer.tensor(shape, tensor.dtype, parts_of(block, number, share.span))

    def _optimizer_file(self, rank: Rank) -> TargetFile:
        composer, static = PaddleComposer(), self._static(rank)
        shares = self.laid.shares(rank)
        masters: dict[str, Named] = {}
        for share in shares:
            number = self._number(MASTER, share.block.parameter)
            if number is not None:
                name = static[share.block.parameter.name]
                masters[name] = Named(name + INFIX, self._array(composer, share, number))
        arrays: dict[str, ArrayRef] = {}
        for state in self.states:
            for share in shares:
                number = self._number(state, share.block.parameter)
                if number is not None:
                    name = static[share.block.parameter.name]
                    infix = INFIX if name in masters else ""
                    key = f"{name}{infix}_{_ACCUMULATORS.get(state, state)}_0"
                    arrays[key] = self._array(composer, share, number)
        scheduler = {} if self.scheduler is None else {SCHEDULER: dict(self.scheduler)}
        path = f"optimizer{self._suffix(rank, shard=True)}.pdopt"
        if not masters:
            return composer.file(path, {**arrays, **scheduler}, {key: key for key in arrays})
        named = {key: Named(key, ref) for key, ref in arrays.items()}
        return composer.file(path, {**named, MASTER_WEIGHTS: masters, **scheduler}, None)

    def _average_file(self, rank: Rank) -> TargetFile:
        """Averages of parameters with a master as the masters lie, others whole where their weight lies."""
        composer, static = PaddleComposer(), self._static(rank)
        state: dict[str, Any] = {}
        masters: dict[str, Named] = {}
        for share in self.laid.shares(rank):
            parameter = share.block.parameter
            number = self._number(EMA, parameter)
            if number is not None and self._number(MASTER, parameter) is not None:
                name = static[parameter.name]
                masters[name] = Named(name + INFIX, self._array(composer, share, number))
        blocks = self._model_blocks(rank)
        if self.kind == PLAIN:
            blocks = [block for block in blocks if self.laid.group_rank(block, rank) == 0]
        for block in blocks:
            parameter = block.parameter
            number = self.at.get((EMA, parameter.name))
            if number is not None and self._number(MASTER, parameter) is None:
                name = static[parameter.name]
                state[parameter.name] = Named(name, self._array(composer, Share(block, None), number))
        return composer.file(f"ema{self._suffix(rank, shard=True)}.pdopt", {MASTER_WEIGHTS: masters, **state}, None)

    # -- the rest ----------------------------------------------------------------------------------------------------------

    def _meta(self) -> dict[str, Any]:
        """`model_meta.json`."""
        d = self.laid.degrees
        metas: dict[str, Any] = {}
        for rank in self.laid.ranks():
            key = f"tp{rank.tp:02d}_pp{rank.pp:02d}" + (f"_ep{rank.ep:02d}" if d.ep > 1 else "")
            if key in metas:
                continue
            static, blocks = self._static(rank), self.laid.blocks(rank)
            owner = self.laid.owner_of(rank) if d.version == V1 else {}
            metas[key] = {
                "param2rank": {static[name]: to for name, to in sorted(owner.items(), key=lambda item: item[1])},
                "structure_name_mapping": {block.parameter.name: static[block.parameter.name] for block in blocks},
                "param_meta": {block.parameter.name: self._described(block) for block in blocks},
                "param_meta_keys": ["shape", "dtype", "is_distributed", "no_sync"],
                "sharding_strategy": "ShardingV1" if d.version in (V1, "") else "ShardingV2",
                "enable_overlap": False,
            }
        config = {
            "pp_degree": d.pp, "mp_degree": d.tp, "sharding_degree": d.sharding, "ep_degree": d.ep,
            "moe_sharding_degree": d.moe_sharding if d.ep > 1 else 0,
        }  # fmt: skip
        return {"parallel_config": config, "sharding_metas": metas}

    def _described(self, block: Block) -> list[Any]:
        """[shape, dtype, is_distributed, no_sync], as Paddle notes them."""
        expert = block.parameter.expert is not None
        no_sync = expert and not self.laid.by_tensor
        apart = block.cut.dim is not None or expert or block.parameter.name.endswith(".e_score_correction_bias")
        return [list(block.shape), _CODES[block.parameter.dtype.name], apart, no_sync]

    def _extras(self) -> list[TargetFile]:
        """Files of plain values and of tensors that are no parameter's."""
        extras = {key: value for key, value in self.wanted.extras.items() if key != SCHEDULER or self.scheduler is None}
        paddle = self.wanted.hints.get("dialect") == "paddle"
        if self.scheduler is not None and "scheduler" not in extras:
            extras["scheduler"] = dict(self.scheduler)
        tensors = [(i, tensor) for i, tensor in enumerate(self.wanted.tensors) if tensor.key.state == EXTRAS]
        return extras_files(extras, tensors, paddle=paddle)

    def _say(self) -> None:
        """What a user should know of what was written."""
        trained = [p for p in self.laid.parameters.values() if p.trained]
        rounded = [p.name for p in trained if (MODEL, p.name) in self.at and self._number(MASTER, p) is not None]
        if self.kind == IO and rounded:
            self.notes.append(
                f"{len(rounded)} weights are written beside their fp32 masters: Paddle's sharding_io leaves them out and rounds"
                " the masters again when it loads; it does not look at them"
            )
        if self.laid.degrees.version == V1 and self.laid.degrees.ep > 1:
            self.notes.append(
                "PaddleFormers 1.2.0 runs expert ranks with sharding v2 alone: --sharding v2 is what it loads"
            )
        powers = {"beta1_pow_acc", "beta2_pow_acc"}
        if {"exp_avg", "exp_avg_sq"} <= set(self.states) and not powers <= set(self.states):
            self.notes.append(
                "the source has no beta1_pow_acc and beta2_pow_acc, which Paddle's Adam asks for: they are left out, not guessed"
            )


def parts_of(block: Block, number: int, span: Span | None) -> list[Part]:
    """Wanted tensor `number` as it fills a block, or the span of its line that begins at element 0 of an array."""
    steps = contiguous_strides(block.shape)
    first = 0 if span is None else span.start
    boxes: Sequence[Box] = [whole(block.shape)] if span is None else flat_boxes(block.shape, span.start, span.stop)
    out = []
    for box in boxes:
        for there, here in block.boxes:
            shared = box & here
            if shared is None:
                continue
            start = sum(o * s for o, s in zip(shared.offset, steps, strict=True)) - first
            reach = sum((n - 1) * s for n, s in zip(shared.shape, steps, strict=True)) + 1
            logical = shared.translate(here.offset, sign=-1).translate(there.offset)
            out.append(Part(number, logical, start, None if reach == shared.numel else steps))
    return out
