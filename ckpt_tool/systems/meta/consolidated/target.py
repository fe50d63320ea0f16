"""Writing: `consolidated.NN.pth`, a file a tensor parallel rank, and `params.json`.

Every shard is a flat dict of names and tensors, as Meta's loaders expect: `torch.load(weights_only=True)` reads it.
Everything that is wrong with the degree is reported at once, before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.mesh import divisors_near
from ckpt_tool.core.target import Target, TargetFile, Wanted, WantedTensor, whole_file
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.state_dict.composer import StoragePart, TorchComposer
from ckpt_tool.systems.meta.consolidated.files import PARAMS
from ckpt_tool.systems.meta.consolidated.params import MetaHints, MetaSizes, sizes_of
from ckpt_tool.systems.meta.consolidated.rules import ALL, EITHER, EMBEDDING, cut_of

DEGREE = "E1410"
UNSURE = "E1411"
INDIVISIBLE = "E1412"
LLAMA3_THETA = 500_000.0  # of every Llama 3; Llama 1 and 2 have 10,000, Code Llama 1,000,000


def meta_target(wanted: Wanted) -> Target:
    """The plan of the output files.

    Raises UsageError: E1410 (another degree than tp), E1411 (no rule for how a tensor is sharded, or no sizes), E1412
    (dims and heads that --tp does not divide).
    """
    tp = _tp(wanted.wish.degrees)
    hints = wanted.hints.get(MetaHints) or MetaHints(None, None, False)
    params = _set_vocabulary(hints.params, wanted.tensors) if hints.params is not None else None
    cuts, notes = _cuts(wanted, tp, params, hints.embedding) if tp > 1 else ([ALL] * len(wanted.tensors), [])
    files = [_shard(wanted.tensors, cuts, rank, tp) for rank in range(tp)]
    copies = list(wanted.side_file_copies())
    # An unchanged params.json is copied byte for byte; a changed or computed one replaces it.
    same = hints.as_read and params == hints.params
    if params is not None and not (same and any(file.path == PARAMS for file in copies)):
        copies = [file for file in copies if file.path != PARAMS]
        copies.append(whole_file(PARAMS, (json.dumps(params, indent=2, ensure_ascii=False) + "\n").encode()))
    if params is None:
        notes.append("no params.json is written: nothing states the model's sizes (--config config.json does)")
    return Target("meta", (*files, *copies), notes=tuple(notes))


def _set_vocabulary(params: Mapping[str, Any], tensors: Sequence[WantedTensor]) -> Mapping[str, Any]:
    """The params with `vocab_size` set to the rows of the written embedding, if they state another number."""
    rows = next(
        (tensor.shape[0] for tensor in tensors if tensor.key.name == EMBEDDING and len(tensor.shape) == 2), None
    )
    stated = params.get("vocab_size")
    if rows is None or type(stated) is not int or stated < 1 or stated == rows:
        return params
    return {**params, "vocab_size": rows}


def _tp(degrees: Degrees) -> int:
    foreign = [name for name, size in degrees.stated().items() if size > 1 and name != "tp"]
    if foreign:
        raise UsageError(
            f"--{foreign[0]} {degrees.at(foreign[0])}: Meta's checkpoints have tensor parallel shards alone",
            code=DEGREE,
            hint="give --tp, or leave the degree off",
        )
    return degrees.at("tp")


def _cuts(
    wanted: Wanted, tp: int, params: Mapping[str, Any] | None, embedding: int | None
) -> tuple[list[int], list[str]]:
    """The dim along which each tensor is cut (`ALL` for a full copy), and lines for the report.

    embedding: the dim along which the source's embedding is cut, None if it is not.
    """
    strange = [tensor.key.name for tensor in wanted.tensors if cut_of(tensor.key.name) is None]
    if params is None or strange:
        what = f"nothing says how {strange[0]} is cut" if strange else "nothing states the number of heads"
        raise UsageError(
            f"--tp {tp}: {what}",
            code=UNSURE,
            key=strange[0] if strange else None,
            faults=strange[1:50],
            hint="--dialect meta names it as Meta does; --tp 1 keeps it whole"
            if strange
            else "give the model's config.json with --config FILE, or --tp 1",
        )

    notes = []
    # The generations differ in how they cut the embedding: as in the source, else by signs of Llama 3 in the params.
    if embedding in (0, 1):
        dim = embedding
    else:
        inner = params.get("model")
        level = inner if isinstance(inner, Mapping) else params
        dim = 0 if level.get("use_scaled_rope") or level.get("rope_theta") == LLAMA3_THETA else 1
        whose = "Llama 3 loads it" if dim == 0 else "Llama 1 and 2 load it"
        notes.append(f"{EMBEDDING} is cut along its {('rows', 'columns')[dim]}, as {whose}")

    cuts: list[int] = []
    for tensor in wanted.tensors:
        cut = cut_of(tensor.key.name)
        if cut is None:
            cut = ALL
        cuts.append(dim if cut == EITHER else cut)
    _check(wanted.tensors, cuts, tp, sizes_of(params, PARAMS))
    return cuts, notes


def _check(tensors: Sequence[WantedTensor], cuts: Sequence[int], tp: int, sizes: MetaSizes) -> None:
    """Raise UsageError E1412, listing everything that the degree does not divide."""
    faults = [f"{n} heads of {what}" for n, what in ((sizes.heads, "queries"), (sizes.kv, "keys")) if n % tp]
    for tensor, cut in zip(tensors, cuts, strict=True):
        if cut != ALL and (len(tensor.shape) != 2 or tensor.shape[cut] % tp):
            faults.append(f"{tensor.key.name} of shape {list(tensor.shape)}, dim {cut}")
    if faults:
        near = [degree for degree in divisors_near(sizes.kv, tp) if degree != tp]
        raise UsageError(
            f"--tp {tp} does not divide {faults[0]}",
            code=INDIVISIBLE,
            faults=faults[1:50],
            hint=f"degrees that divide the heads: {', '.join(map(str, near))}",
        )


def _shard(tensors: Sequence[WantedTensor], cuts: Sequence[int], rank: int, tp: int) -> TargetFile:
    """The plan of one rank's file."""
    composer = TorchComposer()
    state = {}
    for number, (tensor, cut) in enumerate(zip(tensors, cuts, strict=True)):
        box = whole(tensor.shape)
        if cut != ALL:
            band = tensor.shape[cut] // tp
            offset = [0] * len(tensor.shape)
            shape = list(tensor.shape)
            offset[cut], shape[cut] = rank * band, band
            box = Box(tuple(offset), tuple(shape))
        state[tensor.key.name] = composer.tensor(box.shape, tensor.dtype, [StoragePart(number, box, 0)])
    return composer.file(f"consolidated.{rank:02d}.pth", state)
