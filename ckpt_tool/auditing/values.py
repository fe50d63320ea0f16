"""Findings from values: copies, zeros, constants, NaN, tied heads that differ.

    A0201  a layer with exactly the matrices of another layer; an expert that equals another
    A0202  a matrix of zeros; a vector of zeros, if the same vector of other layers is not zero
    A0203  the same with another constant
    A0204  NaN or an infinity in a weight
    A0301  a head that the config ties to the embedding but that is no copy of it

A constant that is the same in every layer is an initial value and no fault: norms of ones, biases of zeros, tables of
angles.
Cost: two passes over the values (digests, then sums); `head_differs` reads some rows. What it does not do: compare with
another checkpoint (`ckpt diff`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ckpt_tool.auditing.findings import CONSTANT, COPIES, HEAD, NOT_FINITE, ZEROS, FoundFault
from ckpt_tool.auditing.subject import Subject
from ckpt_tool.conversion.tied_head import TIED, pair_of
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.families.table import form_of
from ckpt_tool.weight_schemes.quantised_weights import part_of

_LEAST = 64  # elements; smaller tensors may be equal or constant by coincidence
_LAYER = re.compile(r"^(.*?(?:^|\.)(?:layers|h|blocks|block)\.)(\d{1,9})(\..*)$")
_EXPERT = re.compile(r"^(.*\.experts\.)(\d{1,9})(\..*)$")
# Buffers such as masks, which may be constant or infinite.
_MASKS = (".bias", "mask", "inv_freq", "masked_bias", "position_ids", "relative_position_index")
# Adapters begin with zeros here, so that they change nothing at first.
_BEGUN_AT_ZERO = ("lora_B", "lora_embedding_B")
_SHOWN = 100


def head_differs(subject: Subject) -> Iterator[FoundFault]:
    """The finding that a tied head differs from the embedding. Compares some rows only, so it costs no full read."""
    pair = pair_of(subject.kinds)
    if pair is None or subject.config.get(TIED) is not True or not set(pair) <= subject.kinds.keys():
        return
    head, embedding = (subject.kinds[name] for name in pair)
    if head.shape != embedding.shape or head.dtype != embedding.dtype or len(head.shape) != 2 or not head.shape[0]:
        return
    from ckpt_tool.run.row_norms import equal_rows

    keys = (TensorKey(pair[0], subject.state), TensorKey(pair[1], subject.state))
    if not equal_rows(subject.opened.catalog, subject.opened.tree, *keys):
        message = f"{pair[0]} is no copy of {pair[1]}, to which the config ties it: who loads it may take either"
        yield FoundFault(HEAD, message, pair[0])


def findings(subject: Subject, progress: Progress) -> Iterator[FoundFault]:
    """The findings on copies, zeros, constants, NaN and Inf. Reads the tensors once."""
    from ckpt_tool.run.scan import digests_of
    from ckpt_tool.run.stats import Statistics

    catalog = subject.opened.catalog
    tree = subject.opened.tree
    keys = [TensorKey(name, subject.state) for name in subject.kinds]
    progress.start(sum(catalog.tensors[key].nbytes for key in keys), "auditing")
    statistics = Statistics()
    found = digests_of(catalog, tree, keys=keys, progress=progress, also=statistics.visit)
    digests = {key.name: digest for key, digest in found.items()}
    sums = {key.name: row for key, row in statistics.found().items()}
    progress.finish()
    alike = {name for name, row in sums.items() if row["min"] is not None and row["min"] == row["max"]}
    yield from _copies(subject, digests, alike)
    yield from _constants(subject, sums, alike)
    yield from _not_finite(subject, sums)


def _copies(subject: Subject, digests: Mapping[str, str], alike: set[str]) -> Iterator[FoundFault]:
    """Findings on layers with exactly the matrices of another layer, then on such experts."""
    for pattern, kind in ((_LAYER, "layer"), (_EXPERT, "expert")):
        modules: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        for name, digest in digests.items():
            match = pattern.match(name)
            shape = subject.kinds[name].shape
            if match and len(shape) > 1 and prod(shape) >= _LEAST and name not in alike:
                modules[match[1]][int(match[2])][match[3]] = digest
        for front, numbers in modules.items():
            first_of: dict[tuple[tuple[str, str], ...], int] = {}
            for number in sorted(numbers):
                original = first_of.setdefault(tuple(sorted(numbers[number].items())), number)
                if original != number:
                    message = f"{kind} {front}{number} has the weights of {front}{original}, bit for bit"
                    yield FoundFault(COPIES, message, f"{front}{number}")


def _constants(subject: Subject, sums: Mapping[str, Mapping[str, Any]], alike: set[str]) -> Iterator[FoundFault]:
    """Findings on constant tensors, unless the same tensor is constant in every layer."""
    forms = Counter(form_of(name)[0] for name in subject.kinds)
    same = Counter(form_of(name)[0] for name in alike)
    for name in sorted(alike):
        shape = subject.kinds[name].shape
        form = form_of(name)[0]
        everywhere = same[form] == forms[form]
        if not subject.kinds[name].dtype.is_float or prod(shape) < _LEAST or part_of(name) is not None:
            continue
        vector = len(shape) < 2 or name.endswith(("bias", *_MASKS))
        if any(word in name for word in _BEGUN_AT_ZERO) or (vector and (everywhere or forms[form] < 2)):
            continue
        value = sums[name]["min"]
        if value == 0:
            yield FoundFault(ZEROS, f"{name} {list(shape)} is all zeros", name)
        else:
            yield FoundFault(CONSTANT, f"{name} {list(shape)} is {value:g} everywhere", name)


def _not_finite(subject: Subject, sums: Mapping[str, Mapping[str, Any]]) -> Iterator[FoundFault]:
    """Findings on weights with NaN or infinite values."""
    for name, row in sums.items():
        bad = row["nan"] + row["inf"]
        if bad and not name.endswith(_MASKS):
            kind = "NaN" if row["nan"] else "infinite"
            yield FoundFault(NOT_FINITE, f"{bad} values of {name} are {kind}", name)
