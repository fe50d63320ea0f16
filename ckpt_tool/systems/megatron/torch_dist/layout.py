"""Decides where every tensor of a new torch_dist checkpoint goes: its key, its position in a stack, its boxes and their
ranks.

The one idea: the inverse of reading. A name determines a key and a position (layer, expert); tensors whose positions
fill a grid become one stored tensor with leading dims, cut as Megatron's ranks would have cut it:

    decoder.layers.0...3.mlp.linear_fc1.weight (96, 32), TP 2, gated
    -> decoder.layers.mlp.linear_fc1.weight (4, 96, 32): boxes (l, 0) (l, 48) by tensor rank 0, (l, 24) (l, 72) by rank
       1, each (1, 24, 32), written by the first data rank of the stage that holds layer l

The cuts only make writing and reading efficient: Megatron loads any. So a tensor that does not divide and may be padded
when it is loaded (the vocabulary, `allow_shape_mismatch`) stays whole, while heads, feed-forward rows and experts that
don't divide are an error: the model can't run at that degree. Keys are spelled as the source spelled them (`styles`),
else as its arguments make Megatron 0.16.1 spell them: stacked unless layers differ
(`transformer/transformer_block.py`), norms as the layer spec stores them (`models/gpt/gpt_layer_specs.py`). Rank
numbers: `tp-cp-ep-dp-pp`, tp fastest (`core/mesh.py`).

Tensors with the same layout are decided together (`megatron.torch_dist.alike`). Cost: 2 us a tensor to parse its name,
1 us to place it. What it does not do: bytes and files (`megatron.torch_dist.target`), objects
(`megatron.torch_dist.state`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ckpt_tool.core.attention_window import stated_windows
from ckpt_tool.core.bounds import check_count
from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import EXTRAS, MASTER, MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.dcp_container.dcp_item_files import StoredItem, TensorShare
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.adapter import Stretch, stretches
from ckpt_tool.systems.megatron.args import facts_of
from ckpt_tool.systems.megatron.groups import is_matrix
from ckpt_tool.systems.megatron.hints import DistHints
from ckpt_tool.systems.megatron.job import MegatronJob, carve_out_experts, check_experts
from ckpt_tool.systems.megatron.options import MegatronOptions
from ckpt_tool.systems.megatron.parts import HALF, of_part
from ckpt_tool.systems.megatron.rules import pieces, section_names
from ckpt_tool.systems.megatron.stages import NO_SPLIT, Stages, chosen_stages, from_counts
from ckpt_tool.systems.megatron.torch_dist.alike import Class, StackMember, StackSpot, classes, spot_of
from ckpt_tool.systems.megatron.torch_dist.keys import (
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
from ckpt_tool.systems.megatron.wanted import unheld

Shape = tuple[int, ...]
EXPERTS = "E0237"
NO_RULE = "E0275"
CHUNKS = 1 << 16  # of all stages
_NUMBER = itemgetter(0)  # the number of a share's tensor
# Styles of the norms in layers of Transformer Engine's spec: fused into the linear that follows if there is one.
_BY_TE = frozenset(f"{how}:{norm}_layernorm." for how in ("fused", "plain") for norm in ("pre_mlp", "input"))


class _KeyPart(NamedTuple):
    """The part of a tensor that is stored under one key."""

    part: str  # "": the whole tensor, under its own key
    shape: tuple[int, ...]  # of the part
    cut: tuple[StoredItem, ...]  # the boxes in which it is stored


class DistLayout:
    """The layout of all wanted tensors except extras.

    degrees: every mesh dim, `dp` is the number of all data ranks.
    """

    def __init__(self, wanted: Wanted, args: Mapping[str, Any], degrees: Mapping[str, int]) -> None:
        self.wanted = wanted
        self.args = args
        spec = wanted.wish.of(MegatronOptions).spec
        self.facts = facts_of(args, spec)
        self.notes: list[str] = []
        self.tensors = [(i, t) for i, t in enumerate(wanted.tensors) if t.key.state != EXTRAS]
        self.names = {t.key.name for _, t in self.tensors}
        self.classes = classes(self.tensors)
        self.examples = list(dict.fromkeys([each.name for each in self.classes]))  # one name of each class is enough
        numbers: dict[str, list[int]] = {}
        for each in self.classes:
            if each.spot.layer is not None:
                numbers.setdefault(each.spot.stack, []).extend([m.layer for m in each.members if m.layer is not None])

        self.counts = {stack: _count(found, "layers") for stack, found in numbers.items()}
        self.layers = max((n for stack, n in self.counts.items() if not names.is_tower(f"{stack}.")), default=0)
        experts = [m.expert for each in self.classes for m in each.members if m.expert is not None]
        self.experts = _count(experts, "experts")
        self.degrees = carve_out_experts(degrees, self.notes) if self.experts else dict(degrees)
        source = wanted.hints.get(DistHints) if wanted.source_format == "megatron-dist" else None
        own = source if spec is None else None
        self.as_source = own is not None
        self.windows = list(source.windows) if source is not None and source.windows else stated_windows(args)
        self.styles = set(own.styles) if own is not None else self._styles()
        self._check_windows()
        self.singletons = SINGLETONS in self.styles
        self.distributed = self.facts.distributed is not False or self.facts.layer_wise
        check_experts(self.degrees["ep"], self.experts, EXPERTS)
        gated = bool(self.facts.gated or HALVES in self.styles)
        self.shapes = {t.key.name: t.shape for _, t in self.tensors}
        job = MegatronJob(self.facts, self.degrees, self._stages(), self.experts, gated, not self.facts.te)
        self.job = job.of_shapes(self._showing(), 1)
        alike: dict[tuple[str, str, Shape], str] = {}  # one name for all states of a kind, which have the same rule
        for each in self.classes:
            alike.setdefault((each.spot.stack, each.spot.template, each.shape), each.name)

        kinds = [(name, shape) for (_, _, shape), name in alike.items()]
        self._check_rules(kinds)
        self.notes += self.job.check(kinds)
        wished = {stack for stack in self.counts if stacked_style(stack) in self.styles}
        self.stacked = {stack for stack in wished if self._uniform(stack)}
        self.as_source &= self.stacked == wished
        self.grids = self._grids()

        # Caches: tensors of one class, and the states of one parameter, share keys, cuts and stages.
        self._keys: dict[tuple[str, str, str], DistKey] = {}
        self._cuts: dict[tuple[str, str, bool, Shape], list[_KeyPart]] = {}
        self._stage_of: dict[tuple[str, int | None], int] = {}

    # -- what there is ------------------------------------------------------------------------------------------------

    def _styles(self) -> set[str]:
        """Return the styles in which Megatron would spell the keys, by the job's arguments."""
        args = self.args
        several = [args.get("moe_layer_freq"), args.get("linear_attention_freq")]
        differing = any(isinstance(n, list) or (type(n) is int and n > 1) for n in several)
        differing |= bool(args.get("hetereogenous_dist_checkpoint") or args.get("heterogeneous_layers_config_path"))
        differing |= any(
            names.stem(name).startswith("decoder.final_norm.") for name in self.examples
        )  # a hybrid model's
        v4 = any(f".{names.DEEPSEEK_V4}." in name for name in self.examples)  # core makes each layer's keys its own
        differing |= v4
        towers = [f"{stack}." for stack in self.counts if names.is_tower(f"{stack}.")]
        out = {stacked_style(tower[:-1]) for tower in towers if not names.is_foreign(tower)}  # the hub's own never do
        out |= set() if differing else {STACKED_LAYERS}
        if any(name.endswith(f".{names.RESIDUAL}.weight") for name in self.examples):  # no norm is fused there
            return out
        if kind := names.gemma4_layer(self.examples):
            return out | {APART} | (_BY_TE if kind == names.GEMMA4_SPARSE else set())

        mla = v4 or any(".linear_kv_down_proj." in name for name in self.examples)
        if self.facts.te:
            out |= {*_BY_TE, "fused:norm."}
            before = [f".{each}." for each in names.NORMED_BEFORE]
            if mla and not any(each in name for each in before for name in self.examples):
                out |= {"fused:self_attention.q_layernorm.", "fused:self_attention.kv_layernorm."}
                out |= {"plain:self_attention.q_layernorm.", "plain:self_attention.kv_layernorm."}
        elif not mla:
            out |= {"fused:input_layernorm.", "fused:pre_mlp_layernorm."}

        return out

    def _check_windows(self) -> None:
        """Give each layer keys of its own, with a note, if attentions have separate keys by kind and no kind is
        known."""
        if self.apart and len(self.windows) != self.layers:
            self.styles -= {APART, STACKED_LAYERS}
            self.notes.append(
                "Megatron-Bridge stores the attentions of windowed and of whole layers apart: nothing states which "
                "layers are which, so each has keys of its own, which it does not load (--config FILE says it)"
            )

    @property
    def apart(self) -> bool:
        """Whether sliding-window attentions are stored under separate keys."""
        return APART in self.styles

    def _kind(self, stack: str, layer: int | None) -> str:
        """Return the layer's kind (of `KINDS`), "" if all kinds share keys."""
        if layer is None or not self.apart or names.is_tower(f"{stack}."):
            return ""
        return next(kind for kind, windowed in KINDS.items() if windowed == self.windows[layer])

    def _lead(self, stack: str, kind: str) -> int:
        """Return the number of layers that share a key."""
        return self.windows.count(KINDS[kind]) if kind else self.counts[stack]

    def _stages(self) -> Stages:
        pp = self.degrees["pp"]
        vpp = self.degrees["vpp"]
        layers = self.layers
        if pp * vpp > CHUNKS:
            raise UsageError(f"--pp {pp} --vpp {vpp} are {pp * vpp} chunks", code=NO_SPLIT, hint="give smaller degrees")
        mtp = names.mtp_count(self.examples)
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

    def _showing(self) -> dict[str, Shape]:
        """The shapes that can show sections and norms: of all but experts, and one of these of each class."""
        few = (each for each in self.classes if each.spot.expert is not None)
        lone = (each for each in self.classes if each.spot.expert is None)
        tensors = self.wanted.tensors
        shown = {tensors[m.number].key.name: each.shape for each in lone for m in each.members}
        return shown | {each.name: each.shape for each in few}

    def _uniform(self, stack: str) -> bool:
        """Have all layers of a stack the same tensors of the same shapes in every state?"""
        seen: dict[tuple[str, str, str], Counter[int | None]] = {}  # how many layers have the tensor, by expert
        for each in self.classes:
            if each.spot.layer is None or each.spot.stack != stack:
                continue
            by_kind: dict[str, list[int | None]] = {}
            apart = of_kind(each.spot.template, "x") != each.spot.template and self.apart
            for _, layer, expert in each.members:
                by_kind.setdefault(self._kind(stack, layer) if apart else "", []).append(expert)
            for kind, experts in by_kind.items():
                known = seen.setdefault((each.state, each.spot.template, kind), Counter())
                if not known.keys().isdisjoint(experts):  # of another shape or dtype in other layers
                    return False
                known.update(experts)
        return all(
            n == many
            for (_, _, kind), counts in seen.items()
            for many in (self._lead(stack, kind),)
            for n in counts.values()
        )

    def _grids(self) -> dict[tuple[str, str, int | None], bool]:
        """Whether the experts under a template fill their grid, by state, template and, where its tensors have keys of
        their own, layer (`_separate_layer`)."""
        seen: dict[tuple[str, str, int | None], list[set[int]]] = {}  # the experts of each class
        for each in self.classes:
            if each.spot.expert is None:
                continue
            own: dict[int | None, set[int]] = {}
            for _, layer, expert in each.members:
                own.setdefault(self._separate_layer(each.spot.stack, layer), set()).add(expert or 0)
            for layer, experts in own.items():
                seen.setdefault((each.state, each.spot.template, layer), []).append(experts)
        return {
            key: not self.singletons and len(found) == 1 and len(found[0]) == self.experts
            for key, found in seen.items()
        }

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _separate_layer(self, stack: str, layer: int | None) -> int | None:
        """Return the layer if its tensors have keys of their own, None if layers are stacked."""
        return None if stack in self.stacked else layer

    def _fill_template(self, spot: StackSpot, *, grid: bool) -> str:
        """Return the template with the numbers that a key has: of layers that are not stacked, of experts in no
        grid."""
        return spot.placed(layer=spot.stack not in self.stacked, expert=not grid)

    def _key(self, number: int, spot: StackSpot) -> DistKey | None:
        """Return the key of a tensor, None if it would be read back under another name."""
        tensor = self.wanted.tensors[number]
        name, state = tensor.key
        kind = self._kind(spot.stack, spot.layer)
        grid = spot.expert is None or self.grids[state, spot.template, self._separate_layer(spot.stack, spot.layer)]
        layers = spot.stack in self.stacked
        key = self._fill_template(spot, grid=grid)
        made = self._keys.get((state, kind, key))
        if made is None:  # names with the same key differ only in positions, so one check is enough for all
            part = next(iter(self._sections(tensor)), ("",))[0]
            full = of_kind(stored(spelled(key, name, self.styles, self.names)), kind)
            made = parse(self.fqn(state, of_part(full, part) if part else full, name))
            if made != DistKey(state, full, layers, spot.expert is not None and grid, part):
                return None
            self._keys[state, kind, key] = made
        return made if name_of(made, _position_under_key(made, spot.layer, spot.expert)) == name else None

    def fqn(self, state: str, key: str, name: str) -> str:
        """Return the whole key of a state.

        Masters are `param` with the distributed optimizer, and `fp32_param` without one, or for the matrices that a
        layer-wise optimizer has in addition to it.
        """
        if state == MODEL:
            return key
        whole = self.facts.layer_wise and is_matrix(name, self.shapes.get(name, ()))
        plain = "param" if self.distributed and not whole else "fp32_param"
        return f"optimizer.state.{plain if state == MASTER else state}.{key}"

    def object_key(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return (key, shape of the grid of positions) for objects of a tensor's module, such as extra states."""
        spot = spot_of(name)
        grid = self.grids.get((MODEL, spot.template, self._separate_layer(spot.stack, spot.layer)), False)
        key = self._fill_template(spot, grid=True)
        full = of_kind(stored(spelled(key, name, self.styles, self.names)), self._kind(spot.stack, spot.layer))
        shape = (self._lead(spot.stack, parse(full).kind),) if spot.stack in self.stacked else ()
        if spot.expert is not None:
            if grid:
                shape = (*shape, self.experts)
            else:
                full = full.replace(".experts.experts.", f".experts.experts.{spot.expert}.", 1)
        return full, shape or (1,)

    def one_of_each_key(self) -> list[str]:
        """Return one name for each `object_key`, sorted; names with the same key differ only in positions."""
        first: dict[tuple[object, ...], str] = {}
        for each in self.classes:
            for key, members in self._group_by_key(each, MODEL):
                least = min([self.wanted.tensors[member.number].key.name for member in members])
                object_key = (each.spot.stack, each.spot.template, *key)
                known = first.get(object_key, least)
                first[object_key] = min(known, least)
        return sorted(first.values())

    # -- entries ------------------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, tuple[tuple[int, ...], list[TensorShare]]]:
        """Return every stored tensor: key -> (shape, shares), a share for each logical tensor under the key.

        Raises UsageError E2001 for a name that would be read back as another.
        """
        found: dict[str, tuple[tuple[int, ...], list[TensorShare]]] = {}
        refused: list[int] = []
        for each in self.classes:
            cut = self._cut(each)
            for _, members in self._group_by_key(each, each.state):
                # All keys are one text with positions filled in: if the first and the last are right, all are.
                ends = [
                    self._key(m.number, each.spot._replace(layer=m.layer, expert=m.expert))
                    for m in (members[0], members[-1])
                ]
                key = ends[0]
                if key is None or ends[1] != key:
                    refused.append(members[-1 if key else 0].number)
                    continue
                fqn = self.fqn(key.state, key.key, self.wanted.tensors[members[0].number].key.name)
                stack = each.spot.stack
                lead = (self._lead(stack, key.kind),) if key.layers else ()
                lead = (*lead, self.experts) if key.experts else lead
                shares = self._shares(members, key, each)
                for part, shape, items in cut:
                    _, under = found.setdefault(of_part(fqn, part) if part else fqn, ((*lead, *shape), []))
                    under += [TensorShare(number, items, at, first) for number, at, first in shares]

        if refused:
            raise unheld("megatron-dist", self.wanted.tensors[min(refused)], self.wanted.tensors)

        for _, under in found.values():
            under.sort(key=_NUMBER)
        return dict(sorted(found.items(), key=lambda row: row[1][1][0].tensor))

    def _group_by_key(self, each: Class, state: str) -> Iterable[tuple[tuple[object, ...], list[StackMember]]]:
        """Return (what distinguishes the key in the class, its members) for each key. state: whose grids count."""
        template, stack, *_ = each.spot
        if stack in self.stacked and not self.apart:
            if each.spot.expert is None or self.grids.get((state, template, None)):
                return [((None, "", False), each.members)]
        own: dict[tuple[object, ...], list[StackMember]] = {}
        for member in each.members:
            alone = self._separate_layer(stack, member.layer)
            grid = member.expert is None or self.grids.get((state, template, alone))
            own.setdefault((alone, self._kind(stack, member.layer), not grid and member.expert), []).append(member)
        return own.items()

    def _shares(
        self, members: Iterable[StackMember], key: DistKey, each: Class
    ) -> list[tuple[int, tuple[int, ...], int]]:
        """Return (number, position, first global rank that has it) of the tensors of one key."""
        tp, ep, etp, dp, cp = (self.degrees[dim] for dim in ("tp", "ep", "etp", "dp", "cp"))
        per = max(self.experts // ep, 1)
        behind = tp * cp * dp
        stage = self._stage_of
        counted = dict[int | None, int | None]()
        out = []
        for number, layer, expert in members:
            place = (each.spot.stack if layer is not None else each.name, layer)
            if place not in stage:
                stage[place] = next(self.job.homes(self.wanted.tensors[number].key.name))[0].pp
            if layer not in counted:  # among those of its kind
                among = layer is not None and key.layers and key.kind
                counted[layer] = self.windows[:layer].count(KINDS[key.kind]) if among else layer
            first = behind * stage[place] + (0 if expert is None else etp * (expert // per))
            out.append((number, _position_under_key(key, counted[layer], expert), first))
        return out

    def _cut(self, each: Class) -> list[_KeyPart]:
        """Return how the tensors of a class are cut; the same for all layers, experts and states of one shape."""
        tensor = self.wanted.tensors[each.members[0].number]
        spot = each.spot
        shape = each.shape
        case = (spot.stack, spot.template, spot.expert is None, shape)
        found = self._cuts.get(case)
        if found is None:
            boxes = list(self._boxes(tensor))
            parts = self._sections(tensor)
            lying = stretches(tensor.key.name, (*shape, 0)[0], self.degrees["tp"], gated=self.job.gated)
            if lying:
                self._cuts[case] = found = [_reorder_stored_rows(shape, lying)]
                return found
            whole_ = tuple([StoredItem(box, box.offset, box.shape, rank) for box, rank in boxes])
            found = [] if parts else [_KeyPart("", shape, whole_)]
            for part, start, rows in parts:
                own = Box((start, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))
                inside = [(box & own, rank) for box, rank in boxes]
                items = [(box, (box.offset[0] - start, *box.offset[1:]), rank) for box, rank in inside if box]
                cut = tuple([StoredItem(box, offset, box.shape, rank) for box, offset, rank in items])
                found.append(_KeyPart(part, own.shape, cut))
            self._cuts[case] = found
        return found

    def _sections(self, tensor: WantedTensor) -> list[tuple[str, int, int]]:
        """Return (name, first row, rows) of the parts of a tensor that have keys of their own, [] if it has one key."""
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
        """Yield the tensor's boxes, each with the rank that writes it, counted from the first rank that has the tensor.

        That rank has the first replica of the box.
        """
        shape = tensor.shape
        rule = self.job.rule(tensor.key.name, len(tensor.shape))
        degree = self.degrees[rule.axis]
        own = rule.sections(shape[rule.dim]) if rule.dim is not None and rule.dim < len(shape) else ()
        # Rows that ranks can't share evenly (a vocabulary) are stored whole: Megatron loads any cut.
        if not own or 0 in shape or any(n % degree for n in own):
            yield whole(shape), 0
            return
        for rank in range(degree):
            for piece in pieces(rule, shape, rank, degree, apart=True):
                yield piece.box, rank


def _position_under_key(key: DistKey, layer: int | None, expert: int | None) -> tuple[int, ...]:
    """Return the position of a tensor under a key: the numbers of its layer and expert, as far as the key stacks
    them."""
    at = (layer,) if key.layers and layer is not None else ()
    return (*at, expert) if key.experts and expert is not None else at


def _reorder_stored_rows(shape: Shape, rows: Iterable[Stretch]) -> _KeyPart:
    """Return the cut of a tensor whose rows are stored in another order (`adapter.stretches`)."""
    rest = (0,) * len(shape[1:])
    items = list[StoredItem]()
    for row in rows:
        box = Box((row.there, *rest), (row.rows, *shape[1:]))
        items.append(StoredItem(box, (row.here, *rest), box.shape, row.rank))
    return _KeyPart("", shape, tuple(items))


def _count(numbers: Sequence[int], what: str) -> int:
    return check_count(max(numbers, default=-1) + 1, len(numbers), f"{what} by the tensors' names")
