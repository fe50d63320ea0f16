"""The config of a GGUF source's model, read from its metadata."""

from __future__ import annotations

import struct

from ckpt_tool.core.hints import Stated
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.sources.config import ModelConfig
from ckpt_tool.sources.opening import Opened
from ckpt_tool.systems.llamacpp.config import ROPE_FREQS, foreign, hub_config

_MOST_FREQUENCIES = 4096  # half of a head's elements: no head is so wide


def read_metadata(opened: Opened) -> ModelConfig | None:
    """The model's config under the hub's keys, None if the source has no GGUF metadata.

    For an architecture without a family the ModelConfig has no config but the error that explains it. Raises InputError
    E1712.
    """
    stated = opened.catalog.hints.get(Stated)
    if stated is None:
        return None
    shapes = {row.name: row.dtype.elements(row.shape) for row in opened.catalog.rows()}
    config = hub_config(stated.values, shapes, _rope_frequencies(opened))
    if config is None:
        return ModelConfig(None, foreign=foreign(stated.values))
    return ModelConfig(config, origin="the metadata of its files")


def _rope_frequencies(opened: Opened) -> tuple[float, ...]:
    """The values of `rope_freqs.weight`, which llama.cpp stores for Llama 3's rope; () if there is no such tensor."""
    tensor = opened.catalog.tensors.get(TensorKey(ROPE_FREQS))
    if tensor is None or tensor.dtype.name != "F32" or tensor.numel > _MOST_FREQUENCIES or len(tensor.chunks) != 1:
        return ()
    array = tensor.chunks[0].array
    return struct.unpack(f"<{tensor.numel}f", opened.tree.read(array.path, array.offset, tensor.nbytes))
