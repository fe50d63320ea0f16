"""`--aoa FILE`: tensors under the names and in the structure that AOA statements give (`systems.paddle.aoa`).

The statements are applied to where the elements are stored, whatever the source and the target are. Cost: that of
compiling them.
"""

from __future__ import annotations

from pathlib import Path

from ckpt_tool.conversion.naming import refuse_experts, renamed
from ckpt_tool.core.hints import Dialect
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import UsageError, wrap_os_error
from ckpt_tool.plan.mapping import parameter_shapes
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.systems.paddle.aoa.program import Shards, compile_aoa, read_aoa

AOA_LIMIT = 16 << 20  # bytes of a file of statements: one for each tensor of the largest models has a few megabytes


def named_by_statements(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` under the names that the statements of `--aoa` give. Raises UsageError."""
    writing = job.writing
    refuse_experts(writing, "--aoa says how names change")
    if writing.dialect not in (None, "keep"):
        raise UsageError("--aoa and --dialect both say how names change", code="E1282", hint="give one of the two")

    file = Path(writing.aoa or "")
    try:
        if file.stat().st_size > AOA_LIMIT:
            raise UsageError(f"--aoa: more than {AOA_LIMIT >> 20} MiB of statements", code="E1283", path=file)
        text = file.read_text(encoding="utf-8")
    except OSError as e:
        raise wrap_os_error(e, file, "reading the statements") from e
    except UnicodeDecodeError as e:
        raise UsageError("--aoa: the file is not UTF-8 text", code="E1283", path=file) from e
    statements, reverse = read_aoa(text)
    shapes = parameter_shapes(chosen.stored)
    mapped = compile_aoa(
        statements, shapes, reverse=reverse, shards=Shards(_bands(chosen)), skip_unmatched=job.reading.lenient
    )
    return renamed(chosen, mapped, writing, f"the statements of {file.name}", [Dialect("keep")])


def _bands(chosen: Chosen) -> dict[str, int]:
    """The number of bands along the last dim, {parameter: bands}, for parameters that are cut along that dim alone.

    It is the number of ranks of a fused weight that the source's format does not recognise as fused. Weights that it
    does recognise are unfused already: their boxes alternate.
    """
    out = {}
    for row in chosen.stored:
        tensor = row.tensor
        if tensor.key.state == MODEL and len(tensor.shape) == 2 and len(tensor.chunks) > 1:
            columns = {
                (chunk.box.offset[1], chunk.array) for chunk in tensor.chunks if chunk.box.shape[1] < tensor.shape[1]
            }
            files = {array for _, array in columns}
            if columns and len(columns) == len(files) and tensor.shape[1] % len(columns) == 0:
                out[tensor.key.name] = len(columns)
    return out
