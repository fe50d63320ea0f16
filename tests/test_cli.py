"""The rim: what is typed reaches the command, what comes back reaches the screen, and every end has its exit code.

The commands are stood in for here (their own tests run them); a few tests at the end start the real process, because
imports, signals, pipes and closed streams only exist there.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tool
from ckpt_tool import api, cli
from ckpt_tool.cli import parser
from ckpt_tool.cli.plain import plain_job
from ckpt_tool.cli.verbs import VERBS, VerbJob
from ckpt_tool.commands import apply, clean, convert, diff, doctor, inspect, kernels, merge, verify
from ckpt_tool.errors import (
    CorruptFile,
    OutputExists,
    SourceChanged,
    StorageError,
    UnsafeInput,
    UsageError,
    catalogue,
)
from ckpt_tool.merging.options import MergeOptions
from ckpt_tool.option_kinds.statement import LAYOUT, options_of
from ckpt_tool.options.python_docs import python_help
from ckpt_tool.options.reading import Inspection, Reading, Show
from ckpt_tool.options.verbs import Comparison, Share, Verification
from ckpt_tool.options.writing import Writing

CATALOG: dict[str, Any] = {
    "schema_version": 1,
    "format": "dcp",
    "path": "x",
    "resolved": "",
    "mesh": {},
    "extras": {},
    "notes": [],
    "total": {"tensors": 1, "bytes": 4, "parameters": 1},
    "states": {"model": {"tensors": 1, "bytes": 4}},
    "tensors": [{"name": "w", "state": "model", "dtype": "F32", "shape": [1], "bytes": 4}],
}
PLAN = {"plan": {"bytes_read": 4, "bytes_written": 4, "peak_memory": 4, "files": 1, "copies": 1}}
WRITTEN = {
    "schema_version": 1,
    **PLAN,
    "fallbacks": [],
    "removed": [],
    "removed_bytes": 0,
    "dropped": [],
    "elapsed_s": 0.1,
    "digest_checked": True,
}
DRY = {key: value for key, value in WRITTEN.items() if key not in ("elapsed_s", "digest_checked")}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


class Stub:
    """Stands in for a command and keeps what it was given."""

    def __init__(self, document: dict[str, Any] | BaseException) -> None:
        self.document = document
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.args = args
        self.kwargs = kwargs
        if isinstance(self.document, BaseException):
            raise self.document
        return self.document


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stub]:
    """Every command stood in for."""
    homes = {
        "inspect": (inspect, CATALOG),
        "reshard": (convert, WRITTEN),
        "convert": (convert, WRITTEN),
        "merge": (merge, WRITTEN),
        "diff": (diff, {"equal": True, "compared": 1, "differences": []}),
        "verify": (verify, {"ok": True, "findings": [], "digests": {}}),
        "apply": (apply, WRITTEN),
        "doctor": (doctor, {"self_test": "ok"}),
        "clean": (clean, {"folder": ".", "leavings": []}),
    }
    stubs = {"kernels": Stub({"ok": True})}
    monkeypatch.setattr(kernels, "check", stubs["kernels"])
    for name, (module, document) in homes.items():
        stubs[name] = Stub(document)
        monkeypatch.setattr(module, name, stubs[name])
    return stubs


def run(*arguments: str) -> int:
    return cli.run(arguments)


# -- what is typed arrives ---------------------------------------------------------------------------------------------


def test_inspect_arrives(stub: dict[str, Stub]) -> None:
    assert (
        run("inspect", "x", "--from", "dcp", "--match", "a*", "--match", "re:b", "--state", "model,ema", "--stats") == 0
    )
    wanted = Inspection(match=("a*", "re:b"), states=("model", "ema"), stats=True)
    assert stub["inspect"].args == ("x", Reading(from_format="dcp"), wanted)
    assert stub["inspect"].kwargs == {"columns": True, "incomplete": True}


def test_a_bare_inspect_is_the_same_job_without_the_parser(stub: dict[str, Stub]) -> None:
    calls = []
    for line in (["inspect", "x"], ["inspect", "x", "--progress", "auto"]):
        assert run(*line) == 0
        calls.append((stub["inspect"].args, stub["inspect"].kwargs))
    assert calls[0] == calls[1]
    assert all(plain_job(line) is None for line in (["inspect"], ["inspect", "--help"], ["inspect", ""], ["diff", "x"]))


@pytest.mark.parametrize("verb", ["reshard", "convert"])
def test_writers_arrive(verb: str, stub: dict[str, Stub]) -> None:
    options = "--tp 8 --pp 2 --pp-split 3,5 --zero 1 --strict-shard --state model --drop ema --dtype bf16 --no-resume"
    options += " --remove-keys a --remove-keys b --memory 64MiB --max-shard-size 2GB --threads 3 --verify full --force"
    to = ["--to", "dcp"] if verb == "convert" else []
    assert run(verb, "in", "out", *options.split(), *to, "--follow-symlinks") == 0
    src, dst, reading, writing, progress = stub[verb].args
    assert (src, dst, reading) == ("in", "out", Reading(follow_symlinks=True)) and hasattr(progress, "advance")
    assert writing == Writing(
        to="dcp" if to else None,
        degrees={"tp": 8, "pp": 2},
        pp_split=(3, 5),
        zero=1,
        on_indivisible="error",
        states=("model",),
        drop=("ema",),
        dtypes={"": "BF16"},
        resume=False,
        remove_keys=("a", "b"),
        memory=64 << 20,
        max_shard_size=2 * 10**9,
        threads=3,
        verify="full",
        force=True,
    )


def test_merge_arrives(stub: dict[str, Stub]) -> None:
    assert (
        run(
            "merge",
            "a",
            "b",
            "out",
            "--method",
            "dare_ties",
            "--weight",
            "0.3",
            "--weight",
            "0.7",
            "--base",
            "c",
            "--density",
            "0.5",
            "--seed",
            "7",
            "--on-conflict",
            "last",
            "--to",
            "safetensors",
        )
        == 0
    )
    assert stub["merge"].args[:3] == (["a", "b"], "out", Reading())
    assert stub["merge"].args[3].to == "safetensors"
    assert stub["merge"].args[4] == MergeOptions(
        "dare-ties", weights=(0.3, 0.7), base="c", density=(0.5,), seed=7, on_conflict="last"
    )
    assert (
        run(
            "merge",
            "a",
            "out",
            "--method",
            "ema",
            "--lambda",
            "2",
            "--no-normalize",
            "--last",
            "3",
            "--decay",
            "0.9",
            "--epsilon",
            "0.1",
            "--gamma",
            "0.2",
            "--tokenizer",
            "base",
            "--density",
            "1",
            "--density",
            "0.5",
        )
        == 0
    )
    assert stub["merge"].args[4] == MergeOptions(
        "ema",
        factor=2.0,
        normalize=False,
        last=3,
        decay=0.9,
        epsilon=0.1,
        gamma=0.2,
        tokenizer="base",
        density=(1.0, 0.5),
    )


def test_merge_config_is_not_the_model_config(stub: dict[str, Stub]) -> None:
    assert run("merge", "out", "--config", "m.yaml") == 0
    assert stub["merge"].args[0] == [] and stub["merge"].args[2].config is None
    assert stub["merge"].args[4].config == "m.yaml"


def test_the_other_verbs_arrive(stub: dict[str, Stub]) -> None:
    assert run("diff", "a", "b", "--rtol", "1e-5", "--map", "m", "--state", "ema") == 0
    assert stub["diff"].args == ("a", "b", Reading(), Comparison(rtol=1e-5, map_file="m", states=("ema",)))
    assert run("verify", "a") == 0 and stub["verify"].args == ("a", Reading(), Verification("full"))
    assert run("verify", "a", "--verify", "quick") == 0 and stub["verify"].args[2].mode == "quick"
    assert run("apply", "p.json", "--part", "3/8", "--threads", "2") == 0
    assert stub["apply"].args[:3] == ("p.json", Share((3, 8)), Writing(threads=2))
    assert run("apply", "p.json", "--part", "auto") == 0 and stub["apply"].args[1] == Share("auto")
    assert run("clean", "d") == 0 and stub["clean"].kwargs == {"remove": False}
    assert run("clean", "d", "--remove") == 0 and stub["clean"].kwargs == {"remove": True}
    assert run("doctor") == 0
    assert run("kernels", "check", "--cases", "7", "--kernel", "box_copy") == 0
    assert stub["kernels"].kwargs == {"cases": 7, "seed": 0, "only": ("box_copy",)}


def test_values_may_look_like_options_after_two_dashes(stub: dict[str, Stub]) -> None:
    assert run("inspect", "--", "--odd-name") == 0
    assert stub["inspect"].args[0] == "--odd-name"


def test_reporting_options_may_come_before_the_verb(stub: dict[str, Stub], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--color=never", "--progress", "none", "-v", "inspect", "x") == 0
    assert json.loads(capsys.readouterr().out) == CATALOG


# -- an option is one statement ---------------------------------------------------------------------------------------


def test_a_field_is_all_that_an_option_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One field more in a group: typer's road, plain lines, help, completion, faults and Python have it."""

    @dataclass(frozen=True)
    class More(Writing):
        """Writing with an option that nobody has heard of."""

        colour_depth: int | None = LAYOUT.choice("Bits of a colour.", ("8", "16"), "BITS")

    got: list[Any] = []
    monkeypatch.setitem(VERBS, "reshard", VERBS["reshard"]._replace(takes=lambda: (Reading, More)))
    monkeypatch.setattr(convert, "reshard", lambda *given: got.append(given[3]) or WRITTEN)
    for line in (["--colour-depth", "8"], ["--colour-depth=8", "-vv"]):  # plain, and by typer
        assert run("reshard", "a", "b", *line) == 0
    api.reshard("a", "b", colour_depth="8")
    assert got == [More(colour_depth="8")] * 3  # type: ignore[arg-type]
    capsys.readouterr()
    assert run("reshard", "--help") == 0 and "--colour-depth BITS" in capsys.readouterr().out
    assert run("reshard", "a", "b", "--colour-depth", "9") == 2
    assert "--colour-depth: found '9', want one of 8, 16" in capsys.readouterr().err
    assert run("inspect", "a", "--colour-depth", "8") == 2
    assert "--colour-depth belongs to ckpt reshard" in capsys.readouterr().err

    def reshard(src: str, dst: str, **options: Any) -> dict[str, Any]:
        return {}

    assert signature(api._with_options("reshard")(reshard)).parameters["colour_depth"].annotation == "str | None"


