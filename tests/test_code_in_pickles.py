"""Code in every pickle file of every format: refused before anything else is said, and listed by `inspect --security`.

One file of a sound fixture is changed so that an unpickler would run `posix.system`: called at the start, before the
end, as a value in each of its nested dicts (arguments, RNG states, loss scalers, optimizer states are such), as the
state of an object, or the whole file replaced or cut short behind it. Nothing here unpickles: `pickletools` only says
where opcodes begin.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickletools
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_tool.cli import run
from ckpt_tool.formats import registry

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
# of an older save in the same folder, or of no reader's: listed, and no verb reads it
UNREAD = ("twice/0.metadata", "twice/0_0.distcp", "accelerate/random_states_0.pkl")
NESTED = 4  # dicts of a pickle that are tried
VERBS = {
    "verify": lambda src, out: ["verify", src],
    "reshard": lambda src, out: ["reshard", src, out],
    "convert": lambda src, out: ["convert", src, out, "--to", "sharded"],
    "merge": lambda src, out: ["merge", src, out],
}
Change = Callable[[bytes, bytes], bytes]  # (a pickle, the opcodes that call) -> another


def call(canary: Path) -> bytes:
    """Opcodes of any protocol that push the result of `posix.system("touch CANARY")`."""
    return b"cposix\nsystem\n(V" + f"touch {canary}".encode() + b"\ntR"


def started(data: bytes, code: bytes) -> bytes:
    """Called first, its result thrown away: what is left is as before."""
    at = 2 if data[:1] == b"\x80" else 0
    return data[:at] + code + b"0" + data[at:]


def ended(data: bytes, code: bytes) -> bytes:
    return data[:-1] + code + b"0."


def built(data: bytes, code: bytes) -> bytes:
    """As the state that BUILD gives to the value."""
    return data[:-1] + b"}Vx\n" + code + b"sb."


def replaced(data: bytes, code: bytes) -> bytes:
    return b"\x80\x02" + code + b"."


def in_dict(number: int) -> Change:
    """As an item of one of the nested dicts, chosen by hash."""

    def change(data: bytes, code: bytes) -> bytes:
        ops = list(pickletools.genops(data))
        after = [i for i, (op, _, _) in enumerate(ops) if op.name == "EMPTY_DICT"]
        if number >= len(after):
            pytest.skip("fewer dicts")
        after.sort(key=lambda i: hashlib.sha256(str(i).encode()).digest())
        i = after[number] + 1
        while ops[i][0].name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            i += 1
        at = ops[i][2]
        return data[:at] + b"Vx\n" + code + b"s" + data[at:]

    return change


CHANGES: dict[str, Change] = {
    "start": started,
    "end": ended,
    "build": built,
    "replaced": replaced,
    **{f"dict{number}": in_dict(number) for number in range(NESTED)},
}


def end_of(data: bytes) -> int:
    """Bytes of the first pickle in `data`."""
    return next(at for op, _, at in pickletools.genops(data) if op.name == "STOP") + 1


def changed(data: bytes, change: Change, code: bytes) -> bytes:
    """The file with its (main) pickle changed; a zip is packed again, a stream's fourth pickle is the main one."""
    if data[:2] == b"PK" and change is not replaced:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
            for member in old.namelist():
                value = old.read(member)
                new.writestr(zipfile.ZipInfo(member), change(value, code) if member.endswith("/data.pkl") else value)
        return out.getvalue()
    at = 0
    if data.startswith(bytes.fromhex("80028a0a6cfc9c46f9206aa85019")):
        for _ in range(3):
            at += end_of(data[at:])
    end = at + end_of(data[at:]) if data[:1] == b"\x80" else len(data)
    return data[:at] + change(data[at:end], code) + data[end:]


def holds_pickle(path: Path) -> bool:
    data = path.read_bytes()
    safe = int.from_bytes(data[:8], "little") <= len(
        data
    )  # a safetensors header of 640 bytes, ... begins like a pickle
    return data[:2] == b"PK" or (data[:1] == b"\x80" and not safe)


def cases() -> Iterator[object]:
    """For each fixture one file of each kind: names without their numbers."""
    for name in registry.NAMES:
        for fixture in sorted(path for path in (FIXTURES / name).glob("*") if ".truth." not in path.name):
            files = sorted(path for path in fixture.rglob("*") if path.is_file()) if fixture.is_dir() else [fixture]
            kinds = {
                re.sub(r"\d+|[^/]*/fp32|zero/[^/]*/", "#", str(path.relative_to(fixture.parent))): path
                for path in reversed(files)
                if holds_pickle(path)
            }
            for path in kinds.values():
                inside = path.relative_to(fixture.parent)
                for how in (
                    ("start", "replaced", "cut")
                    if path.suffix == ".distcp" and path.read_bytes()[:2] == b"PK"
                    else (*CHANGES, "cut")
                ):
                    yield pytest.param(fixture, inside, how, id=f"{name}-{inside}-{how}")


def test_every_format_with_pickles_is_here() -> None:
    assert len({case.values[0].parent.name for case in CASES}) >= 11


CASES = list(cases())


@pytest.mark.share(24)
@pytest.mark.parametrize(("fixture", "inside", "how"), CASES)
def test_code_is_refused_first_and_listed(fixture: Path, inside: Path, how: str, tmp_path: Path, capfd) -> None:
    source = tmp_path / "source" / fixture.name
    canary = tmp_path / "canary"
    source.parent.mkdir()
    (shutil.copytree if fixture.is_dir() else shutil.copy)(fixture, source)
    poisoned = source.parent / inside
    data = changed(poisoned.read_bytes(), CHANGES.get(how, started), call(canary))
    if how == "cut":
        data = data[: max(len(data) * 2 // 3, data.find(b"posix") + 400)]
    poisoned.write_bytes(data)
    for verb, arguments in VERBS.items() if str(inside) not in UNREAD else ():
        out = tmp_path / verb
        code = run([*map(str, arguments(source, out)), "--json"])
        error = capfd.readouterr().err.strip().splitlines()[-1]
        assert code == 4, (verb, code, error[:600])
        assert "posix.system" in error and not out.exists(), (verb, error[:600])
    assert run(["inspect", str(source), "--security", "--json"]) == 0
    security = json.loads(capfd.readouterr().out)["security"]
    assert any("posix.system" in line and inside.name in line for line in security["unsafe"]), security["unsafe"]
    listed = [file for file in security["files"] if "posix.system" in file["globals"]]
    assert listed and inside.name == listed[0]["file"].rpartition("/")[2]
    assert run(["inspect", str(source), "--security"]) == 0
    assert "UNSAFE global posix.system" in " ".join(capfd.readouterr().out.split())
    assert not canary.exists()
