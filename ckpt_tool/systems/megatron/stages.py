"""The layers of each pipeline stage: Megatron's even, uneven and interleaved splits, from arguments and back to them.

The one idea: whatever rule made the split, the layers run through the chunks in one order: chunk 0 of every stage, then
chunk 1 of every stage, and so on (a chunk is a stage's share of a virtual pipeline; without one there is one a stage).
So the numbers of layers in that order determine the split, and a layer's local number is its global number minus the
number of layers in earlier chunks.

    8 layers, 2 stages, 2 chunks each:  stage 0: [0 1] [4 5]    stage 1: [2 3] [6 7]
    4 layers, 3 stages, decoder_first_pipeline_num_layers 2:    [0 1] [2] [3]
    "Ett|t|tmL" (layout string, 3 stages):                       embedding and 2, 1, 1 with MTP and loss

    "MG*-|M-G-" (a hybrid model's pattern, 2 stages):            4 and 4, one letter a layer

Rules, the first that applies (core 0.16.1 `get_num_layers_to_build`, `get_transformer_layer_offset`,
`PipelineParallelLayerLayout`): hybrid_layer_pattern with `|`; pipeline_model_parallel_layout;
decoder_first/last_pipeline_num_layers, the rest spread evenly over the stages between;
account_for_embedding/loss_in_pipeline_split, which count as a layer each; even.
MTP layers are on the last chunk, or on the chunk with `m` in the layout; it has a copy of the embedding as well.

Sources (NVIDIA/Megatron-LM, core 0.16.1): `core/transformer/transformer_block.py`, `transformer_layer.py`,
`pipeline_parallel_layer_layout.py`, `multi_token_prediction.py`; 0.19.2 `models/hybrid/hybrid_layer_allocation.py`.

Cost: linear. What it does not do: names, shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpt_tool.core.mesh import divisors
from ckpt_tool.errors import UsageError

NO_SPLIT = "E0272"
_LAYOUT_LIMIT = 1 << 20  # characters of an unrolled layout


class Stage(NamedTuple):
    """One chunk of one stage."""

    pp: int  # the pipeline stage
    vpp: int  # the chunk's number on that stage
    first: int  # global number of its first layer
    layers: int  # how many decoder layers it has
    embedding: bool  # it is the first chunk
    head: bool  # it is the last chunk
    mtp: int = 0  # how many MTP layers it has


class Stages(NamedTuple):
    """All chunks, in the order in which layers run through them: chunk-major, then stage."""

    pp: int
    vpp: int
    chunks: tuple[Stage, ...]

    def of(self, pp: int, vpp: int) -> Stage:
        """Return chunk `vpp` of stage `pp`."""
        return self.chunks[vpp * self.pp + pp]

    def holding(self, layer: int) -> Stage | None:
        """Return the chunk that has decoder layer number `layer`, None beyond the last layer."""
        return next((c for c in self.chunks if c.first <= layer < c.first + c.layers), None)

    @property
    def mtp_stage(self) -> Stage:
        """The chunk with the MTP layers, or the one that would have them."""
        return next((c for c in self.chunks if c.mtp), self.chunks[-1])

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each chunk, in the order of `chunks`."""
        return tuple(c.layers for c in self.chunks)


def from_counts(counts: Sequence[int], pp: int, vpp: int = 1, *, mtp: int = 0, mtp_at: int | None = None) -> Stages:
    """Return the stages with these numbers of layers.

    Args:
        counts: layers of each chunk, chunk-major (`counts[vpp * PP + pp]`).
        pp: number of stages.
        vpp: chunks of each stage.
        mtp: number of MTP layers.
        mtp_at: the chunk that has them (position in `counts`), by default the last.
    """
    chunks = []
    first = 0
    last = len(counts) - 1
    for i, layers in enumerate(counts):
        here = mtp if i == (last if mtp_at is None else mtp_at) else 0
        chunks.append(Stage(i % pp, i // pp, first, layers, i == 0, i == last, here))
        first += layers
    return Stages(pp, vpp, tuple(chunks))


def parse_layout(text: str) -> list[str] | None:
    """Return a layout string as one text of `E t m L` for each chunk, multiplications unrolled; None if it is invalid.

    >>> parse_layout("Et*2|(t|)*2,mL")
    ['Ett', 't', 't', 'mL']
    """
    flat = text.replace(",", "").replace(" ", "")
    # Groups first, because `*` after a parenthesis would else repeat only the parenthesis. The size is checked before
    # anything is repeated.
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        room = sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, flat))
        if room > _LAYOUT_LIMIT:
            return None
        flat = re.sub(pattern, lambda m: m[1] * int(m[2]), flat)
    chunks = flat.split("|")
    return chunks if all(set(chunk) <= set("EtmL") for chunk in chunks) else None


