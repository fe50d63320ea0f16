"""No number of a file decides how long `ckpt` runs or how much it holds: every number of every config, argument, header
and index of the fixtures is set to what no file can hold, and every verb ends soon, in little memory, by the contract.

The cases come from the fixtures: one for each format, kind of file and field, so that a new fixture brings its own.
Each runs in a fork of its own with 1 GiB more address space than the test has, and 10 seconds a verb.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiers import chosen

from ckpt_tool.cli import run

FIXTURES = Path(__file__).parents[1] / "fixtures"
VALUES: dict[str, tuple[Any, ...]] = {
    "field": (10**9, 2**63 - 1, 10**30, -1, 0, 1.5, "1"),
    "name": ("5000", "999999999", "9" * 30, "9" * 5000, "\u00b2"),
    "file": ("0099", "99999", "9999999", "9" * 30),
}
LEVEL = re.compile(r"(?:^|\.)(layers|h|blocks|experts|local_experts)\.(\d+)(?=\.)")
# of a verb, above what the test itself holds
SECONDS = 10
MEMORY = 1 << 30
CONTRACT = {0, 1, 2, 3, 4, 5, 6, 7}
OTHERS = {
    "": ("paddle.safetensors",),
    "paddle.safetensors": ("hf.safetensors",),
}  # the same model in two dialects, in one folder
LARGEST = 2 << 20  # bytes of a fixture's folder


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"shared_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


edits = _load(Path(__file__).parent / "fuzz" / "edits.py")


class Where(NamedTuple):
    """A number of a file; the fields are a case's."""

    what: str
    field: str
    at: int
    group: int = 0


class Case(NamedTuple):
    """One number of a fixture. what: `field` (a value in a file), `name` (of a tensor: digits of a text in a file),
    `file` (in a file's name). at: which of the file's numbers, or texts, or the name's groups of digits; group: of the
    text's digits."""

    folder: Path
    what: str
    file: str
    field: str
    at: int
    group: int = 0

    def __str__(self) -> str:
        return f"{self.what}-{self.folder.relative_to(FIXTURES)}-{self.file}-{self.field or 'number'}-{self.at}.{self.group}"  # noqa: E501


def folders() -> list[Path]:
    """The checkpoints among the fixtures, the smallest of each format first."""
    found = [
        folder
        for folder in (*FIXTURES.glob("*/*"), *FIXTURES.glob("convert/*/*"))
        if folder.is_dir() and folder.parent.name not in ("make", "convert", "bridge")  # a torch_dist as others are
    ]
    sized = {folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in found}
    return sorted(
        (folder for folder in found if sized[folder] <= LARGEST), key=lambda each: (each.parent.name, sized[each])
    )


def _model(folder: Path) -> Path:
    """What the fields of a fixture are counted for: a family or an adapter, whose config is its own, or a format."""
    return folder if folder.parent.name in ("families", "peft") else folder.parent


def cases(some: list[Path]) -> Iterator[Case]:
    """One for each (format, kind of file, field), one for each (format, kind of name), one for each kind of file name:
    a second layer of the same fields tells nothing new."""
    seen = set()
    for folder in some:
        model = str(_model(folder))
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            file = path.relative_to(folder).as_posix()
            for where in (*_in_name(file), *_in_file(edits.part_of(path.read_bytes()))):
                kind = model, where.what, path.suffix or path.name, where.field, where.group
                if kind not in seen:
                    seen.add(kind)
                    yield Case(folder, where.what, file, where.field, where.at, where.group)


def _in_name(file: str) -> Iterator[Where]:
    for number, _ in enumerate(re.findall(r"\d+", file)):
        yield Where("file", re.sub(r"\d+", "#", file), number)


def _in_file(part: Any) -> Iterator[Where]:
    for at, number in enumerate(edits.numbers(part) if part else ()):
        yield Where("field", f"{number.field} {type(number.value).__name__}", at)
    for at, text in enumerate(edits.texts(part) if part else ()):
        for group, match in enumerate(LEVEL.finditer(text.value)):
            yield Where("name", match[1], at, group)


def verbs(source: Path, sound: Path, out: Path) -> list[list[str]]:
    """The lines that read all that a source says of itself; the conversions lay it out anew for ranks of other
    systems."""
    base = FIXTURES / ("paddle-lora/base" if source.name == "adapter" else "convert/llama/hf")
    folds = [["merge", f"{base}", f"{source}", f"{out}-folded", "--method", "lora"]]
    return [
        *(folds if (source / "adapter_config.json").exists() else ()),
        ["inspect", f"{source}"],
        ["verify", f"{source}"],
        ["diff", f"{source}", f"{sound}"],
        ["reshard", f"{source}", f"{out}-reshard", "--dry-run"],
        ["merge", f"{source}", f"{out}-merge"],
        ["reshard", f"{source}", f"{out}-stages", "--pp", "2", "--ep", "2", "--dp", "2", "--dry-run"],
        *(
            ["convert", f"{source}", f"{out}-{to}", "--to", to, *more]
            for to, *more in (
                ("safetensors",),
                ("sharded", "--tp", "2", "--pp", "2", "--dialect", "keep"),
                ("megatron-dist", "--dry-run"),
                ("paddle", "--tp", "2", "--dry-run", "--lenient"),
                ("deepspeed", "--dp", "2", "--zero", "1", "--dry-run"),
                ("megatron", "--pp", "2", "--dry-run", "--lenient"),
                ("meta", "--dry-run"),
                ("paddle-flex", "--dry-run"),
            )
        ),
    ]


