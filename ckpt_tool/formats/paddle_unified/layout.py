"""Which of a unified checkpoint's model weights lie transposed: decided for each file and each tensor, never guessed.

The trap: with `save_to_hf` (the default since PaddleFormers 0.3) the model file holds Linear weights as Hugging Face does,
[out, in], and says `"format": "pt"`; optimizer and master weights beside it stay in Paddle's [in, out]. A square weight shows
nothing by its shape. What decides, in this order:

    the file says "np"                                            as it lies
    no matrix, or "lora" in the name                              as it lies
    a master weight or moment of another shape than [out, in]     its shape settles this weight, and all weights of the
                                                                  module's name: the writer goes by that name alone
    the list of the model type (`paddle.rules.transposed_in_hf`)  settles the rest
    neither                                                       InputError E1353 that says what to pass

    model gate_proj BF16 [48, 32], master gate_proj F32 [32, 48]  ->  gate_proj is transposed, of every layer

Source: PaddleFormers 1.2.0 `transformers/conversion_utils.py` (`convert_transpose_selected_weights`: a list of module names
a model class, two-dimensional tensors alone). Cost: linear. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tool.core.catalog import Note
from ckpt_tool.errors import InconsistentCheckpoint, InputError
from ckpt_tool.formats.paddle.rules import model_type_of, transposed_in_hf

UNDECIDED, DISAGREE = "E1353", "E1354"

Shape = tuple[int, ...]


def module_of(name: str) -> str:
    """The module's name, by which the writer chooses.

    >>> module_of("model.layers.3.mlp.gate_proj.weight")
    'gate_proj'
    """
    words = [word for word in name.split(".") if not word.isdecimal()]
    return words[-2] if len(words) > 1 else words[-1] if words else name


def may_be_transposed(name: str, shape: Shape) -> bool:
    return len(shape) == 2 and "lora" not in name and name.endswith(".weight")


def transposed(
    stored: Mapping[str, Shape],
    trained: Mapping[str, Shape],
    config: Mapping[str, Any],
    *,
    path: str,
    settle: bool = True,
) -> tuple[set[str], list[Note]]:
    """The names that lie transposed. stored: weights of files that say `pt`, shapes as they lie. trained: shapes of master
    weights and moments, in Paddle's layout. path: the folder, for messages. settle: False for a first look, in which
    what stays open counts as it lies.

    Raises InconsistentCheckpoint E1354 for weights that contradict each other, InputError E1353 for what stays open.
    """
    matrices = {name: shape for name, shape in stored.items() if may_be_transposed(name, shape)}
    seen = _seen(matrices, trained, path)
    flips, open_, odd = set[str](), list[str](), set[str]()
    rules: dict[str, bool | None] = {}
    for name in matrices:
        tail = ".".join(name.rsplit(".", 4)[-4:])  # the lists speak of the last words, and there are few of them
        if tail not in rules:
            rules[tail] = transposed_in_hf(name, 2, config)
        rule, shown = rules[tail], seen.get(module_of(name)) if seen else None
        if shown is not None and rule is not None and shown != rule:
            odd.add(module_of(name))
        flip = rule if shown is None else shown
        if flip is None:
            open_.append(name)
        elif flip:
            flips.add(name)
    if open_ and settle:
        raise _undecided(open_, matrices, config, path)
    notes = []
    if odd:
        modules = ", ".join(sorted(odd)[:20])
        notes.append(
            Note("W-layout", f"by the shapes of their master weights these lie otherwise than listed: {modules}")
        )
    return flips, notes


def _seen(matrices: Mapping[str, Shape], trained: Mapping[str, Shape], path: str) -> dict[str, bool]:
    """Module -> whether its weights lie transposed, as the shapes of their master weights and moments show."""
    seen: dict[str, tuple[bool, str]] = {}
    for name, (rows, columns) in matrices.items():
        theirs = trained.get(name)
        if rows == columns or theirs not in ((rows, columns), (columns, rows)):
            continue
        flip = theirs == (columns, rows)
        first, other = seen.setdefault(module_of(name), (flip, name))
        if first != flip:
            raise InconsistentCheckpoint(
                f"{other} and {name} lie in different layouts by their master weights' shapes", code=DISAGREE, path=path,
                key=name, hint="files of two saves lie together: fetch one save whole",
            )  # fmt: skip
    return {module: flip for module, (flip, _) in seen.items()}


def _undecided(names: list[str], shapes: Mapping[str, Shape], config: Mapping[str, Any], path: str) -> InputError:
    kind = model_type_of(config)
    about = f"the model type {kind!r} is not known" if kind else "nothing says the model type"
    return InputError(
        f"{len(names)} weights lie in the Hugging Face layout or not: {about}, and no master weight of another shape tells;"
        f" the first: {names[0]} {list(shapes[names[0]])}",
        code=UNDECIDED, path=path, key=names[0], faults=names[1:50],
        hint="pass --config with the model's config.json, or --family: the model type says which weights are transposed",
    )  # fmt: skip


def kind_of_layout(formats: Iterable[str]) -> str:
    """`pt` where any model file is in the Hugging Face layout, else `np`."""
    return "pt" if "pt" in set(formats) else "np"
