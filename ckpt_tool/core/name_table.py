"""Which names become which: the table of a conversion between dialects, with layers folded into patterns.

>>> table_of_names({"layers.0.q.weight": ("decoder.0.qkv.weight",), "layers.1.q.weight": ("decoder.1.qkv.weight",)})
[{'source': 'layers.*.q.weight', 'target': ['decoder.*.qkv.weight'], 'tensors': 2}]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")  # a part between dots that is a number


def table_of_names(names: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """A row for each pattern of source names and what is made of them, in the order of the source. Empty where every
    name stays as it is. names: name in the source -> names in the output."""
    if all(tuple(outputs) == (name,) for name, outputs in names.items()):
        return []

    counts: dict[tuple[str, tuple[str, ...]], int] = {}
    for name, outputs in names.items():
        targets = tuple(dict.fromkeys(_NUMBER.sub("*", target) for target in outputs))
        row = _NUMBER.sub("*", name), targets
        counts[row] = counts.get(row, 0) + 1
    return [
        {"source": source, "target": list(targets), "tensors": count} for (source, targets), count in counts.items()
    ]
