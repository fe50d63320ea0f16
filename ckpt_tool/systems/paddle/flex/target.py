"""Writing a flex checkpoint: the Trainer's folders, or the plain folder that a source was.

The one idea: for every rank the items that it would hand to `paddle.distributed.save_state_dict`, folder by folder, and
from those the files that Paddle itself would have written: data files by `paddle.pickle_file`, metadata as a pickle of
its records.

    model_state/0.metadata, R_0.distcp    every block of the model that rank R computes with
    optimizer_state/, master_weight/      its share of the states: blocks (v1), or flattened ranges without padding (v2)
    ema_state/                            where there are averages: as the masters; of fp32 parameters as the model
    model_meta.json                       if there are averages: the degrees
    scheduler.pdparams, saved_signal_R    the scheduler's values; "1" for each rank that is done

The Trainer's loader wants all three folders, each with one metadata file, so they are there even when nothing is in
them (47 bytes a rank). States that Paddle has no suffix for are kept as `NAME.STATE_0` in `optimizer_state/`, where its
loader looks for the keys it knows alone. Without degrees one rank holds everything and no rule of tensor parallelism is
needed.

An `FlexBlock` is one local tensor with its place in the global one, made from the layout's blocks and shares
(`paddle.layout`); what Paddle's own save does with them, all ranks' items in a row, is then repeated to the letter:

    equal items (key, offset, range, shape) are stored once, in the file that has the least items so far; of those in
    the order of their names ("10_0.distcp" before "2_0.distcp")

so LayerNorms of a TP 2 job land in `1_0.distcp`, whose rank listed nothing else first.

Which tensors there are (`fit`), and what is made of others:

    tied embeddings  model_state/ has both names; states are stored once, under the name that is first in the alphabet
                     (lm_head.weight before model.embed_tokens.weight); with pipeline stages each stage looks for its
                     own name
    bf16 weights     model_state/ has them, although a job with sharding v2 rounds its masters instead; where the source
                     has masters alone they are those, rounded to bf16

Names that the source has and Paddle would not look for are kept too: its loader asks only for the keys it knows. Paddle
cuts k_proj and v_proj if tensor ranks divide the number of key and value heads, and keeps full copies otherwise; here
the loader goes by the recorded boxes alone, so either way is right. Without a config they are cut if their width
divides, and a note reports it.

Source: PaddleFormers 1.2.0 `trainer/trainer.py` (`_save_flex_model_state`, `_save_flex_optimizer_state`,
`_load_flex_checkpoint`), PaddlePaddle 3.3.1 `flex_checkpoint/dcp/save_state_dict.py` (`balanced_dedup_key_in_dict`),
`utils.py` (`merge_state_dict_metadata`), `load_state_dict.py` (read items are matched by boxes),
`dygraph_sharding_optimizer.py` (`sharded_state_dict`: ranges), `optimizer/adamw.py` (`sharded_state_dict`: the first of
the sorted names), runs of tied models. Cost: some 20 us an item. What it does not do: replicas
(`replicate_saved_into_local`), asynchronous saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import whole
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.flat_line import Boxes
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.target import LayoutWish, Target, TargetArray, TargetFile, Wanted, WantedTensor, whole_file
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, LogicalTensor, Path, TensorKey
from ckpt_tool.formats.base import Fitted
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.storage.pickles.pickle_frames import plan_framed
from ckpt_tool.storage.pickles.pickle_values import PickledRecord
from ckpt_tool.storage.safetensors_files.safetensors_file import build_header
from ckpt_tool.systems.paddle.dtypes import DTYPE_NAMES
from ckpt_tool.systems.paddle.extras import extras_files
from ckpt_tool.systems.paddle.flex.folders import (
    EMA_FOLDER,
    MASTER_FOLDER,
    MASTER_SUFFIX,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    folder_of,
    suffix_of,
)
from ckpt_tool.systems.paddle.flex.metadata import MODULE
from ckpt_tool.systems.paddle.job import JobDegrees, PaddleRank
from ckpt_tool.systems.paddle.layout import (
    Block,
    BlockShare,
    LaidParameter,
    config_of,
    nothing_shared,
    paddle_hints,
    settle,
)
from ckpt_tool.systems.paddle.options import PaddleOptions
from ckpt_tool.systems.paddle.pdparams.target import Rows, made_of, parts_of, with_head, with_rows, with_weights
from ckpt_tool.systems.paddle.pickle_file import PaddleComposer
from ckpt_tool.systems.paddle.ranks import meta_json
from ckpt_tool.systems.paddle.rules import joined_shape, text_config
from ckpt_tool.systems.paddle.stored_names import static_key

# -- items -------------------------------------------------------------------------------------------------------------


class FlexBlock(NamedTuple):
    """One local tensor of a rank."""

    key: str
    path: Path
    name: str  # its static name
    dtype: DType
    offset: tuple[int, ...]  # of its block in the global tensor
    shape: tuple[int, ...]  # of its block
    whole: tuple[int, ...]  # shape of the global tensor
    span: tuple[int, int] | None  # the range of the block's elements that is stored, None for all of them
    number: int  # index of the wanted tensor
    boxes: Boxes  # what fills the block, of wanted tensor `number`

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for items of two ranks that are stored once."""
        return self.key, self.offset, self.span, self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array in the file: flat for a range."""
        return self.shape if self.span is None else (self.span[1] - self.span[0],)


def whole_item(key: str, path: Path, name: str, tensor: WantedTensor, number: int) -> FlexBlock:
    """The item of a tensor of which every rank holds a full copy."""
    shape = tensor.shape
    box = whole(tensor.shape)
    return FlexBlock(key, path, name, tensor.dtype, (0,) * len(shape), shape, shape, None, number, ((box, box),))


def block_item(
    key: str, name: str, tensor: WantedTensor, number: int, block: Block, span: tuple[int, int] | None
) -> FlexBlock:
    """The item of a rank's block, or of a range of it. Concatenated, the blocks make up the global tensor."""
    shape = joined_shape(block.shape, block.cut, block.of)
    return FlexBlock(key, (key,), name, tensor.dtype, block.offset, block.shape, shape, span, number, block.boxes)


