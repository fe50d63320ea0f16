"""Plain lines of reshard and convert give the very job that typer's road gives, and leave it everything else."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tool import cli_options
from ckpt_tool.cli_job import Job, plain_job
from ckpt_tool.cli_parser import parse
from ckpt_tool.cli_plain import FLAGS, REPEATED, VALUED
from ckpt_tool.commands import convert
from ckpt_tool.core.progress import SILENT

TAKES = (
    cli_options.TO,
    cli_options.LAYOUT,
    cli_options.TRAVEL,
    cli_options.KEYS,
    cli_options.READING,
    cli_options.RUN,
    cli_options.PLAN,
    cli_options.REPORTING,
)

PLAIN = [
    "reshard in out",
    "reshard in out --tp 2 -q --no-fsync",
    "reshard --dp=3 in --zero 3 out --json --no-resume",
    "reshard in out --tp 2 --tp 4 --pp-split 3,5 --pp 2 --strict-shard --progress none",
    "convert in out --to dcp --dtype bf16 --dtype optimizer=fp32 --state model,ema --drop ema",
    "convert in=1 out.pt --to torch --remove-keys a* --remove-keys re:^b --keep-keys c --model-only --force",
    "convert in out --to safetensors --max-shard-size 500MB --memory 64MiB --threads 3 --verify off --dry-run",
    "convert in out --from dcp --to sharded --lenient --follow-symlinks --replica-policy first --prefer dcp --fsync",
]
NOT_PLAIN = [
    "reshard",
    "reshard in",
    "reshard in out more",
    "reshard in out --help",
    "reshard in out --to dcp",
    "convert in out",
    "reshard in out --tp",
    "reshard in out --tp two",
    "reshard in out --tp -1",
    "reshard in out --tq 2",
    "reshard in out -v",
    "reshard in out -qv",
    "reshard in out --force=1",
    "convert in out --to nothing",
    "reshard -- in out",
    "reshard in out --verify often",
    "reshard in out --on-indivisible pad",
    "merge in out",
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reached the commands."""
    found: list[Any] = []
    for verb in ("reshard", "convert"):
        monkeypatch.setattr(convert, verb, lambda *given, verb=verb: found.append((verb, *given)) or {})
    return found


@pytest.mark.parametrize("line", PLAIN)
def test_a_plain_line_is_the_same_job(line: str, calls: list[Any]) -> None:
    plain, parsed = plain_job(line.split()), parse(line.split())
    assert isinstance(plain, Job) and isinstance(parsed, Job)
    for job in (plain, parsed):
        job.run(SILENT)
    assert calls[0] == calls[1] and calls[0][0] == line.split()[0]
    assert [getattr(plain, name) for name in ("verb", "show", "writes", "plans", "sources", "page")] == [
        getattr(parsed, name) for name in ("verb", "show", "writes", "plans", "sources", "page")
    ]


@pytest.mark.parametrize("line", NOT_PLAIN)
def test_all_other_lines_are_left_to_the_parser(line: str) -> None:
    assert plain_job(line.split()) is None


def test_a_line_being_completed_is_left_to_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_CKPT_COMPLETE", "complete_bash")
    assert plain_job(["reshard", "in", "out"]) is None


def test_every_plain_option_is_an_option_of_the_parser() -> None:
    known: dict[str, tuple[str, Any]] = {}
    for option in (option for group in TAKES for option in group):
        kind, about = option.annotation.__origin__, option.annotation.__metadata__[0]
        for name in (part for spelled in (about.default, *about.param_decls) for part in spelled.split("/")):
            known[name] = (option.name, kind)
    for table, kind in ((VALUED, str | None), (REPEATED, list[str] | None)):
        assert {name: (keyword, kind) for name, keyword in table.items()} == {name: known[name] for name in table}
    assert {name: (keyword, bool) for name, (keyword, _) in FLAGS.items()} == {name: known[name] for name in FLAGS}
