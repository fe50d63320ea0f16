"""Names averages of a model's weights (EMA) that are stored without the parameters' names: lists, names without dots.

    ema: {"decay": 0.999, "shadow_params": [T0, T1]}                torch_ema, diffusers' EMAModel, score_sde
    model_ema.diffusion_modelinput_blocks00weight                   LDM's LitEma: the parameter's name without dots
    generator_ema.conv.weight with generator.conv.weight            GAN trainers
    ema: {"ema_model.w": T0, "online_model.w": T1, "step": T2}      ema-pytorch
    teacher.backbone.w with student.backbone.w                      DINO, mean teachers; target_network. of BYOL

A list follows the order of the model's parameters, so it is aligned with the model of the same file as an optimizer's
numbers are: by shapes, and only if exactly one alignment fits. An average that does not fit, or has no twin in the
model, is refused under its own name, because it must neither be taken for the model nor mixed with it.

Sources: torch_ema 0.3 `ema.py` (`state_dict`), diffusers 0.35 `training_utils.py` (`EMAModel.state_dict`), score_sde
`models/ema.py`, latent-diffusion `ldm/modules/ema.py` (`m_name2s_name`), ema-pytorch 0.7 `ema_pytorch.py`. Cost: a few
dict operations a tensor of an average. What it does not do: say which levels are averages (`words.is_average`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import EMA, MODEL, Path
from ckpt_tool.errors import InputError, UsageError
from ckpt_tool.formats.state_dict.optimizer_ids import Aligned, Candidate, align
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.words import LIVE_MODELS, SECOND_MODELS, is_average, without_average

LISTS = ("shadow_params", "collected_params")  # the averages; the weights that were put aside for them
COUNTERS = frozenset(("decay", "num_updates", "initted", "step", "n_averaged", "updates"))
_WITHIN = ("ema_model.", "online_model.")  # ema-pytorch's names of the average and of the model itself
_WRAPPER = "module"
_MODULE_TOO = "ema"  # says less than `model_ema`: a model's own module may be called so
_LIST_ALONE = "E2951"
_NO_TWIN = "E2952"
_TAKEN_FOR_AVERAGE = "E3015"

Shape = tuple[int, ...]


class ListedAverage(NamedTuple):
    """Averages that are a list."""

    root: Path  # where it is
    members: tuple[tuple[int, int], ...]  # (number, leaf) in the list's order


class Sorted(NamedTuple):
    """The leaves below one level of averages."""

    named: dict[int, str]  # leaf -> the name of its parameter
    lists: tuple[ListedAverage, ...]  # those without names
    others: tuple[int, ...]  # leaves that are no average


def sort_averages(paths: Mapping[int, Path], root: Path, below: Path) -> Sorted:
    """What the leaves below a level of averages are. paths: leaf -> its path. below: the level that the names start
    behind, which is `root` or a level below it."""
    named: dict[int, str] = {}
    lists: dict[Path, list[tuple[int, int]]] = {}
    others: list[int] = []
    for leaf, path in paths.items():
        number = path[-1]
        if type(number) is int and len(path) <= len(root) + 2:
            if str(path[-2]) == LISTS[1]:
                others.append(leaf)
            else:
                lists.setdefault(path[:-1], []).append((number, leaf))
            continue
        named[leaf] = dotted(path[len(below) :])

    # ema-pytorch leaves the model itself out with include_online_model=False: then every average has the prefix.
    prefixed = [name for name in named.values() if name not in COUNTERS]
    has_average = any(name.startswith(_WITHIN[0]) for name in prefixed)
    is_pytorch_ema = has_average and all(name.startswith(_WITHIN) for name in prefixed)
    if is_pytorch_ema:
        others += [leaf for leaf, name in named.items() if not name.startswith(_WITHIN[0])]
        named = {leaf: name.removeprefix(_WITHIN[0]) for leaf, name in named.items() if leaf not in others}
    found = tuple(ListedAverage(where, tuple(sorted(members))) for where, members in lists.items())
    return Sorted(named, found, tuple(others))


def name_list(listed: ListedAverage, shapes: Sequence[Shape], model: Sequence[Candidate]) -> Aligned:
    """The parameters that a list of averages follows, by number. shapes: of the list's tensors."""
    numbers = [number for number, _ in listed.members]
    if numbers != list(range(len(numbers))):
        return Aligned({}, "its numbers have gaps")
    moments = {number: {"exp_avg": shape} for number, shape in zip(numbers, shapes, strict=True)}
    return align([{"params": numbers}], moments, model)


def refuse_list(listed: ListedAverage, leaf: Path, why: str) -> InputError:
    """The error (E2951) for a list of averages that can't be named."""
    return InputError(
        f"{dotted(listed.root)} lists averages without names, and the model of the file does not state them ({why})",
        code=_LIST_ALONE,
        key=dotted(leaf),
        hint="copy the average into the model (copy_to) and save its state dict; --drop ema writes the rest",
    )