class FlexSave(NamedTuple):
    """A save of all ranks."""

    files: Mapping[int, list[FlexBlock]]  # rank -> the items that its file keeps, in their order
    storage: Sequence[tuple[FlexBlock, int]]  # (item, rank) in the order of the metadata
    stated: Mapping[str, list[FlexBlock]]  # the different shards of each key, in order


def kept(ranks: Iterable[tuple[int, Sequence[FlexBlock]]], unique: int = 0) -> FlexSave:
    """Decide which file stores each item, as Paddle does. ranks: (rank, its items), in the order of ranks."""
    homes: dict[tuple[object, ...], list[int]] = {}
    first: dict[tuple[object, ...], FlexBlock] = {}
    stated: dict[str, list[FlexBlock]] = {}
    mine: dict[int, Sequence[FlexBlock]] = {}
    indexes: dict[int, list[tuple[object, ...]]] = {}  # of a list of items: ranks may share one
    for rank, items in ranks:
        mine[rank] = items
        found = indexes.get(id(items))
        if found is None:
            found = indexes[id(items)] = [item.identity for item in items]
        for item, index in zip(items, found, strict=True):
            if index not in first:
                first[index] = item
                stated.setdefault(item.key, []).append(item)
            homes.setdefault(index, []).append(rank)
    # Paddle's own rule, repeated exactly: the file with the fewest items so far, then the order of names.
    load = dict.fromkeys(mine, 0)
    names = {rank: file_name(rank, unique) for rank in mine}
    owner: dict[tuple[object, ...], int] = {}
    for index, candidates in homes.items():
        owner[index] = min(candidates, key=lambda r: (load[r], names[r]))
        load[owner[index]] += 1

    files: dict[int, list[FlexBlock]] = {}
    for rank, items in mine.items():
        files[rank] = [item for item in items if owner[item.identity] == rank]
    return FlexSave(files, [(first[index], rank) for index, rank in owner.items()], stated)


