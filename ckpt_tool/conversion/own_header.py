"""What a format's own files state of the model, in words of the format (`Holds.own_header`).

GGUF alone has such files. What makes its metadata (`gguf_header`) is loaded for it alone.
"""

from __future__ import annotations

from ckpt_tool.sources.chosen import Chosen, Conversion


def with_header(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with what its output's files state of the model, where the format has them do so."""
    if not job.fmt.holds.own_header:
        return chosen
    from ckpt_tool.conversion.gguf_header import with_metadata

    return with_metadata(chosen, job)
