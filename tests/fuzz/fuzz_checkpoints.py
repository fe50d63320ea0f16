"""Fuzzing of whole checkpoints, through the verbs: fixtures edited by `mutations`, and what must hold for all of them.

    python tests/fuzz/fuzz_checkpoints.py --seconds 2400 [--only orbax] [--seed 1] [--out FOLDER] [--processes]
    python tests/fuzz/fuzz_checkpoints.py --readers ...                          the readers alone, ten times as many
    python tests/fuzz/fuzz_checkpoints.py --case orbax:4711 [--out FOLDER]       one case again; its files are kept

A case is the name of a group and a number, which give the fixture, the edits and the options. Each runs in a fork of
its own (`--processes`: each verb as a program of its own) with `MEMORY` more data than the process has, `SECONDS` a
verb. What must hold: an exit code of the contract for bad input (0 to 4); a message with a code, a hint and a place;
nothing written but a whole output; the source as it was; nothing of what lies outside it in the output; no program, no
socket, no file opened for writing elsewhere; and where a conversion that changes no value succeeds, `ckpt diff` finds
none changed. Findings go to FOLDER/findings.jsonl, one line each with the case.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FIXTURES = ROOT / "fixtures"
SECONDS = 20
MEMORY = 512 << 20
CONTRACT = {0, 1, 2, 3, 4}
SECRET = b"what lies outside of the checkpoint 7c1d"
LARGEST = 400_000  # bytes of a fixture


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"fuzz_{name}", Path(__file__).with_name(f"{name}.py"))
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    return sys.modules[spec.name]


mutations = _load("mutations")
targets = _load("targets")


class Group(NamedTuple):
    """globs: of fixtures, files or folders. lines: what follows the verb and the source of each line; `=` in front:
    the output is held against the source by `diff`, values unchanged; `?`: one run in three."""

    globs: tuple[str, ...]
    lines: tuple[str, ...]


_READS = ("inspect", "verify")
_KEPT = "=convert --to sharded --dialect keep"
GROUPS = {
    "gguf": Group(
        ("gguf/*.gguf", "gguf-made/*.gguf"),
        (*_READS, "=convert --to gguf", "convert --to safetensors", "convert --to safetensors --dequantize", "?audit"),
    ),
    "to-gguf": Group(
        ("gguf-made/*/config.json",), ("inspect", "convert --to gguf", "?convert --to gguf --gguf-type q8_0", "?audit")
    ),
    "orbax": Group(
        ("orbax/*/", "maxtext/*/*scanned/"),
        (*_READS, _KEPT, "=convert --to orbax --dialect keep", "convert --to safetensors"),
    ),
    "quantised": Group(
        ("quantized/*/", "quantized-families/*/", "quantized-inputs/*/"),
        (
            *_READS,
            "=convert --to safetensors",
            "convert --to safetensors --dequantize",
            "?convert --to safetensors --repack compressed-tensors",
            "?convert --to gguf --dequantize",
            "?convert --to sharded --tp 2",
            "?audit",
        ),
    ),
    "to-quantise": Group(
        ("families/llama*/", "families/qwen3*/", "deltas/*/base/"),
        ("inspect", "convert --to safetensors --quantize int8", "?convert --to safetensors --quantize fp8-block",
         "?convert --to safetensors --quantize mxfp4", "?convert --to orbax"),
    ),
    "deltas": Group(("deltas/*/",), ("inspect", "patch")),
    "others": Group(
        ("dcp/*/", "megatron-dist/*/", "megatron-fsdp/*/", "deepspeed/*/", "deepspeed-universal/*/", "paddle*/*/",
         "torch/*", "torchao-states/*", "sharded/*/", "meta/*/", "peft/*/", "nemo*/*", "megatron/*/", "safetensors/*/"),
        (*_READS, _KEPT, "convert --to safetensors", "?convert --to safetensors --dequantize"),
    ),
}  # fmt: skip


@cache
def fixtures(group: str) -> list[tuple[str, bool, dict[str, bytes]]]:
    """(name, is it one file?, its files) of a group, in a fixed order."""
    found = []
    for glob in GROUPS[group].globs:
        for path in sorted(FIXTURES.glob(glob)):
            path = path.parent if path.name == "config.json" else path
            if "truth" in path.name or path.suffix in (".json", ".md"):
                continue
            files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
            data = {p.relative_to(path.parent if path.is_file() else path).as_posix(): p.read_bytes() for p in files}
            data = {name: each for name, each in data.items() if name != "paddle.safetensors" and "truth" not in name}
            if sum(map(len, data.values())) <= LARGEST:
                found.append((path.relative_to(FIXTURES).as_posix(), path.is_file(), data))
    return found


def lay(files: Any, folder: Path) -> None:
    """Write the files of a case."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(data, mutations.Link):
                path.symlink_to(data.to)
            elif isinstance(data, mutations.Pipe):
                os.mkfifo(path)
            else:
                path.write_bytes(data)
        except OSError:  # a file in the place of a folder: the case is without it
            continue


