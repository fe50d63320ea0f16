"""A rank's file from another save, seen by the step counters that optimizers keep as tensors beside their moments.

The one idea: torch keeps `step` and Paddle the powers of beta a parameter, so a file of a rank holds counters of its
own. Parameters may count apart from each other (one without a gradient does not step), then a file holds several counts
and nothing follows. But where all counters of one file agree, and all of another agree on another count, the files
were not written at one time:

    __1_0.distcp   step 3, 3, 3      __2_0.distcp   step 2, 2       -> E0305

Experts are left out: those of a rank may all have been idle in a step. Sources: `torch/optim/adamw.py` (2.13, `step`),
PaddlePaddle 3.3.1 `optimizer/adamw.py` (`beta1_pow_acc`, `beta2_pow_acc`). Cost: up to SAMPLE reads of one number a
file. What it
    does not
do: counters that are plain values, which formats compare as they read them; files that hold fewer than LEAST counters.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import STEP, StoredArray
from ckpt_tool.errors import CkptError, InconsistentCheckpoint
from ckpt_tool.storage.source import Tree

LEAST = 2  # counters of a file: one may belong to a parameter that counts apart
SAMPLE = 4  # counters of a file that are read
NEAR = 1e-5  # relative: a step changes the smallest power (of 0.999) by a thousandth
_CODES = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}


def other_steps(tree: Tree, catalog: Catalog) -> Iterator[CkptError]:
    """InconsistentCheckpoint E0305 for each kind of counter by which files are of different saves, with all files that
    differ from most."""
    if len(catalog.files) < 2 or not any(_is_counter(state) for state in catalog.states()):
        return
    found: dict[str, dict[str, list[StoredArray]]] = defaultdict(lambda: defaultdict(list))
    for key in [key for key in catalog.tensors if _is_counter(key.state) and "expert" not in key.name]:
        for chunk in catalog.tensors[key].chunks:
            if chunk.box.numel == 1 and chunk.array.dtype.name in _CODES:
                found[key.state][chunk.array.path].append(chunk.array)
    for state, files in found.items():
        counts = _counts(tree, files)
        usual = Counter(counts.values()).most_common(1)[0][0] if counts else 0.0
        odd = [path for path, count in counts.items() if not _near(count, usual)]
        if odd:
            home = next(path for path, count in counts.items() if _near(count, usual))
            yield InconsistentCheckpoint(
                f"all {state} in {odd[0]} are {counts[odd[0]]:g}, all in {home} {usual:g}",
                code="E0305",
                path=tree.display(odd[0]),
                faults=[f"{path}: {counts[path]:g}" for path in odd[1:50]],
                hint="a rank's file comes from another save: fetch one save whole; --lenient takes it as it is",
            )


def _is_counter(state: str) -> bool:
    return state == STEP or "_pow_acc" in state


def _counts(tree: Tree, files: Mapping[str, list[StoredArray]]) -> dict[str, float]:
    """File -> what its counters agree on; {} where those of any file do not agree."""
    out = {}
    for path, arrays in files.items():
        if len(arrays) < LEAST:
            continue
        spread = {i * (len(arrays) - 1) // (SAMPLE - 1) for i in range(SAMPLE)}
        values = [_value(tree, arrays[i]) for i in sorted(spread)]
        if not all(_near(value, values[0]) for value in values):
            return {}
        out[path] = values[0]
    return out


def _value(tree: Tree, array: StoredArray) -> float:
    code = _CODES[array.dtype.name]
    return float(struct.unpack(code, tree.read(array.path, array.offset, struct.calcsize(code)))[0])


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= NEAR * abs(b)
