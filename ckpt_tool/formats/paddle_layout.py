"""Who holds what in a Paddle job: for degrees that were asked for, every rank and its part of every parameter.

The one idea: a rank is (stage, tensor rank, sharding rank). Stage and names say which parameters (`paddle_stages`), the tensor
rank which part of them (`paddle_rules`): a `Block`. With expert parallelism the ranks of a stage are numbered a second time,
r = shard * TP + tp: experts of expert rank r mod EP, whole, and r div EP is the rank in the experts' own sharding group. So

    tp * sharding == ep * moe_sharding        tp 2, sharding 4, ep 4:  r = 0..7, expert ranks 0 1 2 3 0 1 2 3

The states of a block are dealt to the ranks of its group, dense ones over `sharding`, experts over `moe_sharding`: whole to an
owner (v1) or as flat slices with padding (v2; `paddle_slices`): a `Share`.

    laid = settle(wanted)
    for rank in laid.ranks():
        laid.blocks(rank)     # the model as the rank computes with it
        laid.shares(rank)     # its part of master weights and moments

`--dp` counts all data ranks. They are sharding ranks unless `--zero 0`, or the source's were not; what is left over are copies,
which keep no files. Expert ranks are carved out of all tensor and sharding ranks of a stage, and Paddle wants EP to be a multiple
of TP then and all data ranks to shard.

Sources: PaddleFormers 1.2.0 `trainer/training_args.py` (degrees, order of ranks), paddlepaddle 3.3.1
`fleet/base/topology.py` (`EPHybridCommunicateGroup`), and those of the modules named. Codes: E1250 stages, E1251 tensor and
expert degrees, E1252 degrees that Paddle lacks, E1253 sharding. Cost: some us a parameter, tensor rank and expert rank; a rank
more of the sharding group costs its shares. What it does not do: names inside files, files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import lcm, prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.mesh import divisors_near
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.paddle_order import registration_order
from ckpt_tool.formats.paddle_rules import Cut, cut_of, is_expert, local_boxes, text_config
from ckpt_tool.formats.paddle_slices import BUFFER_MB, Member, Span, owners, spans
from ckpt_tool.formats.paddle_stages import Items, Stages, items_of, stages_of

DEGREE, LACKS, SHARDING = "E1251", "E1252", "E1253"
V1, V2 = "v1", "v2"
_SCALARS = ("beta1_pow_acc", "beta2_pow_acc", "step")


class Degrees(NamedTuple):
    """dp: all data ranks. sharding: those that share the states (1: nobody does). version: `v1`, `v2`, "" when nobody does."""

    tp: int
    pp: int
    ep: int
    dp: int
    sharding: int
    version: str

    @property
    def moe_sharding(self) -> int:
        """Ranks that share the states of one expert rank's experts."""
        return self.tp * self.sharding // self.ep if self.ep > 1 else self.sharding


class Rank(NamedTuple):
    """A rank that keeps something of its own. number: in the job, as the Trainer orders them. ep: its expert rank. moe_shard:
    its rank in the experts' sharding group (without expert parallelism `shard`)."""

    number: int
    pp: int
    tp: int
    shard: int
    ep: int
    moe_shard: int


class Parameter(NamedTuple):
    """A parameter or buffer of the model. dtype: what it is computed with. trained: has the optimizer a state of it? expert: is
    it a routed expert's? stages: all that hold it. alias: the tied parameter whose states are this one's too, None for others."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    trained: bool
    expert: int | None
    stages: tuple[int, ...]
    alias: str | None = None


class Block(NamedTuple):
    """A tensor rank's part of a parameter. shape: its own. boxes: (box in the parameter, box in the block), tiling the block.
    cut: how tensor ranks part it; rank, of: this part's number; (Cut(None), 0, 1) where each holds the whole."""

    parameter: Parameter
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Box], ...]
    cut: Cut
    rank: int
    of: int

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the block begins when those of all tensor ranks are laid end to end (what flex checkpoints call global)."""
        return tuple(self.rank * n if axis == self.cut.dim else 0 for axis, n in enumerate(self.shape))


class Share(NamedTuple):
    """What a rank keeps of a block's states: the whole block in its own shape, or with v2 a span of its row-major line."""

    block: Block
    span: Span | None