@pytest.mark.parametrize("name", ["reshard", "convert", "merge", "diff", "verify"])
def test_python_shows_its_options(name: str) -> None:
    function = getattr(ckpt_tool, name)
    options = VERBS[name].options()
    keywords = set(signature(function).parameters)
    assert {one for one in options if one not in options_of(Show)} <= keywords
    text = " ".join(function.__doc__.split())
    for keyword in keywords & set(options) - {"progress"}:
        assert f" {keyword}: {python_help(options[keyword].help, options)}" in text


CONTRACT = {
    "inspect": "--match --state --depth --placement --security --stats --from --follow-symlinks --lenient",
    "reshard": "--tp --pp --ep --etp --dp --cp --vpp --layout --pp-split --zero --on-indivisible "
    "--strict-shard --state "
    "--drop --dtype --remove-keys --keep-keys --model-only --max-shard-size --force --resume --no-resume --memory "
    "--threads --verify --dry-run --plan --ray --from --replica-policy",
    "convert": "--to --dialect --family --config --as-model --dequantize --allow-lossy --tp --dry-run --plan",
    "merge": "--method --weight --base --density --t --seed --config --on-conflict --remove-keys --to",
    "diff": "--rtol --atol --map --state --from",
    "verify": "--mode --from --require-checksums",
    "apply": "--part --threads --memory --resume",
    "clean": "--remove",
    "doctor": "",
    "explain": "",
    "kernels": "--arch --out --force --cases --seed --kernel --quick",
}


