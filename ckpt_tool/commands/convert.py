"""`ckpt reshard` and `ckpt convert`: the same values for other degrees, or in another format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ckpt_tool.commands.chosen import Chosen
from ckpt_tool.commands.config import read_config
from ckpt_tool.commands.dequantized import dequantized
from ckpt_tool.commands.groups import without_removed
from ckpt_tool.commands.naming import under_other_names
from ckpt_tool.commands.options import Reading, Writing
from ckpt_tool.commands.quantised import with_their_parts
from ckpt_tool.commands.select import group_of, split_keys, state_filter
from ckpt_tool.commands.source import Opened, open_source
from ckpt_tool.commands.vocabulary import grown_vocabulary, is_vocabulary, trim_vocabulary
from ckpt_tool.commands.write import write
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.soundness import check_sound
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.beside import optimizer_files
from ckpt_tool.formats.steps import other_steps
from ckpt_tool.plan.moves import Stored


def reshard(src: str, dst: str, reading: Reading, writing: Writing, progress: Progress) -> dict[str, Any]:
    """The same checkpoint, every state of it, for other parallel degrees. Degrees left out keep the source's value."""
    if writing.aoa or writing.dialect not in (None, "keep"):
        option = "--aoa" if writing.aoa else "--dialect"
        raise UsageError(
            f"reshard keeps names: {option} changes them", code="E2702",
            hint="ckpt convert takes the degrees too, so one hop is enough",
        )  # fmt: skip
    opened = open_source(src, reading)
    chosen = dequantized(choose(opened, reading, writing, inherits=True), writing)
    return write(chosen, dst, writing, progress, to=writing.to or opened.catalog.format)


def convert(src: str, dst: str, reading: Reading, writing: Writing, progress: Progress) -> dict[str, Any]:
    """Another format (and other degrees on the way). Degrees left out are 1."""
    if writing.to is None:
        raise UsageError("convert needs --to FORMAT", code="E0263", hint="such as --to safetensors")
    opened = open_source(src, reading)
    chosen = dequantized(choose(opened, reading, writing), writing)
    chosen = under_other_names(chosen, reading, writing, registry.by_name(writing.to))
    return write(chosen, dst, writing, progress, to=writing.to)


def choose(opened: Opened, reading: Reading, writing: Writing, *, inherits: bool = False) -> Chosen:
    """The tensors of one source that the options ask for, with what was removed and dropped by name."""
    opened.refuse_unsafe()
    catalog = opened.catalog
    catalog.check()
    if not reading.lenient:
        check_sound(catalog, other_steps(opened.tree, catalog))
    refuse_left_optimizer(opened, writing)
    present = catalog.states()
    asked = state_filter(writing.states, [*present, *(["extras"] if catalog.extras else [])])
    unwanted = state_filter(writing.drop, [*present, EXTRAS]) if writing.drop else None
    kept, removed = split_keys(
        catalog.tensors, remove=writing.remove_keys, keep=writing.keep_keys, model_only=writing.model_only
    )
    kept, removed = with_their_parts(catalog, kept, removed, writing)
    behind: dict[str, list[LogicalTensor]] = {}
    stored = []
    for key in kept:
        tensor = catalog.tensors[key]
        if not asked(key.state) or unwanted is not None and unwanted(key.state):
            behind.setdefault(key.state, []).append(tensor)
        else:
            stored.append(Stored(0, tensor))
    dropped = [
        {"state": state, "tensors": len(rows), "bytes": sum(row.nbytes for row in rows), "reason": "not asked for"}
        for state, rows in behind.items()
    ]
    extras = catalog.extras
    if extras and (not asked(EXTRAS) or unwanted is not None and unwanted(EXTRAS)):
        dropped.append({"state": EXTRAS, "tensors": 0, "bytes": 0, "names": sorted(map(str, extras)),
                        "reason": "not asked for"})  # fmt: skip
        extras = {}
    renewed: set[TensorKey] = set()
    if writing.as_model:
        if not any(row.tensor.key.state == writing.as_model for row in stored) and writing.as_model in present:
            raise UsageError(
                f"--as-model {writing.as_model}: --state, --drop or the patterns leave {writing.as_model} behind", code="E0265",
                hint=f"ask for it: --as-model alone takes {writing.as_model} for the model and drops the other weights",
            )  # fmt: skip
        stored, more = _as_model(stored, writing.as_model)
        dropped += more
        renewed |= {row.tensor.key for row in stored}
    if writing.vocab_size is not None:
        stored, more = trim_vocabulary(stored, writing.vocab_size)
        dropped += more
        renewed |= {row.tensor.key for row in stored if is_vocabulary(row.tensor.key.name)}
    chosen = Chosen(
        (opened,),
        tuple(stored),
        without_removed(extras, {key.name for key in removed} - {key.name for key in kept}),
        tuple(catalog.tensors[key] for key in removed),
        tuple(dropped),
        inherits,
        renewed=frozenset(renewed),
        config=read_config(reading.config) if reading.config else None,
        first_replica=reading.replica_policy == "first",
    )
    return grown_vocabulary(chosen, writing) if writing.vocab_size else chosen


