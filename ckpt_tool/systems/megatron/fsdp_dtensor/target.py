"""Plans a Megatron-FSDP checkpoint that Megatron's own `load_checkpoint` accepts with any degrees.

The one idea: the inverse of reading. A name gives back its key, a gated fc1 its halves; boxes are those of tensor
ranks, cut by whole rows between data ranks; everything else is one nested dict, flattened as torch does.

    decoder.layers.0.mlp.linear_fc1.weight (40, 24), dp 2
    -> model.module.decoder.layers.0.mlp.linear_fc1.weight_w (20, 24): rows 0-9 in __0_0.distcp, 10-19 in __1_0.distcp

* Spelling is the source's own, else by the arguments: Transformer Engine's norms and experts with its spec, halves with
  `swiglu`, MTP's inner layer as core 0.19 has it.
* A tensor that is stored whole and has halves or sections has the rows of each tensor rank together, for the requested
  `--tp`: only a job of that tensor degree reads it correctly, as with Megatron's own files. A note names it.
* A vocabulary is padded with zero rows to the number that Megatron expects; the real number is stored under a key of
  ours.
* The optimizer's hyperparameters are stored with each parameter; a group that the source lacks is made from its most
  similar one (`megatron.groups`). RNG states go to `rng_state` if the tensor ranks are the source's, else they are left
  out, with a note.

Sources: `megatron.fsdp_dtensor.format`; torch 2.13's loader asks for keys of its own and takes any boxes. Cost: 20 us a
box and hyperparameter. What it does not do: the uneven cuts of FSDP's own buffer, pipeline stages (`format`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.layout import block
from ckpt_tool.core.target import Target, Wanted, WantedTensor, whole_file
from ckpt_tool.core.tensor import EXTRAS, MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.dcp_container.dcp_item_files import ItemFiles, StoredItem, TensorShare
from ckpt_tool.formats.dcp_container.dcp_metadata import METADATA, pickled
from ckpt_tool.formats.dcp_container.dcp_state import Known, NestingSlot, flatten
from ckpt_tool.formats.state_dict.composer import TorchComposer
from ckpt_tool.formats.state_dict.tree import dotted, join
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import DIMS, NAMESPACE, arguments, facts_of, updated, with_spec
from ckpt_tool.systems.megatron.extra_states import EXTRA_STATES, LEFT
from ckpt_tool.systems.megatron.fsdp_dtensor.keys import (
    MTP_INNER,
    STATES,
    VOCAB_ROWS,
    WRAPPER,
    FsdpHints,
    model_key,
    parse,
    spelled,
    state_key,
)
from ckpt_tool.systems.megatron.groups import (
    GroupKey,
    chained,
    groups_for,
    groups_of,
    is_expert_group,
    key_of_group,
    key_of_param,
)
from ckpt_tool.systems.megatron.job import MegatronJob, carve_out_experts, check_experts
from ckpt_tool.systems.megatron.legacy.target import ARGS_LEFT, EXTRAS_LEFT, OURS, writable, written_of
from ckpt_tool.systems.megatron.options import MegatronOptions
from ckpt_tool.systems.megatron.parts import HALF
from ckpt_tool.systems.megatron.pointer import folder_of, pointer_to
from ckpt_tool.systems.megatron.rng import NO_STATES, OTHER_RANKS, by_rank, can_resume, note_of_missing, tensors_of_rng
from ckpt_tool.systems.megatron.rules import gated, is_vocabulary, pieces, section_names
from ckpt_tool.systems.megatron.stages import from_counts
from ckpt_tool.systems.megatron.wanted import UNHELD, unheld, vocabulary_rows

EXPERTS = "E0237"
NO_RULE = "E0275"
_OWN = ("args", "model", "optimizer", "rng_state", OURS)  # keys whose values are made here
_FOREIGN = ("content_metadata", "sharded_objects", EXTRA_STATES)  # values about the files of a torch_dist source


class _StoredKey(NamedTuple):
    """The part of a tensor that is stored under one key."""

    part: str  # of `megatron.parts`, "" for the whole tensor
    shape: tuple[int, ...]  # of the stored tensor
    moves: list[tuple[Box, Box]]  # (box of the stored tensor, box of the whole one)


def fsdp_target(wanted: Wanted) -> Target:
    """Return all files of the output.

    Raises:
        UsageError: E0237, E0273 degrees that the model can't take, E0275 sections that are not known, E2001 tensors
        that
            the format can't hold, E0242.
    """
    return _MegatronFsdpWriting(wanted).target()


def _undivided_share(number: int, shape: tuple[int, ...]) -> TensorShare:
    """Return the share of a tensor that rank 0 stores whole."""
    return TensorShare(number, (StoredItem(whole(shape), (0,) * len(shape), shape, 0),))


class _MegatronFsdpWriting:
    """The planning of one target: decisions in `__init__`, files in `target`."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.notes: list[str] = []
        spec = wanted.wish.of(MegatronOptions).spec
        self.args = with_spec(arguments(wanted.extras), spec)
        self.facts = facts_of(self.args, spec)
        self.model = {t.key.name: t for t in wanted.tensors if t.key.state == MODEL}
        shapes = {name: tensor.shape for name, tensor in self.model.items()}
        experts = names.experts_count(shapes)
        degrees = {dim: wanted.wish.degrees.at(dim) for dim in DIMS}
        degrees["etp"] = wanted.wish.degrees.etp or degrees["tp"]
        self.degrees = carve_out_experts(degrees, self.notes) if experts else degrees
        check_experts(self.degrees["ep"], experts, EXPERTS)
        self.experts = experts
        self.hints = self._spelling(wanted.hints.get(FsdpHints), shapes)
        stages = from_counts([names.layers_count(shapes)], 1, mtp=names.mtp_count(shapes))
        job = MegatronJob(self.facts, self.degrees, stages, experts, gated(shapes, self.facts), not self.hints.te)
        self.job = job.of_shapes(shapes, 1)
        self._check_rules(shapes)
        self.notes += self.job.check(shapes.items())
        self.rows, self.kept = self._vocabulary()
        self.items = ItemFiles(wanted.tensors)
        self.folder = folder_of(wanted.extras.get("iteration"))
        self._whole: list[str] = []  # one of each kind that is stored whole, the rows of each tensor rank together
        self._cuts: dict[tuple[str, tuple[int, ...]], list[_StoredKey]] = {}

    def _spelling(self, own: FsdpHints | None, shapes: Mapping[str, tuple[int, ...]]) -> FsdpHints:
        """Return how keys are spelled: as in the source, or by its arguments if it has another format or --spec is
        given.
        """
        if (
            own is not None
            and self.wanted.source_format == "megatron-fsdp"
            and self.wanted.wish.of(MegatronOptions).spec is None
        ):
            return own

        grouped = self.facts.container == names.TE_GROUPED
        halves = self.args.get("swiglu", True) is not False
        half = "bf16" not in self.args or bool(self.args.get("bf16") or self.args.get("fp16"))
        inner = own.mtp_inner if own is not None else None
        if inner is None and names.mtp_count(shapes):
            self.notes.append(
                f"MTP's inner layer is {MTP_INNER}, as core 0.19 asks for it: newer ones ask for transformer_layer"
            )

        return FsdpHints(
            WRAPPER,
            WRAPPER * (3 if half else 2),  # of Megatron's FSDP and of its adapter, and Float16Module
            self.facts.te,
            names.TE_GROUPED if grouped else names.SEQUENTIAL,
            inner or MTP_INNER,
            halves,
            own is not None and own.sections,
            "_",
            {},
        )

    def _vocabulary(self) -> tuple[int | None, int | None]:
        """Return (rows to store, rows of the model) of the vocabulary's tensors, (None, None) if nothing is padded."""
        number = {t.key.name: i for i, t in enumerate(self.wanted.tensors) if t.key.state == MODEL}
        rows, kept, notes = vocabulary_rows(self.wanted, number, self.facts, self.degrees["tp"])
        have = next(
            (self.model[name].shape[0] for name in self.model if is_vocabulary(name) and self.model[name].shape), 0
        )
        if rows is not None and rows < have:
            self.notes.append(
                f"the vocabulary has {have} rows, Megatron's loader wants {rows} for {self.degrees['tp']} tensor "
                "ranks: --vocab-size N cuts the rows beyond the tokenizer's"
            )
            return None, None
        self.notes += notes if rows != have else ()
        return (rows, kept) if rows and rows > have else (None, None)

    def _pad_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape in the files, with the padding of a vocabulary."""
        if self.rows is None or not is_vocabulary(name) or shape[:1] != (self.kept,):
            return shape
        return (self.rows, *shape[1:])

    def _check_rules(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UsageError E0275 for a tensor that can't be cut, or that Megatron can't store in this format."""
        for name, shape in shapes.items():
            rule = self.job.rule(name, len(shape))
            if name.endswith(names.BY_HEAD):
                what = "its rows are stored by key head, as mcore-bridge has them"
                hint = "write --to megatron-dist"
            elif rule.lacks and (self.hints.sections or self.degrees[rule.axis] > 1):
                what = "its sections are not known"
                hint = f"they follow from the arguments {rule.lacks}"
            elif not rule.known and self.degrees[rule.axis] > 1:
                what = f"no rule says how {self.degrees[rule.axis]} tensor ranks share it"
                hint = "bring the names into Megatron's (--dialect megatron), or write with --tp 1"
            else:
                continue
            raise UsageError(f"{name}: {what}", code=NO_RULE, key=name, hint=hint)

    # -- the output ----------------------------------------------------------------------------------------------------

    def target(self) -> Target:
        """Return all files of the output."""
        folder = self.folder
        for path, value in flatten(self._values()):
            self._value(path, value)
        for number, tensor in enumerate(self.wanted.tensors):
            if tensor.key.state != EXTRAS:
                self._tensor(number, tensor)
        if self._whole:
            size = self.degrees["tp"]
            self.notes.append(
                f"{', '.join(dict.fromkeys(self._whole))} and their like are stored whole, the rows of each tensor "
                f"rank together, as Megatron does: only a job with --tensor-model-parallel-size {size} reads them right"
            )
        entries = self.items.entries.values()
        files = [*self.items.finished(), whole_file(folder + METADATA, pickled(entries, folder))]
        files.append(pointer_to(folder))
        copies = self.wanted.side_file_copies()
        files = [*files, *copies]
        notes = tuple(dict.fromkeys(self.notes))
        return Target("megatron-fsdp", tuple(files), notes=notes, places=self.items.places(files))

    def _add(self, fqn: str) -> str:
        if fqn in self.items.entries:
            raise UsageError(
                f"two things would be stored under {fqn!r}", code=UNHELD, key=fqn, hint="rename or remove one of them"
            )
        return fqn

    def _value(self, path: tuple[str | int, ...], value: Any) -> None:
        fqn = self._add(dotted(path))
        if isinstance(value, NestingSlot):
            shape = self.wanted.tensors[value.number].shape
            self.items.tensor(fqn, path, shape, [_undivided_share(value.number, shape)], self.folder)
        elif isinstance(value, Known):
            self.items.known(fqn, path, tuple(value.shape), value.dtype, value.data, self.folder)
        else:
            self.items.object(fqn, path, TorchComposer().file("", value), self.folder)

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _tensor(self, number: int, tensor: WantedTensor) -> None:
        name, state = tensor.key
        local = spelled(name, self.hints, self.model)
        shape = self.model[name].shape if name in self.model else tensor.shape
        own = tensor.shape != shape  # a step, a row's or column's statistics
        for stored in self._find_stored_keys(name, self._pad_shape(name, shape)):
            if state == MODEL:
                fqn = model_key(local, self.hints, stored.part)
                path: tuple[str | int, ...] = ("model", fqn.removeprefix("model."))
            else:
                fqn = state_key(local, state, self.hints, stored.part)
                path = ("optimizer", "state", fqn.removeprefix(STATES).removesuffix(f".{state}"), state)
            self._check(fqn, tensor, stored.part, own=own)
            if own:  # a step is repeated for each half; no other state may differ from its parameter's shape
                self.items.tensor(
                    self._add(fqn), path, tensor.shape, [_undivided_share(number, tensor.shape)], self.folder
                )
            else:
                share = TensorShare(number, tuple(self._items(number, stored)))
                self.items.tensor(self._add(fqn), path, stored.shape, [share], self.folder)

    def _check(self, fqn: str, tensor: WantedTensor, part: str, *, own: bool) -> None:
        """Raise UsageError E2001 for a name that would be read back as another, or a state that can't be split into
        parts.

        own: whether the state has another shape than its parameter.
        """
        made = parse(fqn)
        if made is None or made.key != tensor.key or made.part != part or (own and part and tensor.shape):
            raise unheld("megatron-fsdp", tensor, self.wanted.tensors)

    def _find_stored_keys(self, name: str, shape: tuple[int, ...]) -> list[_StoredKey]:
        """Return the parts in which a tensor is stored; the same for all layers and experts, so the result is
        cached."""
        template = ".".join("*" if word.isdecimal() else word for word in name.split("."))
        found = self._cuts.get((template, shape))
        if found is None:
            found = self._cuts[template, shape] = list(self._split_keys(name, shape))
        return found

    def _split_keys(self, name: str, shape: tuple[int, ...]) -> Iterator[_StoredKey]:
        rule = self.job.rule(name, len(shape))
        own = rule.sections(shape[0]) if rule.dim == 0 and len(rule.parts) > 1 and shape else ()
        words = section_names(name) if self.hints.sections else ()
        if self.hints.halves and rule.parts == (1, 1) and ".linear_fc1." in name:
            words = HALF
        if own and len(words) == len(own):
            start = 0
            for word, rows in zip(words, own, strict=True):
                part = (rows, *shape[1:])
                yield _StoredKey(word, part, [(whole(part), Box((start, *(0,) * (len(shape) - 1)), part))])
                start += rows
            return
        size = self.degrees[rule.axis]
        if not own or size == 1:
            yield _StoredKey("", shape, [(whole(shape), whole(shape))])
            return
        self._whole.append(name)
        rows = shape[0] // size
        moves = []
        for rank in range(size):
            for piece in pieces(rule, shape, rank, size):
                moves.append((piece.within.translate((rank * rows, *(0,) * (len(shape) - 1))), piece.box))
        yield _StoredKey("", shape, moves)

    def _items(self, number: int, stored: _StoredKey) -> Iterator[StoredItem]:
        """Yield the boxes under one key: those of tensor ranks, cut by rows between data ranks."""
        tp = self.degrees["tp"]
        ep = self.degrees["ep"]
        etp = self.degrees["etp"]
        data = self.degrees["dp"] * self.degrees["cp"]
        name = self.wanted.tensors[number].key.name
        true = whole(self.wanted.tensors[number].shape)
        expert = names.expert_of(name)
        rule = self.job.rule(name, len(stored.shape))
        size = self.degrees[rule.axis]
        dim = rule.dim if rule.dim is not None and rule.dim < len(stored.shape) else None
        if dim is None or 0 in stored.shape or stored.shape[dim] % size:
            dim = None
            size = 1

        first = etp * (expert.expert // max(self.experts // ep, 1)) if expert else 0
        inner, shards = (etp * ep, max(tp * data // (etp * ep), 1)) if expert else (tp, data)
        for rank in range(size):
            own = _slice(stored.shape, dim, rank, size)
            for box, shard in _rows(own, shards):
                for at, source in stored.moves:
                    if shared := box & at:
                        inside = shared.translate(at.offset, sign=-1).translate(source.offset)
                        kept = inside & true or Box(true.offset, (0,) * len(true.shape))
                        yield StoredItem(kept, shared.offset, shared.shape, first + rank + inner * shard)

        if 0 in stored.shape:
            yield StoredItem(stored.moves[0][1], (0,) * len(stored.shape), stored.shape, first)

    # -- everything else -----------------------------------------------------------------------------------------------

    def _values(self) -> dict[Any, Any]:
        """Return the nested dict without the model and the optimizer's states."""
        out: dict[Any, Any] = {"args": Opaque(NAMESPACE, (), self._arguments())}
        out |= {"checkpoint_version": 3.0, "iteration": 0}
        carried = {key: value for key, value in self.wanted.extras.items() if key not in (*_OWN, *_FOREIGN)}
        out |= written_of(carried, EXTRAS_LEFT, self.notes)
        if self.wanted.extras.get("sharded_objects"):
            self.notes.append("objects of single ranks are left out: Megatron-FSDP has none")
        if scales := self.wanted.extras.get(EXTRA_STATES):
            self.notes.append(f"{len(scales)} {LEFT} {next(iter(scales))}: Megatron-FSDP keeps none")
        leaves = [
            (tensor.path or (tensor.key.name,), NestingSlot(number))
            for number, tensor in enumerate(self.wanted.tensors)
            if tensor.key.state == EXTRAS
        ]
        out = join(out, leaves)
        if self.rows is not None:
            out[OURS] = {VOCAB_ROWS: self.kept}
        out |= self._rng() | self._groups()
        return out

    def _arguments(self) -> dict[str, Any]:
        args = updated(self.args, self.degrees, self.job.stages, 0)
        args |= {"ckpt_format": "fsdp_dtensor", "use_megatron_fsdp": True}
        kept = written_of(args, ARGS_LEFT, self.notes)
        if not self.args:
            self.notes.append("the source has no Megatron arguments: degrees alone are written into args")
        return kept

    def _rng(self) -> dict[str, Any]:
        """Return the RNG states by stage and tensor rank, {} (with a note) if the ranks are not the source's."""
        states = self.wanted.extras.get("rng_state")
        if not states:
            if can_resume(self.wanted.tensors):
                self.notes.append(note_of_missing(NO_STATES))
            return {}
        before = self.wanted.hints.get(Degrees)
        same = before is not None and all(before.at(dim) == self.degrees[dim] for dim in ("tp", "pp"))
        shape, own = by_rank(states, self.degrees)
        if not same or len(shape) != 2 or set(own) != {(0, rank) for rank in range(self.degrees["tp"])}:
            self.notes.append(note_of_missing(OTHER_RANKS))
            return {}
        value = {str(at): tensors_of_rng(state, Known, inside=False) for at, state in own.items()}
        if not writable({at: _plain(state) for at, state in value.items()}):
            self.notes.append(note_of_missing("they hold values of classes that are not written"))
            return {}
        return {"rng_state": value}

    def _groups(self) -> dict[str, Any]:
        """Return the hyperparameters of each parameter that has states of the optimizer."""
        states = {t.key.name for t in self.wanted.tensors if t.key.state not in (MODEL, EXTRAS)}
        trained = [name for name in self.model if name in states and not names.is_buffer(name)]
        stored = [group for one in chained(self.wanted.extras.get("optimizer")) for group in groups_of(one)]
        self._left_of_optimizer()
        if not stored or not trained:
            if stored or trained:
                left = "states" if stored else "hyperparameters"
                self.notes.append(f"param_to_group_meta is left out: the source has no {left} of the optimizer")
            return {}
        stored = [dict(group) for group in stored]
        for group in stored:
            group.pop("params", None)
        chosen = self._choose_groups(trained, stored)
        meta = {self._wrap_name(name): chosen[name] for name in trained}
        return {"optimizer": {"param_to_group_meta": meta}}

    def _wrap_name(self, name: str) -> str:
        """Return a parameter's name with the wrappers' prefix of the optimizer's keys."""
        return f"{self.hints.optimizer}{spelled(name, self.hints, self.model)}"

    def _choose_groups(self, trained: Iterable[str], stored: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the group of each parameter.

        Experts have the source's hyperparameters. `is_expert_parallel` is only kept if the source is a Megatron-FSDP
        checkpoint that has it: core 0.19 writes none, because its parameters have lost that mark.
        """
        own = any(map(is_expert_group, stored))
        keys: dict[bool, dict[str, GroupKey]] = {False: {}, True: {}}
        for name in trained:
            keys[own and ".experts." in name][name] = key_of_param(name, self.model[name].shape, self.facts)
        out: dict[str, dict[str, Any]] = {}
        for experts, members in keys.items():
            made = groups_for(stored, set(members.values()), self.facts, experts=experts)
            if self.wanted.source_format != "megatron-fsdp":
                made = [{**group, "is_expert_parallel": False} for group in made]
            by_key = {key_of_group(group, self.facts): group for group in made}
            out |= {name: by_key.get(key, made[0]) for name, key in members.items()}
        return out | {name: stored[n] for name, n in self.hints.groups.items() if name in out and n < len(stored)}

    def _left_of_optimizer(self) -> None:
        """Add a note on the optimizer's plain values that Megatron-FSDP has no place for."""
        left = dict.fromkeys(
            str(key)
            for one in chained(self.wanted.extras.get("optimizer"))
            if isinstance(one, dict)
            for key, value in one.items()
            if key not in ("optimizer", "param_groups", "param_state", "param_state_sharding_type", "state") and value
        )
        if left:
            self.notes.append(f"left out of the optimizer, Megatron-FSDP has no place for it: {', '.join(left)}")


def _plain(value: Any) -> Any:
    """Return an RNG state with bytes in place of its tensors."""
    if isinstance(value, Known):
        return value.data
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _slice(shape: tuple[int, ...], dim: int | None, rank: int, size: int) -> Box:
    """Return a tensor rank's box of the stored tensor."""
    if dim is None:
        return whole(shape)
    n = shape[dim] // size
    offset = tuple(rank * n if d == dim else 0 for d in range(len(shape)))
    return Box(offset, tuple(n if d == dim else extent for d, extent in enumerate(shape)))


def _rows(box: Box, shards: int) -> Iterator[tuple[Box, int]]:
    """Yield (box of a data rank, its number), cutting the box by whole rows."""
    if not box.shape:
        yield box, 0
        return
    for shard in range(min(shards, max(box.shape[0], 1))):
        start, rows = block(box.shape[0], shards, shard)
        if rows:
            yield Box((box.offset[0] + start, *box.offset[1:]), (rows, *box.shape[1:])), shard