def case(group: str, number: int) -> tuple[str, bool, Any, list[str], Random]:
    """(fixture, is it one file?, files, edits, the choices that are left)."""
    rng = Random(f"{group}:{number}")
    name, single, data = fixtures(group)[rng.randrange(len(fixtures(group)))]
    files, done = mutations.mutated(rng, data)
    return name, single and len(files) == 1, files, done, rng


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for at, folders, names in os.walk(folder):
        for name in (*folders, *names):
            info = os.lstat(os.path.join(at, name))
            found[os.path.join(at, name)] = (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ino)
    return found


def lines_of(group: str, source: Path, out: Path, rng: Random) -> list[tuple[str, list[str], Path | None]]:
    """(how it is judged, arguments, output) of each line."""
    lines = []
    for number, text in enumerate(GROUPS[group].lines):
        if text[0] == "?" and rng.random() > 0.34:
            continue
        verb, *more = text.lstrip("?=").split()
        to = out / f"o{number}"
        how = "=" if text[0] == "=" else ""
        if verb == "patch":
            deltas = sorted(str(path) for path in (source / "deltas").glob("*"))
            lines.append((how, ["patch", str(source / "base"), *deltas, str(to)], to))
        elif verb == "convert":
            if more[1] == "gguf":
                to = to.with_suffix(".gguf")
            lines.append((how, ["convert", str(source), str(to), *more], to))
        elif group == "deltas":
            lines += [(how, [verb, str(path)], None) for path in (source / "base", *(source / "deltas").glob("*"))]
        else:
            lines.append((how, [verb, str(source)], None))
    return lines


# -- one case ----------------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    code: int
    err: str
    trace: str
    wrote: list[str]


def apart(lines: list[list[str]], scratch: Path, programs: bool) -> list[Ran]:
    """Every line's end; less of them where one ended the process."""
    if programs:
        return [_program(line) for line in lines]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            _in_fork(lines, write, scratch)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8", errors="replace") as pipe:
        done = [Ran(*json.loads(line)) for line in pipe.read().splitlines()]
    _, status = os.waitpid(pid, 0)
    if len(done) < len(lines):
        done.append(Ran(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else 999, "", "", []))
    return done


