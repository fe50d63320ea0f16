"""`paddle-flex`: the folders of PaddleFormers' Trainer, each a `paddle.distributed.save_state_dict` of all ranks.

    model_state/0.metadata, 0_0.distcp, 1_0.distcp, ...      every block of the model that a rank computes with
    master_weight/, optimizer_state/, ema_state/            flat ranges of blocks, cut over the data ranks (sharding v2)
    scheduler.pdparams, saved_signal_R, model_meta.json

The one idea: a rank hands over blocks, and the metadata says which block, or which range of a block's line, is in
which file. What several ranks hold is stored once, by the file with the least keys so far. A block of [gate | up] is
[gate_r | up_r], and is recorded rank after rank. Weights that are fp32 have no master; their averages have their
plain names.

The pickles are made by the tool's pickle writer, which knows the classes' names: no Paddle is needed. Source:
PaddlePaddle 3.3.1 `distributed/flex_checkpoint/dcp/`, PaddleFormers 1.2.0 `trainer/trainer.py`. What it does not do:
safetensors inside, replicas.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.harness.pieces import RankState
from ckpt_tool.harness.saving.fault_point import fault_point
from ckpt_tool.harness.saving.megatron_model import join_module, share_of
from ckpt_tool.harness.saving.paddle_model import PaddleWeight, powers, scheduler, select_stateful, weights
from ckpt_tool.harness.saving.whole import HARNESS, WholeState, region
from ckpt_tool.storage.pickles.pickle_values import NumpyArray, PickledRecord
from ckpt_tool.storage.pickles.pickle_writer import dumps

_MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
_DTYPES = {torch.float32: ("float32", "<f4"), torch.bfloat16: ("bfloat16", "<u2")}
_STATES = (
    ("master", "master_weight", ".w_0"),
    ("exp_avg", "optimizer_state", ".moment1_0"),
    ("exp_avg_sq", "optimizer_state", ".moment2_0"),
    ("ema", "ema_state", ".w_0"),
)


class RankBlock(NamedTuple):
    """What a rank hands over."""

    key: str
    values: torch.Tensor
    # shape, offset, whole: of its block
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    span: tuple[int, int] | None  # the part of the block's line in `values`, None for all

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes the items of two ranks one."""
        return self.key, self.offset, self.span, self.shape


def write(whole: WholeState, folder: Path) -> None:
    """Write the folders of the Trainer, and the files next to them."""
    saves: dict[str, list[list[RankBlock]]] = {}  # by folder, the items of each rank
    for folder_name in ("model_state", "optimizer_state", "master_weight", "ema_state"):
        saves[folder_name] = [[] for _ in whole.ranks]
    for number, rank in enumerate(whole.ranks):
        for folder_name, item in _items(whole, rank):
            saves[folder_name][number].append(item)

    for number, (name, items) in enumerate(saves.items()):
        if number == len(saves) // 2:
            fault_point("files")
        _save(folder / name, items)

    for number in range(len(whole.ranks)):
        (folder / f"saved_signal_{number}").write_text("1")
    layout = whole.layout
    degrees = {
        "pp_degree": layout.pp,
        "mp_degree": layout.tp,
        "sharding_degree": layout.dp,
        "ep_degree": layout.ep,
        "moe_sharding_degree": layout.dp // layout.ep,
    }
    (folder / "model_meta.json").write_text(json.dumps({"parallel_config": degrees, "sharding_metas": {}}))
    (folder / "config.json").write_text(json.dumps(whole.config, indent=2))
    fault_point("index")
    (folder / "scheduler.pdparams").write_bytes(scheduler(whole, HARNESS))


def _items(whole: WholeState, rank: RankState) -> list[tuple[str, RankBlock]]:
    """(folder, item) of all that the rank holds."""
    items: list[tuple[str, RankBlock]] = []
    own_weights = [weight for weight in weights(whole) if share_of(weight.module, rank)]
    for weight in own_weights:
        items.append(("model_state", _block(whole, rank, weight, "model", weight.name)))
    own_weights = select_stateful(own_weights, whole)
    items += [
        ("optimizer_state", RankBlock(f"{weight.name}.{suffix}", power, (1,), (0,), (1,), None))
        for weight in own_weights
        for suffix, power in powers(whole)
    ]
    for expert in (False, True):
        group = [weight for weight in own_weights if (weight.module.expert is not None) is expert]
        for state, folder, suffix in _STATES:
            items += [(folder, item) for item in _shares(whole, rank, group, state, suffix, expert=expert)]
    return items


