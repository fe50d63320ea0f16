"""The layout of a Paddle job that is to be written: for wanted tensors and degrees, every rank and its part of every
parameter.

Stage and names decide which parameters a rank has (`paddle.job`), the tensor rank which part of them (`paddle.rules`):
a `Block`. Experts are not cut on their expert rank. If the ranks of the tensor group divide the experts (`moe_group` of
ERNIE's classes, "mp" unless the config says otherwise), each expert is complete on one tensor rank, and is sharded like
any other parameter: `LaidParameter.by_tensor`. The states of a block are sharded over the ranks of its group, those of
dense layers over `sharding`, those of experts over `moe_sharding`: unsharded at an owner (v1), or as flat slices with
padding (v2): a `BlockShare`.

    laid = settle(wanted)
    for rank in laid.degrees.ranks():
        laid.blocks(rank)     # the model as the rank computes with it
        laid.shares(rank)     # its part of master weights and moments

`--dp` counts all data ranks. They are sharding ranks unless `--zero 0`, or the source's were not; what is left over are
copies, which keep no files. Expert ranks are carved out of all tensor and sharding ranks of a stage, and Paddle wants
EP to be a multiple of TP then and every data rank to shard: `--tp 2 --dp 4 --ep 4` is sharding 4, moe_sharding 2.

Parameters are derived from the wanted tensors, which are all there is to go by:

    w [model] BF16 (8, 4), w [master], w [exp_avg], w [beta1_pow_acc] (1,)
          Parameter("w", (8, 4), BF16, trained=True, ...)

Sources: PaddleFormers 1.2.0 `trainer/training_args.py` (`_post_init_parallel_degree`, order of ranks),
`nn/moe/utils.py` (`_parse_moe_group`). Codes: E1251 tensor and expert degrees, E1252 degrees that Paddle lacks, E1253
sharding. Cost: some us a parameter, tensor rank and expert rank; a rank more of the sharding group costs its shares.
What it does not do: names inside files, files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import gcd, lcm, prod
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import check_count
from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.mesh import divisors_near
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.systems.paddle.job import (
    V1,
    V2,
    Items,
    JobDegrees,
    OptimizerMember,
    PaddleHints,
    PaddleRank,
    PaddleStages,
    ParameterSpan,
    items_of,
    owners,
    spans,
    stages_of,
)
from ckpt_tool.systems.paddle.options import PaddleOptions
from ckpt_tool.systems.paddle.rules import HEADS, PaddleCut, cut_of, is_expert, local_boxes, model_type_of, text_config
from ckpt_tool.systems.paddle.stored_names import EMBEDDINGS, HEAD, registration_order

# -- degrees -----------------------------------------------------------------------------------------------------------

DEGREE = "E1251"
LACKS = "E1252"
SHARDING = "E1253"
_TENSOR = ("mp", "model", "tp", "mpdp")  # `moe_group`s that are the tensor group


def paddle_hints(wanted: Wanted) -> PaddleHints:
    """The hints of the source's reader for Paddle's formats; empty ones for a source of another system."""
    return wanted.hints.get(PaddleHints) or PaddleHints()


def config_of(wanted: Wanted) -> Mapping[str, Any]:
    """The model's config as far as it is known: values of `--config` go before the source's own."""
    known = {**(paddle_hints(wanted).config or {}), **(wanted.wish.config or {})}
    seen = wanted.extras.get(HEADS)
    return known or ({HEADS: seen} if isinstance(seen, Mapping) else {})


def degrees_of(wanted: Wanted, experts: int, notes: list[str]) -> JobDegrees:
    """The degrees of the job, from the options and the source.

    Args:
        wanted: The output.
        experts: The number that the expert ranks must divide; 0 without experts.
        notes: Receives lines about degrees that were changed.

    Raises:
        UsageError: E1251 to E1253.
    """
    stated = wanted.wish.degrees
    tp, pp, ep, dp = (max(1, stated.at(name)) for name in ("tp", "pp", "ep", "dp"))
    for name in ("vpp", "etp", "cp"):
        if stated.at(name) > 1 and not (name == "etp" and stated.etp == tp):
            raise UsageError(
                f"--{name} {stated.at(name)}: paddle is written for tensor, pipeline, expert and data ranks",
                code=LACKS,
                hint=f"the nearest that it takes is --{name} 1",
            )

    zero = wanted.wish.zero
    if ep > 1:
        dp = _fit_data_ranks(tp, ep, dp, experts, notes)
        if zero == 0 and dp > 1:
            raise UsageError(
                f"--zero 0 with --ep {ep}: Paddle's expert ranks are carved out of sharding ranks",
                code=SHARDING,
                hint="the nearest that it takes is --zero 1",
            )
        sharding = dp
    elif zero is None:
        sharding = _inherit_sharding(wanted, dp)
    else:
        sharding = 1 if zero == 0 else dp

    wish = wanted.wish.of(PaddleOptions).sharding or paddle_hints(wanted).sharding or (V2 if ep > 1 else V1)
    if sharding == 1 and wanted.wish.of(PaddleOptions).sharding:
        notes.append(nothing_shared(wish))
    if zero is not None and zero > 1:
        notes.append(f"--zero {zero} is written as sharding stage 1: Paddle's files share states, not gradients")
    return JobDegrees(tp, pp, ep, dp, sharding, wish if sharding > 1 else "")


def nothing_shared(version: object) -> str:
    """The note for a `--sharding` that has no effect, because one rank holds every state."""
    return f"--sharding {version}: no data ranks share states here, so it changes nothing"


def _fit_data_ranks(tp: int, ep: int, dp: int, experts: int, notes: list[str]) -> int:
    """The number of data ranks, raised so that `ep` divides the ranks of a stage. Raises UsageError E1251."""
    if not experts:
        raise UsageError(f"--ep {ep}: the model has no experts", code=DEGREE, hint="leave --ep off")

    def runs(n: int) -> bool:
        """Whether Paddle can run with `n` expert ranks."""
        return experts % n == 0 and (n == 1 or n % tp == 0)

    if not runs(ep):
        valid = [n for n in range(1, min(experts, 1 << 16) + 1) if runs(n)]
        near = sorted(sorted(valid, key=lambda n: abs(n - ep))[:3])
        why = f"{experts} experts do not divide by {ep}" if experts % ep else f"{ep} is no multiple of --tp {tp}"
        raise UsageError(
            f"--ep {ep}: {why}",
            code=DEGREE,
            hint=f"--ep that Paddle can run here: {', '.join(map(str, near))} (tp * sharding = ep * moe_sharding)",
        )
    # Expert ranks are carved out of the tp * dp ranks of a stage, so `ep` must divide that number.
    least = lcm(tp * dp, ep) // tp
    if least != dp:
        notes.append(
            f"data ranks raised from {dp} to {least}: {ep} expert ranks are carved out of tensor and data ranks"
        )
    return least


def _inherit_sharding(wanted: Wanted, dp: int) -> int:
    """The default number of sharding ranks: that of the source if it fits, else all data ranks."""
    before = wanted.hints.get(Degrees)
    had = paddle_hints(wanted).sharding_degree
    if had is None or before is None:
        return dp
    if before.at("dp") == dp and dp % max(had, 1) == 0:
        return max(had, 1)
    return dp if had > 1 or before.at("dp") == 1 else 1


def check_heads(config: Mapping[str, Any], degrees: JobDegrees, names: Iterable[str]) -> None:
    """Raise UsageError E1251 if tensor ranks would split a head, or a group of heads that is fused in one matrix."""
    facts = text_config(config)
    fused = any(".qkv_proj." in name for name in names)
    for key, what in (("num_attention_heads", "attention heads"), ("num_key_value_heads", "groups of fused heads")):
        heads = facts.get(key)
        if type(heads) is int and heads > 0 and heads % degrees.tp and (fused or key == "num_attention_heads"):
            raise UsageError(
                f"--tp {degrees.tp} does not divide the {heads} {what}",
                code=DEGREE,
                hint=f"--tp near that does: {', '.join(map(str, _near(heads, degrees.tp)))}",
            )


def _near(n: int, wanted: int) -> list[int]:
    """Divisors of `n` near `wanted`; 1 alone for a number that no model has."""
    return divisors_near(n if n < 1 << 20 else 0, wanted) or [1]


def experts_by_tensor(experts: int, degrees: JobDegrees, config: Mapping[str, Any]) -> bool:
    """Whether the tensor ranks divide the experts among themselves (`moe_group`; ERNIE's classes default to "mp").

    Raises UsageError E1251 if they can't evenly.
    """
    if degrees.tp == 1 or degrees.ep > 1 or not experts:
        return False
    facts = text_config(config)
    stated = facts.get("moe_group")
    default = stated is None and model_type_of(facts).startswith("ernie4_5_moe")
    if not default and stated not in _TENSOR:
        return False
    if experts % degrees.tp:
        near = _near(experts, degrees.tp)
        raise UsageError(
            f"--tp {degrees.tp}: tensor ranks share {experts} experts among themselves",
            code=DEGREE,
            hint=f"--tp near that does: {', '.join(map(str, near))}",
        )
    return True


# -- parameters --------------------------------------------------------------------------------------------------------

_SCALARS = ("beta1_pow_acc", "beta2_pow_acc", "step")
Rows = Mapping[str, Mapping[str, WantedTensor]]  # name -> state -> tensor


class Parameter(NamedTuple):
    """A parameter or buffer of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: DType  # what it is computed with
    trained: bool  # the optimizer has states of it
    # The only expert rank (or tensor rank, `LaidParameter.by_tensor`) with this routed expert; None if all have it.
    expert: int | None
    stages: tuple[int, ...]  # all that hold it
    alias: str | None = None  # the tied parameter whose states are this one's too, None for others


def rows_of(tensors: Sequence[WantedTensor]) -> dict[str, dict[str, WantedTensor]]:
    """The wanted tensors as {name: {state: tensor}}, without extras."""
    out: dict[str, dict[str, WantedTensor]] = {}
    for tensor in tensors:
        if tensor.key.state != EXTRAS:
            out.setdefault(tensor.key.name, {})[tensor.key.state] = tensor
    return out


def experts_in(names: Sequence[str]) -> int:
    """The greatest common divisor of the layers' numbers of experts, which expert ranks must divide; 0 without any."""
    counts = _expert_counts(names).values()
    return gcd(*counts) if counts else 0


def expert_of(name: str) -> tuple[str, int | None]:
    """(prefix before the number, global number of the expert) of a routed expert's tensor; ("", None) for others."""
    if not is_expert(name):
        return "", None
    front, _, rest = name.rpartition("experts.")
    word = rest.partition(".")[0]
    return front, int(word) if word.isdecimal() and len(word) < 10 else None


def parameters_of(
    names: Sequence[str],
    rows: Rows,
    stages: PaddleStages,
    config: Mapping[str, Any],
    statics: Mapping[str, str],
    holders: int,
) -> dict[str, Parameter]:
    """The parameters of the model, in the order of `names`.

    Args:
        names: Structured names, in the order of registration.
        rows: The wanted tensors.
        stages: The pipeline.
        config: The model's config.
        statics: The source's static names.
        holders: The number of ranks that experts are distributed over.
    """
    pair = tied_pair(names, rows, stages.items, config, statics)
    local = {front: ceil_div(count, holders) for front, count in _expert_counts(names).items()}
    # Without any optimizer states every parameter counts as trained.
    trains = any(state not in (MODEL, EMA) for states in rows.values() for state in states)
    out = {}
    for name in names:
        states = rows[name]
        front, number = expert_of(name)
        expert = number // local[front] if number is not None and holders > 1 else None
        trained = not trains or any(state not in (MODEL, EMA) for state in states)
        alias = None
        if pair and name in pair:
            other = pair[1 - pair.index(name)]
            trained = trained or any(state not in (MODEL, EMA) for state in rows[other])
            alias = pair[0] if name == pair[1] else None
        out[name] = Parameter(name, _shape(states), _dtype(states), trained, expert, (stages.of(name),), alias)
    return out


def _expert_counts(names: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        front, number = expert_of(name)
        if number is not None:
            counts[front] = max(counts.get(front, 0), number + 1)
    return {front: check_count(count, len(names), "experts by the tensors' names") for front, count in counts.items()}


def tied_pair(
    names: Sequence[str], rows: Rows, items: Items, config: Mapping[str, Any], statics: Mapping[str, str]
) -> tuple[str, str] | None:
    """(embedding, head) if they are one tensor, else None.

    The config decides; without it they are tied if they share a static name, or if only one of them has states.
    """
    first = [name for name in names if items.at(name) == 0 and name.endswith(EMBEDDINGS)]
    last = [name for name in names if name.endswith(HEAD)]
    # Tied tensors have one shape; a head of another one can't share the embedding's bytes.
    if len(first) != 1 or len(last) != 1 or _shape(rows[first[0]]) != _shape(rows[last[0]]):
        return None
    pair = first[0], last[0]
    stated = text_config(config).get("tie_word_embeddings")
    if isinstance(stated, bool):
        return pair if stated else None
    embedding, head = pair
    one_has_states = _is_trained(rows[embedding]) != _is_trained(rows[head])
    one_static_name = embedding in statics and statics.get(embedding) == statics.get(head)
    return pair if one_static_name or one_has_states else None


def _is_trained(states: Mapping[str, WantedTensor]) -> bool:
    """Whether the parameter has states of the optimizer (or a master weight)."""
    return any(state not in (MODEL, EMA) for state in states)


def _shape(states: Mapping[str, WantedTensor]) -> tuple[int, ...]:
    """The parameter's shape, from any of its tensors that is not a scalar of the optimizer."""
    for state in (MODEL, MASTER, EMA):
        if state in states:
            return states[state].shape
    return next((t.shape for state, t in states.items() if state not in _SCALARS), next(iter(states.values())).shape)


def _dtype(states: Mapping[str, WantedTensor]) -> DType:
    """The dtype that the model computes with. With only a master it is bf16: Paddle leaves out no other weights."""
    if MODEL in states:
        return states[MODEL].dtype
    return DTYPES["BF16"] if MASTER in states else DTYPES["F32"]


# -- who holds what ----------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A tensor rank's part of a parameter."""

    parameter: Parameter
    shape: tuple[int, ...]  # of the block
    boxes: tuple[tuple[Box, Box], ...]  # (box in the parameter, box in the block), tiling the block
    cut: PaddleCut  # how the parameter is cut; PaddleCut(None) if each rank has a full copy
    rank: int  # number of this part
    of: int  # number of parts

    @property
    def offset(self) -> tuple[int, ...]:
        """The block's offset in the concatenation of all tensor ranks' blocks (flex checkpoints' global tensor)."""
        return tuple(self.rank * n if axis == self.cut.dim else 0 for axis, n in enumerate(self.shape))


class BlockShare(NamedTuple):
    """What a rank keeps of a block's states."""

    block: Block
    span: ParameterSpan | None  # under v2: the part of the block's row-major order; None for the complete block


class LaidParameter:
    """The complete layout of a job. parameters: by name, in the order in which Paddle registers them."""

    def __init__(
        self,
        degrees: JobDegrees,
        stages: PaddleStages,
        parameters: Mapping[str, Parameter],
        config: Mapping[str, Any],
        notes: Sequence[str],
        *,
        by_tensor: bool = False,
    ) -> None:
        self.degrees = degrees
        self.stages = stages
        self.parameters = parameters
        self.by_tensor = by_tensor
        self.config = config
        self.notes = tuple(notes)
        self._by_stage: list[list[Parameter]] = [[] for _ in range(degrees.pp)]
        for parameter in parameters.values():
            for stage in parameter.stages:
                first = (
                    parameter.alias is not None and degrees.pp > 1
                )  # a pipeline makes shared layers before all others
                self._by_stage[stage].insert(0 if first else len(self._by_stage[stage]), parameter)
        # Ranks that differ only in their sharding rank have the same blocks and owners.
        self._blocks = lru_cache(maxsize=None)(self._make_blocks)
        self._owners = lru_cache(maxsize=None)(self._make_owners)

    def blocks(self, rank: PaddleRank) -> Sequence[Block]:
        """The blocks of the rank's model, in the order of registration."""
        return self._blocks(rank.pp, rank.tp, rank.ep)

    def _make_blocks(self, pp: int, tp: int, ep: int) -> tuple[Block, ...]:
        out = []
        for parameter in self._by_stage[pp]:
            if parameter.expert is not None and parameter.expert != (tp if self.by_tensor else ep):
                continue
            alone = PaddleCut(None) if parameter.expert is not None else None
            cut = alone or cut_of(parameter.name, parameter.shape, self.config, self.degrees.tp, ep=self.degrees.ep)
            shape, boxes = local_boxes(parameter.shape, cut, self.degrees.tp, tp)
            of = 1 if cut.dim is None else self.degrees.tp
            out.append(Block(parameter, shape, tuple(boxes), cut, tp if of > 1 else 0, of))
        return tuple(out)

    def optimized(self, rank: PaddleRank) -> list[Block]:
        """The blocks of the optimizer's list of parameters, which contains a tied pair once."""
        every = self.blocks(rank)
        here = {block.parameter.name for block in every}
        return [b for b in every if b.parameter.trained and b.parameter.alias not in here]

    def shares(self, rank: PaddleRank) -> list[BlockShare]:
        """What the rank keeps of the states, in the optimizer's order; under v1 in the order of assignment."""
        blocks = self.optimized(rank)
        if not self.degrees.version:
            return [BlockShare(block, None) for block in blocks]
        if self.degrees.version == V1:
            blocks_by_name = {block.parameter.name: block for block in blocks}
            owned: list[BlockShare] = []
            for name, owner in self.owner_of(rank).items():
                block = blocks_by_name[name]
                if owner == self.group_rank(block, rank):
                    owned.append(BlockShare(block, None))
            return owned

        held: dict[str, ParameterSpan] = {}
        for colour in self.colours(blocks):
            ranks = self.group_size(colour[0])
            own = self.group_rank(colour[0], rank)
            held |= spans([_member(b) for b in colour], ranks, own)
        return [BlockShare(b, held[b.parameter.name]) for b in blocks if b.parameter.name in held]

    def group_rank(self, block: Block, rank: PaddleRank) -> int:
        """The rank's number in the group over which the block's states are sharded."""
        return rank.moe_shard if self._is_in_expert_group(block) else rank.shard

    def group_size(self, block: Block) -> int:
        """The size of the group over which the block's states are sharded."""
        return self.degrees.moe_sharding if self._is_in_expert_group(block) else self.degrees.sharding

    def _is_in_expert_group(self, block: Block) -> bool:
        """Whether the block's states are sharded in the experts' own group."""
        return block.parameter.expert is not None and not self.by_tensor

    def colours(self, blocks: Sequence[Block]) -> list[list[Block]]:
        """The blocks of each sharding group (Paddle's colour): dense ones first, then experts, without empty groups."""
        dense = [block for block in blocks if not self._is_in_expert_group(block)]
        experts = [block for block in blocks if self._is_in_expert_group(block)]
        return [kind for kind in (dense, experts) if kind]

    def owner_of(self, rank: PaddleRank) -> Mapping[str, int]:
        """Under v1: the rank, in its group, that owns each parameter of the rank's model."""
        return self._owners(rank.pp, rank.tp, rank.ep)

    def _make_owners(self, pp: int, tp: int, ep: int) -> dict[str, int]:
        any_rank = PaddleRank(0, pp, tp, 0, ep, 0)  # owners are the same whichever rank of the group asks
        out: dict[str, int] = {}
        for colour in self.colours(self.optimized(any_rank)):
            out |= owners([_member(b) for b in colour], self.group_size(colour[0]))
        return out


def _member(block: Block) -> OptimizerMember:
    dtype = block.parameter.dtype
    return OptimizerMember(block.parameter.name, prod(block.shape), dtype.name, max(1, dtype.bits // 8))


def settle(wanted: Wanted) -> LaidParameter:
    """Decide the layout of all wanted tensors. Raises UsageError E1250 to E1253, and as `paddle.rules.cut_of`."""
    own = paddle_hints(wanted)
    config = config_of(wanted)
    rows = rows_of(wanted.tensors)
    names = registration_order(list(rows), tuple(own.names or ()))
    items = items_of(names, config)
    notes: list[str] = []
    degrees = degrees_of(wanted, experts_in(names), notes)
    if degrees.ep == 1 and all(state in (MODEL, EMA) for states in rows.values() for state in states):
        degrees = degrees._replace(sharding=1, version="")  # there is nothing to share

    stages = stages_of(items, degrees.pp, wanted.wish.pp_split, own.counts or ())
    if stages.method == "uniform":
        notes.append(
            f"{items.layers} decoder layers do not divide by {degrees.pp} stages: cut as Paddle's uniform method does, "
            f"{', '.join(map(str, stages.counts))}"
        )

    # Experts are spread over the ranks of one of the two groups, never of both.
    by_tensor = experts_by_tensor(experts_in(names), degrees, config)
    holders = degrees.tp if by_tensor else degrees.ep
    parameters = parameters_of(names, rows, stages, config, own.names or {}, holders)
    check_heads(config, degrees, names)
    laid = LaidParameter(degrees, stages, parameters, config, notes, by_tensor=by_tensor)
    if degrees.version == V1 and degrees.ep > 1:
        notes.append("sharding v1 with expert ranks: experts are dealt to owners inside their own sharding group")
        laid.notes = tuple(notes)

    for rank in laid.degrees.ranks():  # compute every cut now, so that errors are raised before anything is written
        if rank.shard == 0 or rank.ep:
            laid.blocks(rank)

    return laid
