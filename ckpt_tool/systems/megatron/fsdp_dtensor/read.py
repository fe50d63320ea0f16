"""Reading a Megatron-FSDP checkpoint: what a DCP holds, put under logical names. `megatron.fsdp_dtensor.format` is the
specification.

    keys -> names, parts joined -> rows of tensor ranks put in order -> groups, RNG states, arguments as extras
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.box import Box
from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.hints import Degrees, Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import EXTRAS, MODEL, Chunk, LogicalTensor, TensorKey, first_rows
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, UnknownFormat
from ckpt_tool.formats import checksums
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.formats.dcp_container.dcp_metadata import (
    CONTRADICTION,
    FSDP_GROUPS,
    METADATA,
    DcpListing,
    check_files,
    read_listing,
)
from ckpt_tool.formats.dcp_container.dcp_state import State
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.storage.records import read_array
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import arguments, facts_of
from ckpt_tool.systems.megatron.fsdp_dtensor import folder as fsdp_folder
from ckpt_tool.systems.megatron.fsdp_dtensor.keys import (
    VOCAB_ROWS,
    WRAPPER,
    FsdpHints,
    FsdpKey,
    logical,
    parse,
    unwrapped,
)
from ckpt_tool.systems.megatron.groups import is_expert_group, key_of_group, key_of_param
from ckpt_tool.systems.megatron.legacy.target import OURS
from ckpt_tool.systems.megatron.main_weights import half_of
from ckpt_tool.systems.megatron.parts import HALF, Gathered, parts_of
from ckpt_tool.systems.megatron.pointer import misnamed
from ckpt_tool.systems.megatron.rng import rank_name
from ckpt_tool.systems.megatron.rules import gated, is_vocabulary, pieces, rule_of, sections_of

SHARED = "E2008"
STATELESS = "E0302"
RNG, _GROUPS = "rng_state", FSDP_GROUPS.split(".")[1]
_RNG_LIMIT = 1 << 20  # bytes of a state that becomes a value
_PLACE = re.compile(r"\((\d{1,9}), (\d{1,9})\)")  # (pipeline stage, tensor rank), the key of an RNG state


def read_tree(tree: Tree, options: ReadOptions) -> Catalog:
    """Return the catalog of the checkpoint in `tree`; `format` lists options and errors."""
    found = fsdp_folder.find(tree)
    folder = found[0] if found else ""
    if not tree.exists(folder + METADATA):
        raise UnknownFormat(
            "no .metadata: this is no Megatron-FSDP folder",
            code="E0393",
            path=tree.display(folder),
            hint="pass the folder that holds .metadata (iter_NNNNNNN), or its run's",
        )
    listing = read_listing(tree, folder, (METADATA,))
    check_files(tree, [listing], folder + METADATA)
    catalog = _MegatronFsdpReading(tree, folder, listing, options).catalog()
    catalog.check()
    return catalog


class _MegatronFsdpReading:
    """The reading of one checkpoint: the model's and the optimizer's tensors first, then all other values."""

    def __init__(self, tree: Tree, folder: str, listing: DcpListing, options: ReadOptions) -> None:
        self.tree = tree
        self.folder = folder
        self.listing = listing
        self.options = options
        self.state = State(tree, [listing])
        self.found: dict[TensorKey, Gathered] = {}
        self.keys: list[FsdpKey] = []
        self.others: list[LogicalTensor] = []
        self.notes: list[Note] = []

    def catalog(self) -> Catalog:
        """Return the catalog of the checkpoint."""
        for tensor in self.state.tensors:
            key = parse(dotted(tensor.path))
            if key is None:
                self._other(tensor)
            else:
                self._part(key, tensor)

        extras = self.state.extras.finished()
        facts = facts_of(arguments(extras))
        tensors = self._tensors()
        self._check_stages(tensors, facts.pp, facts.layers)
        tensors = dict(self._order_rows(tensors, extras))
        tensors = _without_padding(tensors, extras.pop(OURS, None))
        apart = self._optimizer(extras, tensors)
        self._rng(extras, facts.degrees)
        tensors, unread = set_apart(tensors | {t.key: t for t in self.others})
        degrees = facts.degrees
        self.notes += [note for note in (misnamed(self.tree, self.folder, extras.get("iteration")),) if note]
        if half := half_of(extras, tensors.values()):
            message = f"the model are the optimizer's fp32 main weights, the job computes in {half}: --dtype {half}"
            self.notes.append(Note("N-main-weights", f"{message} writes what it computed with"))

        return Catalog(
            "megatron-fsdp",
            tensors=tensors,
            extras=extras,
            mesh=Mesh.of_degrees(degrees),
            files=(self.folder + METADATA, *self.state.files),
            sidefiles=(),
            notes=(
                *self.notes,
                *self.state.notes(),
                *notes_of(unread),
                *checksums.missing(self.tree, tensors.values(), required=self.options.require_checksums),
            ),
            unsafe=self.state.all_unsafe(),
            hints=Hints.of(
                Degrees(**degrees), self._hints(apart), Globals.each(self.listing.globals, self.state.items.globals)
            ),
            indexes=(self.folder + METADATA,),
            unread=unread,
        )

    def _hints(self, apart: Mapping[str, int]) -> FsdpHints:
        """Return how the source spells its keys, for a writer.

        apart: the parameters in unexpected groups (`_exceptions`).
        """
        model = next((key.wrappers for key in self.keys if key.key.state == MODEL), WRAPPER)
        states = next((key.wrappers for key in self.keys if key.key.state != MODEL), "")
        local_names = {key.local for key in self.keys}
        containers = set(filter(None, map(names.container_of, local_names)))
        inner = None
        # The two names that versions of Megatron have for the inner layer.
        for module in ("mtp_model_layer", "transformer_layer"):
            if inner is None and any(f".{module}." in name for name in local_names):
                inner = module
        convolution = "." if any(names.convolution(name, "_") != name for name in local_names) else "_"
        return FsdpHints(
            model,
            states or WRAPPER * 3,
            any(map(names.is_fused_norm, local_names)),
            containers.pop() if len(containers) == 1 else None,
            inner,
            any(key.part in HALF for key in self.keys),
            any(key.part and key.part not in HALF for key in self.keys),
            convolution,
            apart,
        )

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _part(self, key: FsdpKey, tensor: LogicalTensor) -> None:
        self.keys.append(key)
        parts = parts_of(key.local, key.part)
        known = self.found.get(key.key)
        if known is None:
            known = self.found[key.key] = Gathered(tensor.shape, tensor.dtype, parts)
        elif key.part in known.held or not _is_one_more(tensor, parts, known):
            raise InconsistentCheckpoint(
                f"{key.key} is stored twice, or in parts that do not go together, under {dotted(tensor.path)}",
                code=CONTRADICTION,
                path=self.tree.display(self.folder + METADATA),
                key=str(key.key),
                hint="two modules of one name in one save (chunks of a virtual pipeline?): nothing says which counts",
            )
        known.begin(key.part, tensor.shape)
        known.place(key.part, tensor.chunks)

    def _other(self, tensor: LogicalTensor) -> None:
        """Add a tensor of no parameter: an RNG state becomes bytes, all others are extras."""
        placed = len(tensor.path) > 2 and tensor.path[0] == RNG and _PLACE.fullmatch(str(tensor.path[1]))
        if placed and tensor.dtype.name == "U8" and len(tensor.shape) == 1 and tensor.chunks:
            (chunk, *more) = tensor.chunks
            if not more and tensor.nbytes <= _RNG_LIMIT:
                self.state.extras.put(tensor.path, bytes(read_array(self.tree, chunk.array)))
                return
        self.others.append(tensor._replace(key=TensorKey(dotted(tensor.path), EXTRAS)))

    def _tensors(self) -> dict[TensorKey, LogicalTensor]:
        path = self.tree.display(self.folder)
        return {key: found.whole(key, path) for key, found in self.found.items()}

    def _check_stages(self, tensors: Iterable[TensorKey], pp: int, layers: int | None) -> None:
        """Raise InconsistentCheckpoint E2008 if pipeline stages wrote their layers under the same names."""
        have = names.layers_count([key.name for key in tensors if key.state == MODEL])
        if pp > 1 and layers and 0 < have < layers:
            raise InconsistentCheckpoint(
                f"{have} layers are stored, the model has {layers}: its {pp} pipeline stages number theirs from 0 "
                "each, and one stage's were written under each name",
                code=SHARED,
                path=self.tree.display(self.folder),
                hint="the other stages' layers are in no file: save with one pipeline stage, or as torch_dist",
            )

    def _order_rows(
        self, tensors: Mapping[TensorKey, LogicalTensor], extras: Mapping[str, Any]
    ) -> Iterator[tuple[TensorKey, LogicalTensor]]:
        """Yield the tensors with the rows of each half or section together.

        A tensor that is stored whole has the rows of tensor rank 0 first, with a part of each section, then those of
        rank 1, and so on.
        """
        facts = facts_of(arguments(extras))
        shapes = {key.name: tensor.shape for key, tensor in tensors.items() if key.state == MODEL}
        sections = sections_of(shapes, facts)
        gate = gated(shapes, facts)
        for key, tensor in tensors.items():
            rule = rule_of(key.name, len(tensor.shape), gated=gate, down_shared=False, sections=sections)
            size = facts.degrees[rule.axis]
            if len(rule.parts) < 2 or size < 2 or self.found[key].parts or not tensor.shape:
                yield key, tensor
                continue
            rows = tensor.shape[0] // size
            moves = [
                (piece.within.translate((rank * rows, *piece.within.offset[1:])), piece.box)
                for rank in range(size)
                for piece in pieces(rule, tensor.shape, rank, size)
            ]
            yield key, tensor._replace(chunks=tuple(_rearrange_chunks(tensor.chunks, moves)))

    # -- plain values --------------------------------------------------------------------------------------------------

    def _optimizer(self, extras: dict[str, Any], tensors: Mapping[TensorKey, LogicalTensor]) -> dict[str, int]:
        """Replace the hyperparameters of each parameter by groups, as Megatron's other formats have them.

        Returns {parameter: group} for parameters that are in another group than their name and shape imply.
        """
        stored = extras.get("optimizer")
        stated = stored.pop(_GROUPS, None) if isinstance(stored, dict) else None
        if not isinstance(stored, dict) or not isinstance(stated, dict):
            return {}
        groups: list[dict[str, Any]] = []
        known: dict[str, int] = {}
        member: dict[str, int] = {}
        for name, meta in stated.items():
            # Parameters with equal hyperparameters form a group; the text makes unhashable values comparable.
            group = dict(meta) if isinstance(meta, dict) else {"value": meta}
            text = repr(sorted(group.items(), key=lambda pair: str(pair[0])))
            if text not in known:
                known[text] = len(groups)
                groups.append(group)
            member[logical(unwrapped(str(name)))] = known[text]
        self._check_states(member, tensors)
        dense = [group for group in groups if not is_expert_group(group)]
        experts = [group for group in groups if is_expert_group(group)]
        parted = [{"optimizer": {"param_groups": part}} for part in (dense, experts) if part]
        rest = {key: value for key, value in stored.items() if value != {}}
        extras["optimizer"] = {**rest, **parted[0]} if len(parted) == 1 else parted
        return self._exceptions(member, groups, tensors, extras)

    def _exceptions(
        self,
        member: Mapping[str, int],
        groups: Sequence[Mapping[str, Any]],
        tensors: Mapping[TensorKey, LogicalTensor],
        extras: Mapping[str, Any],
    ) -> dict[str, int]:
        facts = facts_of(arguments(extras))
        kinds = [(key_of_group(group, facts), is_expert_group(group)) for group in groups]
        # Groups are numbered as in the extras: the dense ones first, then the experts'.
        order = {id(g): n for n, g in enumerate([*filter(_dense, groups), *filter(is_expert_group, groups)])}
        out = {}
        for name, number in member.items():
            tensor = tensors.get(TensorKey(name))
            if tensor is None:
                continue
            apart = ".experts." in name and any(expert for _, expert in kinds)
            wanted = (key_of_param(name, tensor.shape, facts), apart)
            if kinds.count(wanted) != 1 or kinds.index(wanted) != number:
                out[name] = order[id(groups[number])]
        return out

    def _check_states(self, member: Mapping[str, int], tensors: Iterable[TensorKey]) -> None:
        """Raise Incomplete E0302 if only some of the optimizer's parameters have states."""
        trained = {key.name for key in tensors if key.state != MODEL}
        missing = [name for name in member if name not in trained]
        if not missing or len(missing) == len(member):
            return
        message = f"{len(missing)} of {len(member)} parameters of the optimizer have no state, the others have"
        if self.options.lenient:
            self.notes.append(Note("N-no-state", f"{message}, such as {missing[0]}", key=missing[0]))
            return
        fault = Incomplete(
            message,
            code=STATELESS,
            path=self.tree.display(self.folder),
            key=missing[0],
            faults=missing[1:50],
            hint="a part of the optimizer was not saved, or removed; --lenient takes it as it is",
        )
        report_missing(fault)

    def _rng(self, extras: dict[str, Any], degrees: Mapping[str, int]) -> None:
        """Rename the RNG states as all formats of Megatron name them (`megatron.rng`)."""
        stored = extras.get(RNG)
        if not isinstance(stored, dict):
            return
        shape = (degrees["pp"], degrees["tp"])
        out = {}
        for place, value in stored.items():
            found = _PLACE.fullmatch(str(place))
            if found is None or not all(map(numeral, found.groups())):
                return
            out[rank_name((int(found[1]), int(found[2])), shape)] = value
        extras[RNG] = out


