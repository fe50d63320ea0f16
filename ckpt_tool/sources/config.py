"""Finds the model's config: the file given by `--config`, or the `config.json` next to the checkpoint, as data only.

A config with the hub's keys comes from `--config`, config.json, or Megatron's arguments:

    config.json next to the weights              as it is
    Meta's params.json, nothing next to it       what it says (`systems.meta.source_config`)
    GGUF's metadata, nothing next to it          what it says (`systems.llamacpp.source_config`)
    Megatron's arguments, nothing next to them        what they say (`families.config.translation`)
    both                                         config.json, with what the arguments say otherwise, noted

A Megatron job may have continued training with another context length or rope; then its arguments are right and the
config.json that was copied into its folder is outdated. Side files of a Megatron folder are at its top, next to the
pointer file. Cost: one small file.
What it does not do: run anything, or write (`conversion.side_files`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.errors import CorruptFile, InputError, UsageError, wrap_os_error
from ckpt_tool.formats.entry import offered
from ckpt_tool.formats.hub_folder.model_files import NESTED, is_sidefile
from ckpt_tool.options.reading import Reading
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes.quantised_weights import CONFIG_KEYS, QUANTISER_FILES

if TYPE_CHECKING:
    from ckpt_tool.sources.opening import Opened

NAME = "config.json"
# Degrees of a job that Paddle's trainers note in config.json (PaddleFormers 1.2.0,
# `transformers/configuration_utils.py`).
DEGREES = tuple(
    """
    tensor_model_parallel_size pipeline_model_parallel_size sharding_parallel_size expert_model_parallel_size
    data_parallel_size context_parallel_size sep_parallel_size tensor_parallel_degree pipeline_parallel_degree
    sharding_parallel_degree expert_parallel_degree
    """.split()
)
SIDE_FILE_LIMIT = 128 << 20  # bytes: the largest tokenizers have some 30 MB
_OF_ITS_WEIGHTS = (NAME, "params.json", "README.md", "LICENSE*", *QUANTISER_FILES)  # of that model, not of the output's
LIMIT = 16 << 20  # bytes: real ones have some kilobytes, those with quantisation lists a few megabytes


def read_config(path: str) -> Mapping[str, Any]:
    """The config at `path`, a file or a folder that holds one. Raises UsageError E0239, StorageError."""
    file = Path(path)
    file = file / NAME if file.is_dir() else file
    try:
        if file.stat().st_size > LIMIT:
            raise UsageError(f"--config: a file of more than {LIMIT >> 20} MiB is no config", code="E0239", path=file)
        raw = file.read_bytes()
    except OSError as e:
        raise wrap_os_error(e, file, "reading the config") from e
    return parsed(raw, str(file))


def files_of_config(path: str) -> dict[str, bytes]:
    """What else of a model's folder goes with its config: tokenizer, generation config, chat template, preprocessors,
    and code as text. path: of `--config`; a file alone has no such files. Raises UsageError E0239, StorageError."""
    folder = Path(path)
    if not folder.is_dir():
        return {}
    found: dict[str, bytes] = {}
    for file in sorted(folder.iterdir()):
        if not is_sidefile(file.name) or any(fnmatchcase(file.name, pattern) for pattern in _OF_ITS_WEIGHTS):
            continue
        if not file.is_file():
            continue
        try:
            if file.stat().st_size > SIDE_FILE_LIMIT:
                raise UsageError(
                    f"--config: {file.name} has more than {SIDE_FILE_LIMIT >> 20} MiB, which no tokenizer's file has",
                    code="E0239",
                    path=file,
                    hint="pass config.json alone, and copy the other files yourself",
                )
            found[file.name] = file.read_bytes()
        except OSError as e:
            raise wrap_os_error(e, file, "reading a file next to the config") from e
    return found


def config_in(tree: Tree) -> Mapping[str, Any] | None:
    """The `config.json` of a checkpoint, None where it has none. Raises as `read_config`."""
    if tree.single is not None or not tree.exists(NAME):
        return None
    return parsed(tree.read_whole(NAME, limit=LIMIT), tree.display(NAME))


def quantised_config(opened: Opened) -> Mapping[str, Any] | None:
    """The source's `config.json`, with what a file of a quantiser's own says where it says nothing of quantising:
    GPTQ's, AWQ's and ModelOpt's tools write one next to it, and may write it alone. Raises as `read_config`."""
    config = file_config(opened)
    if config is not None:
        return config
    stated = (_with_quantisation(None, tree) for tree in opened.trees)
    return next((config for config in stated if config is not None), None)


def _with_quantisation(config: Mapping[str, Any] | None, tree: Tree) -> Mapping[str, Any] | None:
    files = [name for name in QUANTISER_FILES if tree.exists(name)] if tree.single is None else []
    if not files:
        return config

    from ckpt_tool.weight_schemes.declared_scheme import of_quantiser, section

    if config is not None and section(config) is not None:
        return config
    for name in files:
        stated = of_quantiser(name, parsed(tree.read_whole(name, limit=LIMIT), tree.display(name)))
        if stated is not None:
            return {**(config or {}), CONFIG_KEYS[0]: stated}
    return config


