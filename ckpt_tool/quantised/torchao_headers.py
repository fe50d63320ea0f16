"""torchao's descriptions of its tensors, which safetensors files have in their headers: they are kept in conversions.

They are among the extras of a folder of safetensors files. In such a folder every file repeats them; a format that
stores extras keeps them there and returns them; elsewhere they are dropped with the extras, and the report says so.
Descriptions of weights that are floats now, or were removed, are not written. Tensors from pickles have none: there
objects of torchao's classes take that role.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import Incomplete, UsageError
from ckpt_tool.formats.hub_folder.subclasses import NAMES, Subclasses, block_in, present, stated_in
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.weight_schemes.quantised_weights import FoundWeights, TensorKind, WeightFault, subclasses_in
from ckpt_tool.weight_schemes.weight_layouts import WantedParts, unlike

LACKING = "E1460"
UNSTATED = "E1474"
_COMMON = "metadata"
_BY_FILE = "metadata_by_file"


def carry_headers(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with what its files state of torchao's tensors. Raises Incomplete E1460 for weights of which a part is
    not there; UsageError E1474 for weights of which nothing is stated."""
    stated = stated_in(_headers(chosen.sources[0].catalog.extras))
    names = (row.tensor.key.name for row in chosen.stored if row.tensor.key.state == MODEL)
    unstated = [weight for weight in subclasses_in(names) if weight not in stated]
    if unstated:
        raise UsageError(
            f"{len(unstated)} weights are torchao's codes, and no header states what they are",
            code=UNSTATED,
            key=unstated[0],
            faults=unstated[1:],
            hint="--dequantize writes them as floats; --quantize int8:torchao as well quantises them again",
        )
    if not stated:
        return chosen
    texts, lacking = present(stated, chosen.model)
    refuse_lacking(lacking)
    if texts and "quantize" not in job.fmt.holds.uses_options:
        return chosen
    hints = chosen.all_hints.having(Subclasses(texts)) if texts else chosen.hints
    return replace(chosen, extras=_without(chosen.extras, {NAMES, *stated}), hints=hints)


def header_faults(
    extras: Mapping[str, Any], found: FoundWeights, tensors: Mapping[str, TensorKind]
) -> Iterator[WeightFault]:
    """Where torchao's weights are not as the headers state them: parts that are not there, and scales of other blocks.
    extras: of a catalog."""
    stated = stated_in(_headers(extras))
    if not stated:
        return
    for part in present(stated, tensors)[1]:
        yield WeightFault(part, "the header states this part, and it is not there", lacking=True)
    for weight in found.weights.values():
        block = block_in(stated.get(weight.made, ""))
        if block is None or len(weight.shape) != 2:
            continue
        wanted_parts = WantedParts(block=block)
        is_divided = all(size % step == 0 for size, step in zip(weight.shape, block, strict=True))
        if not is_divided:
            what = f"codes of shape {list(weight.shape)} in blocks of {list(block)}, as the header states"
            yield WeightFault(weight.lead, what, lacking=False)
        else:
            yield from unlike(weight, wanted_parts, tensors)


def refuse_lacking(lacking: Sequence[str]) -> None:
    """Raise Incomplete E1460 where parts of torchao's weights are not there."""
    if lacking:
        raise Incomplete(
            f"{len(lacking)} parts of torchao's tensors are not there: {lacking[0]}",
            code=LACKING,
            key=lacking[0],
            faults=lacking[1:],
            hint="fetch the checkpoint again; --remove-keys wants a pattern that takes all parts of a weight",
        )


def _headers(extras: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`__metadata__` of each file, put together from the extras: entries common to all files, and those of one file."""
    common = _mapping(extras.get(_COMMON))
    by_file = [_mapping(each) for each in _mapping(extras.get(_BY_FILE)).values()]
    return [{**common, **each} for each in by_file or [{}]]


def _without(extras: Mapping[str, Any], dropped_keys: Collection[str]) -> dict[str, Any]:
    """The extras less these keys of headers, and less what holds nothing then."""
    other_extras = {key: value for key, value in extras.items() if key not in (_COMMON, _BY_FILE)}
    common = {key: value for key, value in _mapping(extras.get(_COMMON)).items() if key not in dropped_keys}
    by_file = {}
    for path, header in _mapping(extras.get(_BY_FILE)).items():
        kept_keys = {key: value for key, value in _mapping(header).items() if key not in dropped_keys}
        if kept_keys:
            by_file[path] = kept_keys
    return {**other_extras, **({_COMMON: common} if common else {}), **({_BY_FILE: by_file} if by_file else {})}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
