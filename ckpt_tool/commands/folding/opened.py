"""Opening an adapter: PEFT's folders, and the LoRA folders of PaddleFormers.

PaddleFormers keeps `lora_A` (in, r) and `lora_B` (r, out) beside weights that lie (in, out): `W += lora_A @ lora_B * alpha / r`
(1.2.0 `peft/lora/lora_layers.py`). Seen through swapped strides they are PEFT's pair for a weight that lies turned, so
nothing else knows the difference.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tool.commands.folding.changed import Adapter
from ckpt_tool.commands.folding.settings import paddle_settings_of, settings_of
from ckpt_tool.commands.options import Reading
from ckpt_tool.commands.source import open_source
from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.core.tensor import MODEL, Chunk, LogicalTensor
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.peft.lone import CONFIG, PADDLE_CONFIG, is_adapter, without_config
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.strict_json import parse

USAGE = "E1420"
_LIMIT = 16 << 20  # bytes


def open_adapter(src: str, reading: Reading, weight: float) -> Adapter:
    """The adapter at `src`, to be folded with `weight`. Raises UsageError E1420 for what is none, E1422, E1423, and what
    reading raises."""
    tree = open_tree(src, follow_symlinks=reading.follow_symlinks)
    names = tree.names() if tree.single is None else []
    paddle = PADDLE_CONFIG in names and CONFIG not in names
    asked = replace(reading, from_format="peft" if CONFIG in names else None, family=None, config=None)
    opened = open_source(src, asked).refuse_unsafe()
    catalog = opened.catalog
    if catalog.format != "peft" and not paddle and is_adapter(catalog.tensors):
        raise without_config(opened.tree)
    if catalog.format != "peft" and not (paddle and catalog.format == "paddle-unified"):
        raise UsageError(
            f"{src} is no adapter but {catalog.format}", code=USAGE, path=opened.path,
            hint=f"pass the folder that holds {CONFIG}, behind the base",
        )  # fmt: skip
    catalog.check()
    if not paddle:
        config, path = catalog.hints["peft"]["config"], opened.tree.display(CONFIG)
        settings = settings_of(config, path, weight=weight, lenient=reading.lenient)
        return Adapter(opened, settings, tuple(catalog.tensors.values()))
    path = opened.tree.display(PADDLE_CONFIG)
    value = parse(opened.tree.read_whole(PADDLE_CONFIG, limit=_LIMIT), path=path)
    settings = paddle_settings_of(value if isinstance(value, dict) else {}, path, weight=weight)
    tensors = [tensor for tensor in catalog.tensors.values() if tensor.key.state == MODEL]
    turned = tuple(_turned(each) if ".lora_" in each.key.name and len(each.shape) == 2 else each for each in tensors)
    return Adapter(opened, settings, turned, paddle=True)


def _turned(tensor: LogicalTensor) -> LogicalTensor:
    """The transpose of a matrix, where it lies."""
    chunks = []
    for chunk in tensor.chunks:
        array, (box, within) = chunk.array, (chunk.box, chunk.within)
        if within.shape != box.shape:  # a flat slice
            start, strides = chunk.region()
            array = replace(
                array, offset=array.offset + start * (array.dtype.bits // 8), shape=box.shape, strides=strides
            )
            within = Box((0, 0), box.shape)
        strides = array.strides or contiguous_strides(array.shape)
        there = replace(array, shape=array.shape[::-1], strides=strides[::-1])
        chunks.append(
            Chunk(
                Box(box.offset[::-1], box.shape[::-1]),
                there,
                Box(within.offset[::-1], within.shape[::-1]),
                chunk.replica,
            )
        )
    return replace(tensor, shape=tensor.shape[::-1], chunks=tuple(chunks))