@pytest.mark.parametrize("verb", CONTRACT)
def test_every_option_of_the_contract_is_there(verb: str) -> None:
    have = {name for param in parser.build(verb).params for name in (*param.opts, *param.secondary_opts)}
    wanted = f"{CONTRACT[verb]} --json --progress --quiet -q --verbose -v --report --color".split()
    assert set(wanted) <= have


# -- what comes back is shown ------------------------------------------------------------------------------------------


def test_results_go_to_stdout_alone(stub: dict[str, Stub], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "x") == 0
    out, err = capsys.readouterr()
    assert "format  dcp" in out and err == ""


def test_json_is_the_document_and_nothing_else(stub: dict[str, Stub], capsys: pytest.CaptureFixture[str]) -> None:
    name = "\udcff\x1b\u202e\n"
    stub["inspect"].document = {**CATALOG, "tensors": [{**CATALOG["tensors"][0], "name": name}]}
    assert run("inspect", "x", "--json") == 0
    out, err = capsys.readouterr()
    assert out.isascii() and out.endswith("\n") and out.count("\n") == 1 and err == ""
    assert json.loads(out) == stub["inspect"].document


def test_json_has_no_nan(stub: dict[str, Stub], capsys: pytest.CaptureFixture[str]) -> None:
    stub["diff"].document = {
        "equal": False,
        "compared": 1,
        "differences": [{"name": "w", "state": "model", "kind": "value", "max_abs": float("nan"), "first_index": (0,)}],
    }
    assert run("diff", "a", "b", "--json") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    difference = json.loads(capsys.readouterr().out, parse_constant=refuse)["differences"][0]
    assert difference["max_abs"] == "nan" and difference["first_index"] == [0]


