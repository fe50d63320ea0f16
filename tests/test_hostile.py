"""Tables A to F of the threat list, row by row, through every verb that reads: exit code, message, nothing left.

The generators in `tests/hostile/` make the files; each row says which exit code the readers owe and words the message
must hold. `inspect` may show what the others refuse (a pickle that asks for code is shown, never run).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from ckpt_tool.cli import run
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.judging import Judge
from ckpt_tool.sources.steps import run_at

HERE = Path(__file__).parent


def _load(path):
    spec = importlib.util.spec_from_file_location(f"hostile_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


GENERATORS = [_load(path) for path in sorted((HERE / "hostile").glob("*_cases.py"))]
ROWS = [pytest.param(case, id=f"{case[0]}") for module in GENERATORS for case in module.CASES]
VERBS = ("inspect", "verify", "reshard", "convert", "merge")


def call(verb, source, out, options):
    """options: of `convert`, where a row is about them; a dict gives them by verb."""
    more = options if isinstance(options, dict) else {"convert": options}
    arguments = {
        "inspect": ["inspect", source],
        "verify": ["verify", source],
        "reshard": ["reshard", source, out, *more.get("reshard", ())],
        "convert": ["convert", source, out, *(more.get("convert") or ("--to", "sharded"))],
        "merge": ["merge", source, out, *more.get("merge", ())],
        "audit": ["audit", source],
    }[verb]
    return run([*map(str, arguments), "--json"])


def snapshot(path):
    """Everything about the source that may not change."""
    found = {}
    for at, folders, names in os.walk(path):
        for name in (*folders, *names):
            info = os.lstat(os.path.join(at, name))
            found[os.path.join(at, name)] = (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ino)
    return found


@pytest.mark.share(16)
@pytest.mark.parametrize("case", ROWS)
def test_bad_input_is_told_and_leaves_nothing(case, tmp_path, capfd):
    row, make, want, words = case[:4]
    folder = tmp_path / "source"
    outputs = tmp_path / "outputs"
    folder.mkdir()
    outputs.mkdir()
    source = make(folder)
    before = snapshot(folder)
    for verb in (*VERBS, *(["audit"] if isinstance(want, dict) and "audit" in want else ())):
        code = call(verb, source, outputs / verb, case[4] if len(case) > 4 else ())
        streams = capfd.readouterr()
        expected = want.get(verb, want["*"]) if isinstance(want, dict) else want
        assert code == expected, (row, verb, code, streams.err[-600:])
        assert "Traceback" not in streams.err
        if code > 1:
            error = json.loads(streams.err.strip().splitlines()[-1])["error"]
            assert error["code"].startswith("E") and error["hint"], (row, verb, error)
            text = json.dumps(error, ensure_ascii=False).lower()
            for word in (words,) if isinstance(words, str) else words:
                assert word.lower() in text, (row, verb, word, text[:600])
            assert not list(outputs.iterdir()), (row, verb, "something was left")
        elif code == 1 and verb == "verify":
            findings = json.dumps(json.loads(streams.out)["findings"], ensure_ascii=False).lower()
            assert all(word.lower() in findings for word in ((words,) if isinstance(words, str) else words)), findings
        elif code == 0 and verb in ("reshard", "convert", "merge"):
            assert [path.name for path in outputs.iterdir()] == [verb]
        for path in outputs.iterdir():
            _remove(path)
    assert snapshot(folder) == before, "the source was touched"


CASES = [case for module in GENERATORS for case in module.CASES]
LOST = [case for case in CASES if "no file holds it" in case[3] or "in no file" in case[3]]


@pytest.mark.parametrize("case", [pytest.param(case, id=case[0]) for case in LOST])
def test_a_step_that_lists_what_no_file_holds_is_not_complete(case, tmp_path):
    """`latest` passes over such a step, and `prune` does not keep it as one that can't be judged."""
    folder = tmp_path / "run" / "step_10"
    folder.mkdir(parents=True)
    case[1](folder)
    run_of_one = run_at(str(tmp_path / "run"))
    assert Judge(run_of_one, Reading()).of(run_of_one.steps[0]).sound is False


def _remove(path):
    import shutil

    shutil.rmtree(path) if path.is_dir() else path.unlink()


POISONED = [
    case for module in GENERATORS if hasattr(module, "KINDS") for case in module.CASES if case[0].startswith("D3-")
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case[0]) for case in POISONED])
def test_security_names_what_a_file_asks_for(case, tmp_path, capfd):
    """`inspect --security`: the name, its file and place, and the harmless names of the other files."""
    _, make, _, (wanted, filename) = case
    source = make(tmp_path)
    assert run(["inspect", str(source), "--security"]) == 0
    shown = capfd.readouterr().out
    assert shown.count("UNSAFE") == 1
    told = "".join(shown[shown.index("UNSAFE") :].split())  # a long path is wrapped where the terminal ends
    assert wanted in told and filename in told and "opcode" in told
    assert run(["inspect", str(source), "--security", "--json"]) == 0
    security = json.loads(capfd.readouterr().out)["security"]
    assert len(security["unsafe"]) == 1 and any(name.startswith("torch._utils") for name in security["globals"])
    assert not (tmp_path / "canary").exists()
