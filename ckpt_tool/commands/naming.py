"""Naming: the chosen tensors under the names and the structure that the output shall have.

Three roads, and the report says which was taken: AOA statements (`--aoa FILE`), the families' equations where the
source's dialect is known and is not the target's, or none: names are kept. The mapping is applied to where the elements lie
(`plan.mapping`), so nothing has moved yet and every later step is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_tool.algebra.mapped import Mapped
from ckpt_tool.commands.chosen import Chosen
from ckpt_tool.commands.groups import renamed_groups
from ckpt_tool.commands.options import Reading, Writing
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError, wrap_os_error
from ckpt_tool.formats.base import Format

AOA_LIMIT = 16 << 20  # bytes of a file of statements: one for each tensor of the largest models has a few megabytes


def under_other_names(chosen: Chosen, reading: Reading, writing: Writing, fmt: Format) -> Chosen:
    """`chosen` as `--aoa` or `--dialect` (default: what is at home in `fmt`) wants it named. Raises UsageError, InputError."""
    if writing.aoa:
        if writing.dialect not in (None, "keep"):
            raise UsageError("--aoa and --dialect both say how names change", code="E1282", hint="give one of the two")
        return _by_statements(chosen, writing.aoa)
    return chosen


def _by_statements(chosen: Chosen, path: str) -> Chosen:
    from ckpt_tool.algebra.aoa import compile_aoa, read_aoa
    from ckpt_tool.plan.mapping import parameter_shapes

    file = Path(path)
    try:
        if file.stat().st_size > AOA_LIMIT:
            raise UsageError(f"--aoa: more than {AOA_LIMIT >> 20} MiB of statements", code="E1283", path=file)
        text = file.read_text(encoding="utf-8")
    except OSError as e:
        raise wrap_os_error(e, file, "reading the statements") from e
    except UnicodeDecodeError as e:
        raise UsageError("--aoa: the file is not UTF-8 text", code="E1283", path=file) from e
    statements, reverse = read_aoa(text)
    mapped = compile_aoa(statements, parameter_shapes(chosen.stored), reverse=reverse)
    return _renamed(chosen, mapped, f"the statements of {file.name}", {"dialect": "keep"})


def _renamed(chosen: Chosen, mapped: Mapped, by: str, hints: Mapping[str, Any], notes: Sequence[str] = ()) -> Chosen:
    """`chosen` under the names of `mapped`; what the mapping leaves out is told as dropped."""
    from ckpt_tool.plan.mapping import apply_mapping

    applied = apply_mapping(chosen.stored, mapped)
    casts = {TensorKey(made.name): made.dtype for made in mapped.made if made.dtype is not None}
    unfilled = [f"{by}: {name} has no source and is not written" for name in mapped.unfilled]
    return replace(
        chosen,
        stored=applied.stored,
        extras=renamed_groups(chosen.extras, applied.names),
        dropped=(*chosen.dropped, *_dropped(applied.dropped, by)),
        notes=(*chosen.notes, *notes, *unfilled),
        renewed=chosen.renewed | applied.renewed,
        casts={**chosen.casts, **casts},
        names=applied.names,
        hints={**chosen.all_hints, **hints},
    )


def _dropped(tensors: Sequence[LogicalTensor], by: str) -> list[dict[str, Any]]:
    """Entries of the report, one a state."""
    rows: dict[str, list[LogicalTensor]] = {}
    for tensor in tensors:
        rows.setdefault(tensor.key.state, []).append(tensor)
    return [
        {"state": state, "tensors": len(found), "bytes": sum(tensor.nbytes for tensor in found),
         "names": [tensor.key.name for tensor in found[:50]], "reason": f"left out by {by}"}
        for state, found in rows.items()
    ]  # fmt: skip