def apart(lines: list[list[str]]) -> list[tuple[str, int, str]]:
    """(the line, its exit code or minus the signal that ended it, its messages) of each line, run in one fork."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            _in_fork(lines, write)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8", errors="replace") as pipe:
        done = [json.loads(line) for line in pipe.read().splitlines()]
    _, status = os.waitpid(pid, 0)
    found = [(" ".join(line), code, text) for line, (code, text) in zip(lines, done, strict=False)]
    if len(done) < len(lines):
        found.append((" ".join(lines[len(done)]), -os.WTERMSIG(status) if os.WIFSIGNALED(status) else 999, ""))
    return found


def _in_fork(lines: list[list[str]], write: int) -> None:
    """Run the lines; an alarm ends the process, which says that the line that follows the last result took too long."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    scratch = os.open("/dev/null", os.O_WRONLY)
    os.dup2(scratch, 1)
    told = os.memfd_create("stderr")
    os.dup2(told, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor: other tests run beside
        signal.alarm(10 * SECONDS)
        code = run([*line, "--json", "-q"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        size = os.lseek(told, 0, os.SEEK_END)
        os.write(
            write,
            (
                json.dumps([code, os.pread(told, min(size, 2000), max(0, size - 2000)).decode("utf-8", "replace")])
                + "\n"
            ).encode(),
        )
        os.ftruncate(told, 0)
        os.lseek(told, 0, os.SEEK_SET)


def edit(source: Path, case: Case, value: Any) -> None:
    """The number in its place."""
    file = source / case.file
    if case.what == "file":
        match = list(re.finditer(r"\d+", case.file))[case.at]
        to = source / f"{case.file[: match.start()]}{value}{case.file[match.end() :]}"
        to.parent.mkdir(parents=True, exist_ok=True)
        file.rename(to)
        return
    part = edits.part_of(file.read_bytes())
    if case.what == "field":
        file.write_bytes(part.file(edits.with_number(part, edits.numbers(part)[case.at], value)))
        return
    text = edits.texts(part)[case.at]
    match = list(LEVEL.finditer(text.value))[case.group]
    new = f"{text.value[: match.start(2)]}{value}{text.value[match.end(2) :]}"
    file.write_bytes(part.file(edits.with_number(part, text, new)))


def judge(case: Case, value: object, scratch: Path) -> list[str]:
    """What is wrong with how the verbs ended, for one value of one number."""
    source = scratch / "source" / case.folder.name
    shutil.rmtree(scratch / "source", ignore_errors=True)
    shutil.copytree(case.folder, source, ignore=shutil.ignore_patterns(*OTHERS.get(case.file, OTHERS[""])))
    edit(source, case, value)
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    wrong = []
    for line, code, text in apart(verbs(source, case.folder, out / "o")):
        if code in (-signal.SIGALRM, -signal.SIGPROF):
            wrong.append(f"{value!r}: more than {SECONDS} s: {line}")
        elif code not in CONTRACT or "E0704" in text or "Traceback" in text:
            wrong.append(f"{value!r}: {code}: {line}: {text[-600:]}")
    return wrong


# Counts that readers and mappings once counted out, or that a layout is made of.
COUNTS = {
    f"{name} int"
    for name in (
        "num_hidden_layers",
        "num_layers",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "n_layer",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "data_parallel_size",
        "expert_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "world_size",
        "vocab_size",
        "make_vocab_size_divisible_by",
        "tp",
        "pp",
        "dp",
        "n_layers",
        "multiple_of",
        "mp_world_size",
        "dp_world_size",
        "r",
    )
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The default tier has some cases of some folders, as finding those of all takes each of its workers seconds; what
    chooses other tests has all cases, and those are slow."""
    if "case" not in metafunc.fixturenames:
        return
    is_default = "not slow" in metafunc.config.option.markexpr
    own = [case for case in cases_of(is_default) if OF_TEST[metafunc.function.__name__](case)]
    marks = () if is_default else pytest.mark.slow
    metafunc.parametrize("case", [pytest.param(case, id=str(case), marks=marks) for case in own])


@cache
def cases_of(is_default: bool) -> list[Case]:
    every = folders()
    named = [(f"::[{'-'.join(folder.relative_to(FIXTURES).parts)}]", folder) for folder in every]
    return list(cases(chosen(named, 12) if is_default else every))


OF_TEST: dict[str, Callable[[Case], bool]] = {
    "test_a_count_of_a_thousand_million_is_not_counted_out": lambda case: case.field in COUNTS,
    "test_a_number_in_a_name_ends_soon_and_by_the_contract": lambda case: case.what != "field",
    "test_a_number_that_no_file_can_hold_ends_soon_and_by_the_contract": lambda case: case.what == "field",
}


@pytest.mark.share(4)
def test_a_count_of_a_thousand_million_is_not_counted_out(case: Case, tmp_path: Path) -> None:
    assert not (wrong := judge(case, 10**9, tmp_path)), "\n".join(wrong)


@pytest.mark.share(16)
def test_a_number_in_a_name_ends_soon_and_by_the_contract(case: Case, tmp_path: Path) -> None:
    assert not (wrong := [fault for value in VALUES[case.what] for fault in judge(case, value, tmp_path)]), "\n".join(
        wrong
    )


@pytest.mark.first
@pytest.mark.share(400)
def test_a_number_that_no_file_can_hold_ends_soon_and_by_the_contract(case: Case, tmp_path: Path) -> None:
    assert not (wrong := [fault for value in VALUES[case.what] for fault in judge(case, value, tmp_path)]), "\n".join(
        wrong
    )