class Laid:
    """Everything that was decided. parameters: by name, in the order in which Paddle registers them."""

    def __init__(
        self, degrees: Degrees, stages: Stages, parameters: Mapping[str, Parameter], config: Mapping[str, Any],
        notes: Sequence[str], buffer_mb: int,
    ) -> None:  # fmt: skip
        self.degrees, self.stages, self.parameters = degrees, stages, parameters
        self.config, self.notes, self.buffer_mb = config, tuple(notes), buffer_mb
        self._by_stage: list[list[Parameter]] = [[] for _ in range(degrees.pp)]
        for parameter in parameters.values():
            for stage in parameter.stages:
                self._by_stage[stage].append(parameter)
        self._blocks = lru_cache(maxsize=None)(self._make_blocks)
        self._owners = lru_cache(maxsize=None)(self._make_owners)

    def ranks(self) -> Iterator[Rank]:
        """Every rank but the copies that plain data parallelism makes, stage by stage, tensor ranks fastest."""
        for pp in range(self.degrees.pp):
            for shard in range(self.degrees.sharding):
                for tp in range(self.degrees.tp):
                    yield self.rank(pp, tp, shard)

    def rank(self, pp: int, tp: int, shard: int) -> Rank:
        d = self.degrees
        number = (shard * d.pp + pp) * d.tp + tp
        if d.ep == 1:
            return Rank(number, pp, tp, shard, 0, shard)
        moe_shard, ep = divmod(shard * d.tp + tp, d.ep)
        return Rank((moe_shard * d.pp + pp) * d.ep + ep, pp, tp, shard, ep, moe_shard)

    def blocks(self, rank: Rank) -> Sequence[Block]:
        """What the rank's model consists of, in the order of registration."""
        return self._blocks(rank.pp, rank.tp, rank.ep)

    def _make_blocks(self, pp: int, tp: int, ep: int) -> tuple[Block, ...]:
        out = []
        for parameter in self._by_stage[pp]:
            if parameter.expert is not None and parameter.expert != ep:
                continue
            cut = cut_of(parameter.name, parameter.shape, self.config, self.degrees.tp, ep=self.degrees.ep)
            shape, boxes = local_boxes(parameter.shape, cut, self.degrees.tp, tp)
            whole = cut.dim is None
            out.append(Block(parameter, shape, tuple(boxes), cut, 0 if whole else tp, 1 if whole else self.degrees.tp))
        return tuple(out)

    def optimized(self, rank: Rank) -> list[Block]:
        """The blocks of the optimizer's list of parameters: a tied pair stands in it once."""
        every = self.blocks(rank)
        here = {block.parameter.name for block in every}
        return [b for b in every if b.parameter.trained and b.parameter.alias not in here]

    def shares(self, rank: Rank) -> list[Share]:
        """What the rank keeps of the states, in the order of the optimizer's list; under v1 in that of dealing."""
        blocks = self.optimized(rank)
        if not self.degrees.version:
            return [Share(block, None) for block in blocks]
        if self.degrees.version == V1:
            named = {block.parameter.name: block for block in blocks}
            dealt = self.owner_of(rank).items()
            return [Share(b, None) for name, to in dealt if to == self.group_rank(b := named[name], rank)]
        held: dict[str, Span] = {}
        for colour in _colours(blocks):
            ranks = self.degrees.sharding if colour[0].parameter.expert is None else self.degrees.moe_sharding
            own = rank.shard if colour[0].parameter.expert is None else rank.moe_shard
            held |= spans([_member(b) for b in colour], ranks, own, buffer_mb=self.buffer_mb)
        return [Share(b, held[b.parameter.name]) for b in blocks if b.parameter.name in held]

    def group_rank(self, block: Block, rank: Rank) -> int:
        """The rank's number in the group that shares the block's states."""
        return rank.shard if block.parameter.expert is None else rank.moe_shard

    def owner_of(self, rank: Rank) -> Mapping[str, int]:
        """Under v1: the rank, in its group, that owns each parameter of the rank's model."""
        return self._owners(rank.pp, rank.tp, rank.ep)

    def _make_owners(self, pp: int, tp: int, ep: int) -> dict[str, int]:
        any_rank = Rank(0, pp, tp, 0, ep, 0)
        out: dict[str, int] = {}
        for colour in _colours(self.optimized(any_rank)):
            dense = colour[0].parameter.expert is None
            out |= owners([_member(b) for b in colour], self.degrees.sharding if dense else self.degrees.moe_sharding)
        return out


