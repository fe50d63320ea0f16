"""Names and numbers: what a whole model of the family and the config has, and what is there.

    A0101  tensors, modules, layers that are not there        `families.completeness`, as before a conversion
    A0102  names in the layers that no rule of the family has
    A0103  shapes that contradict the config
    A0104  fewer experts than the config says, or more
    A0105  a part of the MTP layers that the config promises
    A0106  numbers of files that are left out: model-00047-of-00048, if the index names the other 47
    A0108  a config that contradicts itself
    A0109  names that begin with what a wrapper puts there: no library finds its weights under them
    A0110  tensors outside the layers that neither the family nor the class in the config has

Cost: a few us a tensor, nothing is read. What it does not do: find what an index or a header shows (`sources.sound`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ckpt_tool.auditing.findings import (
    AHEAD,
    CONFIG,
    EXPERTS,
    MISSING,
    NUMBERS,
    OUTSIDE,
    SHAPE,
    SURPLUS,
    WRAPPED,
    FoundFault,
)
from ckpt_tool.auditing.subject import Subject
from ckpt_tool.conversion.config_fit import (
    modules_of_unknown_codes,
    say_missing,
    say_surplus,
    say_unfitting,
    surplus_names,
    unfitting_shapes,
)
from ckpt_tool.core.bounds import numeral
from ckpt_tool.families.completeness import missing, outside, strange
from ckpt_tool.families.config.translation import contradictions
from ckpt_tool.families.experts import mixed_experts
from ckpt_tool.families.registry import configured_family, names_a_model, stated_classes
from ckpt_tool.families.wrappers import advise_on_prefix, describe_prefix, find_certain_wrapper

_NUMBERED = re.compile(r"(.*-)(\d{1,7})-of-(\d{1,7})(\.[a-z]+)")
_EXPERT = re.compile(r"(.*\.(?:layers|blocks|h)\.(\d{1,9})\..*?experts\.)(\d{1,9})\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,9})\.")
_MTP = re.compile(r"(?:^|\.)mtp(?:_\w+)?(?:\.|$)")
_SHOWN = 200  # findings of one code


def findings(subject: Subject) -> Iterator[FoundFault]:
    """What names, shapes and the index show. Headers alone."""
    if subject.whole:
        yield from _config(subject)
        yield from _find_wrapped(subject)
        yield from _limit_findings(_missing(subject))
        yield from _limit_findings(_strange(subject))
        yield from _outside(subject)
        yield from _limit_findings(_shapes(subject))
        yield from _experts(subject)
        yield from _find_partial_mtp(subject)
    yield from _numbers(subject)


def _limit_findings(found: Iterator[FoundFault]) -> Iterator[FoundFault]:
    findings = list(found)
    yield from findings[:_SHOWN]
    if len(findings) > _SHOWN:
        yield findings[_SHOWN]._replace(message=f"and {len(findings) - _SHOWN} more of this kind", tensor=None)


def _config(subject: Subject) -> Iterator[FoundFault]:
    if subject.sure and subject.model.config:
        for line in contradictions(subject.model.config):
            yield FoundFault(CONFIG, f"the config contradicts itself: {line}", file=subject.model.origin)


def _find_wrapped(subject: Subject) -> Iterator[FoundFault]:
    """Names of a hub folder behind a prefix. A job's own file has the names that the job goes on with."""
    config = subject.model.config
    is_of_the_hub = subject.opened.format.holds.dialect == "hf" and subject.opened.tree.single is None
    if subject.found is not None or config is None or not is_of_the_hub:
        return
    names = list(subject.kinds)
    family = configured_family(config)
    if family is not None:
        description = describe_prefix(names, [family])
        advice = advise_on_prefix(description)
    else:
        prefix = find_certain_wrapper(names) if names_a_model(config) else ""
        description = (
            f"all {len(names)} names begin with `{prefix}`, which a trainer's wrapper puts there" if prefix else ""
        )
        advice = f"--rename '{prefix}*=*' takes it off"
    if description:
        do = f"ckpt convert SRC OUT --to safetensors writes the model again: {advice}."
        yield FoundFault(WRAPPED, f"{description}: no library finds its weights under these names", names[0], do=do)


def lost_names(subject: Subject) -> list[str]:
    """The names that a complete model would have in addition to the tensors that are there, without MTP layers."""
    if subject.found is None:
        return []
    family, dialect = subject.found
    if not subject.sure and strange(family, dialect, subject.weights):
        return []  # another family than it looks like
    return missing(family, dialect, subject.weights, subject.model.config)


def _missing(subject: Subject) -> Iterator[FoundFault]:
    for name in lost_names(subject):
        yield FoundFault(MISSING, say_missing(name), name)


