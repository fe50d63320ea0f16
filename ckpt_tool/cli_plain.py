"""Plain lines of `reshard` and `convert`, read without typer.

A line is plain when it holds the source, the output and options of the two tables below, spelled in full. Whatever else
it holds (help, a short or unknown option, a value that is missing, bad or begins with a dash), the answer is None and
typer reads it: faults and help have one voice. The options mean what `cli_options` says; a test holds the two together.

    ckpt reshard runs/7 out --tp 2 -q --no-fsync          plain
    ckpt reshard runs/7 out --tp two                      not: typer's road tells what is wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tool.cli_job import Job

# option -> (keyword, value)
FLAGS = {
    "--force": ("force", True),
    "--resume": ("resume", True),
    "--no-resume": ("resume", False),
    "--fsync": ("fsync", True),
    "--no-fsync": ("fsync", False),
    "--dry-run": ("dry_run", True),
    "--strict-shard": ("strict_shard", True),
    "--allow-lossy": ("allow_lossy", True),
    "--model-only": ("model_only", True),
    "--lenient": ("lenient", True),
    "--follow-symlinks": ("follow_symlinks", True),
    "--allow-compressed": ("allow_compressed", True),
    "--require-checksums": ("require_checksums", True),
    "--json": ("json", True),
    "--quiet": ("quiet", True),
    "-q": ("quiet", True),
}
# option -> keyword; those that may be repeated give a list
VALUED = {
    "--to": "to",
    "--from": "from_format",
    "--tp": "tp",
    "--pp": "pp",
    "--ep": "ep",
    "--etp": "etp",
    "--dp": "dp",
    "--cp": "cp",
    "--vpp": "vpp",
    "--zero": "zero",
    "--pp-split": "pp_split",
    "--layout": "layout",
    "--max-shard-size": "max_shard_size",
    "--memory": "memory",
    "--threads": "threads",
    "--verify": "verify",
    "--plan": "plan",
    "--prefer": "prefer",
    "--replica-policy": "replica_policy",
    "--progress": "progress",
    "--device": "device",
    "--pinned": "pinned",
}
REPEATED = {
    "--state": "state",
    "--drop": "drop",
    "--dtype": "dtype",
    "--remove-keys": "remove_keys",
    "--keep-keys": "keep_keys",
}


def plain_write(verb: str, words: Sequence[str]) -> Job | None:
    """The job of a plain line (`words`: what follows the verb), None for all others."""
    paths: list[str] = []
    given: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            paths.append(word)
            continue
        name, joined, value = word.partition("=")
        if not joined and name in FLAGS:
            keyword, is_on = FLAGS[name]
            given[keyword] = is_on
            continue
        if not joined:
            value = next(rest, "")
        if not value or value.startswith("-"):
            return None
        if name in VALUED:
            given[VALUED[name]] = value
        elif name in REPEATED:
            given.setdefault(REPEATED[name], []).append(value)
        else:
            return None
    if len(paths) != 2 or not all(paths) or ("to" in given) != (verb == "convert"):
        return None
    return _job(verb, paths[0], paths[1], given)


def _job(verb: str, src: str, dst: str, given: dict[str, Any]) -> Job | None:
    from ckpt_tool.cli_job import show_from, write_job
    from ckpt_tool.commands.options import CallOptions, both_from

    try:
        known = {name: value for name, value in given.items() if name in CallOptions.__annotations__}
        return write_job(verb, src, dst, show_from(given), *both_from(known))
    except UsageError:
        return None