def _program(line: list[str]) -> Ran:
    limit = f'ulimit -d {(MEMORY >> 10) + 400_000}; exec timeout -s ALRM {SECONDS * 3} "$@"'
    done = subprocess.run(
        ["bash", "-c", limit, "x", sys.executable, "-m", "ckpt_tool", *line, "--json", "-q"],
        capture_output=True, cwd=ROOT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return Ran(
        -signal.SIGALRM if done.returncode == 124 else done.returncode, done.stderr.decode("utf-8", "replace"), "", []
    )


def _in_fork(lines: list[list[str]], write: int, scratch: Path) -> None:
    import ckpt_tool.cli as cli

    held = [
        int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line
    ]
    resource.setrlimit(resource.RLIMIT_DATA, (held[0] + MEMORY, held[0] + MEMORY))
    null = os.open("/dev/null", os.O_RDWR)
    told = os.memfd_create("stderr")
    os.dup2(null, 0), os.dup2(null, 1), os.dup2(told, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGALRM, signal.SIG_DFL), signal.signal(signal.SIGPROF, signal.SIG_DFL)
    wrote: list[str] = []
    sys.addaudithook(lambda event, args: _watched(event, args, str(scratch), wrote))
    traces: list[str] = []
    ours = cli._as_ours

    def kept(fault: BaseException) -> Any:
        found = ours(fault)
        if found.exit_code not in CONTRACT:
            traces.append("".join(traceback.format_exception(fault))[-3000:])
        return found

    cli._as_ours = kept
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor: others work beside
        signal.alarm(6 * SECONDS)
        code = cli.run([*line, "--json", "-q"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        sys.stderr.flush()
        size = os.lseek(told, 0, os.SEEK_END)
        text = os.pread(told, min(size, 20_000), max(0, size - 20_000)).decode("utf-8", "replace")
        os.write(write, (json.dumps([code, text, "".join(traces), wrote]) + "\n").encode())
        os.ftruncate(told, 0), os.lseek(told, 0, os.SEEK_SET)
        traces.clear(), wrote.clear()


_BAD = (
    "os.system",
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "pickle.find_class",
)


def _watched(event: str, args: Any, scratch: str, wrote: list[str]) -> None:
    if event in _BAD:
        wrote.append(f"{event} {str(args)[:200]}")
    elif event == "open" and isinstance(args[0], str | bytes) and isinstance(args[2], int):
        path = os.fsdecode(args[0])
        writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not args[2] & os.O_TMPFILE == os.O_TMPFILE
        if (
            writes
            and path.startswith("/")
            and not path.startswith((scratch, "/dev/", tempfile.gettempdir()))
            and "ckpt" not in path
        ):
            wrote.append(f"open {path}")


def judge(
    group: str, number: int, scratch: Path, *, programs: bool = False, keep: bool = False
) -> tuple[list[Any], Counter[str]]:
    """(findings, how the lines ended) of a case."""
    name, single, files, done, rng = case(group, number)
    shutil.rmtree(scratch, ignore_errors=True)
    source = scratch / "source"
    out = scratch / "out"
    lay(files, source)
    out.mkdir()
    (scratch / "secret").write_bytes(SECRET * 100)
    before = snapshot(scratch / "source")
    given = source / next(iter(files)) if single else source
    lines = lines_of(group, given, out, rng)
    ends: Counter[str] = Counter()
    findings: list[Any] = []

    def found(what: str, line: list[str], ran: Ran) -> None:
        findings.append({"case": f"{group}:{number}", "fixture": name, "edits": done, "what": what,
                         "line": " ".join(line).replace(str(scratch), "."), "code": ran.code,
                         "err": ran.err[-1500:], "trace": ran.trace[-2500:], "wrote": ran.wrote})  # fmt: skip

    ran_all = apart([line for _, line, _ in lines], scratch, programs)
    if len(ran_all) < len(lines):
        _, line, to = lines[len(ran_all) - 1]
        found("ended by a signal", line, ran_all[-1])
    again = []
    for (how, line, to), ran in zip(lines, ran_all, strict=False):
        ends[f"{line[0]} {ran.code}"] += 1
        _judge_one(line, to, ran, found, out)
        if how == "=" and ran.code == 0 and to is not None and to.exists():
            again.append(["diff", str(given), str(to)])
    allowed = {
        str(to.relative_to(out)) for (_, _, to), ran in zip(lines, ran_all, strict=False) if to and ran.code == 0
    }
    for extra in {path.name for path in out.iterdir()} - allowed:
        if len(ran_all) == len(lines):
            found(f"left behind: {extra}", [], ran_all[-1])
    if {path.name for path in scratch.iterdir()} != {"source", "out", "secret"} or snapshot(source) != before:
        found("the source or what lies beside it was touched", [], ran_all[-1])
    if SECRET[:20] in b"".join(path.read_bytes()[: 1 << 20] for path in out.rglob("*") if path.is_file()):
        found("what lies outside came into the output", [], ran_all[-1])
    for line, ran in zip(again, apart(again, scratch, programs) if again else (), strict=False):
        ends[f"diff {ran.code}"] += 1
        if ran.code:
            found("other values", line, ran)
    if not keep:
        shutil.rmtree(scratch, ignore_errors=True)
    return findings, ends


def _judge_one(line: list[str], to: Path | None, ran: Ran, found: Any, out: Path) -> None:
    if ran.code not in CONTRACT:
        found("exit code", line, ran)
        return
    if "Traceback" in ran.err:
        found("traceback", line, ran)
    if ran.wrote:
        found("opened or started", line, ran)
    if ran.code < 2:
        return
    try:
        error = json.loads(ran.err.strip().splitlines()[-1])["error"]
    except (ValueError, KeyError, IndexError):
        found("no error on stderr", line, ran)
        return
    if not re.fullmatch(r"E\d{4}", error["code"]) or not error["hint"]:
        found("no code or hint", line, ran)
    elif ran.code in (3, 4) and not (error["path"] or error["tensor"]):
        found("no place", line, ran)


def _metadata(files: dict[str, bytes]) -> None:
    """A model's config and tokenizer as GGUF's pairs."""
    from ckpt_tool.errors import CkptError
    from ckpt_tool.families.config.translation import contradictions
    from ckpt_tool.storage.texts.strict_json import parse
    from ckpt_tool.systems.llamacpp.config import metadata, rope_factors
    from ckpt_tool.systems.llamacpp.gguf.target import pair
    from ckpt_tool.systems.llamacpp.gguf.tokenizer import TokenizerFiles, tokenizer_pairs

    def document(name: str) -> Any:
        found = parse(files[name], path=name) if name in files else None
        return found if isinstance(found, dict) else None

    try:
        config = document("config.json") or {}
        config = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
        if list(contradictions(config)):
            return
        pairs, _ = metadata(config)
        rope_factors(config)
        beside = (document("tokenizer.json"), document("tokenizer_config.json"), files.get("tokenizer.model"))
        more, _ = tokenizer_pairs(
            TokenizerFiles(*beside, document("added_tokens.json") or {}, None, config), pairs[0][2]
        )
        for _, kind, each in (*pairs, *more):
            pair(kind, each)
    except CkptError as fault:
        targets.told(fault)


def _hub(files: dict[str, bytes]) -> None:
    """The pairs of a GGUF file as a model's config and tokenizer."""
    from ckpt_tool.errors import CkptError
    from ckpt_tool.sources.config import stated_config
    from ckpt_tool.systems.llamacpp.gguf.format import FORMAT
    from ckpt_tool.systems.llamacpp.passes.gguf_metadata import hub_tokenizer

    tree = targets.Files(files)
    try:
        if FORMAT.detect(tree):
            catalog = FORMAT.read(tree)
            opened = type("Opened", (), {"catalog": catalog, "tree": tree, "path": "input"})()
            stated = stated_config(opened)
            json.dumps(stated.config if stated else None, allow_nan=False)
            hub_tokenizer(opened)
    except CkptError as fault:
        targets.told(fault)


def _elements(files: dict[str, bytes], made: Any, number: int, start: int, stop: int) -> Any:
    """Elements of an input of a recipe; bytes of those below 8 bits."""
    import numpy as np

    from ckpt_tool.run.compute import numpy_type

    array = made.inputs[number].tensor.chunks[0].array
    item = max(1, array.dtype.bits // 8)
    data = files[array.path][array.offset + start * item : array.offset + stop * item]
    assert 0 <= start <= stop <= array.dtype.nbytes(array.numel) // item and len(data) == (stop - start) * item, (
        number,
        start,
        stop,
    )
    found = np.frombuffer(bytearray(data), np.uint8)
    return found if array.dtype.bits < 8 else found.view(numpy_type(array.dtype))


def _integers(files: dict[str, bytes], each: Any) -> list[int]:
    """What `dequantize._numbers` reads."""
    from ckpt_tool.errors import CkptError

    tensor = each.tensor
    if tensor.numel > 4096 or not tensor.dtype.name.startswith(("I", "U")):
        raise CkptError("too many", code="E1461")
    array = tensor.chunks[0].array
    item = tensor.dtype.bits // 8
    data = files[array.path][array.offset : array.offset + tensor.nbytes]
    return [
        int.from_bytes(data[n : n + item], "little", signed=tensor.dtype.name[0] == "I")
        for n in range(0, len(data), item)
    ]


def _floats(files: dict[str, bytes]) -> None:
    """Every quantised weight as floats: its first and its last values."""
    from ckpt_tool.core.tensor import TensorKey
    from ckpt_tool.errors import CkptError
    from ckpt_tool.formats import registry
    from ckpt_tool.quantised.codecs.choose_codec import make_recipe
    from ckpt_tool.quantised.dequantize import _model_dtype
    from ckpt_tool.quantised.keep_together import found_in
    from ckpt_tool.run.computed import Input
    from ckpt_tool.sources.config import config_in
    from ckpt_tool.weight_schemes.quantised_weights import TensorKind

    tree = targets.Files(files)
    try:
        fmt, _ = registry.detect(tree)
        tensors = {key.name: each for key, each in fmt.read(tree).tensors.items()}
        config = config_in(tree)
        scheme, found = found_in({name: TensorKind(each.dtype, each.shape) for name, each in tensors.items()}, config)
        _model_dtype(config)
        for weight in found.weights.values() if scheme is None or scheme.known else ():
            inputs = {name: Input(tensors[name], tree) for name in weight.names}
            made = make_recipe(weight, TensorKey(weight.made), inputs, lambda each: _integers(files, each))
            for start in {0, max(0, made.numel - 40), made.numel // 2} if made.numel else ():
                made.values(partial(_elements, files, made), start, min(start + 40, made.numel))
    except CkptError as fault:
        targets.told(fault)


_PARTS = {"to-gguf": _metadata, "gguf": _hub, "quantised": _floats}


class _TooLong(BaseException):
    """An alarm."""


def read(group: str, number: int) -> tuple[list[Any], Counter[str]]:
    """The same for the readers alone, in this process: detect, read, look at every tensor, and at what is quantised."""
    name, _, files, done, _ = case(group, number)
    plain = {path: data for path, data in files.items() if isinstance(data, bytes)}

    def late(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        for top in ("base/", "deltas/weight_v000001/", "deltas/weight_v000002/") if group == "deltas" else ("",):
            targets.read_tree({path.removeprefix(top): data for path, data in plain.items() if path.startswith(top)})
        if group in _PARTS:
            _PARTS[group](plain)
    except BaseException as fault:
        if isinstance(fault, KeyboardInterrupt):
            raise
        trace = "".join(traceback.format_exception(fault))[-3000:]
        finding = {"case": f"{group}:{number}", "fixture": name, "edits": done, "what": "reader", "line": "read",
                   "code": 999, "err": "", "trace": trace, "wrote": []}  # fmt: skip
        return [finding], Counter({"reader failed": 1})
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return [], Counter({"reader": 1})


def warm(groups: list[str], scratch: Path) -> None:
    """Run every kind of line once, on a fixture as it is: what forks would each import is loaded."""
    import ckpt_tool.cli as cli

    shown = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = open(os.devnull, "w")
    for group in groups:
        name, single, files = fixtures(group)[0]
        lay(files, scratch / group)
        out = scratch / f"{group}-out"
        out.mkdir()
        for how, line, to in lines_of(group, scratch / group / (next(iter(files)) if single else ""), out, Random(1)):
            cli.run([*line, "--json", "-q"])
            if how and to and to.exists():
                cli.run(["diff", line[1], str(to), "--json", "-q"])
    sys.stdout, sys.stderr = shown
    shutil.rmtree(scratch)


def signature(finding: Any) -> str:
    """What findings of one cause share."""
    frames = re.findall(r'File ".*?/(ckpt_tool/[^"]+)", line (\d+)', finding["trace"])
    last = f"{frames[-1][0]}:{frames[-1][1]}" if frames else re.sub(r"\d+", "#", finding["err"])[:60]
    code = re.search(r'"code": "(E\d+)"', finding["err"])
    verb = finding["line"].split(" ")[0]
    return f"{finding['what'][:40]} | {finding['code']} {code[1] if code else ''} | {last} | {verb}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", action="append", choices=list(GROUPS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "ckpt-fuzz")
    parser.add_argument("--case")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--readers", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="ckpt-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    os.environ["TMPDIR"] = str(given.out)
    tempfile.tempdir = None
    import ckpt_tool.cli.parser  # noqa: F401  all that is loaded late, once for all forks
    from ckpt_tool.formats import registry

    for name in registry.NAMES:
        registry.by_name(name)
    if given.case:
        group, number = given.case.split(":")
        findings, ends = judge(group, int(number), given.out / "case", programs=given.processes, keep=True)
        print(json.dumps({"edits": case(group, int(number))[3], "ends": ends, "findings": findings}, indent=1))
        for finding in findings:
            print(finding["trace"])
        return
    end = time.monotonic() + given.seconds
    number = given.seed
    total = Counter()
    seen = Counter()
    groups = given.only or list(GROUPS)
    warm(groups, scratch / "warm")
    with open(given.out / "findings.jsonl", "a", encoding="utf-8") as log:
        while time.monotonic() < end:
            group = groups[number % len(groups)]
            try:
                if given.readers:
                    findings, ends = read(group, number)
                else:
                    findings, ends = judge(group, number, scratch / "case", programs=given.processes)
            except Exception:  # of this program: told, and no case
                print(f"{group}:{number}", traceback.format_exc()[-600:], file=sys.stderr, flush=True)
                findings = []
                ends = Counter({"no case": 1})
            total += ends
            total[f"cases {group}"] += 1
            for finding in findings:
                seen[signature(finding)] += 1
                log.write(json.dumps({"signature": signature(finding), **finding}) + "\n")
                log.flush()
            number += 1
            if number % 200 == 0:
                (given.out / f"progress-{given.seed}.json").write_text(
                    json.dumps({"next": number, "ends": total, "findings": seen}, indent=1)
                )
    shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps({"next": number, "ends": total, "findings": seen}, indent=1))


if __name__ == "__main__":
    main()