def _strange(subject: Subject) -> Iterator[FoundFault]:
    if subject.found is not None and subject.sure:
        for name in surplus_names(subject.found, subject.tensors, subject.model.config):
            yield FoundFault(SURPLUS, say_surplus(name, subject.found), name)


def _outside(subject: Subject) -> Iterator[FoundFault]:
    """One finding for all tensors outside the layers that no rule is about. A class that the family does not list
    (`LlamaForSequenceClassification`, a reward model's own) may have heads of its own, so it gets no finding."""
    if subject.found is None or not subject.sure:
        return
    family, dialect = subject.found
    architectures = {name for known_class in family.classes for name in known_class.architectures}
    if not architectures.issuperset(stated_classes(subject.config)):
        return

    coded = modules_of_unknown_codes(subject.kinds, subject.model.config)
    names = [name for name in outside(family, dialect, subject.weights) if name.rpartition(".")[0] not in coded]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield FoundFault(OUTSIDE, f"{names[0]}{others}: outside the layers, and in no rule of {family.name}", names[0])


def _shapes(subject: Subject) -> Iterator[FoundFault]:
    """Against the sizes of the config."""
    if subject.found is None or not subject.sure or not subject.model.config:
        return
    for fault in unfitting_shapes(subject.found, subject.tensors, subject.config):
        yield FoundFault(SHAPE, say_unfitting(fault), fault.name)


def _experts(subject: Subject) -> Iterator[FoundFault]:
    """Findings on experts: those stored one by one whose number is not the config's, and those stored in both layouts.
    `completeness` finds gaps, and shapes reveal a wrong number of fused ones."""
    for front in mixed_experts(subject.weights):
        pattern = front.replace("%d", "*")
        yield FoundFault(EXPERTS, f"{pattern} has its experts both one by one and in one tensor a layer", pattern)
    count = subject.arguments.get("num_experts")
    if type(count) is not int or not count:
        return
    highest: dict[str, int] = {}
    for match in filter(None, map(_EXPERT.match, subject.weights)):
        if match[1] in highest or subject.ruled(match.string):
            highest[match[1]] = max(highest.get(match[1], -1), int(match[3]))
    decoders: dict[str, int] = {}  # of a model that speaks, what it speaks with has experts of its own number
    for front, highest_number in highest.items():
        root = _LAYER.split(front)[0]
        decoders[root] = max(decoders.get(root, -1), highest_number)
    for front, highest_number in highest.items():
        if highest_number + 1 < count and decoders[_LAYER.split(front)[0]] == max(decoders.values()):
            message = f"{front}{highest_number} is the last expert, and the config says {count} of them"
            yield FoundFault(EXPERTS, message, f"{front}{highest_number + 1}")


def count_mtp_layers(subject: Subject) -> tuple[int, set[int | str]]:
    """(layers of multi-token prediction that the config promises, those of which there are tensors: numbers from 0)."""
    promised = subject.arguments.get("mtp_num_layers")
    layers = subject.arguments.get("num_layers")
    promised = promised if type(promised) is int else 0
    present = set[int | str]()
    for name in subject.kinds if promised else ():
        if _MTP.search(name):
            present.add(next((int(word) for word in name.split(".") if numeral(word)), 0))
            continue
        match = _LAYER.search(name)
        if match and type(layers) is int and int(match[1]) >= layers:
            present.add(int(match[1]) - layers)
    return promised, present


def _find_partial_mtp(subject: Subject) -> Iterator[FoundFault]:
    """Some of the layers and not all: a trainer that leaves MTP out leaves all of it out (transformers does)."""
    promised, present = count_mtp_layers(subject)
    gone = [number for number in range(min(promised, 64)) if number not in present]
    if present and gone:
        yield FoundFault(
            AHEAD, f"the config promises {promised} layers of multi-token prediction, number {gone[0]} is not there"
        )


def gaps(subject: Subject) -> Mapping[str, list[int]]:
    """`model-` -> the numbers of files that are left out, by the names of those that the checkpoint consists of."""
    stems: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in subject.opened.catalog.files:
        if match := _NUMBERED.fullmatch(file.rpartition("/")[2]):
            stems[match[1]][int(match[3])].add(int(match[2]))
    missing = {}
    for stem, totals in stems.items():
        for total, have in totals.items():
            lowest = 0 if 0 in have else 1
            numbers = range(lowest, lowest + total) if total <= 100_000 else ()
            gone = [number for number in numbers if number not in have]
            if gone:
                missing[stem] = gone
    return missing


def _numbers(subject: Subject) -> Iterator[FoundFault]:
    for stem, gone in gaps(subject).items():
        listed_numbers = ", ".join(map(str, gone[:8])) + (", ..." if len(gone) > 8 else "")
        noun = "file" if len(gone) == 1 else "files"
        yield FoundFault(NUMBERS, f"by their names {len(gone)} {noun} {stem}N are left out: {listed_numbers}")
