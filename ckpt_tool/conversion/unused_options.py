"""Options that a verb takes with its group and does not carry out: an error, not a run as if they were not given.

    ckpt merge model out --dialect megatron      E3021: merge keeps names
    ckpt patch base delta out --as-model ema     E3021: a delta holds the model alone
    ckpt convert src out --model-only            E3021: nothing is removed
    ckpt convert src out --prefer fp61           E3016: no file of the source is called so, and no level of one

Which passes a verb leaves out (`passes`) says which options would be ignored. What holds anyway (`--dialect keep`) may
be given, as scripts do for every target.
"""

from __future__ import annotations

import re

from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.state_dict.roots import Roots
from ckpt_tool.option_kinds.statement import options_given
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import Opened

CODE = "E3021"
NOT_OF_SOURCE = "E3016"
SHOWN_LEVELS = 6
_WITHOUT_INDEX = "files"  # of `--prefer`
_LORA_WORDS = (".lora_", ".adapter.")  # PEFT's names and Megatron's


def refuse_new_names(verb: str, writing: Writing) -> None:
    """Raise UsageError E3021 for options of the passes NAMES, of a verb that runs none of them."""
    given = {
        "--dialect": writing.dialect not in (None, "keep"),
        "--aoa": bool(writing.aoa),
        "--tied-head": writing.tied_head not in (None, "keep"),
        **{option.names[0]: True for _, option in options_given(writing) if option.renames},
    }
    _refuse(verb, given, "names and structure stay as they are", "ckpt convert changes them, and takes degrees too")


def refuse_of_other_states(verb: str, writing: Writing) -> None:
    """Raise UsageError E3021 for options of the passes SELECTION that a delta can't heed: it is made on the tensors as
    the base has them, and holds no states but the model."""
    given = {
        "--as-model": writing.as_model is not None,
        "--vocab-size": writing.vocab_size is not None,
        "--dequantize": writing.dequantize,
    }
    _refuse(verb, given, "a delta holds the model's tensors as they are stored", "ckpt convert what comes out")


def refuse_without_patterns(verb: str, writing: Writing) -> None:
    """Raise UsageError E3021 for --model-only where no key is removed: most likely --state model is meant."""
    given = {"--model-only": writing.model_only and not (writing.remove_keys or writing.keep_keys)}
    _refuse(verb, given, "it belongs to --remove-keys and --keep-keys", "--state model writes the model alone")


def refuse_dropped_model(verb: str, writing: Writing) -> None:
    """Raise UsageError E3021 for --drop model, of a verb that computes the model."""
    given = {"--drop model": MODEL in writing.drop}
    _refuse(verb, given, "it writes the model", "--drop names states that are left out: optimizer, master, ema, extras")


def refuse_unused_reading(reading: Reading, *sources: Opened) -> None:
    """Raise UsageError E3016 for options about something that none of the sources has: the alpha of a LoRA, and files
    or levels of a file between which --prefer would choose. A name of what is read anyway may be given, as scripts
    do."""
    prefer = reading.prefer
    if reading.lora_alpha is not None and not any(map(_holds_lora, sources)):
        raise UsageError(
            f"--lora-alpha {reading.lora_alpha:g} has no effect: {sources[-1].path} holds no LoRA",
            code=NOT_OF_SOURCE,
            path=sources[-1].path,
            hint="leave it off, or pass the adapter",
        )
    if prefer is not None and not any(_names_model(opened) or _names_files(prefer, opened) for opened in sources):
        shown = ", ".join([*sources[-1].catalog.files[:4], *_levels(sources[-1])])
        raise UsageError(
            f"--prefer {prefer} has no effect: {sources[-1].path} has no such files, and no such level with a model",
            code=NOT_OF_SOURCE,
            path=sources[-1].path,
            hint=f"leave it off, or name what is there, such as {shown}",
        )


def _holds_lora(opened: Opened) -> bool:
    if opened.format.holds.adapter:
        return True
    return any(word in key.name for key in opened.catalog.tensors for word in _LORA_WORDS)


def _names_model(opened: Opened) -> bool:
    """Was the level of the model's tensors named by the user?"""
    roots = opened.catalog.hints.get(Roots)
    return roots is not None and roots.chosen


def _levels(opened: Opened) -> list[str]:
    """The first of the top levels of a nested state, without those that hold no more than a few values."""
    levels: dict[str, None] = {}
    for tensor in opened.catalog.tensors.values():
        if len(tensor.path) > 1 and len(tensor.shape) > 1:
            levels.setdefault(str(tensor.path[0]))
        if len(levels) == SHOWN_LEVELS:
            break
    return list(levels)


def _names_files(prefer: str, opened: Opened) -> bool:
    """Is this a file of the source, a word of a file's name (a stem, a variant, a suffix), or its format?"""
    if prefer == opened.format.name:
        return True
    tree = opened.tree
    paths = list(opened.catalog.files) if tree.single is not None else list(tree.listing())
    if prefer == _WITHOUT_INDEX:
        return len(paths) > 1
    for path in paths:
        name = path.rpartition("/")[2]
        if prefer in (path, name) or name.startswith(f"{prefer}.") or prefer in re.split(r"[.\-]", name):
            return True
    return False


def _refuse(verb: str, given: dict[str, bool], why: str, hint: str) -> None:
    unused = [option for option, was_given in given.items() if was_given]
    if unused:
        raise UsageError(
            f"{unused[0]} has no effect on ckpt {verb}: {why}",
            code=CODE,
            place=f"ckpt {verb}",
            hint=hint,
            faults=[f"{option} neither" for option in unused[1:]],
        )
