"""Plain lines of reshard and convert give the very job that typer's road gives, and leave it everything else."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tool.cli.parser import parse
from ckpt_tool.cli.plain import plain_job
from ckpt_tool.cli.verbs import VerbJob
from ckpt_tool.commands import convert, inspect
from ckpt_tool.core.progress import SILENT

PLAIN = [
    "reshard in out",
    "reshard in out --tp 2 -q --no-fsync",
    "reshard --dp=3 in --zero 3 out --json --no-resume",
    "reshard in out --tp 2 --tp 4 --pp-split 3,5 --pp 2 --strict-shard --progress none",
    "convert in out --to dcp --dtype bf16 --dtype optimizer=fp32 --state model,ema --drop ema",
    "convert in=1 out.pt --to torch --remove-keys a* --remove-keys re:^b --keep-keys c --model-only --force",
    "convert in out --to safetensors --max-shard-size 500MB --memory 64MiB --threads 3 --verify off --dry-run",
    "convert in out --from dcp --to sharded --lenient --follow-symlinks --replica-policy first --prefer dcp --fsync",
    "convert in out --to megatron --spec te --on-indivisible pad --vocab-size 9 --family llama --config c -v",
    "inspect in --match a* --match re:b --depth 2 --stats --json --verbose -v",
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
    "reshard in out -qv",
    "reshard in out --force=1",
    "convert in out --to nothing",
    "reshard -- in out",
    "reshard in out --verify often",
    "merge in out",
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reached the commands."""
    found: list[Any] = []
    for verb, module in (("reshard", convert), ("convert", convert), ("inspect", inspect)):
        monkeypatch.setattr(module, verb, lambda *given, verb=verb, **more: found.append((verb, *given, more)) or {})
    return found


@pytest.mark.parametrize("line", PLAIN)
def test_a_plain_line_is_the_same_job(line: str, calls: list[Any]) -> None:
    plain = plain_job(line.split())
    parsed = parse(line.split())
    assert isinstance(plain, VerbJob) and isinstance(parsed, VerbJob)
    for job in (plain, parsed):
        job.run(SILENT)
    assert calls[0] == calls[1] and calls[0][0] == line.split()[0]
    same = ("verb", "show", "writes", "plans", "sources", "outputs")
    assert [getattr(plain, name) for name in same] == [getattr(parsed, name) for name in same]


@pytest.mark.parametrize("line", NOT_PLAIN)
def test_all_other_lines_are_left_to_the_parser(line: str) -> None:
    assert plain_job(line.split()) is None


def test_a_line_being_completed_is_left_to_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_CKPT_COMPLETE", "complete_bash")
    assert plain_job(["reshard", "in", "out"]) is None