def file_name(rank: int, unique: int = 0, *, safetensors: bool = False) -> str:
    """The name of a rank's data file in save number `unique`."""
    return f"{rank}_{unique}.{'safetensors' if safetensors else 'distcp'}"


# -- heads that no config states ---------------------------------------------------------------------------------------

_STATED = ("num_key_value_heads", "multi_query_group_num", "num_attention_heads", "n_head")
_KEYS = (".k_proj.weight", ".v_proj.weight", ".kv_b_proj.weight")


def with_heads(wanted: Wanted) -> tuple[Wanted, tuple[str, ...]]:
    """`wanted` with a number of key and value heads that fits its tensor ranks, and a note; unchanged if stated."""
    tp = wanted.wish.degrees.at("tp")
    config = config_of(wanted)
    facts = text_config(config)
    widths = {row.shape[-1] for row in wanted.tensors if row.key.name.endswith(_KEYS) and row.shape}
    if tp == 1 or not widths or any(type(facts.get(key)) is int for key in _STATED):
        return wanted, ()
    parted = all(width % tp == 0 for width in widths)
    wish = wanted.wish._replace(config={**config, "num_key_value_heads": tp if parted else 1})
    how = f"cut for --tp {tp}" if parted else "whole on every rank"
    note = (
        f"keys and values are {how}: no config says how many heads they have, and Paddle's loader goes "
        "by the recorded boxes"
    )
    return replace(wanted, wish=wish), (note,)


# -- which tensors -----------------------------------------------------------------------------------------------------


def fit(tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish) -> Fitted:
    """The tensors to write. Raises UsageError as `paddle.layout.settle` does."""
    rows: Rows = list(enumerate(tensors))
    requested = Wanted((), extras, hints, wish=wish)
    if paddle_hints(requested).flex == "plain" and wish.degrees.alone:  # a plain folder will be written again
        return Fitted(tuple(rows))
    dropped: list[dict[str, Any]] = []
    casts: dict[TensorKey, DType] = {}
    rows = with_head(rows, _settle_parameter(rows, requested), dropped)
    rows = _add_tied_states(rows, _settle_parameter(rows, requested), dropped)
    rows = with_weights(rows, wish, casts, dropped)
    return Fitted(tuple(rows), casts, tuple(dropped))


def _settle_parameter(rows: Rows, requested: Wanted) -> LaidParameter:
    return settle(with_heads(with_rows(requested, rows))[0])


def _add_tied_states(rows: Rows, laid: LaidParameter, dropped: list[dict[str, Any]]) -> Rows:
    """Add the states of a tied pair under every name by which Paddle's loader asks for them."""
    head = next((p for p in laid.parameters.values() if p.alias is not None), None)
    if head is None or head.alias is None:
        return rows
    pair = head.alias, head.name
    under = pair if laid.parameters[head.alias].stages != head.stages else (min(pair),)
    have = {row.key for _, row in rows}
    made: Rows = []
    for index, row in rows:
        if row.key.name in pair and row.key.state not in (MODEL, EXTRAS):
            keys = [TensorKey(name, row.key.state) for name in under]
            fresh = [key for key in keys if key not in have]
            have.update(fresh)
            made += [(index, row._replace(key=key, path=())) for key in fresh]
    for state in dict.fromkeys(row.key.state for _, row in made):
        where = f"its {state} is stored under {' and '.join(under)}, where Paddle asks for it"
        dropped.append(made_of(f"{' and '.join(pair)} are tied: {where}", state))
    return rows + made


# -- the whole output --------------------------------------------------------------------------------------------------

_PADDLE_NAMES = {name: paddle for paddle, name in DTYPE_NAMES.items()}
META = "model_meta.json"
ALWAYS = (MODEL_FOLDER, OPTIMIZER_FOLDER, MASTER_FOLDER)


