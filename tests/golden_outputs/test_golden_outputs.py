"""The bytes that commands write and the JSON documents that they print are those of the version that golden.json
names."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ckpt_tool.formats import registry

sys.path.insert(0, str(Path(__file__).resolve().parent))

import record

CASES = record.cases()


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> record.Room:
    return record.Room(tmp_path_factory.mktemp("golden") / "room", CASES)


@pytest.mark.parametrize("name", CASES)
def test_output_and_report_are_as_recorded(name: str, room: record.Room) -> None:
    if ".yaml" in CASES[name]["command"] and importlib.util.find_spec("yaml") is None:
        pytest.skip("needs the extra `merge`")
    changed = record.differences(CASES[name], room.run(name))
    assert not changed, (
        f"{CASES[name]['command']}\nchanged: {'; '.join(changed)}\n"
        "if it is meant, python tests/golden_outputs/record.py records it"
    )


def test_every_format_is_read_and_written() -> None:
    commands = [row["command"] for row in CASES.values() if "{out}" in row["command"]]
    assert len(commands) >= 200
    written = {found[1] for command in commands if (found := re.search(r" --to (\S+)", command))}
    read = {found[1] for command in commands for found in re.finditer(r"\{fixtures\}/([\w-]+)/", command)}
    assert len(written & read & {*registry.NAMES}) >= 13


def test_the_digest_sees_names_permissions_and_bytes(tmp_path: Path) -> None:
    def digest() -> str:
        return record.tree_digest(tmp_path / "out")

    (tmp_path / "out" / "a").mkdir(parents=True)
    file = tmp_path / "out" / "a" / "x"
    file.write_bytes(b"01")
    seen = [digest(), digest()]
    assert seen.pop() == seen[0]
    file.write_bytes(b"11")
    seen.append(digest())
    file.chmod(0o600)
    seen.append(digest())
    file.rename(file.with_name("y"))
    seen.append(digest())
    (tmp_path / "out" / "empty").mkdir()
    seen.append(digest())
    assert len(set(seen)) == 5
    (tmp_path / "out").rename(tmp_path / "another")
    assert record.tree_digest(tmp_path / "another") == seen[-1]


def test_bytes_and_report_are_told_apart() -> None:
    report = record.report_digest({"plan": {"bytes": 1}, "notes": [], "elapsed_s": 1.0})
    before = {"command": "", "exit": 0, "report": report, "tree": "aa"}
    assert (
        record.differences(before, {**before, "report": record.report_digest({"notes": [], "plan": {"bytes": 1}})})
        == []
    )
    assert record.differences(before, {**before, "tree": "bb"}) == ["bytes, paths or permissions of the output"]
    other = record.report_digest({"plan": {"bytes": 2}, "notes": [], "more": 1})
    assert record.differences(before, {**before, "report": other}) == ["the report's more, plan"]
    failed = {"exit": 2, "error": "E0200: no"}
    assert record.differences(before, failed)[:2] == ["exit code 2, was 0", "E0200: no"]
    assert record.differences({"command": ""}, before) == ["new"]
