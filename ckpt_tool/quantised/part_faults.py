"""Faults of quantised weights for `ckpt verify` and `ckpt audit`: parts that are missing or do not fit their scheme.

    faults_of(opened, config)                 by names, dtypes and shapes, and what torchao's headers state
    faults_of(opened, config, values=True)    also small tensors that say a shape (X_shape, bitsandbytes' states)

The faults are all those that would stop `--dequantize`. Weights of unknown schemes are not judged, and neither are
integers and FP8 values that nothing declares to be codes.
Cost: some us a weight; with values a small read for each weight of a scheme that has such tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.tensor import MASTER, MODEL, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint
from ckpt_tool.quantised.dequantize import LACKING, MISFIT, is_of_bitsandbytes, misshapen, small_numbers, stated_shapes
from ckpt_tool.quantised.keep_together import found_in
from ckpt_tool.quantised.torchao_headers import header_faults
from ckpt_tool.sources.opening import Opened
from ckpt_tool.weight_schemes.quantised_weights import TABLED, FoundWeights, TensorKind, WeightFault, has_codes


def faults_of(opened: Opened, config: Mapping[str, Any] | None, *, values: bool = False) -> list[CkptError]:
    """Every fault of the checkpoint's quantised weights, [] where it has none. config: of the model."""
    state = MODEL if any(row.state == MODEL for row in opened.catalog.rows()) else MASTER
    kinds = {row.name: TensorKind(row.dtype, row.shape) for row in opened.catalog.rows() if row.state == state}
    if not has_codes(kind.dtype for kind in kinds.values()) and not is_of_bitsandbytes(config):
        return []
    scheme, found = found_in(kinds, config)
    if (scheme is None and not found.weights) or (scheme is not None and not scheme.known):
        return []

    shapes: dict[str, tuple[int, ...]] = {}
    if any(weight.codes == TABLED for weight in found.weights.values()):
        tensors = {key.name: tensor for key, tensor in opened.catalog.tensors.items() if key.state == state}
        shapes = stated_shapes(found, tensors, opened.tree)
    more = (*header_faults(opened.catalog.extras, found, kinds), *misshapen(found, kinds, config, shapes))
    faults = [_as_error(fault) for fault in (*found.faults, *more)]
    if values and not faults:
        faults += _find_value_faults(opened, found, state)
    return faults


def _as_error(fault: WeightFault) -> CkptError:
    kind = Incomplete if fault.lacking else InconsistentCheckpoint
    return kind(f"{fault.name}: {fault.what}", code=LACKING if fault.lacking else MISFIT, key=fault.name)


def _find_value_faults(opened: Opened, found: FoundWeights, state: str) -> list[CkptError]:
    """Faults that only the values of small parts reveal. Making a weight's recipe finds them; it need not be run."""
    from ckpt_tool.quantised.codecs.choose_codec import make_recipe
    from ckpt_tool.run.computed import Input

    faults: list[CkptError] = []
    for weight in found.weights.values():
        inputs = {name: Input(opened.catalog.tensors[TensorKey(name, state)], opened.tree) for name in weight.names}
        try:
            make_recipe(weight, TensorKey(weight.made), inputs, small_numbers)
        except CkptError as fault:
            fault.key = fault.key or weight.lead
            faults.append(fault)
    return faults