def flex_target(wanted: Wanted) -> Target:
    """The plan of the output folder.

    Raises UsageError E1271 (a state that has no suffix), and as `paddle.layout.settle` if degrees are given.
    """
    notes: list[str] = []
    plain = _plain_items(wanted)
    if plain is not None:
        files = _plain_files(wanted, plain)
    else:
        writer = _FlexWriter(wanted)
        files = writer.files()
        notes += writer.notes
        if writer.laid is None and wanted.wish.of(PaddleOptions).sharding:
            notes.append(nothing_shared(wanted.wish.of(PaddleOptions).sharding))
        if paddle_hints(wanted).flex == "plain" and wanted.source_format == "paddle-flex":
            notes.append("written as the Trainer's folders: a plain folder holds what one rank saves")
    files += extras_files(wanted, wanted.extras)
    files += wanted.side_file_copies()
    return Target("paddle-flex", tuple(files), notes=tuple(notes))


# -- the Trainer's folders ---------------------------------------------------------------------------------------------


class _FlexWriter:
    """One output of the Trainer's kind."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.at = {tensor.key: number for number, tensor in enumerate(wanted.tensors)}
        stated, given = with_heads(wanted)
        self.laid = settle(stated) if _wants_ranks(wanted) else None
        self.notes = (*self.laid.notes, *given) if self.laid else ()
        self.own = paddle_hints(wanted)
        self.names: Mapping[str, str] = self.own.names or {}
        self.states = list(dict.fromkeys(t.key.state for t in wanted.tensors if t.key.state not in (MODEL, EXTRAS)))
        self.by_state: dict[str, dict[str, int]] = {}
        for number, tensor in enumerate(wanted.tensors):
            self.by_state.setdefault(tensor.key.state, {})[tensor.key.name] = number
        known = self.laid.parameters if self.laid else {}
        self.aliases = {  # on other stages each name has ranks, and cuts, of its own
            one.alias: one.name
            for one in known.values()
            if one.alias is not None and known[one.alias].stages == one.stages
        }
        self._blocks = lru_cache(maxsize=None)(self._make_blocks)

    def files(self) -> list[TargetFile]:
        """All files of the Trainer's folders, and a marker for each rank."""
        ranks = self.ranks()
        folders = [*ALWAYS, *([EMA_FOLDER] if EMA in self.by_state else [])]
        out: list[TargetFile] = []
        for folder in folders:
            out += _save_files(f"{folder}/", kept((number, items[folder]) for number, items in ranks))
        if EMA in self.by_state:
            out.append(whole_file(META, self._meta()))
        return out + [whole_file(f"saved_signal_{number}", b"1") for number, _ in ranks]

    def _meta(self) -> bytes:
        """The degrees, which Paddle's callbacks for averages compare with their own before they load any."""
        degrees = self.laid.degrees if self.laid else JobDegrees()
        return meta_json(degrees, {})

    def ranks(self) -> list[tuple[int, dict[str, list[FlexBlock]]]]:
        """(rank, its items by folder), in the order of ranks. What the layout gives to no rank, rank 0 holds whole."""
        if self.laid is None:
            return [(0, self._whole(range(len(self.wanted.tensors))))]
        out = [(rank.number, self._rank(self.laid, rank)) for rank in self.laid.degrees.ranks()]
        out.sort(key=lambda pair: pair[0])
        given = {item.number for _, items in out for folder in items.values() for item in folder}
        rest = self._whole(number for number in range(len(self.wanted.tensors)) if number not in given)
        for folder, items in rest.items():
            out[0][1][folder] = [*out[0][1][folder], *items]
        return out

    def _whole(self, numbers: Iterable[int]) -> dict[str, list[FlexBlock]]:
        out: dict[str, list[FlexBlock]] = {folder: [] for folder in (*ALWAYS, EMA_FOLDER)}
        for number in numbers:
            tensor = self.wanted.tensors[number]
            if tensor.key.state != EXTRAS:
                key = self.key(tensor)
                out[folder_of(tensor.key)].append(whole_item(key, (key,), self.name(tensor), tensor, number))
        return out

    def _rank(self, laid: LaidParameter, rank: PaddleRank) -> dict[str, list[FlexBlock]]:
        model, averages = self._blocks(laid, rank.pp, rank.tp, rank.ep)
        out: dict[str, list[FlexBlock]] = {
            MODEL_FOLDER: model,
            OPTIMIZER_FOLDER: [],
            MASTER_FOLDER: [],
            EMA_FOLDER: [*averages],
        }
        shares = [
            (share, name)
            for share in laid.shares(rank)
            for name in (share.block.parameter.name, self.aliases.get(share.block.parameter.name))
            if name is not None
        ]
        for state in self.states:
            mine = self.by_state[state]
            for share, name in shares:
                number = mine.get(name)
                item = None if number is None else self._share(share, number)
                if number is not None and item is not None:
                    out[folder_of(self.tensor(number).key)].append(item)
        return out

    def _make_blocks(self, laid: LaidParameter, pp: int, tp: int, ep: int) -> tuple[list[FlexBlock], list[FlexBlock]]:
        """Items of the model, and of the averages that are stored as the model is: the same for all ranks that share
        states."""
        found: tuple[list[FlexBlock], list[FlexBlock]] = ([], [])
        for block in laid.blocks(laid.degrees.rank(pp, tp, 0)._replace(ep=ep)):
            for state, items in zip((MODEL, EMA), found, strict=True):
                number = self.by_state.get(state, {}).get(block.parameter.name)
                if number is not None and (state == MODEL or not self.key(self.tensor(number)).endswith(MASTER_SUFFIX)):
                    tensor = self.tensor(number)
                    items.append(block_item(self.key(tensor), self.name(tensor), tensor, number, block, None))
        return found

    def _share(self, share: BlockShare, number: int) -> FlexBlock | None:
        """A rank's share of a state; None where it holds padding alone, or where the model's blocks have it already."""
        tensor = self.tensor(number)
        block = share.block
        span = share.span
        key = self.key(tensor)
        name = self.name(tensor)
        if tensor.key.state == EMA and not key.endswith(MASTER_SUFFIX):
            return None
        if span is not None and span.start == span.stop:
            return None
        if tensor.shape != block.parameter.shape:  # a counter
            return whole_item(key, (key,), name, tensor, number)
        return block_item(key, name, tensor, number, block, None if span is None else (span.start, span.stop))

    def tensor(self, number: int) -> WantedTensor:
        """The wanted tensor of an index."""
        return self.wanted.tensors[number]

    def key(self, tensor: WantedTensor) -> str:
        """The tensor's key in its folder. Averages of fp32 parameters have no suffix."""
        if tensor.key.state != EMA:
            return tensor.key.name + suffix_of(tensor.key)
        number = self.by_state.get(MODEL, {}).get(tensor.key.name)
        bare = number is not None and self.tensor(number).dtype.name == "F32"
        if (
            bare
            and tensor.key.name not in self.by_state.get(MASTER, {})
            and not tensor.key.name.endswith(MASTER_SUFFIX)
        ):
            return tensor.key.name
        return tensor.key.name + MASTER_SUFFIX

    def name(self, tensor: WantedTensor) -> str:
        """The tensor's own name, as Paddle's optimizer makes it of the parameter's; the structured one where none is
        known."""
        static = self.names.get(tensor.key.name)
        base = static if isinstance(static, str) else tensor.key.name
        mastered = tensor.key.state != MODEL and tensor.key.name in self.by_state.get(MASTER, {})
        return static_key(base, tensor.key.state, mastered=mastered)