class Within(NamedTuple):
    """What tensors of a flat state dict that are averages by their first word are."""

    twins: dict[str, str]  # name -> the weight of which it is one
    refused: dict[str, InputError]  # name -> the error for one without such a weight
    counters: list[str]  # what an average counts with
    words: dict[str, int]  # word -> how many averages have it


def find_within(shapes: Mapping[str, Shape], trained: Collection[str] = ()) -> Within:
    """The averages among a model's own names: `model_ema.X`, as LDM saves them.

    Args:
        trained: first words of weights that an optimizer trains, which are no averages whatever they are called.

    >>> find_within({"a.w": (2,), "model_ema.a.w": (2,)}).twins
    {'model_ema.a.w': 'a.w'}
    """
    groups: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        word, _, rest = name.partition(".")
        if rest and is_average(word) and word not in trained:
            groups.setdefault(word, {})[rest] = shape
    live = {name: shape for name, shape in shapes.items() if name.partition(".")[0] not in groups}

    found = Within({}, {}, [], {})
    for word, rows in groups.items():
        counters = COUNTERS.intersection(rows)
        averaged = {name: shape for name, shape in rows.items() if name not in counters}
        twins = find_twins(list(averaged), word, averaged, live)
        if not twins and word.lower() == _MODULE_TOO:  # a module of the model that is called so
            continue

        rows = averaged
        found.counters.extend(f"{word}.{name}" for name in counters)
        if not live and all("." in name for name in rows):  # a file of averages alone, under their own names
            twins = {name: name for name in rows}
        if not set(found.twins.values()).isdisjoint(twins.values()):  # a second average of the same weights
            twins = {name: f"{word}.{name}" for name in rows}
        for name in rows:
            whole = f"{word}.{name}"
            if twins:
                found.twins[whole] = twins[name]
            else:
                found.refused[whole] = refuse_twinless(word, name)
        if twins:
            found.words[word] = len(twins)
    return found


def state_of_refused(name: str) -> str:
    """The state of a refused average. One that may be a part of the model counts as model, so that converting a model
    never loses it silently.

    >>> state_of_refused("model_ema.w"), state_of_refused("teacher.w")
    ('ema', 'model')
    """
    return MODEL if name.partition(".")[0].lower() in SECOND_MODELS else EMA


def find_twins(
    names: Sequence[str], word: str, shapes: Mapping[str, Shape], live: Mapping[str, Shape]
) -> dict[str, str]:
    """The weight of the model for each average below `word.`; {} unless all have a weight of the same shape.

    Args:
        names: of the averages, without `word.`.
        shapes: of the averages.
        live: the model's other weights.
    """
    wrapper = f"{_WRAPPER}."
    if names and all(name.startswith(wrapper) for name in names):  # torch's AveragedModel, timm's ModelEma
        bare = {name.removeprefix(wrapper): name for name in names}
        unwrapped = find_twins(list(bare), word, {inner: shapes[name] for inner, name in bare.items()}, live)
        if unwrapped:
            return {bare[inner]: twin for inner, twin in unwrapped.items()}
    for lead in dict.fromkeys((without_average(word), "", *LIVE_MODELS)):
        start = f"{lead}." if lead else ""
        plain = {name[len(start) :]: name for name in live if name.startswith(start)}
        without_dots: dict[str, str | None] = {}
        for short, name in plain.items():
            flat = short.replace(".", "")
            without_dots[flat] = None if flat in without_dots else name
        for table in (plain, without_dots):
            twins = {name: table.get(name) for name in names}
            found = {name: twin for name, twin in twins.items() if twin is not None and live[twin] == shapes[name]}
            if len(found) == len(names):
                return found
    return {}


def refuse_twinless(word: str, name: str) -> InputError:
    """The error (E2952) for an average in the model's own dict if some tensors below its word match no weight."""
    return InputError(
        f"{word}.{name[:200]} is by its name of an average or of another second model ({word}), and the model does not"
        " have a weight of the same name and shape for each tensor of it",
        code=_NO_TWIN,
        key=f"{word}.{name}"[:200],
        hint=f"--remove-keys '{word}.*' leaves them all out",
    )


def refuse_taken_for_averages(tensors: Sequence[WantedTensor]) -> None:
    """Raise UsageError E3015 for tensors of a model, about to be written, whose names a reader takes for averages.

    Averages that a source had are sorted out when it is read, so these are names that --rename or --aoa gave."""

    words = {tensor.key.name.partition(".")[0] for tensor in tensors}
    if not any(map(is_average, words)):
        return
    within = find_within({tensor.key.name: tensor.shape for tensor in tensors})
    taken = [*within.twins, *within.refused, *within.counters]
    if not taken:
        return

    word = taken[0].partition(".")[0]
    raise UsageError(
        f"the files keep names alone, and {taken[0]} would be read back as an average of the model's weights"
        f" ({word}), not as a weight of the model",
        code=_TAKEN_FOR_AVERAGE,
        key=taken[0],
        faults=[f"{name} as well" for name in taken[1:]],
        hint=f"give names that do not begin with {word}: --rename '{word}.*=*' takes that off",
    )
