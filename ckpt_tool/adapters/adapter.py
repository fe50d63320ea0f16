"""An adapter, opened: its tensors, and what its config says of the arithmetic (`formats.adapters.settings`).

Opened are PEFT's folders, the checkpoints of Megatron's LoRA runs (seen under PEFT's names), and the LoRA folders of
PaddleFormers. PaddleFormers keeps `lora_A` (in, r) and `lora_B` (r, out) for weights stored as (in, out):
`W += lora_A @ lora_B * alpha / r` (1.2.0 `peft/lora/lora_layers.py`). With swapped strides they are PEFT's pair for a
transposed weight, so no other code needs to know the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tool.conversion.adapter_names import under_names
from ckpt_tool.conversion.passes import selected
from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.core.tensor import MODEL, Chunk, LogicalTensor
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.adapters.beside import refuse_unknown_weights
from ckpt_tool.formats.adapters.inside import find_inside
from ckpt_tool.formats.adapters.lone import (
    CONFIG,
    PADDLE_CONFIG,
    PeftHints,
    adapter_config,
    is_adapter,
    without_config,
)
from ckpt_tool.formats.adapters.pairs import EMPTY, find_adapter_faults
from ckpt_tool.formats.adapters.run import LoraHints
from ckpt_tool.formats.adapters.settings import Settings, paddle_settings_of, settings_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.adapter_config import with_stated_alpha
from ckpt_tool.sources.chosen import Conversion
from ckpt_tool.sources.opening import Opened, open_source
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.texts.strict_json import parse

USAGE = "E1420"
_LIMIT = 16 << 20  # bytes


class Adapter(NamedTuple):
    """An opened adapter."""

    opened: Opened
    settings: Settings
    tensors: tuple[LogicalTensor, ...]  # those of its model state, shaped as PEFT shapes them
    paddle: bool = False  # its names are Paddle's, not the hub's
    inside: bool = False  # it is inside the base itself (`adapters.inside`)


def open_adapter(src: str, reading: Reading, weight: float, config: Mapping[str, Any] | None = None) -> Adapter:
    """The adapter at `src`, to be folded with `weight`. config: the base's. Raises UsageError E1420 for what is none,
    E1422, E1423, and what reading raises."""
    tree = open_tree(src, follow_symlinks=reading.follow_symlinks)
    names = tree.names() if tree.single is None else []
    paddle = PADDLE_CONFIG in names and CONFIG not in names
    requested = replace(reading, from_format="peft" if CONFIG in names else None, family=None, config=None)
    opened = open_source(src, requested).refuse_unsafe()
    catalog = opened.catalog
    holds = opened.format.holds
    if catalog.hints.get(LoraHints) is not None:
        return _read_megatron_lora(opened, reading, weight, config)
    if not holds.adapter and not paddle and is_adapter(catalog.tensors):
        raise without_config(opened.tree)

    if not holds.adapter and find_inside({key.name for key in catalog.tensors if key.state == MODEL}) is not None:
        raise UsageError(
            f"{src} is a whole model with an adapter inside, which belongs to this very model",
            code=USAGE,
            path=opened.path,
            hint="fold it alone: ckpt merge MODEL OUT --method lora; or take the adapter out with convert --to peft",
        )

    if not holds.adapter and not (paddle and holds.dialect == "paddle"):
        raise UsageError(
            f"{src} is not an adapter but {catalog.format}",
            code=USAGE,
            path=opened.path,
            hint=f"pass the folder that holds {CONFIG}, after the base",
        )

    catalog.check()
    if not paddle:
        path = opened.tree.display(CONFIG)
        config = with_stated_alpha(adapter_config(catalog), reading.lora_alpha, path)
        settings = settings_of(config, path, weight=weight, lenient=reading.lenient)
        if not reading.lenient:
            refuse_unknown_weights(opened.tree, opened.catalog.files)
            _refuse_empty(opened)
        return Adapter(opened, settings, tuple(catalog.tensors.values()))

    path = opened.tree.display(PADDLE_CONFIG)
    value = parse(opened.tree.read_whole(PADDLE_CONFIG, limit=_LIMIT), path=path)
    stated = value if isinstance(value, dict) else {}
    settings = paddle_settings_of(stated, path, weight=weight, lenient=reading.lenient)
    tensors = [tensor for tensor in catalog.tensors.values() if tensor.key.state == MODEL]
    transposed = tuple(
        _transpose(each) if ".lora_" in each.key.name and len(each.shape) == 2 else each for each in tensors
    )
    return Adapter(opened, settings, transposed, paddle=True)


def _refuse_empty(opened: Opened) -> None:
    """Raise Incomplete E2935 for an adapter of tensors without elements. Other faults are found against the base."""
    for fault in find_adapter_faults(opened.catalog, opened.tree.display()):
        if fault.code == EMPTY:
            fault.path = opened.path
            raise fault


def _read_megatron_lora(opened: Opened, reading: Reading, weight: float, config: Mapping[str, Any] | None) -> Adapter:
    """A LoRA of Megatron's as PEFT has it: names, and rows as strides over what is stored."""
    peft = registry.by_name("peft")
    job = Conversion(reading, Writing(to=peft.name), peft)
    chosen = under_names(replace(selected(opened, job), config=config), job)
    peft_hints = chosen.all_hints.get(PeftHints)
    settings = settings_of(
        peft_hints.config if peft_hints is not None else {}, opened.path, weight=weight, lenient=reading.lenient
    )
    return Adapter(opened, settings, tuple(row.tensor for row in chosen.stored if row.tensor.key.state == MODEL))


def _transpose(tensor: LogicalTensor) -> LogicalTensor:
    """The transpose of a matrix, as strides over what is stored."""
    chunks = []
    for chunk in tensor.chunks:
        array = chunk.array
        box = chunk.box
        within = chunk.within
        if within.shape != box.shape:  # a flat slice
            start, strides = chunk.region()
            offset = array.offset + start * (array.dtype.bits // 8)
            array = array._replace(offset=offset, shape=box.shape, strides=strides)
            within = Box((0, 0), box.shape)
        strides = array.strides or contiguous_strides(array.shape)
        transposed = array._replace(shape=array.shape[::-1], strides=strides[::-1])
        chunks.append(
            Chunk(
                Box(box.offset[::-1], box.shape[::-1]),
                transposed,
                Box(within.offset[::-1], within.shape[::-1]),
                chunk.replica,
            )
        )
    return tensor._replace(shape=tensor.shape[::-1], chunks=tuple(chunks))
