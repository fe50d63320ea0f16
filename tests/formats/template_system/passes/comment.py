"""`--toy-comment`: a line of text among the extras of the output."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tool.systems.toy.options import ToyOptions

from ckpt_tool.sources.chosen import Chosen, Conversion


def with_comment(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with the comment that the user gives."""
    comment = job.writing.of(ToyOptions).toy_comment
    return replace(chosen, extras={**chosen.extras, "comment": comment})