def _dense(group: Any) -> bool:
    return not is_expert_group(group)


def _is_one_more(tensor: LogicalTensor, parts: tuple[str, ...], known: Gathered) -> bool:
    """Return whether the tensor can be another part of the tensor `known`."""
    same = (tensor.dtype, tensor.shape[1:], len(tensor.shape)) == (known.dtype, known.shape[1:], len(known.shape))
    return bool(parts) and same and known.parts == parts


def _without_padding(tensors: dict[TensorKey, LogicalTensor], ours: Any) -> dict[TensorKey, LogicalTensor]:
    """Return the tensors without the rows with which our writer padded a vocabulary."""
    rows = ours.get(VOCAB_ROWS) if isinstance(ours, dict) else None
    if type(rows) is not int or rows < 1:
        return tensors
    own = {key for key, t in tensors.items() if is_vocabulary(key.name) and t.shape and t.shape[0] > rows}
    return {key: first_rows(t, rows) if key in own else t for key, t in tensors.items()}


def _rearrange_chunks(chunks: Iterable[Chunk], moves: Sequence[tuple[Box, Box]]) -> Iterator[Chunk]:
    """Yield the chunks of a tensor, moved. moves: (box of the stored tensor, its box in the whole tensor)."""
    for chunk in chunks:
        for stored, box in moves:
            shared = chunk.box & stored
            if shared is None:
                continue
            start = shared.translate(stored.offset, sign=-1).translate(box.offset)
            inside = shared.translate(chunk.box.offset, sign=-1).translate(chunk.within.offset)
            yield Chunk(start, chunk.array, inside, chunk.replica)
