"""Counts of quantised weights for `ckpt inspect`: as the weights they encode, from headers and config alone.

    parameters: weights, not packed bytes, and no scales; bytes: those that are stored

Tensors are counted by classes (`quantised.module_classes`), so that 92,000 of them cost 40 ms and no memory to speak
of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.listing import RowBlock
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.quantised.module_classes import Alike
from ckpt_tool.sources.config import quantised_config, read_config
from ckpt_tool.sources.opening import Opened
from ckpt_tool.weight_schemes.declared_scheme import found_by, quantisation
from ckpt_tool.weight_schemes.quantised_weights import FoundWeights, TensorKind, has_integers


def summary(opened: Opened, reading: Reading, listed: Collection[str] | None) -> dict[str, Any] | None:
    """What `inspect` says of quantisation, None where there is none.

    listed: names of the model's tensors that are shown, None for all. `more_parameters` is what the count of stored
        elements lacks: 4-bit codes are fewer bytes than weights, scales are none.
    """
    tensors = Alike(_blocks(opened.catalog), listed)
    scheme = quantisation(config_of(opened, reading), tensors.names() if has_integers(tensors.kinds()) else ())
    kinds = tensors.first()
    found = found_by(scheme, kinds)
    if scheme is None and not found.weights:
        return None

    listed_weights = [weight for weight in found.weights.values() if tensors.count(weight.lead)]
    parts = [name for weight in found.weights.values() for name in weight.parts.values()]
    parameters = sum(tensors.count(weight.lead) * prod(weight.shape) for weight in listed_weights)
    stored, nbytes = _sizes((weight.lead for weight in listed_weights), kinds, tensors)
    scales, scale_bytes = _sizes(parts, kinds, tensors)

    document: dict[str, Any] = {
        "scheme": scheme.scheme if scheme is not None else _scheme_of(kinds, found),
        "weights": sum(tensors.count(weight.lead) for weight in listed_weights),
        "parameters": parameters,
        "bytes": nbytes + scale_bytes,
        "blocks": sorted({tuple(weight.block) for weight in listed_weights})[:8],
        "bits": sorted({weight.bits for weight in listed_weights}),
        "dequantizes": scheme is None or scheme.known,
    }
    if scheme is not None and not scheme.known:
        document["why"] = scheme.why
    if found.faults:
        all_found = found_by(scheme, tensors.like(fault.name for fault in found.faults))
        document["faults"] = [f"{fault.name}: {fault.what}" for fault in all_found.faults[:20]]

    document["more_parameters"] = parameters - stored - scales - _sizes(found.beside, kinds, tensors)[0]
    return document


def config_of(opened: Opened, reading: Reading) -> Mapping[str, Any] | None:
    """The config, None if there is none or it can't be read: the tensors can be counted without one."""
    try:
        return read_config(reading.config) if reading.config else quantised_config(opened)
    except UsageError:
        return None


def _blocks(catalog: Catalog) -> Iterator[RowBlock]:
    """The model's tensors as headers state them."""
    blocks = getattr(catalog.tensors, "blocks", None)
    if blocks is not None:
        return (block for block in blocks() if block.state == MODEL)
    rows = [row for row in catalog.rows() if row.state == MODEL]
    names = [row.name.encode("utf-8", "surrogatepass") for row in rows]
    return iter([RowBlock(MODEL, lambda: names, [(row.dtype, row.shape, row.nbytes) for row in rows])])


def _sizes(names: Iterable[str], kinds: Mapping[str, TensorKind], tensors: Alike) -> tuple[int, int]:
    """(elements, bytes) of the listed tensors in the classes of `names`."""
    numel = nbytes = 0
    for name in names:
        dtype, shape = kinds[name]
        count = tensors.count(name)
        numel = numel + count * prod(shape)
        nbytes = nbytes + count * (prod(shape) * dtype.bits // 8)
    return numel, nbytes


def _scheme_of(kinds: Mapping[str, TensorKind], found: FoundWeights) -> str:
    """The scheme in words, from the codes, for a model whose config declares none."""
    return ", ".join(
        sorted({f"{kinds[weight.lead].dtype.name} codes of {weight.bits} bits" for weight in found.weights.values()})
    )
