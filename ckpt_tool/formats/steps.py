"""Detects a rank's file from another save by the step counters that optimizers store as tensors next to their moments.

The one idea: torch stores `step` and Paddle the powers of beta for each parameter, so each rank's file contains
counters. Parameters may have different counts (one without a gradient does not step); then a file contains several
counts and proves nothing. But if all counters of one file agree, and all of another agree on another count, the files
belong to different saves:

    __1_0.distcp   step 3, 3, 3      __2_0.distcp   step 2, 2       -> E0305

    trainer_state.json  "global_step": 40      optimizer.pt  step 2, 2         -> E0305

    trainer_state.json  "global_step": 10      scheduler.pt  last_epoch 5      -> E0305

Experts are left out: those of a rank may all have been idle in a step. Sources: `torch/optim/adamw.py` (2.13, `step`),
PaddlePaddle 3.3.1 `optimizer/adamw.py` (`beta1_pow_acc`, `beta2_pow_acc`), torch 2.13 `optim/lr_scheduler.py`
(`last_epoch` counts the calls of `step`), accelerate 1.15 `scheduler.py` (one call a step, or one a rank). Cost: up to
SAMPLE reads of one number a file, and the small file of a schedule. What it does not do: counters that are plain
values, which formats compare as they read them; files that hold fewer than LEAST counters.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import STEP, StoredArray
from ckpt_tool.errors import CkptError, InconsistentCheckpoint, StorageError
from ckpt_tool.formats.beside import SCHEDULER
from ckpt_tool.storage.source import Tree

LEAST = 2  # counters of a file: a single one may belong to a parameter that skipped steps
SAMPLE = 4  # counters of a file that are read
NEAR = 1e-5  # relative: a step changes the smallest power (of 0.999) by a thousandth
RECORD = "trainer_state.json"
RECORD_LIMIT = 64 << 20  # bytes: the record grows with the log, an entry per logging step
SCALER = "scaler"
# a loss scaler skips steps at the start, and now and then one of many
FEW_SKIPPED = 20
MANY_STEPS = 20
PLATEAU = "num_bad_epochs"  # of schedules that step by a metric
_RNG_OF_RANK = re.compile(r"rng_state_\d+\.pth")
_GLOBAL_STEP = re.compile(rb'"global_step"\s*:\s*(\d{1,15})\b')
_CODES = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}


def other_steps(tree: Tree, catalog: Catalog) -> Iterator[CkptError]:
    """InconsistentCheckpoint E0305 for each kind of counter that shows files of different saves. It lists the files
    that differ from the majority."""
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


def trainer_step(home: Tree, tree: Tree, catalog: Catalog) -> Iterator[CkptError]:
    """InconsistentCheckpoint E0305 if the optimizer or the schedule next to a trainer's record has made another number
    of steps than the record states.

    Args:
        home: the folder that may hold the record, which transformers' Trainer writes last of all files of a step.
        tree: that of the checkpoint, `home` or a folder in it.

    Without a loss scaler an optimizer steps whenever its trainer does, and the schedule with it. With one it may skip
    some steps, and is never ahead. Counters that do not agree among themselves say nothing.
    """
    if home.single is not None or not home.exists(RECORD) or home.size(RECORD) > RECORD_LIMIT:
        return
    stated = set(_GLOBAL_STEP.findall(home.read_whole(RECORD, limit=RECORD_LIMIT)))
    if len(stated) != 1:
        return

    recorded = int(next(iter(stated)))
    may_skip = any(name.startswith(SCALER) for name in home.names()) or bool(catalog.extras.get("skipped_steps"))
    most_skipped = FEW_SKIPPED + recorded // MANY_STEPS if may_skip else 0

    counts = _optimizer_counts(tree, catalog)
    counted = next(iter(counts)) if len(counts) == 1 else recorded
    if not recorded - most_skipped <= counted <= recorded:
        yield _refuse_other_step(home, f"the optimizer has made {counted:g} steps", recorded)

    for name, calls in _scheduler_counts(home):
        # accelerate may call a schedule once for each rank: then its count is that many times as high
        steps = {calls / ranks for ranks in (1, _count_ranks(home))}
        if not any(recorded - most_skipped <= step <= recorded for step in steps):
            yield _refuse_other_step(home, f"the schedule in {name} has made {calls} steps", recorded)


def _refuse_other_step(home: Tree, found: str, recorded: int) -> InconsistentCheckpoint:
    """The error (E0305) for a part of a trainer's folder from another step than its record. found: what was found."""
    return InconsistentCheckpoint(
        f"{found}, {RECORD} belongs to step {recorded}",
        code="E0305",
        path=home.display(RECORD),
        hint="parts of two saves are in the folder: fetch one save whole; --lenient takes it as it is",
    )


def _scheduler_counts(home: Tree) -> Iterator[tuple[str, int]]:
    """(file, number of `step` calls) for each schedule next to the record.

    Left out: ReduceLROnPlateau and similar schedules, which count epochs or evaluations, not optimizer steps."""
    from ckpt_tool.formats.state_dict.content import read_content  # most steps have no schedule next to them

    for name in filter(SCHEDULER.fullmatch, home.names()):
        try:
            extras = read_content(home, name).extras
        except StorageError:
            raise
        except CkptError:  # unreadable: it is reported with the files that are not read
            continue
        if not isinstance(extras, Mapping) or PLATEAU in extras:
            continue
        calls = extras.get("last_epoch")
        if type(calls) is int:
            yield name, calls


def _count_ranks(home: Tree) -> int:
    """The number of ranks of the job, by the RNG states that each rank saved; at least 1."""
    return max(1, sum(1 for name in home.names() if _RNG_OF_RANK.fullmatch(name)))


def _optimizer_counts(tree: Tree, catalog: Catalog) -> set[float]:
    """The different step counts of an optimizer: one element if all agree. DeepSpeed stores a plain number."""
    plain = catalog.extras.get("global_steps")
    if type(plain) is int:
        return {float(plain)}
    arrays = [
        catalog.tensors[key].chunks[0].array
        for key in catalog.tensors
        if key.state == STEP and "expert" not in key.name and catalog.tensors[key].chunks
    ]
    readable = [array for array in arrays if array.numel == 1 and array.dtype.name in _CODES]
    if not readable:
        return set()
    # Evenly spread over all parameters, including the first and the last.
    spread = {i * (len(readable) - 1) // (SAMPLE - 1) for i in range(SAMPLE)}
    return {_value(tree, readable[i]) for i in sorted(spread)}


def _is_counter(state: str) -> bool:
    """Is it torch's `step`, or one of Paddle's powers of beta, which shrink with each step?"""
    return state == STEP or "_pow_acc" in state


def _counts(tree: Tree, files: Mapping[str, list[StoredArray]]) -> dict[str, float]:
    """File -> the count on which a sample of its counters agrees; {} if those of any file disagree."""
    out = {}
    for path, arrays in files.items():
        if len(arrays) < LEAST:
            continue
        # Evenly spread over the file's counters, including the first and the last.
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