def _wants_ranks(wanted: Wanted) -> bool:
    return not wanted.wish.degrees.alone


# -- a plain folder ----------------------------------------------------------------------------------------------------


def _plain_items(wanted: Wanted) -> list[FlexBlock] | None:
    """The items of one rank's plain save, where the source was one and everything still has a key there; else None."""
    own = paddle_hints(wanted)
    if own.flex != "plain" or wanted.source_format != "paddle-flex" or _wants_ranks(wanted):
        return None
    items: list[FlexBlock] = []
    for number, tensor in enumerate(wanted.tensors):
        if tensor.key.state == EXTRAS:
            continue
        path = _plain_path(tensor, own.roots or {})
        if path is None:
            return None
        items.append(whole_item(dotted(path), path, tensor.key.name, tensor, number))
    return items if len({item.key for item in items}) == len(items) else None


def _plain_path(tensor: WantedTensor, roots: Mapping[str, Any]) -> Path | None:
    """The path that a plain save's reader gives this name and state back from; None where there is none."""
    from ckpt_tool.systems.paddle.flex.folders import plain_keys

    leaf = tensor.key.name + (MASTER_SUFFIX if tensor.key.state == EMA else suffix_of(tensor.key))
    group = tensor.key.state if tensor.key.state in (MODEL, EMA, MASTER) else "optimizer"
    tries: list[Path] = [tensor.path] if tensor.path else []
    if isinstance(roots.get(group), str):
        tries += [(roots[group], leaf), (roots[group], tensor.key.name)]
    tries.append((leaf,))
    for path in tries:
        if path and plain_keys([(dotted(path), path)]).keys == [tensor.key]:
            return path
    return None


