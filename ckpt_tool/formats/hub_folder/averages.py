"""Averages (EMA) among a model's own names in safetensors files: `model_ema.X` next to `X`.

    model.safetensors: a.w, model_ema.a.w     ->     a.w of the state model, a.w of the state ema

Safetensors has one flat table of names, so a trainer that saves its whole module there writes the averages under
names of their own. They are recognised by the rules for torch files (`formats.state_dict.averages`): the name is an
average's, and each has a weight of the same shape. Cost: a look at the first word of each name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ckpt_tool.core.catalog import Note, Unread
from ckpt_tool.core.tensor import EMA, EXTRAS, MODEL, LogicalTensor, TensorKey
from ckpt_tool.formats.state_dict.words import is_average
from ckpt_tool.storage.safetensors_files.safetensors_file import SafetensorsHeader


def has_average(headers: Iterable[SafetensorsHeader]) -> bool:
    """Does a name begin with a word of averages?"""
    words: set[bytes] = set()
    for header in headers:
        words.update(name.partition(b".")[0] for name in header.names.encoded())
    return any(is_average(word.decode()) for word in words)


def sort_averages_out(
    tensors: Mapping[TensorKey, LogicalTensor], trained: Collection[str] = ()
) -> tuple[dict[TensorKey, LogicalTensor], tuple[Unread, ...], list[Note]]:
    """(the tensors with averages as the state ema, those that are averages of no weight, notes). trained: first words
    of names that an optimizer trains."""
    from ckpt_tool.formats.state_dict.averages import find_within, state_of_refused

    within = find_within({key.name: tensor.shape for key, tensor in tensors.items() if key.state == MODEL}, trained)
    counters = frozenset(within.counters)

    sorted_out: dict[TensorKey, LogicalTensor] = {}
    unread: list[Unread] = []
    for key, tensor in tensors.items():
        if key.state != MODEL:
            sorted_out[key] = tensor
            continue
        if key.name in within.refused:
            shown = f"{tensor.dtype.name} {list(tensor.shape)}"
            refused = TensorKey(key.name, state_of_refused(key.name))
            unread.append(Unread(refused, shown, fault=within.refused[key.name]))
            continue
        new_key = key
        if key.name in within.twins:
            new_key = TensorKey(within.twins[key.name], EMA)
        elif key.name in counters:
            new_key = TensorKey(key.name, EXTRAS)
        sorted_out[new_key] = tensor if new_key == key else tensor._replace(key=new_key)

    notes = [
        Note("N-averages-within", f"{count} tensors below {word}. are averages, the state ema")
        for word, count in within.words.items()
    ]
    return sorted_out, tuple(unread), notes