@pytest.mark.parametrize(
    ("verb", "arguments", "document", "code"),
    [
        ("diff", ["a", "b"], {"equal": True, "compared": 1, "differences": []}, 0),
        ("diff", ["a", "b"], {"equal": False, "compared": 1, "differences": [{"name": "w", "kind": "value"}]}, 1),
        ("verify", ["a"], {"ok": True, "findings": [], "digests": {}}, 0),
        ("verify", ["a"], {"ok": False, "findings": [{"code": "E0331", "message": "x"}], "digests": {}}, 1),
        ("doctor", [], {"self_test": "ok"}, 0),
        ("doctor", [], {"self_test": "failed: x"}, 1),
        ("kernels", ["check"], {"ok": True}, 0),
        ("kernels", ["check"], {"ok": False}, 1),
    ],
)
def test_findings_are_exit_1(
    verb: str, arguments: list[str], document: dict[str, Any], code: int, stub: dict[str, Stub]
) -> None:
    stub[verb].document = document
    assert run(verb, *arguments) == code
    assert run(verb, *arguments, "--json") == code
    assert run(verb, *arguments, "-q") == code


def test_quiet(stub: dict[str, Stub], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", "a", "b", "--to", "dcp", "-q") == 0
    assert run("diff", "a", "b", "-q") == 0
    out, err = capsys.readouterr()
    assert out == "equal: 1 tensor compared\n" and err == ""


def test_a_plan_is_shown_once(
    stub: dict[str, Stub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(src: str, dst: str, reading: Reading, writing: Writing, progress: Any) -> dict[str, Any]:
        progress.plan(DRY)
        return DRY if writing.dry_run else WRITTEN

    monkeypatch.setattr(convert, "convert", command)
    assert run("convert", "a", "b", "--to", "dcp", "--progress", "plain") == 0
    out, err = capsys.readouterr()
    assert out.count("writes") == 1 and out.endswith("wrote 4 B in 1 file in 0.1 s; digests checked\n") and err == ""
    assert run("convert", "a", "b", "--to", "dcp", "--progress", "none") == 0
    assert capsys.readouterr() == (out, "")
    assert run("convert", "a", "b", "--to", "dcp", "--progress", "plain", "--dry-run") == 0
    out, err = capsys.readouterr()
    assert "writes" in out and "dry run: nothing was written" in out and err == ""


def test_a_terminal_is_not_told_twice(stub: dict[str, Stub], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from ckpt_tool.report import plain

    stub["convert"].document = {**WRITTEN, "dropped": [{"state": "ema", "tensors": 1, "bytes": 4}]}
    assert run("convert", "a", "b", "--to", "dcp") == 0
    assert "ema: 1 tensor, 4 B" in capsys.readouterr().out
    monkeypatch.setattr(plain, "is_terminal", lambda stream: True)
    assert run("convert", "a", "b", "--to", "dcp", "--color", "never") == 0
    out = capsys.readouterr().out
    assert out.count("ema: 1 tensor, 4 B") == 1 and out.endswith("wrote 4 B in 1 file in 0.1 s; digests checked\n")


def test_the_bar_is_gone_before_an_error_is_told(stub: dict[str, Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    class Progress:
        def finish(self) -> None:
            ended.append(True)

    from ckpt_tool.report import progress

    monkeypatch.setattr(progress, "progress_of", lambda *args, **kwargs: Progress())
    stub["verify"].document = CorruptFile("x", code="E0311")
    assert run("verify", "a") == 3 and ended == [True]


def test_report(stub: dict[str, Stub], tmp_path: Path) -> None:
    report = tmp_path / "r.html"
    assert run("convert", "a", "b", "--to", "dcp", "--report", str(report)) == 0
    source = report.read_text()
    assert "ckpt convert" in source and "wrote 4 B" in source and "writes" in source
    assert run("inspect", "x", "--json", "--report", str(report)) == 0 and "ckpt inspect" in report.read_text()


def test_a_report_that_can_not_be_written_is_refused_first(stub: dict[str, Stub], tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"weights")
    assert run("convert", "a", "b", "--to", "dcp", "--report", str(tmp_path / "w.safetensors")) == 5
    assert run("convert", "a", "b", "--to", "dcp", "--report", str(tmp_path / "no" / "r.html")) == 7
    assert run("inspect", str(tmp_path), "--report", str(tmp_path / "r.html")) == 5
    assert stub["convert"].args == () and stub["inspect"].args == ()
    assert (tmp_path / "w.safetensors").read_bytes() == b"weights"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x", code="E0280"), 2),
        (CorruptFile("x", code="E0311"), 3),
        (UnsafeInput("x", code="E0410"), 4),
        (OutputExists("x", code="E0501"), 5),
        (SourceChanged("x", code="E0601"), 6),
        (StorageError("x", code="E0702"), 7),
        (OSError(28, "No space left on device", "f"), 7),
        (MemoryError(), 7),
        (ValueError("surprise"), 70),
        (RecursionError("deep"), 70),
        (KeyboardInterrupt(), 130),
        (cli.Terminated(), 143),
        (BrokenPipeError(), 141),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_error_has_its_exit_code(
    error: BaseException, code: int, as_json: bool, stub: dict[str, Stub], capfd: pytest.CaptureFixture[str]
) -> None:
    stub["verify"].document = error
    assert run("verify", "a", *(["--json"] if as_json else [])) == code
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err
    if code == 141:
        assert err == ""
    elif as_json:
        document = json.loads(err)
        assert document["schema_version"] == 1 and document["error"]["exit_code"] == code
        assert catalogue()[document["error"]["code"]].exit_code == code and document["error"]["hint"]
    else:
        assert err.startswith("error[E") and catalogue()[err[6:11]].exit_code == code and "  hint: " in err


def test_a_run_leaves_the_process_as_it_was(stub: dict[str, Stub]) -> None:
    """`run` is called by tests and programs too: it ends no process, and its handlers end with it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers], gc.get_threshold()
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    stub["verify"].document = KeyboardInterrupt()
    assert run("verify", "a") == 130
    done.set()
    other.join()
    assert ([signal.getsignal(number) for number in numbers], gc.get_threshold()) == before


def test_a_bug_of_ours_asks_to_be_reported(stub: dict[str, Stub], capsys: pytest.CaptureFixture[str]) -> None:
    stub["verify"].document = KeyError("w")
    assert run("verify", "a") == 70
    err = capsys.readouterr().err
    assert "a bug of ours: KeyError: 'w'" in err and "please report" in err and "at: ckpt_tool" in err
    assert run("verify", "a", "-vv") == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_traceback_only_when_asked(stub: dict[str, Stub], capsys: pytest.CaptureFixture[str]) -> None:
    stub["verify"].document = CorruptFile("x", code="E0311")
    for asked, shown in (([], False), (["-v"], False), (["-v", "-v"], True), (["-vv"], True)):
        run("verify", "a", *asked)
        assert ("Traceback" in capsys.readouterr().err) is shown


USAGE = {
    "isnpect": ("'isnpect' is no verb of ckpt", "ckpt", "inspect"),
    "x y z": ("'x' is no verb of ckpt", "ckpt", "the verbs are inspect,"),
    "convert a": ("DST is missing", "ckpt convert", "SRC DST"),
    "merge": ("SRC... DST is missing", "ckpt merge", "SRC... DST"),
    "merge a": ("merge needs a source", "ckpt merge", "SRC... DST"),
    "merge a b --config c": ("--config names the sources", "ckpt merge", "output alone"),
    "convert a b": ("convert needs --to FORMAT", "ckpt convert", "ckpt reshard"),
    "convert a b --tpp 3": ("there is no option --tpp", "ckpt convert", "--tp"),
    "inspect a --to dcp": ("there is no option --to", "ckpt inspect", "--to belongs to ckpt convert"),
    "reshard a b --tp": ("option '--tp' requires an argument", "ckpt reshard", "--help"),
    "reshard a b --tp x": ("--tp: found 'x', want a whole number", "ckpt reshard", "--tp N: Write for N"),
    "reshard a b --tp=0": ("--tp: found 0, want at least 1", "ckpt reshard", "--tp N: Write for N"),
    "convert a b --to safetensor": ("--to: found 'safetensor'", "ckpt convert", "safetensors"),
    "diff a b c": ("got unexpected extra argument", "ckpt diff", "--help"),
    "inspect a --depth 0": ("--depth: found 0", "ckpt inspect", "--depth N: "),
    "verify a --mode off": ("--mode: found 'off'", "ckpt verify", "--mode quick|full: "),
    "apply p --part 9/8": ("--part: found '9/8'", "ckpt apply", "1/8"),
    "inspect a --progress fancy": ("--progress: found 'fancy'", "ckpt inspect", "--progress "),
    "validate --mode exact": ("--mode: found 'exact'", "ckpt validate", "--mode "),
    "kernels": ("build|info|check|bench is missing", "ckpt kernels", "build|info|check|bench"),
    "kernels bulid": ("ckpt kernels has no 'bulid'", "ckpt kernels", "build"),
    "kernels info --cases 3": ("--cases belongs to ckpt kernels check", "ckpt kernels info", "--help"),
    "kernels check --cases 0": ("--cases: found 0", "ckpt kernels", "--cases N: "),
    "convert a b --to torch --drop-optimizer": ("no option --drop-optimizer", "ckpt convert", "--drop optimizer"),
    "convert --hlep": ("no option --hlep", "ckpt convert", "did you mean --help?"),
}


@pytest.mark.parametrize("line", USAGE)
def test_usage_errors_are_three_lines_too(line: str, stub: dict[str, Stub], capsys: pytest.CaptureFixture[str]) -> None:
    what, where, hint = USAGE[line]
    assert run(*line.split()) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 3, err
    assert catalogue()[lines[0][6:11]].exit_code == 2 and what in lines[0]
    assert lines[1] == f"  at: {where}" and lines[2].startswith("  hint: ") and hint in lines[2]
    verb, *rest = line.split()
    assert run(verb, "--json", *rest) == 2
    document = json.loads(capsys.readouterr().err)["error"]
    assert what in document["message"] and document["place"] == where and hint in document["hint"]
    assert not any(stand.args for stand in stub.values()), "nothing was run"


def test_a_path_without_a_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path)) == 2
    assert f"hint: say what to do with it: ckpt inspect {tmp_path}" in capsys.readouterr().err


def test_no_verb_shows_the_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    out, err = capsys.readouterr()
    assert out == "" and all(verb in err for verb in VERBS)


# -- help --------------------------------------------------------------------------------------------------------------


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in VERBS) and "Exit codes" in out


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("width", ["60", "100"])
def test_every_verb_has_help(
    verb: str, width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert run(verb, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: ckpt {verb} [OPTIONS]") and "Reporting:" in out and "--json" in out
    body = out.split("Examples:")[0]  # an example is one line, to be copied
    assert max(map(len, body.splitlines())) <= int(width)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"ckpt {ckpt_tool.__version__}\n"


def test_examples_parse() -> None:
    """What the help shows can be typed."""
    import shlex

    for verb in VERBS.values():
        for example in verb.examples:
            for command in example.split("&&"):
                _, *arguments = shlex.split(command)
                assert isinstance(parser.parse(arguments), VerbJob), command


# -- Python ------------------------------------------------------------------------------------------------------------


def test_the_python_face_mirrors_the_verbs(stub: dict[str, Stub]) -> None:
    assert ckpt_tool.convert(Path("a"), "b", to="dcp", tp=2, remove_keys=["x"], memory="64MiB") == WRITTEN
    assert stub["convert"].args[:4] == (
        "a",
        "b",
        Reading(),
        Writing(to="dcp", degrees={"tp": 2}, remove_keys=("x",), memory=64 << 20),
    )
    ckpt_tool.reshard("a", "b", dp=3, zero=1, strict_shard=True, from_format="dcp")
    assert stub["reshard"].args[2].from_format == "dcp" and stub["reshard"].args[3].on_indivisible == "error"
    ckpt_tool.merge(["a", Path("b")], "c", method="slerp", t=0.5, weight=(0.1, 0.9), config="m.yaml")
    sources, _, reading, _, options, _ = stub["merge"].args
    assert sources == ["a", "b"] and reading.config is None
    assert options == MergeOptions("slerp", t=0.5, weights=(0.1, 0.9), config="m.yaml")
    ckpt_tool.diff("a", "b", rtol=1e-3, state="model", map="m")
    assert stub["diff"].args[3] == Comparison(rtol=1e-3, states=("model",), map_file="m")
    ckpt_tool.verify("a", mode="quick")
    assert stub["verify"].args[2].mode == "quick"
    with pytest.raises(UsageError, match="unknown option 'tpp'"):
        ckpt_tool.convert("a", "b", to="dcp", tpp=2)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="--mode"):
        ckpt_tool.verify("a", mode="off")


def test_the_package_has_only_its_face() -> None:
    assert set(dir(ckpt_tool)) >= {"open", "reshard", "convert", "merge", "diff", "verify", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'conver'"):
        ckpt_tool.conver  # type: ignore[attr-defined]  # noqa: B018


# -- the process -------------------------------------------------------------------------------------------------------

CKPT = [sys.executable, "-m", "ckpt_tool"]
ROOT = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("env", environment())
    options.setdefault("errors", "replace")
    return subprocess.run([*CKPT, *arguments], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("line", ["verify .", "convert source out --to safetensors", "inspect x --report page.html"])
def test_a_current_folder_that_is_gone_is_named(line: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.rmdir({str(gone)!r}); import sys; sys.argv = ['ckpt', *{line.split()!r}]\n"
    code += "from ckpt_tool.__main__ import main\nsys.exit(main())"
    found = {**environment(), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=found, cwd=gone, timeout=60)
    assert done.returncode == 7 and ("E3063" in done.stderr or "E0702" in done.stderr), done.stderr


def loaded(line: str) -> set[str]:
    """The modules that a line of ckpt loads."""
    code = f"import sys; sys.argv = ['ckpt', *{line.split()!r}]\nfrom ckpt_tool.__main__ import main\ntry: main()\n"
    code += "except SystemExit: pass\nprint(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(("line", "most"), [("--version", 2), ("--help", 14), ("convert --help", 40)])
def test_starting_loads_little(line: str, most: int) -> None:
    """What a start costs is what it loads; in seconds: tests/bench/scale.py."""
    ours = {name for name in loaded(line) if name.partition(".")[0] == "ckpt_tool"}
    assert len(ours) <= most, sorted(ours)


def test_safetensors_files_are_inspected_without_any_reader_of_pickles(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    ours = loaded(f"inspect {tmp_path}")
    assert "ckpt_tool.storage.safetensors_files.safetensors_file" in ours
    assert (
        not {
            "ckpt_tool.storage.pickles.pickle_reader",
            "ckpt_tool.storage.pickles.pickle_machine",
            "ckpt_tool.storage.torch_files.torchzip",
        }
        & ours
    )


@pytest.mark.parametrize("line", ["--help", "convert --help", "merge --help", "inspect /nowhere", "nonsense"])
def test_no_heavy_import_without_need(line: str) -> None:
    heavy = {"torch", "numpy", "rich", "pydantic", "ssl", "asyncio", "safetensors", "ml_dtypes", "yaml", "transformers"}
    assert not loaded(line) & heavy


def test_importing_the_package_costs_nothing() -> None:
    code = "import sys; before = set(sys.modules); import ckpt_tool; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == "['ckpt_tool']"


def test_modules_in_the_working_folder_are_not_ours(tmp_path: Path) -> None:
    """A checkpoint's folder may hold a `json.py`; `python -m ckpt_tool` from there must not run it."""
    for name in ("typer", "json", "numpy", "rich", "gc", "ckpt"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('ran code of the working folder')\n")
    done = process("inspect", "nowhere", cwd=tmp_path)
    assert done.returncode == 7 and "does not exist" in done.stderr, done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_crash(closed: str) -> None:
    for arguments, code in ((["--help"], 0), (["inspect", "/nowhere"], 7), (["--version"], 0), (["nonsense"], 2)):
        line = " ".join([*CKPT, *arguments, closed])
        assert (
            subprocess.run(["bash", "-c", line], capture_output=True, env=environment(), timeout=60).returncode == code
        )


@pytest.mark.parametrize(
    "more",
    [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "latin-1"}],
)
def test_other_locales_do_not_crash(more: dict[str, str]) -> None:
    env = {name: value for name, value in environment(**more).items() if name not in ("TERM", "LANG", "LC_CTYPE")}
    done = process("inspect", "/nowhere/层é\udcff", env=env)
    assert done.returncode == 7 and "does not exist" in done.stderr


# A command that says `ready` and then waits, inside a real `ckpt convert`.
WAITING = """
import sys, threading, time
from ckpt_tool.commands import convert
def command(src, dst, reading, writing, progress):
    if src == "threads":
        threading.Thread(target=time.sleep, args=(30,)).start()
    said = False
    while True:
        try:
            if not said:
                said = True
                print("ready", flush=True)
            time.sleep(0.01)
        except KeyboardInterrupt:
            if src != "stubborn":
                raise
            print("again", flush=True)
convert.convert = command
from ckpt_tool.__main__ import main
sys.argv[1:] = ["convert", sys.argv[1], "out", "--to", "dcp", *sys.argv[2:]]
main()
"""


def waiting(kind: str, *arguments: str, ignore: int | None = None) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING, kind, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=(lambda: signal.signal(ignore, signal.SIG_IGN)) if ignore else None,
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGINT, 130, "SIGINT"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGHUP, 143, "SIGTERM")],
)
@pytest.mark.parametrize("kind", ["plain", "threads"])
def test_signals(number: int, code: int, name: str, kind: str) -> None:
    child = waiting(kind)
    began = time.monotonic()
    child.send_signal(number)
    _, err = child.communicate(timeout=20)
    assert child.returncode == code and time.monotonic() - began < 10
    assert err.splitlines() == [
        f"error[E{code}0]: interrupted by {name}",
        "  at: ckpt convert",
        "  hint: the same command resumes",
    ]


def test_signals_as_json() -> None:
    child = waiting("plain", "--json")
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 143 and json.loads(err)["error"]["code"] == "E1430"


def test_the_second_signal_ends_at_once() -> None:
    child = waiting("stubborn")
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None and child.stdout.readline() == "again\n"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == 130


def test_nohup_is_honoured() -> None:
    child = waiting("plain", ignore=signal.SIGHUP)
    child.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.5)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 143


BIG = """
import sys
from ckpt_tool.commands import inspect
tensors = [{"name": f"t{i}x", "state": "model", "dtype": "F32", "shape": [1], "bytes": 4} for i in range(50_000)]
inspect.inspect = lambda *args, **kwargs: {
    "format": "dcp", "path": "x", "mesh": {}, "total": {}, "states": {}, "tensors": tensors, "extras": {}, "notes": []}
from ckpt_tool.__main__ import main
sys.argv[1:] = ["inspect", "x", "--depth", "1", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("more", ["", "--json"])
def test_a_reader_that_leaves_is_quiet(more: str) -> None:
    line = f'{sys.executable} -c "$BIG" {more} | head -c 100 >/dev/null; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment(BIG=BIG), timeout=60)
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_slow_reader_gets_every_byte(unbuffered: str) -> None:
    """A non-blocking pipe takes 64 KiB and refuses; an unbuffered stream drops what did not fit. 4 MB arrive whole."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    env = environment(PYTHONUNBUFFERED=unbuffered)
    child = subprocess.Popen([sys.executable, "-c", BIG, "--json"], stdout=writing, stderr=subprocess.PIPE, env=env)
    os.close(writing)
    time.sleep(0.5)
    with open(reading, "rb") as pipe:
        document = json.loads(pipe.read())
    assert len(document["tensors"]) == 50_000
    assert child.communicate(timeout=60)[1] == b"" and child.returncode == 0


def test_a_full_disk_behind_stdout_is_no_success() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", BIG], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60
        )
    assert done.returncode == 7 and done.stderr.startswith("error[E0701]: writing the result failed")


def test_completion_knows_verbs_and_options() -> None:
    base = {"_CKPT_COMPLETE": "complete_bash"}
    done = process(env=environment(**base, COMP_WORDS="ckpt in", COMP_CWORD="1"))
    assert done.stdout.split() == ["inspect"]
    done = process(env=environment(**base, COMP_WORDS="ckpt convert --to megatron-", COMP_CWORD="3"))
    assert done.stdout.split() == ["megatron-dist", "megatron-fsdp"]