def from_layout(text: str, pp: int) -> Stages | None:
    """Return the stages of a layout string, None if it is invalid or its chunks do not divide by `pp` stages."""
    chunks = parse_layout(text)
    if chunks is None or pp < 1 or len(chunks) % pp:
        return None
    where = next((i for i, chunk in enumerate(chunks) if "m" in chunk), None)
    counts = [chunk.count("t") for chunk in chunks]
    made = from_counts(counts, pp, len(chunks) // pp, mtp="".join(chunks).count("m"), mtp_at=where)
    loss = next((i for i, chunk in enumerate(chunks) if "L" in chunk), len(chunks) - 1)
    begin = next((i for i, chunk in enumerate(chunks) if "E" in chunk), 0)
    return made._replace(
        chunks=tuple(c._replace(embedding=i == begin, head=i == loss) for i, c in enumerate(made.chunks))
    )


def from_args(args: Mapping[str, Any], pp: int, vpp: int, layers: int, *, mtp: int = 0) -> Stages | None:
    """The split that Megatron makes of `layers` with these arguments (`megatron.args`); None when they do not
    divide."""
    pattern = _pattern(args)
    if pattern and "|" in pattern[1]:
        segments = [len(segment) for segment in pattern[1].split("|")]
        fits = len(segments) == pp * vpp and sum(segments) == layers
        return from_counts(segments, pp, vpp, mtp=mtp) if fits else None
    layout = args.get("pipeline_model_parallel_layout")
    if isinstance(layout, str) and layout:
        made = from_layout(layout, pp)
        return made if made and made.vpp == vpp and sum(made.counts) == layers else None
    if pp == 1 and vpp == 1:
        return from_counts([layers], 1, mtp=mtp)
    first = args.get("decoder_first_pipeline_num_layers")
    last = args.get("decoder_last_pipeline_num_layers")
    if isinstance(first, int) or isinstance(last, int):
        counts = _uneven(layers, pp, vpp, first, last)
    else:
        counts = _even(
            layers,
            pp,
            vpp,
            bool(args.get("account_for_embedding_in_pipeline_split")),
            bool(args.get("account_for_loss_in_pipeline_split")),
        )
    return from_counts(counts, pp, vpp, mtp=mtp) if counts else None


def _pattern(args: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the pattern of a hybrid model, None for other models.

    (name of the argument, a letter for each layer with `|` between stages, the rest with the MTP layers)
    """
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        text = args.get(name)
        if isinstance(text, str) and text:
            main, slash, rest = text.partition("/")
            return name, main, slash + rest
    return None


def _uneven(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> list[int] | None:
    between = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or between < 0 or (rest % between if between else rest):
        return None
    a_stage = [rest // between if between else 0] * pp
    if first is not None:
        a_stage[0] = first
    if last is not None:
        a_stage[-1] = last
    if any(n % vpp for n in a_stage):  # each stage's layers are distributed over its chunks
        return None
    return [n // vpp for n in a_stage] * vpp


def _even(layers: int, pp: int, vpp: int, embedding: bool, loss: bool) -> list[int] | None:
    slots = layers + embedding + loss
    if slots % (pp * vpp):
        return None
    counts = [slots // (pp * vpp)] * (pp * vpp)
    # The embedding and the loss each took the slot of a layer.
    counts[0] -= embedding
    counts[-1] -= loss
    return counts if min(counts) >= 0 else None


def from_wish(split: Sequence[int], pp: int, vpp: int, layers: int, *, mtp: int = 0) -> Stages:
    """Return the stages of `--pp-split`: layers of each stage, or of each chunk in the order in which layers run.

    Raises UsageError E0272.
    """
    counts: list[int] | None = None
    if len(split) == pp * vpp:
        counts = list(split)
    elif len(split) == pp and all(n % vpp == 0 for n in split):
        counts = [n // vpp for n in split] * vpp
    if counts is None or sum(counts) != layers:
        what = f"{pp} stages" + (f" of {vpp} chunks" if vpp > 1 else "")
        raise UsageError(
            f"--pp-split {','.join(map(str, split))} does not distribute {layers} layers over {what}",
            code=NO_SPLIT,
            hint=f"give {pp * vpp} numbers that sum to {layers}",
        )
    return from_counts(counts, pp, vpp, mtp=mtp)


def chosen_stages(
    wish: Sequence[int], args: Mapping[str, Any], pp: int, vpp: int, layers: int, *, mtp: int = 0
) -> Stages:
    """Return the stages of a new checkpoint: by `--pp-split`, else as Megatron splits with these arguments, else
    evenly.

    Raises UsageError E0272.
    """
    if wish:
        return from_wish(wish, pp, vpp, layers, mtp=mtp)
    made = from_args(args, pp, vpp, layers, mtp=mtp) or from_args({}, pp, vpp, layers, mtp=mtp)
    if made is None or (not layers and pp > 1):
        with_vpp = f" with --vpp {vpp}" if vpp > 1 else ""
        valid = nearest(pp, even_degrees(layers, vpp) if layers else [1])
        raise UsageError(
            f"--pp {pp}{f' --vpp {vpp}' if vpp > 1 else ''}: {layers} layers do not spread evenly over "
            f"{pp * vpp} chunks",
            code=NO_SPLIT,
            hint=f"--pp that does{with_vpp}: {valid}; or say how with --pp-split",
        )
    return made


def even_degrees(layers: int, vpp: int = 1) -> list[int]:
    """Return the pipeline degrees that divide `layers` evenly with `vpp` chunks a stage."""
    return [n for n in divisors(layers) if layers % (n * vpp) == 0]


def nearest(wanted: int, valid: Sequence[int]) -> str:
    """Return the valid degrees nearest to the wanted one, at most two below and two above, as text for a hint."""
    below = [n for n in valid if n < wanted][-2:]
    above = [n for n in valid if n > wanted][:2]
    return ", ".join(map(str, [*below, *above])) or "none"


def args_of(stages: Stages, args: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the arguments that make Megatron split this way.

    The simplest form that expresses the split is chosen: no argument for an even split,
    decoder_first/last_pipeline_num_layers for uneven ends, else a layout string. A hybrid model's pattern in `args`
    (the source's arguments) gets a `|` between stages instead.
    """
    plain: dict[str, Any] = {
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    counts = stages.counts
    pp = stages.pp
    vpp = stages.vpp
    layers = sum(counts)
    pattern = _pattern(args)
    if pattern:
        name, main, rest = pattern
        letters = main.replace("|", "")
        begin = [sum(counts[:i]) for i in range(len(counts))]
        if len(letters) == layers:
            parted = "|".join(letters[at : at + n] for at, n in zip(begin, counts, strict=True))
            return plain | {name: parted + rest}
        return plain

    moved = any(c.mtp for c in stages.chunks[:-1])
    if len(set(counts)) <= 1 and not moved:
        return plain

    if not moved and vpp == 1:
        for ends in ((counts[0], None), (None, counts[-1]), (counts[0], counts[-1])):
            if _uneven(layers, pp, 1, *ends) == list(counts):
                return plain | {
                    "decoder_first_pipeline_num_layers": ends[0],
                    "decoder_last_pipeline_num_layers": ends[1],
                }

    parts = [
        ("E" if c.embedding else "") + "t" * c.layers + "m" * c.mtp + ("L" if c.head else "") for c in stages.chunks
    ]
    return plain | {"pipeline_model_parallel_layout": "|".join(parts)}
