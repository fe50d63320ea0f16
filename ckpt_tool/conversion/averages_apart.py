"""Averages among the model's own names, of sources whose reader does not look for them: DeepSpeed, Megatron, sharded.

    DeepSpeed's module: a.w, teacher.a.w     to safetensors     a.w of the state model, a.w of the state ema

Such a job's file has its module's names, and the same format takes them back as they are. Another format would have the
average as a part of the model, so it is sorted out first, as readers of torch files and safetensors do
(`formats.state_dict.averages`). Weights below such a name that the job trains, as their optimizer's states show, are no
averages. Cost: a look at the first word of each name.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tool.core.tensor import EMA, EXTRAS, MODEL
from ckpt_tool.formats.hub_folder.averages import sort_averages_out
from ckpt_tool.formats.state_dict.words import is_average
from ckpt_tool.sources.chosen import Chosen, Conversion


def sort_averages_apart(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen`, of a source whose averages among the model's names are the state ema."""
    opened = chosen.sources[0]
    catalog = opened.catalog
    states_by_word: dict[str, set[str]] = {}
    for row in catalog.rows():
        states_by_word.setdefault(row.name.partition(".")[0], set()).add(row.state)

    trained = {word for word, states in states_by_word.items() if states - {MODEL, EMA, EXTRAS}}
    of_model = (word for word, states in states_by_word.items() if MODEL in states and word not in trained)
    if not any(map(is_average, of_model)):
        return chosen

    tensors, unread, notes = sort_averages_out(catalog.tensors, trained)
    sorted_out = replace(catalog, tensors=tensors, unread=(*catalog.unread, *unread), notes=(*catalog.notes, *notes))
    return replace(chosen, sources=(opened._replace(catalog=sorted_out),))