def _colours(blocks: Sequence[Block]) -> list[list[Block]]:
    """Dense and experts' blocks, each in order; an empty kind is left out. With one expert rank all are of one colour."""
    dense = [block for block in blocks if block.parameter.expert is None]
    experts = [block for block in blocks if block.parameter.expert is not None]
    return [kind for kind in (dense, experts) if kind]


def _member(block: Block) -> Member:
    dtype = block.parameter.dtype
    return Member(block.parameter.name, prod(block.shape), dtype.name, max(1, dtype.bits // 8))


# -- deciding -----------------------------------------------------------------------------------------------------------


def settle(wanted: Wanted) -> Laid:
    """All of it for what is wanted. Raises UsageError E1250 to E1253, and as `paddle_rules.cut_of`."""
    own = paddle_hints(wanted)
    config = config_of(wanted)
    rows = _rows(wanted.tensors)
    names = registration_order(list(rows), tuple(own.get("names") or ()))
    items = items_of(names, config)
    notes: list[str] = []
    degrees = degrees_of(wanted, _experts(names), notes)
    if degrees.ep == 1 and all(state in (MODEL, EMA) for states in rows.values() for state in states):
        degrees = degrees._replace(sharding=1, version="")  # there is nothing to share
    stages = stages_of(items, degrees.pp, wanted.options.get("pp_split") or (), own.get("counts") or ())
    if stages.method == "uniform":
        notes.append(
            f"{items.layers} decoder layers do not divide by {degrees.pp} stages: cut as Paddle's uniform method does, "
            f"{', '.join(map(str, stages.counts))}"
        )
    parameters = _parameters(names, rows, items, stages, degrees, config, own)
    _check_heads(config, degrees)
    said = own.get("comm_buffer_mb")
    laid = Laid(degrees, stages, parameters, config, notes, said if type(said) is int and said > 0 else BUFFER_MB)
    if degrees.version == V1 and degrees.ep > 1:
        notes.append("sharding v1 with expert ranks: experts are dealt to owners inside their own sharding group")
        laid.notes = tuple(notes)
    for rank in laid.ranks():  # every cut is tried before anything is laid out
        if rank.shard == 0 or rank.ep:
            laid.blocks(rank)
    return laid


def paddle_hints(wanted: Wanted) -> Mapping[str, Any]:
    """What the source's reader remembered for writing Paddle's formats; {} from a source of another system."""
    own = wanted.hints.get("paddle")
    return own if isinstance(own, Mapping) else {}


def config_of(wanted: Wanted) -> Mapping[str, Any]:
    """The model's config as far as anybody knows it: `--config`, else the source's own."""
    for said in (wanted.options.get("config"), paddle_hints(wanted).get("config"), wanted.hints.get("config")):
        if isinstance(said, Mapping) and said:
            return said
    return {}


def _rows(tensors: Sequence[WantedTensor]) -> dict[str, dict[str, WantedTensor]]:
    """name -> state -> tensor, extras aside."""
    out: dict[str, dict[str, WantedTensor]] = {}
    for tensor in tensors:
        if tensor.key.state != EXTRAS:
            out.setdefault(tensor.key.name, {})[tensor.key.state] = tensor
    return out


def _experts(names: Sequence[str]) -> int:
    """The number of experts that every layer with experts can be parted by: their greatest common number; 0 without any."""
    from math import gcd

    counts: dict[str, int] = {}
    for name in names:
        front, number = expert_of(name)
        if number is not None:
            counts[front] = max(counts.get(front, 0), number + 1)
    return gcd(*counts.values()) if counts else 0


def expert_of(name: str) -> tuple[str, int | None]:
    """(what stands before the number, the expert's global number) of a routed expert's tensor; ("", None) of others."""
    if not is_expert(name):
        return "", None
    front, _, rest = name.rpartition("experts.")
    word = rest.partition(".")[0]
    return front, int(word) if word.isdecimal() else None


def degrees_of(wanted: Wanted, experts: int, notes: list[str]) -> Degrees:
    """The degrees of the job. experts: the number that expert ranks must divide. Raises UsageError E1251 to E1253."""
    said: Mapping[str, int] = wanted.options.get("degrees") or {}
    tp, pp, ep, dp = (max(1, said.get(name, 1)) for name in ("tp", "pp", "ep", "dp"))
    for name in ("vpp", "etp", "cp"):
        if said.get(name, 1) > 1 and not (name == "etp" and said["etp"] == tp):
            raise UsageError(
                f"--{name} {said[name]}: paddle is written for tensor, pipeline, expert and data ranks", code=LACKS,
                hint=f"the nearest that it takes is --{name} 1",
            )  # fmt: skip
    zero = wanted.options.get("zero")
    if ep > 1:
        dp = _with_experts(tp, ep, dp, experts, notes)
        if zero == 0 and dp > 1:
            raise UsageError(
                f"--zero 0 with --ep {ep}: Paddle's expert ranks are carved out of sharding ranks", code=SHARDING,
                hint="the nearest that it takes is --zero 1",
            )  # fmt: skip
        sharding = dp
    else:
        sharding = 1 if zero == 0 else dp if zero else _inherited(wanted, dp)
    wish = wanted.options.get("sharding") or paddle_hints(wanted).get("sharding") or (V2 if ep > 1 else V1)
    if zero is not None and zero > 1:
        notes.append(f"--zero {zero} is written as sharding stage 1: Paddle's files share states, not gradients")
    return Degrees(tp, pp, ep, dp, sharding, wish if sharding > 1 else "")


def _with_experts(tp: int, ep: int, dp: int, experts: int, notes: list[str]) -> int:
    """The data ranks that expert ranks can be carved out of. Raises UsageError E1251."""
    if not experts:
        raise UsageError(f"--ep {ep}: the model has no experts", code=DEGREE, hint="leave --ep off")
    valid = [n for n in range(1, experts + 1) if experts % n == 0 and (n == 1 or n % tp == 0)]
    if ep not in valid:
        near = sorted(sorted(valid, key=lambda n: abs(n - ep))[:3])
        why = f"{experts} experts do not divide by {ep}" if experts % ep else f"{ep} is no multiple of --tp {tp}"
        raise UsageError(
            f"--ep {ep}: {why}", code=DEGREE,
            hint=f"--ep that Paddle can run here: {', '.join(map(str, near))} (tp * sharding = ep * moe_sharding)",
        )  # fmt: skip
    least = lcm(tp * dp, ep) // tp
    if least != dp:
        notes.append(
            f"data ranks raised from {dp} to {least}: {ep} expert ranks are carved out of tensor and data ranks"
        )
    return least


def _inherited(wanted: Wanted, dp: int) -> int:
    """Sharding ranks where nobody says: as the source had it, all data ranks where that can't be."""
    own = paddle_hints(wanted)
    before = wanted.hints.get("degrees")
    had = own.get("sharding_degree")
    if type(had) is not int or not isinstance(before, Mapping):
        return dp
    if before.get("dp", 1) == dp and dp % max(had, 1) == 0:
        return max(had, 1)
    return dp if had > 1 or before.get("dp", 1) == 1 else 1


def _check_heads(config: Mapping[str, Any], degrees: Degrees) -> None:
    """Raise UsageError E1251 where tensor ranks would part a head, or a group of heads that lie fused."""
    facts = text_config(config)
    heads = facts.get("num_attention_heads")
    if degrees.tp > 1 and type(heads) is int and heads > 0 and heads % degrees.tp:
        raise UsageError(
            f"--tp {degrees.tp} does not divide the {heads} attention heads", code=DEGREE,
            hint=f"--tp near that does: {', '.join(map(str, divisors_near(heads, degrees.tp)))}",
        )  # fmt: skip


def _parameters(
    names: Sequence[str], rows: Mapping[str, Mapping[str, WantedTensor]], items: Items, stages: Stages,
    degrees: Degrees, config: Mapping[str, Any], own: Mapping[str, Any],
) -> dict[str, Parameter]:  # fmt: skip
    statics = own.get("names") or {}
    pair = tied_pair(names, rows, items, config, statics)
    local = {front: -(-count // degrees.ep) for front, count in _expert_counts(names).items()}
    trains = any(state not in (MODEL, EMA) for states in rows.values() for state in states)
    out = {}
    for name in names:
        states = rows[name]
        front, number = expert_of(name)
        expert = number // local[front] if number is not None and degrees.ep > 1 else None
        trained = not trains or any(state not in (MODEL, EMA) for state in states)
        alias = None
        if pair and name in pair:
            other = pair[1 - pair.index(name)]
            trained = trained or any(state not in (MODEL, EMA) for state in rows[other])
            alias = pair[0] if name == pair[1] else None
        out[name] = Parameter(
            name, _shape(states), _dtype(states), trained, expert, (stages.of(name),), alias
        )  # fmt: skip
    return out


def _expert_counts(names: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        front, number = expert_of(name)
        if number is not None:
            counts[front] = max(counts.get(front, 0), number + 1)
    return counts


def tied_pair(
    names: Sequence[str], rows: Mapping[str, Mapping[str, WantedTensor]], items: Items, config: Mapping[str, Any],
    statics: Mapping[str, str],
) -> tuple[str, str] | None:  # fmt: skip
    """(embedding, head) when they are one tensor: the config says so, or they share a static name, or a training state lists
    only one of the two."""
    first = [
        name
        for name in names
        if items.at(name) == 0 and name.endswith(("embed_tokens.weight", "word_embeddings.weight"))
    ]
    last = [name for name in names if name.endswith("lm_head.weight")]
    if len(first) != 1 or len(last) != 1 or _shape(rows[first[0]]) != _shape(rows[last[0]]):
        return None
    pair = first[0], last[0]
    said = text_config(config).get("tie_word_embeddings")
    if isinstance(said, bool):
        return pair if said else None
    mine = [{state for state in rows[name] if state not in (MODEL, EMA)} for name in pair]
    same = pair[0] in statics and statics.get(pair[0]) == statics.get(pair[1])
    return pair if same or bool(mine[0]) != bool(mine[1]) else None


def _shape(states: Mapping[str, WantedTensor]) -> tuple[int, ...]:
    """The parameter's own shape: scalars of the optimizer aside."""
    for state in (MODEL, MASTER, EMA):
        if state in states:
            return states[state].shape
    return next((t.shape for state, t in states.items() if state not in _SCALARS), next(iter(states.values())).shape)


def _dtype(states: Mapping[str, WantedTensor]) -> DType:
    """What the parameter is computed with; where only a master is there, bf16: Paddle leaves out no other."""
    if MODEL in states:
        return states[MODEL].dtype
    return DTYPES["BF16"] if MASTER in states else DTYPES["F32"]
