"""Where every tensor of a new torch_dist checkpoint goes: its key, its place among stacked ones, its boxes, their
ranks.

The one idea: the inverse of reading. A name gives back its key and its position (layer, expert); tensors whose
positions fill a grid of one shape are one stored tensor with leading dims, cut as Megatron's ranks would have cut it:

    decoder.layers.0...3.mlp.linear_fc1.weight (96, 32), TP 2, gated
    -> decoder.layers.mlp.linear_fc1.weight (4, 96, 32): boxes (l, 0) (l, 48) by tensor rank 0, (l, 24) (l, 72) by rank
       1, each (1, 24, 32), written by the first data rank of the stage that holds layer l

The cuts are for the writers' and readers' ease: Megatron loads any. So what does not divide and may be padded when
loaded (the vocabulary, `allow_shape_mismatch`) stays whole, while heads, feed-forward rows and experts that don't
divide are a degree that the model can't take. Keys are spelled as the source spelled them (`styles`), else as its
arguments make Megatron 0.16.1 spell them: stacked unless layers differ (`transformer/transformer_block.py`), norms as
the layer spec stores them (`models/gpt/gpt_layer_specs.py`). Rank numbers: `tp-cp-ep-dp-pp`, tp fastest
(`core/mesh.py`).

Cost: about 10 us a box. What it does not do: bytes and files (`megatron_dist.target`), objects (`megatron_dist.state`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ckpt_tool.core.bounds import bounded
from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import EXTRAS, MASTER, MODEL
from ckpt_tool.core.window import stated_windows
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.containers.dcp_item_files import Item, Share
from ckpt_tool.formats.megatron import names
from ckpt_tool.formats.megatron.adapter import Stretch, stretches
from ckpt_tool.formats.megatron.args import facts_of
from ckpt_tool.formats.megatron.hints import DistHints
from ckpt_tool.formats.megatron.job import Job, carved, check_experts
from ckpt_tool.formats.megatron.parts import HALF, of_part
from ckpt_tool.formats.megatron.rules import pieces, section_names
from ckpt_tool.formats.megatron.stages import NO_SPLIT, Stages, chosen_stages, from_counts
from ckpt_tool.formats.megatron_dist.keys import (
    APART,
    HALVES,
    KINDS,
    SINGLETONS,
    STACKED_LAYERS,
    DistKey,
    name_of,
    of_kind,
    parse,
    spelled,
    stacked_style,
    stored,
)

Shape = tuple[int, ...]
EXPERTS, UNHELD, NO_RULE = "E0237", "E2001", "E0275"
CHUNKS = 1 << 16  # of all stages
# norms of layers in Transformer Engine's spec: in the linear that follows, where there is one
_BY_TE = frozenset(f"{how}:{norm}_layernorm." for how in ("fused", "plain") for norm in ("pre_mlp", "input"))
_LAYER = re.compile(rf"({names.STACK})\.(\d{{1,9}})\.(.+)", re.DOTALL)
_EXPERT = re.compile(r"(.+\.experts)\.local_experts\.(\d{1,9})\.(.+)", re.DOTALL)


class _Spot(NamedTuple):
    """Where a tensor stands: template of its key, layer and expert (None: not in one). stack: whose layer it is, the
    language model's or a tower's ("": in none)."""

    template: str
    stack: str
    layer: int | None
    expert: int | None


class _Part(NamedTuple):
    """What of a tensor is stored under one key ("": all, under the tensor's own). shape: the part's."""

    part: str
    shape: tuple[int, ...]
    cut: tuple[Item, ...]


class DistLayout:
    """The layout of all tensors of `wanted` but extras. degrees: every mesh dim, `dp` all data ranks."""

    def __init__(self, wanted: Wanted, args: Mapping[str, Any], degrees: Mapping[str, int]) -> None:
        self.wanted = wanted
        self.args = args
        spec = wanted.wish.spec
        self.facts = facts_of(args, spec)
        self.notes: list[str] = []
        self.tensors = [(i, t) for i, t in enumerate(wanted.tensors) if t.key.state != EXTRAS]
        self.names = {t.key.name for _, t in self.tensors}
        self.spots = {name: _spot(name) for name in self.names}
        numbers: dict[str, list[int]] = {}
        for spot in self.spots.values():
            if spot.layer is not None:
                numbers.setdefault(spot.stack, []).append(spot.layer)
        self.counts = {stack: _count(found, "layers") for stack, found in numbers.items()}
        self.layers = max((n for stack, n in self.counts.items() if not names.is_tower(f"{stack}.")), default=0)
        self.experts = _count([s.expert for s in self.spots.values() if s.expert is not None], "experts")
        self.degrees = carved(degrees, self.notes) if self.experts else dict(degrees)
        source = wanted.hints.get(DistHints) if wanted.source_format == "megatron-dist" else None
        own = source if spec is None else None
        self.as_source = own is not None
        self.windows = list(source.windows) if source is not None and source.windows else stated_windows(args)
        self.styles = set(own.styles) if own is not None else self._styles()
        self._check_windows()
        self.singletons = SINGLETONS in self.styles
        self.distributed = self.facts.distributed is not False
        check_experts(self.degrees["ep"], self.experts, EXPERTS)
        gated = bool(self.facts.gated or HALVES in self.styles)
        self.shapes = {t.key.name: t.shape for _, t in self.tensors}
        job = Job(self.facts, self.degrees, self._stages(), self.experts, gated, not self.facts.te)
        self.job = job.of_shapes(self.shapes, 1)
        alike: dict[tuple[str, str, Shape], str] = {}  # one of each kind: their rules are the same
        for _, tensor in self.tensors:
            spot = self.spots[tensor.key.name]
            alike.setdefault((spot.stack, spot.template, tensor.shape), tensor.key.name)
        kinds = [(name, shape) for (_, _, shape), name in alike.items()]
        self._check_rules(kinds)
        self.notes += self.job.check(kinds)
        wished = {stack for stack in self.counts if stacked_style(stack) in self.styles}
        self.stacked = {stack for stack in wished if self._uniform(stack)}
        self.as_source &= self.stacked == wished
        self.grids = self._grids()
        # what tensors have in common, found once
        self._keys: dict[tuple[str, str, str], DistKey] = {}
        self._cuts: dict[tuple[str, str, bool, Shape], list[_Part]] = {}
        self._stage_of: dict[str | tuple[str, int], int] = {}

    # -- what there is ------------------------------------------------------------------------------------------------

    def _styles(self) -> set[str]:
        """As Megatron would spell the keys, by its arguments."""
        args = self.args
        several = [args.get("moe_layer_freq"), args.get("linear_attention_freq")]
        differing = any(isinstance(n, list) or type(n) is int and n > 1 for n in several)
        differing |= bool(args.get("hetereogenous_dist_checkpoint") or args.get("heterogeneous_layers_config_path"))
        differing |= any(names.stem(name).startswith("decoder.final_norm.") for name in self.names)  # a hybrid model's
        towers = [f"{stack}." for stack in self.counts if names.is_tower(f"{stack}.")]
        out = {stacked_style(tower[:-1]) for tower in towers if not names.is_foreign(tower)}  # the hub's own never do
        out |= set() if differing else {STACKED_LAYERS}
        if any(name.endswith(f".{names.RESIDUAL}.weight") for name in self.names):  # no norm is fused there
            return out
        if kind := names.gemma4_layer(self.names):
            return out | {APART} | (_BY_TE if kind == names.GEMMA4_SPARSE else set())
        mla = any(".linear_kv_down_proj." in name for name in self.names)
        if self.facts.te:
            out |= {*_BY_TE, "fused:norm."}
            sparse = any(f".{names.INDEXER}." in name for name in self.names)  # its norms stand apart
            if mla and not sparse:
                out |= {"fused:self_attention.q_layernorm.", "fused:self_attention.kv_layernorm."}
                out |= {"plain:self_attention.q_layernorm.", "plain:self_attention.kv_layernorm."}
        elif not mla:
            out |= {"fused:input_layernorm.", "fused:pre_mlp_layernorm."}
        return out

    def _check_windows(self) -> None:
        """Attentions are stored apart by what looks through a window; where nothing states it, each layer has keys."""
        if self.apart and len(self.windows) != self.layers:
            self.styles -= {APART, STACKED_LAYERS}
            self.notes.append(
                "Megatron-Bridge stores the attentions of windowed and of whole layers apart: nothing states which "
                "layers are which, so each has keys of its own, which it does not load (--config FILE says it)"
            )

    @property
    def apart(self) -> bool:
        """Are attentions stored apart by what looks through a window?"""
        return APART in self.styles

    def _kind(self, spot: _Spot) -> str:
        """Of which of `KINDS` the layer is; "" where kinds share keys."""
        if spot.layer is None or not self.apart or names.is_tower(f"{spot.stack}."):
            return ""
        return next(kind for kind, windowed in KINDS.items() if windowed == self.windows[spot.layer])

    def _lead(self, stack: str, kind: str) -> int:
        """How many layers share a key."""
        return self.windows.count(KINDS[kind]) if kind else self.counts[stack]

    def _stages(self) -> Stages:
        pp, vpp, layers = self.degrees["pp"], self.degrees["vpp"], self.layers
        if pp * vpp > CHUNKS:
            raise UsageError(f"--pp {pp} --vpp {vpp} are {pp * vpp} chunks", code=NO_SPLIT, hint="give smaller degrees")
        mtp = names.mtp_count(self.names)
        wish = self.wanted.wish.pp_split
        if not layers and not wish:
            return from_counts([0] * (pp * vpp), pp, vpp, mtp=mtp)
        return chosen_stages(wish, self.args, pp, vpp, layers, mtp=mtp)

    def _check_rules(self, kinds: Iterable[tuple[str, Shape]]) -> None:
        """Raise UsageError E0275 where the sections of a recurrent module, each stored under a key of its own, are not
        known."""
        for name, shape in kinds:
            rule = self.job.rule(name, len(shape))
            if rule.lacks:
                raise UsageError(
                    f"the sections of {name} {list(shape)} are not known, and each is stored apart",
                    code=NO_RULE,
                    key=name,
                    hint=f"they follow from the module's other tensors, or from the arguments {rule.lacks}",
                )

    def _uniform(self, stack: str) -> bool:
        """Have all layers of a stack the same tensors of the same shapes in every state?"""
        seen: dict[tuple[str, str, str, int | None], dict[int, tuple[Any, ...]]] = {}
        for _, tensor in self.tensors:
            spot = self.spots[tensor.key.name]
            if spot.layer is not None and spot.stack == stack:
                apart = self._kind(spot) if of_kind(spot.template, "x") != spot.template else ""
                kind = (tensor.key.state, spot.template, apart, spot.expert)
                seen.setdefault(kind, {})[spot.layer] = (tensor.shape, tensor.dtype)
        many = {kind: self._lead(stack, kind[2]) for kind in seen}
        return all(len(each) == many[kind] and len(set(each.values())) == 1 for kind, each in seen.items())

    def _grids(self) -> dict[tuple[str, str], bool]:
        """Whether the experts under a template fill their grid, by (state, key with its layer)."""
        seen: dict[tuple[str, str], dict[int, tuple[Any, ...]]] = {}
        for _, tensor in self.tensors:
            spot = self.spots[tensor.key.name]
            if spot.expert is not None:
                key = (tensor.key.state, self._with_layer(spot))
                seen.setdefault(key, {})[spot.expert] = (tensor.shape, tensor.dtype)
        return {
            key: not self.singletons and len(each) == self.experts and len(set(each.values())) == 1
            for key, each in seen.items()
        }

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _with_layer(self, spot: _Spot) -> str:
        if spot.layer is None or spot.stack in self.stacked:
            return spot.template
        return f"{spot.stack}.{spot.layer}.{spot.template[len(spot.stack) + 1 :]}"

    def _key(self, tensor: WantedTensor) -> tuple[DistKey, tuple[int, ...]]:
        """(key, position) of a tensor. Raises UsageError (E2001) for a name that would not be read back."""
        name, state = tensor.key.name, tensor.key.state
        spot = self.spots[name]
        key, at, kind = self._with_layer(spot), [], self._kind(spot)
        layers, experts = spot.stack in self.stacked, False
        if layers and spot.layer is not None:
            at.append(spot.layer)
        if spot.expert is not None:
            experts = self.grids[state, key]
            if experts:
                at.append(spot.expert)
            else:
                key = key.replace(".experts.experts.", f".experts.experts.{spot.expert}.", 1)
        made = self._keys.get((state, kind, key))
        if made is None:  # names of one key differ in its positions alone
            part = next(iter(self._sections(tensor)), ("",))[0]
            full = of_kind(stored(spelled(key, name, self.styles, self.names)), kind)
            made = parse(self.fqn(state, of_part(full, part) if part else full))
            if made != DistKey(state, full, layers, experts, part):
                self._refuse(tensor)
            self._keys[state, kind, key] = made
        if name_of(made, tuple(at)) != name:
            self._refuse(tensor)
        if layers and made.kind:
            at[0] = self.windows[: at[0]].count(KINDS[made.kind])
        return made._replace(part=""), tuple(at)

    def _refuse(self, tensor: WantedTensor) -> NoReturn:
        raise UsageError(
            f"megatron-dist would read {tensor.key.name!r} back under another name",
            code=UNHELD,
            key=str(tensor.key),
            hint="rename or remove it (--remove-keys), or choose another format",
        )

    def fqn(self, state: str, key: str) -> str:
        """The whole key. Masters are `param` with the distributed optimizer, `fp32_param` without one."""
        if state == MODEL:
            return key
        plain = "param" if self.distributed else "fp32_param"
        return f"optimizer.state.{plain if state == MASTER else state}.{key}"

    def object_key(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(key of a model tensor, shape of the positions under it) of what hangs on its module."""
        spot = self.spots[name]
        key = self._with_layer(spot)
        full = of_kind(stored(spelled(key, name, self.styles, self.names)), self._kind(spot))
        shape = (self._lead(spot.stack, parse(full).kind),) if spot.stack in self.stacked else ()
        if spot.expert is not None:
            if self.grids.get((MODEL, key)):
                shape = (*shape, self.experts)
            else:
                full = full.replace(".experts.experts.", f".experts.experts.{spot.expert}.", 1)
        return full, shape or (1,)

    def one_of_each_key(self) -> list[str]:
        """The first name of those that have one `object_key`: stacked layers and experts differ in positions alone."""
        first: dict[tuple[str, str, object], str] = {}
        for name in sorted(self.names):
            spot = self.spots[name]
            key = self._with_layer(spot)
            first.setdefault((key, self._kind(spot), not self.grids.get((MODEL, key)) and spot.expert), name)
        return list(first.values())

    # -- entries ------------------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, tuple[tuple[int, ...], list[Share]]]:
        """Every stored tensor: key -> (shape, shares); a share for each part that is stored under a key of its own.
        Raises UsageError E2001 for a name that can't be kept."""
        found: dict[str, tuple[tuple[int, ...], list[Share]]] = {}
        for number, tensor in self.tensors:
            key, at = self._key(tensor)
            fqn, first = self.fqn(key.state, key.key), self._first_rank(tensor.key.name)
            for part, shape, cut in self._cut(tensor):
                own = of_part(fqn, part) if part else fqn
                row = found.get(own)
                if row is None:
                    stack = self.spots[tensor.key.name].stack
                    lead = (self._lead(stack, key.kind),) if key.layers else ()
                    row = found[own] = ((*lead, *((self.experts,) if key.experts else ()), *shape), [])
                row[1].append(Share(number, cut, at, first))
        return found

    def _cut(self, tensor: WantedTensor) -> list[_Part]:
        """How a tensor is cut. Decided once for those of one shape in all layers, of all experts."""
        spot, shape = self.spots[tensor.key.name], tensor.shape
        case = (spot.stack, spot.template, spot.expert is None, shape)
        found = self._cuts.get(case)
        if found is None:
            boxes = list(self._boxes(tensor))
            parts = self._sections(tensor)
            lying = stretches(tensor.key.name, (*shape, 0)[0], self.degrees["tp"], gated=self.job.gated)
            if lying:
                self._cuts[case] = found = [_stretched(shape, lying)]
                return found
            whole_ = tuple([Item(box, box.offset, box.shape, rank) for box, rank in boxes])
            found = [] if parts else [_Part("", shape, whole_)]
            for part, start, rows in parts:
                own = Box((start, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))
                inside = [(box & own, rank) for box, rank in boxes]
                items = [(box, (box.offset[0] - start, *box.offset[1:]), rank) for box, rank in inside if box]
                cut = tuple([Item(box, offset, box.shape, rank) for box, offset, rank in items])
                found.append(_Part(part, own.shape, cut))
            self._cuts[case] = found
        return found

    def _sections(self, tensor: WantedTensor) -> list[tuple[str, int, int]]:
        """(name, first row, rows) of the parts of a tensor that have keys of their own; [] for all others."""
        rule = self.job.rule(tensor.key.name, len(tensor.shape))
        if rule.dim != 0 or not tensor.shape:
            return []
        words = section_names(tensor.key.name)
        if not words and rule.parts == (1, 1) and self.singletons and HALVES in self.styles:
            words = HALF
        rows = rule.sections(tensor.shape[0])
        if len(words) != len(rows):
            return []
        return [(word, sum(rows[:i]), rows[i]) for i, word in enumerate(words)]

    def _boxes(self, tensor: WantedTensor) -> Iterator[tuple[Box, int]]:
        """The tensor's boxes, and how far behind the first rank that holds it the one is that writes each: it has the
        first replica."""
        shape, rule = tensor.shape, self.job.rule(tensor.key.name, len(tensor.shape))
        degree = self.degrees[rule.axis]
        own = rule.sections(shape[rule.dim]) if rule.dim is not None and rule.dim < len(shape) else ()
        if not own or 0 in shape or any(n % degree for n in own):
            yield whole(shape), 0
            return
        for rank in range(degree):
            for piece in pieces(rule, shape, rank, degree, apart=True):
                yield piece.box, rank

    def _first_rank(self, name: str) -> int:
        """The first of the global ranks that hold the tensor."""
        tp, ep, etp, dp, cp = (self.degrees[dim] for dim in ("tp", "ep", "etp", "dp", "cp"))
        spot = self.spots[name]
        place = name if spot.layer is None else (spot.stack, spot.layer)
        stage = self._stage_of.get(place)
        if stage is None:
            stage = self._stage_of[place] = next(self.job.homes(name))[0].pp
        return tp * cp * dp * stage + (0 if spot.expert is None else etp * (spot.expert // max(self.experts // ep, 1)))


def _stretched(shape: Shape, rows: Iterable[Stretch]) -> _Part:
    """A tensor whose rows lie in another order where it is stored."""
    rest, items = (0,) * len(shape[1:]), list[Item]()
    for row in rows:
        box = Box((row.there, *rest), (row.rows, *shape[1:]))
        items.append(Item(box, (row.here, *rest), box.shape, row.rank))
    return _Part("", shape, tuple(items))


def _count(numbers: Sequence[int], what: str) -> int:
    return bounded(max(numbers, default=-1) + 1, len(numbers), f"{what} by the tensors' names")


def _spot(name: str) -> _Spot:
    layer = expert = None
    found = _LAYER.fullmatch(name)
    stack, template = "", name
    if found is not None and found[2] == str(int(found[2])):
        stack, layer, template = found[1], int(found[2]), f"{found[1]}.{found[3]}"
    inner = _EXPERT.fullmatch(template)
    if inner is not None and inner[2] == str(int(inner[2])):
        expert, template = int(inner[2]), f"{inner[1]}.experts.{inner[3]}"
    return _Spot(template, stack, layer, expert)