def refuse_left_optimizer(opened: Opened, writing: Writing) -> None:
    """Raise UsageError E1643 where an optimizer's state lies beside the model, can't be read, and would have a place in the
    target: what is asked for and can't be had is an error unless named in `--drop`."""
    to = registry.by_name(writing.to or opened.catalog.format)
    asked = not writing.states or any(name == "all" or group_of(name) == "optimizer" for name in writing.states)
    if not asked or writing.as_model or "optimizer" in writing.drop or not to.holds.has("optimizer"):
        return
    tree = opened.tree
    left = optimizer_files(tree.names() if tree.single is None else (), opened.catalog.files)
    if left:
        raise UsageError(
            f"{left[0]} holds an optimizer's state by parameter number: whose it is stands in no file, so it can't be taken along",
            code="E1643", path=tree.display(left[0]), faults=[f"{name} too" for name in left[1:]],
            hint="--state model (or --drop optimizer) writes the rest and leaves it behind",
        )  # fmt: skip


def _as_model(stored: Iterable[Stored], state: str) -> tuple[list[Stored], list[dict[str, Any]]]:
    """Write `ema` or `master` as the model. Parameters without that state are an error: nothing is mixed in silence."""
    rows = list(stored)
    if state not in (EMA, MASTER):
        raise UsageError(f"--as-model {state}", code="E0265", hint="one of ema, master")
    chosen = {row.tensor.key.name: row for row in rows if row.tensor.key.state == state}
    model = {row.tensor.key.name: row for row in rows if row.tensor.key.state == MODEL}
    if not chosen:
        raise UsageError(f"the checkpoint has no state {state}", code="E0265", hint="see ckpt inspect")
    missing = [name for name in model if name not in chosen]
    out = []
    for name, row in {**model, **chosen}.items():
        tensor = row.tensor
        path = model[name].tensor.path if name in model else ()
        out.append(row._replace(tensor=replace(tensor, key=TensorKey(name, MODEL), path=path)))
    dropped: dict[str, dict[str, Any]] = {}
    for row in rows:
        name, held = row.tensor.key.name, row.tensor.key.state
        if held in (MODEL, state) and not (held == MODEL and name in chosen):
            continue
        entry = dropped.setdefault(held, {"state": held, "tensors": 0, "bytes": 0, "reason": f"--as-model {state}"})
        entry["tensors"] += 1
        entry["bytes"] += row.tensor.nbytes
    notes = list(dropped.values())
    if missing:
        notes.append({"state": state, "tensors": 0, "bytes": 0, "names": missing[:50],
                      "reason": f"{len(missing)} tensors have no {state}: the model's own are written (buffers)"})  # fmt: skip
    return out, notes
