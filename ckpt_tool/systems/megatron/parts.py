"""Tensors that Megatron stores in parts, each under a key of its own, and how the whole tensor is put together.

The one idea: a tensor whose sections are cut separately is stored as one key for each section, so that any number of
ranks can load it; the whole tensor is its parts, concatenated along the rows.

    linear_fc1.weight_w, linear_fc1.weight_v        gate and up of a gated fc1   -> linear_fc1.weight [gate; up]
    experts.linear_fc1.weight3_w, ..._v             the same of expert 3         -> experts.linear_fc1.weight3
    in_proj.weight.query, ....key, ....value, ...   sections of a recurrent module (`rules.SECTIONS`)

torch_dist always stores sections, and halves for singleton experts (`megatron.torch_dist.keys`). Megatron-FSDP stores
halves wherever the layer is gated by SwiGLU, and sections if Megatron-Bridge saved it (`megatron.fsdp_dtensor.format`).

Sources (NVIDIA/Megatron-LM core 0.19.0): `core/transformer/mlp.py` (`apply_swiglu_sharded_factory`),
`core/transformer/fsdp_dtensor_checkpoint.py` (`handle_swiglu_in_state_dict`, `handle_gdn_in_state_dict`),
`core/ssm/mamba_mixer.py`, `core/ssm/gated_delta_net/`. Cost: a us a key. What it does not do: files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

from ckpt_tool.core.box import Box
from ckpt_tool.core.catalog import mark_replicas
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import Chunk, ChunkColumns, LogicalTensor, TensorKey
from ckpt_tool.errors import Incomplete
from ckpt_tool.systems.megatron.rules import section_names

HALF = ("w", "v")
LACKING = "E0309"
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias)\d{0,9})_([wv])", re.DOTALL)
_WORDS = {"w": "gate (_w) half of a gated fc1", "v": "up (_v) half of a gated fc1"}


def apart(key: str) -> tuple[str, str]:
    """Return (key of the whole tensor, name of the part that is stored under `key`); the part is "" for a whole tensor.

    >>> apart("mlp.linear_fc1.weight_v"), apart("mlp.linear_fc2.weight")
    (('mlp.linear_fc1.weight', 'v'), ('mlp.linear_fc2.weight', ''))
    """
    if half := _HALF.fullmatch(key):
        return half[1], half[2]
    front, dot, last = key.rpartition(".")
    return (front, last) if dot and last in section_names(front) else (key, "")


def parts_of(key: str, part: str) -> tuple[str, ...]:
    """Return all parts of the tensor `key`, of which `part` is one, in their order; () if `part` is ""."""
    if part in HALF:
        return HALF
    return section_names(key) if part else ()


def of_part(key: str, part: str) -> str:
    """Return the key under which part `part` of the tensor `key` is stored."""
    return f"{key}_{part}" if part in HALF else f"{key}.{part}"


def moved(chunk: Chunk, rows: int) -> Chunk:
    """Return the chunk moved down by `rows` rows; a scalar's chunk is returned unchanged."""
    offset = chunk.box.offset
    if not offset:
        return chunk
    return Chunk(Box((offset[0] + rows, *offset[1:]), chunk.box.shape), chunk.array, chunk.within, chunk.replica)


class Gathered:
    """A logical tensor while its chunks are gathered.

    shape: of the first part that was found. parts: the names of its parts in their order, () if it is stored whole.
    chunks: of a tensor that is stored whole. held, rows: the chunks and the number of rows of each part found so far.
    """

    __slots__ = ("chunks", "dtype", "held", "parts", "rows", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: DType, parts: tuple[str, ...]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.parts = parts
        self.chunks: Sequence[Chunk] = ()
        self.held: dict[str, Sequence[Chunk]] = {}
        self.rows: dict[str, int] = {}

    def begin(self, part: str, shape: tuple[int, ...]) -> None:
        """Record that a part was found ("" for the whole tensor), and its number of rows."""
        if part:
            self.rows[part] = shape[0] if shape else 0
            self.held[part] = ()

    def place(self, part: str, chunks: Sequence[Chunk]) -> None:
        """Set the chunks of a part for which `begin` was called; `ChunkColumns` are kept as they are."""
        if part:
            self.held[part] = chunks
        else:
            self.chunks = chunks

    def whole(self, key: TensorKey, path: str) -> LogicalTensor:
        """Return the tensor, its parts concatenated along the rows.

        Args:
            key: of the tensor.
            path: the folder, for the message.

        Raises:
            Incomplete: E0309, a part is missing.
        """
        shape = self.shape
        chunks = self.chunks
        if self.parts:
            rows, chunks = self._join_parts(key, path)
            shape = (rows, *shape[1:]) if shape else shape  # a step counter: one a part, all alike
        if not isinstance(chunks, ChunkColumns):
            chunks = mark_replicas(chunks) if len(chunks) > 1 else tuple(chunks)
        return LogicalTensor(key, shape, self.dtype, chunks)

    def _join_parts(self, key: TensorKey, path: str) -> tuple[int, Sequence[Chunk]]:
        """Return (rows of the whole tensor, its chunks), from the parts."""
        missing = [part for part in self.parts if part not in self.held]
        if missing:
            what = _WORDS.get(missing[0], f"section {missing[0]!r} of a projection")
            raise Incomplete(
                f"the {what} is missing",
                code=LACKING,
                key=str(key),
                path=path,
                hint=f"all {len(self.parts)} parts are stored under keys of their own",
            )
        # The rows at which each part begins; the last entry is the number of all rows.
        starts = [0, *accumulate(self.rows[part] for part in self.parts)]
        held = [(self.held[part], start) for part, start in zip(self.parts, starts, strict=False)]
        # Columns of many chunks can be joined without making an object for each chunk.
        if all(isinstance(chunks, ChunkColumns) for chunks, _ in held):
            from ckpt_tool.formats.dcp_container.dcp_columns import DcpColumns, joined

            columns = joined([(cast(DcpColumns, chunks), start) for chunks, start in held])
            if columns is not None:
                return starts[-1], columns
        return starts[-1], [moved(chunk, start) for chunks, start in held for chunk in chunks]
