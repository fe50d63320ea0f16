"""Copies side files: what is stored next to the weights and belongs to the model, such as the tokenizer.

    hf -> safetensors --dtype bf16    tokenizer, README: byte for byte; config.json: corrected (`output_config`)
    hf -> megatron-dist               all of them at the top of the folder, config.json as it was: the way back is exact
    megatron-dist -> safetensors      config.json from Megatron's arguments (`sources.config`)
    hf -> paddle                      config.json in Paddle's words (`systems.paddle.config`)
    gguf -> safetensors               config.json and the tokenizer's files of the metadata

The one idea: a name is on the list or it is not copied: indexes, optimizers and a job's pickles of another save would
only mislead. A config.json in which nothing is untrue is copied as it is. Files of code are copied as text, with a
note; nothing here runs them. Cost: one small file. What it does not do: Megatron's arguments (`megatron_arguments`),
what changes in config.json (`output_config`), read tensors.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckpt_tool.core.hints import Stated
from ckpt_tool.core.target import Target, Wanted, whole_file
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import Format
from ckpt_tool.formats.entry import offered
from ckpt_tool.formats.hub_folder.model_files import NESTED, TOKENIZER, is_model_code, is_sidefile, tokenizer_files
from ckpt_tool.formats.hub_folder.modules import module_files, module_weights
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.chosen import Chosen
from ckpt_tool.sources.config import NAME, file_config, files_of_config, tree_of
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    pass

_OWN = ("params.json",)  # Meta's config, translated elsewhere


def side_files(chosen: Chosen, fmt: Format) -> tuple[tuple[str, int], ...]:
    """(path, size in bytes) of the first source's side files, those of the folder with its pointer file among them."""
    opened = chosen.sources[0]
    foreign = opened.format.holds.own_sidefiles - fmt.holds.own_sidefiles
    of_adapter = _adapter_config_of(chosen, fmt)
    held = {*opened.catalog.files, *({*_OWN} - {fmt.holds.config}), *foreign} - {*of_adapter}
    names = dict.fromkeys((*opened.catalog.sidefiles, *of_adapter))
    for tree in (opened.tree, opened.outer):
        if tree is not None and tree.single is None:
            beside = (*sorted(filter(is_sidefile, tree.names())), *module_files(tree), *tokenizer_files(tree))
            names |= dict.fromkeys(beside)
    found = ((path, tree_of(opened, path)) for path in names if path not in held and path not in chosen.stale)
    return tuple((path, tree.size(path)) for path, tree in found if tree is not None and tree.listing()[path] >= 0)


def _adapter_config_of(chosen: Chosen, fmt: Format) -> tuple[str, ...]:
    """The config of an adapter that is written under its own names in a format without a place for it: nothing else
    says its rank and alpha."""
    opened = chosen.sources[0]
    keeps_names = chosen.all_hints.dialect == opened.catalog.hints.dialect
    if not opened.format.holds.adapter or fmt.holds.adapter or not keeps_names:
        return ()
    from ckpt_tool.formats.adapters.lone import CONFIG

    return (CONFIG,) if CONFIG in opened.tree.names() else ()


def refuse_lost_modules(chosen: Chosen, fmt: Format, *, single: bool) -> None:
    """Raise UsageError E1470 where other modules of a sentence-transformers model have weights, and the output is no
    folder in which that library looks for them."""
    trees = (chosen.sources[0].tree, chosen.sources[0].outer)
    weights = [path for tree in trees if tree is not None for path in module_weights(tree)]
    if weights and (single or fmt.holds.dialect != "hf" or fmt.holds.adapter):
        where = "a single file" if single else fmt.name
        raise UsageError(
            f"{', '.join(weights)}: trained weights of the sentence-transformers model for which {where} has no place",
            code="E1470",
            path=chosen.sources[0].path,
            hint="--to safetensors keeps all modules; for the first one alone pass its file (or index) in place of the"
            " folder",
        )


def source_of(chosen: Chosen, path: str) -> Tree:
    """The tree that a side file is copied from."""
    return tree_of(chosen.sources[0], path) or chosen.sources[0].tree


def with_side_files(target: Target, chosen: Chosen, fmt: Format, wanted: Wanted, writing: Writing) -> Target:
    """The target with the config that belongs to it, and what is to be reported of its side files."""
    if target.single is not None:
        for name in _adapter_config_of(chosen, fmt):
            target = target.noted(
                f"{name} is not written next to a single file, and nothing else states the adapter's alpha: "
                "a folder as the output takes it along"
            )
        _refuse_unsaid(chosen, "a single file has no config.json next to it", "name a folder as the output")
        return target
    target = _with_side_files(target, chosen, fmt, wanted, writing)
    target = _with_tokenizer(_with_files_of_config(target, chosen), chosen, fmt)
    hub = fmt.holds.dialect == "hf" and not fmt.holds.adapter
    if hub and not any(file.path == NAME for file in target.files):
        _refuse_unsaid(chosen, f"there is no {NAME}", "--config FILE gives one")
        return target.noted(
            f"no {NAME} is written, and a library does not open the folder without: --config FILE gives one"
        )
    return target


