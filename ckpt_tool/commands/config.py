"""The model's config: what `--config` names, or the `config.json` that lies with the checkpoint. Data, never code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_tool.errors import CorruptFile, UsageError, wrap_os_error
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.strict_json import parse

NAME = "config.json"
# Degrees of a job that Paddle's trainers note in config.json (PaddleFormers 1.2.0, `transformers/configuration_utils.py`).
DEGREES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "sharding_parallel_size", "expert_model_parallel_size",
    "data_parallel_size", "context_parallel_size", "sep_parallel_size", "tensor_parallel_degree",
    "pipeline_parallel_degree", "sharding_parallel_degree", "expert_parallel_degree",
)  # fmt: skip
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


def config_in(tree: Tree) -> Mapping[str, Any] | None:
    """The `config.json` of a checkpoint, None where it has none. Raises as `read_config`."""
    if tree.single is not None or not tree.exists(NAME):
        return None
    return parsed(tree.read_whole(NAME, limit=LIMIT), tree.display(NAME))


def without_degrees(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """(the config with the degrees of the job that saved it set to one rank, their names): a whole model has none, and
    PaddleFormers looks for its tensor ranks when a config names them."""
    names = [name for name in DEGREES if type(config.get(name)) is int and config[name] > 1]
    return {**config, **dict.fromkeys(names, 1)}, names


def parsed(raw: bytes, shown: str) -> Mapping[str, Any]:
    """The config that `raw` holds. shown: the file in messages. Raises UsageError E0239."""
    try:
        value = parse(raw, path=shown)
    except CorruptFile as e:
        raise UsageError(
            f"the config is not read: {e.message}", code="E0239", path=shown, offset=e.offset,
            hint="pass a sound one with --config FILE",
        ) from e  # fmt: skip
    if not isinstance(value, dict):
        raise UsageError("the config is no JSON object", code="E0239", path=shown)
    return value