def without_degrees(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """(the config with the degrees of the job that saved it set to one rank, their names): a whole model has none, and
    PaddleFormers looks for its tensor ranks when a config names them."""
    names = [name for name in DEGREES if type(config.get(name)) is int and config[name] > 1]
    return {**config, **dict.fromkeys(names, 1)}, names


def parsed(raw: bytes, shown: str) -> Mapping[str, Any]:
    """The config that `raw` holds. shown: the file in messages. Raises UsageError E0239.

    Python's words for floats that JSON has not, which Mamba's published configs hold (`"time_step_limit": [0.0,
    Infinity]`), are read as what transformers 5 writes for them.

    >>> parsed(b'{"time_step_limit": [0.0, Infinity]}', "config.json")
    {'time_step_limit': [0.0, {'__float__': 'Infinity'}]}
    """
    if _NO_NUMBER.search(raw):
        raw = _spell_floats(raw)

    from ckpt_tool.storage.texts.strict_json import parse

    try:
        value = parse(raw, path=shown)
    except CorruptFile as e:
        raise UsageError(
            f"the config is not read: {e.message}",
            code="E0239",
            path=shown,
            offset=e.offset,
            hint="pass a valid one with --config FILE",
        ) from e
    if not isinstance(value, dict):
        raise UsageError("the config is no JSON object", code="E0239", path=shown)
    return value


_NO_NUMBER = re.compile(rb"\b(?:Infinity|NaN)\b")
_MARK = re.compile(rb'"|\\.|(-?Infinity|NaN)', re.DOTALL)


def _spell_floats(raw: bytes) -> bytes:
    """The JSON text with Python's Infinity and NaN, outside strings, as transformers 5 writes them."""
    in_string = False

    def spell(mark: re.Match[bytes]) -> bytes:
        nonlocal in_string
        if mark[0] == b'"':
            in_string = not in_string

        if mark[1] is None or in_string:
            return mark[0]
        return b'{"__float__": "%s"}' % mark[1]

    return _MARK.sub(spell, raw)


# -- in the hub's words, whatever states it ----------------------------------------------------------------------------


class ModelConfig(NamedTuple):
    """The model's config, and where it comes from."""

    config: Mapping[str, Any] | None  # in the hub's words, None where nothing states it
    notes: tuple[str, ...] = ()  # for the report
    file: bool = False  # is config.json there?
    asked: bool = False  # is it what --config names?
    origin: str = NAME  # what it comes from, in words
    derived: bool = False  # made of what a job says that it computes, which a larger model may have as a part
    # why the family must not be concluded from names alone: the files state a model that no family covers
    foreign: InputError | None = None


def config_of(opened: Opened, reading: Reading | None = None, family: str | None = None) -> ModelConfig:
    """Where the model's config comes from, and what it is. family: whose arguments they are, where that is known.

    Raises UsageError E0239 for a config that can't be read, StorageError."""
    if reading is not None and reading.config:
        return ModelConfig(read_config(reading.config), asked=True, origin="--config")
    config = file_config(opened)
    if family is None and reading is not None and reading.family:
        family = reading.family.partition(":")[0]
    for read_job in offered("job_config"):
        model: ModelConfig | None = read_job(opened, config, family)
        if model is not None:
            return model
    if config is not None:
        return ModelConfig(config, file=True)
    return stated_config(opened) or ModelConfig(None)


def file_config(opened: Opened) -> Mapping[str, Any] | None:
    """The source's config.json, None where it has none. Raises UsageError E0239."""
    for tree in (opened.tree, opened.outer):
        for name in (NAME, NESTED + NAME) if tree is not None and tree.single is None else ():
            if tree is not None and tree.exists(name):
                config = parsed(tree.read_whole(name, limit=LIMIT), tree.display(name))
                return _with_quantisation(config, tree)
    return None


def stated_config(opened: Opened) -> ModelConfig | None:
    """What the files of the source's system state of the model in words of their own, None where they state nothing.

    Each system with such files has a reader of them (`formats.entry.System.config_reader`)."""
    for read_config_of in offered("config_reader"):
        model: ModelConfig | None = read_config_of(opened)
        if model is not None:
            return model
    return None


def change_config(config: Mapping[str, Any], path: Sequence[str], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other values, in the part that the keys of `path` lead to."""
    if not path:
        return _with(config, changed)
    return {**config, path[0]: change_config(config[path[0]], path[1:], changed)}


def _with(config: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other values; rope in one spelling alone."""
    out = {**config, **changed}
    if changed.keys() & {"rope_theta", "rope_scaling", "partial_rotary_factor"}:
        out.pop("rope_parameters", None)
    return {key: value for key, value in out.items() if value is not None or key in config}


def check_config(model: ModelConfig, path: str) -> None:
    """Raise for a config that contradicts itself, all faults at once: UsageError E1240 where --config says it, else
    InputError E1378. path: of the checkpoint, or of what --config names."""
    from ckpt_tool.families.config.translation import contradictions

    faults = list(contradictions(model.config or {}))
    if not faults:
        return
    message = f"the config contradicts itself: {faults[0]}"
    if model.asked:
        raise UsageError(
            message, code="E1240", path=path, faults=faults[1:], hint="pass the config of this very model with --config"
        )
    raise InputError(
        message,
        code="E1378",
        path=path,
        place=model.origin,
        faults=faults[1:],
        hint="pass a valid config with --config FILE",
    )


def tree_of(opened: Opened, path: str) -> Tree | None:
    """The tree that holds a side file: the checkpoint's folder, or that whose pointer file named it."""
    return next((tree for tree in (opened.tree, opened.outer) if tree is not None and tree.exists(path)), None)