def _refuse_unsaid(chosen: Chosen, why: str, hint: str) -> None:
    """Raise UsageError E2722 where the config of the output has to say how its weights are stored, and there is none:
    no library would take the codes for weights."""
    if chosen.stated:
        raise UsageError(f"nothing would say how the weights are quantised: {why}", code="E2722", hint=hint)


def _with_side_files(target: Target, chosen: Chosen, fmt: Format, wanted: Wanted, writing: Writing) -> Target:
    target = _unnested(target) if fmt.holds.dialect == "hf" else target
    code = [file.path for file in target.files if is_model_code(file.path)]
    if code:
        target = target.noted(f"code is copied as text, and not run: {', '.join(sorted(code))}")
    if fmt.holds.adapter:
        return target
    try:
        before = file_config(chosen.sources[0])
    except UsageError:  # a side file that only its own library reads: copied as it is
        return target
    is_copied = fmt.holds.dialect == "keep" and not chosen.untrue  # the source's own, and not one of --config
    stated = chosen.config if chosen.config is not None and not is_copied else before
    if stated is None or NAME in chosen.stale:
        return target
    from ckpt_tool.conversion.output_config import config_of_output

    config, notes = config_of_output(stated, chosen, fmt, wanted, writing)
    if is_copied and config == stated:
        return target
    if fmt.holds.dialect == "hf" and chosen.config_path is not None and stated != before:
        from ckpt_tool.conversion.config_fit import check_config_fits

        notes += check_config_fits(config, chosen, wanted)
    target = target.noted(*notes)
    copied = next((file for file in target.files if file.path == NAME), None)
    if (copied or _makes_one(chosen, fmt)) and (copied is None or config != before or copied.copy_of is None):
        data = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        files = tuple(file for file in target.files if file is not copied)
        target = target._replace(files=(*files, whole_file(NAME, data)))
        if before is None:
            target = target.noted(f"{NAME} is derived from {chosen.config_from}")
    return target


def _with_files_of_config(target: Target, chosen: Chosen) -> Target:
    """The target, where it has a config, with the tokenizer and the other files of the folder that `--config` names.
    Files of the source itself stay."""
    if chosen.config_path is None or not any(file.path == NAME for file in target.files):
        return target
    have = {file.path for file in target.files}
    files = {name: data for name, data in files_of_config(chosen.config_path).items() if name not in have}
    if not files:
        return target
    target = target._replace(files=(*target.files, *(whole_file(name, data) for name, data in files.items())))
    return target.noted(f"taken from the folder of --config: {', '.join(files)}")


def _with_tokenizer(target: Target, chosen: Chosen, fmt: Format) -> Target:
    """The target with tokenizer files made from the source's header, if the source has no such files next to it."""
    if (
        chosen.sources[0].catalog.hints.get(Stated) is None
        or not _makes_one(chosen, fmt)
        or fmt.holds.adapter
        or any(fnmatchcase(file.path, "tokenizer*") for file in target.files)
    ):
        return target
    for read_tokenizer in offered("tokenizer"):
        files, notes = read_tokenizer(chosen.sources[0])
        whole = tuple(whole_file(name, data) for name, data in files.items())
        target = target._replace(files=(*target.files, *whole)).noted(*notes)
    return target


def _makes_one(chosen: Chosen, fmt: Format) -> bool:
    """Should the output get a config.json if the source has none? Models of Hugging Face and Paddle need one; one in a
    Megatron output that comes from another system allows converting back; Meta has its own file."""
    dialect = chosen.dialect_in(fmt)
    return dialect in ("hf", "paddle") or dialect == "megatron" != chosen.home


def _unnested(target: Target) -> Target:
    """The target with the side files of verl's `huggingface/` and of a job's `tokenizer/` at its top, where a model's
    loader looks."""
    have = {file.path for file in target.files}
    files = []
    for file in target.files:
        folder = next((each for each in (NESTED, TOKENIZER) if file.path.startswith(each)), "")
        top = file.path.removeprefix(folder)
        moves = bool(folder) and file.copy_of is not None and top not in have
        files.append(file._replace(path=top) if moves else file)
        have.add(top)
    return target._replace(files=tuple(files))