def _plain_files(wanted: Wanted, items: list[FlexBlock]) -> list[TargetFile]:
    return _save_files("", kept([(0, items)]), safetensors=bool(paddle_hints(wanted).safetensors))


# -- files -------------------------------------------------------------------------------------------------------------


def _save_files(folder: str, save: FlexSave, *, safetensors: bool = False) -> list[TargetFile]:
    """A save's data files and its metadata."""
    out = []
    for rank, items in save.files.items():
        path = folder + file_name(rank, safetensors=safetensors)
        out.append(_safetensors(path, items) if safetensors else _distcp(path, items))
    plan = plan_framed(_metadata(save, safetensors=safetensors))
    return [*out, whole_file(f"{folder}0.metadata", plan.literals[0][1])]


def _distcp(path: str, items: Sequence[FlexBlock]) -> TargetFile:
    composer = PaddleComposer()
    state = {
        item.key: composer.tensor(
            item.stored_shape, item.dtype, parts_of(item.number, item.shape, item.boxes, item.span)
        )
        for item in items
    }
    return composer.file(path, state, {item.key: item.name for item in items})


def _safetensors(path: str, items: Sequence[FlexBlock]) -> TargetFile:
    head, offsets, size = build_header([(item.key, item.dtype, item.stored_shape) for item in items], {})
    arrays = tuple(
        TargetArray(item.number, whole(item.shape), offset)
        for item, offset in zip(items, offsets, strict=True)
        if prod(item.shape)
    )
    return TargetFile(path, size, ((0, head),), arrays)


def _metadata(save: FlexSave, *, safetensors: bool) -> PickledRecord:
    """Paddle's `Metadata` of a save."""
    states = {key: list(map(_pickle_block, items)) for key, items in save.stated.items()}
    storage = {
        PickledRecord(f"{MODULE}.LocalTensorIndex", state=_index(item)): file_name(rank, safetensors=safetensors)
        for item, rank in save.storage
    }
    paths = {key: items[0].path for key, items in save.stated.items()}
    state = {"state_dict_metadata": states, "storage_metadata": storage, "flat_mapping": paths}
    return PickledRecord(f"{MODULE}.Metadata", state=state)


def _pickle_block(item: FlexBlock) -> PickledRecord:
    return PickledRecord(f"{MODULE}.LocalTensorMetadata", state=_describe_block(item))


def _describe_block(item: FlexBlock) -> dict[str, Any]:
    return {
        "global_offset": item.offset,
        "local_shape": item.shape,
        "dtype": _PADDLE_NAMES[item.dtype.name],
        "global_shape": item.whole,
        "is_flattened": item.span is not None,
        "flattened_range": item.span,
    }


def _index(item: FlexBlock) -> dict[str, Any]:
    return {
        "tensor_key": item.key,
        "global_offset": item.offset,
        "is_flattened": item.span is not None,
        "flattened_range": item.span,
        "replica_id": None,
        "local_shape": item.shape,
    }