def _block(whole: WholeState, rank: RankState, weight: PaddleWeight, state: str, key: str) -> RankBlock:
    """The rank's block of a weight, whole."""
    tensor = join_module(weight.module, state, whole)
    values = torch.cat([tensor[region(box)] for box in share_of(weight.module, rank)])
    shape = tuple(tensor.shape)
    cut = weight.module.cut
    tp_rank = rank.at.tp if cut is not None and whole.layout.tp > 1 else 0
    offset = tuple(tp_rank * n if dim == cut else 0 for dim, n in enumerate(values.shape))
    if weight.turned:
        values = values.t()
        shape = shape[::-1]
        offset = offset[::-1]
    return RankBlock(key, values.contiguous(), tuple(values.shape), offset, shape, None)


def _shares(
    whole: WholeState, rank: RankState, group: Sequence[PaddleWeight], state: str, suffix: str, *, expert: bool
) -> list[RankBlock]:
    """The rank's part of a state: of all blocks laid end to end, its equal part; whole blocks without ZeRO."""
    layout = whole.layout
    ranks, shard_rank = (layout.dp // layout.ep, rank.at.dp // layout.ep) if expert else (layout.dp, rank.at.dp)
    shares = []
    line = 0
    blocks = []
    for weight in group:
        plain = whole.tensors["model", weight.module.parts[0]].dtype == torch.float32
        if plain and state == "master":
            continue
        key = weight.name + ("" if plain and state == "ema" else suffix)
        blocks.append(_block(whole, rank, weight, state, key))
    share = ceil_div(sum(block.values.numel() for block in blocks), ranks)
    for block in blocks:
        numel = block.values.numel()
        start, stop = (min(max(edge - line, 0), numel) for edge in (shard_rank * share, (shard_rank + 1) * share))
        line += numel
        if not layout.zero or ranks == 1:
            shares.append(block)
        elif start < stop:
            shares.append(block._replace(values=block.values.reshape(-1)[start:stop], span=(start, stop)))
    return shares


def _save(folder: Path, ranks: Sequence[Sequence[RankBlock]]) -> None:
    """What `save_state_dict` of all ranks leaves: a data file a rank, one metadata file."""
    folder.mkdir()
    holders: dict[tuple[object, ...], list[int]] = {}
    first_of: dict[tuple[object, ...], RankBlock] = {}

    for number, items in enumerate(ranks):
        for item in items:
            holders.setdefault(item.identity, []).append(number)
            first_of.setdefault(item.identity, item)

    stored: list[list[RankBlock]] = [[] for _ in ranks]
    for identity, numbers in holders.items():
        stored[min(numbers, key=lambda number: (len(stored[number]), f"{number}_0"))].append(first_of[identity])
    states: dict[str, list[PickledRecord]] = {}
    storage: dict[PickledRecord, str] = {}

    for number, items in enumerate(stored):
        file = f"{number}_0.distcp"
        for item in items:
            states.setdefault(item.key, []).append(
                PickledRecord(f"{_MODULE}.LocalTensorMetadata", state=_describe_item(item))
            )
            storage[PickledRecord(f"{_MODULE}.LocalTensorIndex", state=_index(item))] = file
        (folder / file).write_bytes(_data(items))

    state = {
        "state_dict_metadata": states,
        "storage_metadata": storage,
        "flat_mapping": {key: (key,) for key in states},
    }
    (folder / "0.metadata").write_bytes(dumps(PickledRecord(f"{_MODULE}.Metadata", state=state), protocol=4))


def _data(items: Sequence[RankBlock]) -> bytes:
    """`paddle.save` of a flat dict: arrays, then the table of the tensors' own names; bf16 as its bits."""
    body: dict[str, Any] = {}
    for item in items:
        bits = item.values.contiguous()
        bits = bits.view(torch.int16) if bits.dtype == torch.bfloat16 else bits
        data = bits.reshape(-1).numpy().tobytes()
        body[item.key] = NumpyArray(_DTYPES[item.values.dtype][1], tuple(item.values.shape), False, data)
    names = {item.key: f"parameter_{number}.w_0" for number, item in enumerate(items)}
    return dumps({**body, "StructuredToParameterName@@": names}, protocol=4)


def _describe_item(item: RankBlock) -> dict[str, Any]:
    return {
        "global_offset": item.offset,
        "local_shape": item.shape,
        "dtype": _DTYPES[item.values.dtype][0],
        "global_shape": item.whole,
        "is_flattened": item.span is not None,
        "flattened_range": item.span,
    }


def _index(item: RankBlock) -> dict[str, Any]:
    return {
        "tensor_key": item.key,
        "global_offset": item.offset,
        "is_flattened": item.span is not None,
        "flattened_range": item.span,
        "replica_id": None,
        "local_shape": item.shape,
    }
