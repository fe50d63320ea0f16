"""Each verb that removes or replaces, with a fault at every one of its system calls, one at a time.

A scene is a folder with all that a verb works on and a person's files among it. The verb runs once undisturbed and its
calls below the folder are counted; then it runs again for each call, which the kernel refuses (`system_calls`), or at
which the process is killed. After each:

    a file that the undisturbed run leaves as it is is there, bit for bit
    what that run makes, replaces or takes away is as before it or as after it, whole; halves are under hidden names of
    ours alone
    the exit code is 0 or 7; 0 only where all is done; an error is one JSON object with a code and a path, no traceback
    the same command again succeeds, and with `ckpt clean` everything is as after the undisturbed run

EIO and ESTALE at every call, EMFILE at every call that opens, ENOSPC at every call that changes the disk, EACCES at
every call by path. Before a call that changes nothing the disk is as before the next one that does: so kills come at
those that change it, and after the last. The default tier takes a few calls of each scene, `crash` all.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import stat
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import exchanging
import pytest
import system_calls

import ckpt_tool as ckpt

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
KILLED = -signal.SIGKILL
STEP = FIXTURES / "safetensors" / "llama_one_file"
JOB = FIXTURES / "dcp" / "tp2_dp2"
FAULTS = ("EIO", "ESTALE", "EMFILE", "ENOSPC", "EACCES", "kill")
# That `access` says no is its answer.
BY_PATH = {call.name for call in system_calls.CALLS.values() if "f" not in call.places} - {"access"}
# Hidden names of ours, and what differs in them from run to run.
STAGED = r"(.*/)?\.[^/]+\.ckpt-partial(/.*)?"
REMOVED = r"(.*/)?\.[^/]+\.[0-9a-f]{8}\.ckpt-removed(/.*)?"

Snapshot = dict[str, tuple[Any, ...]]


class Scene(NamedTuple):
    """What a verb works on.

    line: the command; words that begin with `@` are paths below the scene. build: lays everything. units: what the
    undisturbed run makes, replaces or takes away, each at once. dissolving: folders of ours in which files go one by
    one. clean: where `ckpt clean` looks afterwards. says: what a run that ends with 0 must have printed, by a key of
    the document.
    """

    line: tuple[str, ...]
    build: Callable[[Path], None]
    units: tuple[str, ...] = ()
    dissolving: tuple[str, ...] = ()
    clean: tuple[str, ...] = ()
    says: str = ""


# -- the scenes --------------------------------------------------------------------------------------------------------


def make_old(folder: Path) -> None:
    """Long ago: a run that may have been written a moment ago is left alone."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 10**6,) * 2, follow_symlinks=False)


def write(path: Path, text: str = "mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def lay_run(root: Path) -> None:
    """Six steps of a Trainer: 200 and 250 may go. A link, an archive, a pointer and the newest keep the others."""
    run = root / "run"
    for number in (100, 150, 200, 250, 300, 400):
        shutil.copytree(STEP, run / f"checkpoint-{number}")
    write(run / "checkpoint-400/trainer_state.json", json.dumps({"best_model_checkpoint": "out/checkpoint-300"}))
    (run / ".best").symlink_to("checkpoint-100")
    (run / "archive").mkdir()
    ckpt.delta(run / "checkpoint-150", run / "checkpoint-200", run / "archive/201", dedup=True, fsync=False)
    write(run / "notes.txt")
    write(run / ".thesis.ckpt-partial/chapter.tex")
    make_old(root)


def lay_torn_run(root: Path) -> None:
    """Three steps, of which the newest is broken and the last complete one is named by a pointer; a person has put
    files into the first."""
    run = root / "run"
    for number in (100, 200, 300, 400):
        shutil.copytree(STEP, run / f"checkpoint-{number}")
    os.truncate(run / "checkpoint-400/model.safetensors", 1000)
    write(run / "latest", "checkpoint-300")
    write(run / "checkpoint-100/eval/results.csv")
    make_old(root)


def lay_around(root: Path) -> None:
    """What a person keeps beside an output, under names like ours too."""
    write(root / ".thesis.ckpt-partial/chapter.tex")
    write(root / ".photos.ckpt-removed/photo.jpg")
    write(root / ".photos.0123abcd.ckpt-removed/photo.jpg")
    write(root / "out-old/a.txt")
    write(root / "notes.txt")


def lay_replaced_folder(root: Path) -> None:
    shutil.copytree(JOB, root / "source")
    shutil.copytree(STEP, root / "out")
    lay_around(root)


def lay_replaced_file(root: Path) -> None:
    shutil.copytree(JOB, root / "source")
    shutil.copy(STEP / "model.safetensors", root / "out.safetensors")
    lay_around(root)


def lay_adapter(root: Path) -> None:
    shutil.copytree(FIXTURES / "convert/llama/hf", root / "base")
    shutil.copytree(FIXTURES / "peft/on_llama", root / "adapter")
    shutil.copytree(STEP, root / "out")
    lay_around(root)


def lay_steps(root: Path) -> None:
    """Two steps of a run with what a person keeps in the second."""
    for number in (1, 2):
        shutil.copytree(STEP, root / f"run/checkpoint-{number}")
    deep = root.joinpath("run/checkpoint-2", *"abcdefghi")
    write(deep / "notes.txt")
    (root / "run/checkpoint-2/link").symlink_to("a/b/c/d/e/f/g/h/i/notes.txt")
    lay_around(root)


def lay_archive(root: Path) -> None:
    """The same steps, the second as an archive, and an older output."""
    lay_steps(root)
    run = root / "run"
    ckpt.delta(run / "checkpoint-1", run / "checkpoint-2", root / "archive", dedup=True, fsync=False)


def lay_replaced_archive(root: Path) -> None:
    lay_steps(root)
    run = root / "run"
    ckpt.delta(run / "checkpoint-1", run / "checkpoint-1", root / "archive", dedup=True, fsync=False)


def lay_patched(root: Path) -> None:
    """An archive of files that a checkpoint accounts for, so that its step may be replaced again."""
    run = root / "run"
    for number in (1, 2):
        shutil.copytree(STEP, run / f"checkpoint-{number}")
    write(run / "checkpoint-2/README.md", "changed")
    ckpt.delta(run / "checkpoint-1", run / "checkpoint-2", root / "archive", dedup=True, fsync=False)
    shutil.copytree(STEP, root / "out")
    lay_around(root)


def lay_leavings(root: Path) -> None:
    """What a killed run has staged, what another had replaced and what a killed prune had begun to delete; a person's
    files in the first two."""
    from ckpt_tool.storage.output.removal import measure, retire
    from ckpt_tool.storage.output.replaced import entries_below
    from ckpt_tool.storage.output.staging import FILES, Staging, _mark_replaced

    lay_around(root)
    with Staging(root / "out", "plan", ["f", "sub/g", "sub/h"]) as staging:
        for name in ("f", "sub/g", "sub/h"):
            os.close(staging.create(name, 3))
    write(root / ".out.ckpt-partial/notes.txt")
    with Staging(root / "other", "plan", ["model.safetensors"]) as staging:
        os.close(staging.create("model.safetensors", 3))
    replaced = root / ".older.ckpt-partial"
    shutil.copytree(STEP, replaced)
    _mark_replaced(replaced, entries_below(replaced))
    write(replaced / FILES, json.dumps(sorted(path.name for path in STEP.iterdir())))
    write(replaced / "photo.jpg")
    shutil.copytree(STEP, root / "checkpoint-7")
    retire(root / "checkpoint-7", measure(root / "checkpoint-7"))


SHARDED = ("--to", "sharded", "--tp", "2", "--threads", "1")
SCENES = {
    "prune": Scene(
        ("prune", "@run", "--keep-last", "1"),
        lay_run,
        units=("run/checkpoint-200", "run/checkpoint-250"),
        dissolving=(REMOVED,),
        clean=("run",),
        says="remove",
    ),
    "prune_with_others": Scene(
        ("prune", "@run", "--keep-last", "1", "--with-other-files"),
        lay_torn_run,
        units=("run/checkpoint-100", "run/checkpoint-200"),
        dissolving=(REMOVED,),
        clean=("run",),
        says="remove",
    ),
    "latest": Scene(("latest", "@run"), lay_run, says="path"),
    "latest_torn": Scene(("latest", "@run"), lay_torn_run, says="path"),
    "clean": Scene(
        ("clean", "@", "--remove"),
        lay_leavings,
        dissolving=(r"\.(out|other|older)\.ckpt-partial(/.*)?", r"\.checkpoint-7\.[0-9a-f]{8}\.ckpt-removed(/.*)?"),
        clean=("",),
        says="leavings",
    ),
    "convert_force": Scene(
        ("convert", "@source", "@out", *SHARDED, "--force"),
        lay_replaced_folder,
        units=("out",),
        dissolving=(STAGED,),
        clean=("",),
    ),
    "convert_force_file": Scene(
        ("convert", "@source", "@out.safetensors", "--to", "safetensors", "--threads", "1", "--force"),
        lay_replaced_file,
        units=("out.safetensors",),
        dissolving=(STAGED,),
        clean=("",),
    ),
    "reshard_force": Scene(
        ("reshard", "@source", "@out", "--tp", "1", "--dp", "1", "--threads", "1", "--force"),
        lay_replaced_folder,
        units=("out",),
        dissolving=(STAGED,),
        clean=("",),
    ),
    "merge_force": Scene(
        ("merge", "@base", "@adapter", "@out", "--method", "lora", "--threads", "1", "--force"),
        lay_adapter,
        units=("out",),
        dissolving=(STAGED,),
        clean=("",),
    ),
    "dedup": Scene(
        ("delta", "@run/checkpoint-1", "@run/checkpoint-2", "@archive", "--dedup", "--threads", "1"),
        lay_steps,
        units=("archive",),
        dissolving=(STAGED,),
        clean=("",),
    ),
    "dedup_force": Scene(
        ("delta", "@run/checkpoint-1", "@run/checkpoint-2", "@archive", "--dedup", "--threads", "1", "--force"),
        lay_replaced_archive,
        units=("archive",),
        dissolving=(STAGED,),
        clean=("",),
    ),
    "patch": Scene(
        ("patch", "@run/checkpoint-1", "@archive", "@out", "--threads", "1"),
        lay_archive,
        units=("out",),
        dissolving=(STAGED,),
        clean=("",),
    ),
    "patch_force": Scene(
        ("patch", "@run/checkpoint-1", "@archive", "@out", "--threads", "1", "--force"),
        lay_patched,
        units=("out",),
        dissolving=(STAGED,),
        clean=("",),
    ),
}


# -- what is there -----------------------------------------------------------------------------------------------------


def look(folder: Path) -> Snapshot:
    """Every path below with its kind, its mode, and its bytes or where it links to."""
    found: Snapshot = {}
    for above, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(above, name)
            info = os.lstat(path)
            what: Any = ""
            if stat.S_ISLNK(info.st_mode):
                what = os.readlink(path)
            elif stat.S_ISREG(info.st_mode):
                with open(path, "rb") as f:
                    what = f.read()
            found[os.path.relpath(path, folder)] = (stat.filemode(info.st_mode), what)
    return found


def below(found: Snapshot, unit: str) -> Snapshot:
    return {path: row for path, row in found.items() if f"{path}/".startswith(f"{unit}/")}


def is_any_of(path: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, path, re.DOTALL) for pattern in patterns)


class Play:
    """A scene in a folder of its own, and what is known of its undisturbed run."""

    def __init__(self, scene: Scene, root: Path, server: Any) -> None:
        self.scene = scene
        self._server = server
        self.place = root / "place"
        self._kept = root / "kept"
        self._kept.mkdir()
        scene.build(self._kept)
        words = [str(self.place / word[1:]) if word[0] == "@" else word for word in scene.line]
        self._line = [*words, "--json", "-q"]
        self.reset()
        self.before = look(self.place)
        done = self.run()
        assert done.status == 0, done.err
        self.calls: list[str] = done.ops
        self._said = self._read_answer(done)
        self._clean()
        self.after = look(self.place)
        mine = [path for path, row in self.before.items() if row[1] == b"mine" and not self._in_unit(path)]
        assert mine == [path for path in mine if self.after.get(path) == self.before[path]]
        self.reset()
        self._recovered = set[str]()
        self.count = 0

    def reset(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self._kept, self.place, symlinks=True)

    def run(self, **fault: Any) -> Any:
        return self._server.run(self._line, under=self.place, kernel=True, **fault)

    def _clean(self) -> None:
        for folder in self.scene.clean:
            line = ["clean", str(self.place / folder), "--remove", "-q"]
            done = self._server.run(line, under=self.place)
            assert done.status == 0, done.err

    def _read_answer(self, done: Any) -> Any:
        """What the verb must say when it succeeds, but for names that differ from run to run."""
        document = json.loads(done.out)
        said = document[self.scene.says] if self.scene.says else None
        return json.loads(re.sub(r"\.[0-9a-f]{8}\.ckpt-removed", ".ckpt-removed", json.dumps(said)))

    # -- one fault -----------------------------------------------------------------------------------------------------

    def places_of(self, fault: str) -> list[int]:
        """At which calls of the undisturbed run a fault makes sense."""
        names = [line.partition(" ")[0] for line in self.calls]
        changing = [at for at, name in enumerate(names, 1) if name.endswith("!")]
        if fault == "kill":
            last = changing[-1] if changing else 0
            return [*changing, *range(last + 1, min(last + 2, len(names) + 1))]
        if fault == "ENOSPC":
            return sorted({*changing, *(at for at, name in enumerate(names, 1) if name in ("fsync", "close"))})
        if fault == "EMFILE":
            return [at for at, name in enumerate(names, 1) if "open" in name]
        if fault == "EACCES":
            return [at for at, name in enumerate(names, 1) if name.rstrip("!") in BY_PATH]
        return list(range(1, len(names) + 1))

    def strike(self, fault: str, at: int, *, on: bool = False) -> None:
        """Run with a fault at one call, and look at what it has left."""
        how = {"do": "kill"} if fault == "kill" else {"do": "errno", "number": getattr(errno, fault)}
        done = self.run(at=at, on=on, **how)
        struck = done.ops[at - 1] if len(done.ops) >= at else "no such call"
        self.count += len(done.ops) >= at
        try:
            there = look(self.place)
            self._check_files(there)
            self._check_status(done, fault, there)
            if there != self.before:
                self._recover(there)
                self.reset()
        except AssertionError as e:
            self.reset()
            raise AssertionError(f"{fault} at call {at}, {struck}: {e}\n{done.err}") from e

    def _check_status(self, done: Any, fault: str, there: Snapshot) -> None:
        if done.status == KILLED:
            assert fault == "kill"
            return
        if fault == "EACCES" and done.status == 2:
            assert done.error["code"] == "E2617"  # a link to what nobody may look at is one that is not followed
            return
        assert done.status in (0, 7), f"exit {done.status}"
        assert "Traceback" not in done.err
        if done.status == 7:
            error = done.error
            assert re.fullmatch(r"E\d{4}", error["code"]) and error["path"], f"no code or path: {error}"
            assert done.out == ""
            return
        assert self._read_answer(done) == self._said, f"exit 0, and it says {done.out}"
        for unit in self.scene.units:
            assert below(there, unit) == below(self.after, unit), f"exit 0, and {unit} is not done"

    def _check_files(self, there: Snapshot) -> None:
        """What the undisturbed run leaves alone is there; each unit is as before or as after; nothing else is there."""
        scene = self.scene
        known = dict[str, tuple[Any, ...]]()
        for unit in scene.units:
            now = below(there, unit)
            hidden = {exchanging.restored(path): row for path, row in there.items() if exchanging.restored(path)}
            if hidden and not exchanging.HAS_RENAMEAT2:
                replaced = now == below(self.after, unit)
                whole = exchanging.is_left_of(hidden, below(self.before, unit), replaced=replaced)
                assert whole, f"set aside by halves: {sorted(hidden)}"
                known |= {path: row for path, row in there.items() if exchanging.restored(path)}
                if not now and (self._kept / unit).is_dir():
                    print(exchanging.WEAKER)
                    continue
            assert now in (below(self.before, unit), below(self.after, unit)), f"{unit} by halves: {sorted(now)}"
            known |= now
        for path, row in self.before.items():
            may_go = path not in self.after and is_any_of(path, scene.dissolving)
            if self._in_unit(path) or (may_go and path not in there):
                continue
            assert there.get(path) == row, f"{path} is not as it was"
            known[path] = row
        others = [path for path in there.keys() - known.keys() if not is_any_of(path, scene.dissolving)]
        assert not others, f"left over: {others}"

    def _in_unit(self, path: str) -> bool:
        return any(f"{path}/".startswith(f"{unit}/") for unit in self.scene.units)

    def _recover(self, there: Snapshot) -> None:
        """The same command again, and `clean`; once for each state of the disk."""
        state = self._state_of(there)
        if state in self._recovered:
            return
        done = self.run()
        whole = all(below(there, unit) == below(self.after, unit) for unit in self.scene.units)
        if done.status == 5 and done.error["code"] == "E0504" and self._is_asked_about(there):
            return
        exists = done.status == 5 and whole and "--force" not in self._line
        assert done.status == 0 or exists, f"run again, it ends with {done.status}: {done.err}"
        self._clean()
        again = look(self.place)
        differing = sorted(path for path in again.keys() | self.after.keys() if again.get(path) != self.after.get(path))
        assert not differing, f"run again, these are not as they should be: {differing}"
        self._recovered.add(state)

    def _is_asked_about(self, there: Snapshot) -> bool:
        """Is the old output whole in the staging folder, where nothing says that it may go?"""
        unit = self.scene.units[0]
        inside = f".{unit}.ckpt-partial/"
        staged = {path.removeprefix(inside): row for path, row in there.items() if path.startswith(inside)}
        old = below(self.before, unit)
        return exchanging.is_asked_about(
            staged, {path.removeprefix(f"{unit}/"): row for path, row in old.items() if path != unit}
        )

    def _state_of(self, there: Snapshot) -> str:
        """The state of the disk, but for what differs from run to run: a journal's processes, times, seals and plan
        (which names the source's inodes), random names."""
        text = repr(sorted(there.items()))
        return re.sub(
            r'\.[0-9a-f]{8}\.ckpt-re(moved|placed)|[0-9a-f]{16} (?=\{)|"(pid|began)": ?[\d.]+|"plan": ?"[^"]*"',
            "",
            text,
        )


@pytest.fixture(scope="module")
def plays(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Play]:
    """Each scene once in a process that runs tests."""
    reason = system_calls.why_not()
    if reason:
        pytest.skip(reason)
    made = dict[str, Play]()

    def play(name: str) -> Play:
        if name not in made:
            made[name] = Play(SCENES[name], tmp_path_factory.mktemp(name), server)
        return made[name]

    return play


def strike_all(play: Play, fault: str, places: Iterable[int]) -> None:
    """All of them, and then the failures at once."""
    failures = []
    for at in places:
        try:
            play.strike(fault, at)
        except AssertionError as e:
            failures.append(str(e))
    assert not failures, f"{len(failures)} of {play.count}:\n" + "\n".join(failures[:40])


@pytest.mark.crash
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENES)
def test_a_fault_at_every_system_call(name: str, fault: str, plays: Callable[[str], Play]) -> None:
    play = plays(name)
    before = play.count
    strike_all(play, fault, play.places_of(fault))
    print(f"{name}: {len(play.calls)} calls, {play.count - before} times {fault}")


@pytest.mark.share(5)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENES)
def test_a_fault_at_some_system_calls(name: str, fault: str, plays: Callable[[str], Play]) -> None:
    """The default tier's share: some calls all over the run, others for each fault, and the last that a kill meets."""
    play = plays(name)
    places = play.places_of(fault)
    step = max(1, len(places) // 5)
    first = zlib.crc32(f"{name} {fault}".encode()) % step
    strike_all(play, fault, sorted({*places[first::step], *play.places_of("kill")[-2:]} & set(places)))


@pytest.mark.parametrize("fault", ["EIO", "EACCES"])
def test_marks_and_lists_that_can_not_be_read_make_nothing_ours(fault: str, plays: Callable[[str], Play]) -> None:
    """Without its mark or its list a folder of ours looks like all ours, and a person's like one of ours."""
    play = plays("clean")
    asked = [at for at, line in enumerate(play.calls, 1) if line.startswith("lgetxattr") or "-files" in line]
    strike_all(play, fault, set(asked) & set(play.places_of(fault)))


def test_a_call_that_fails_is_refused_by_the_kernel(plays: Callable[[str], Play]) -> None:
    """The injection itself: the call is not carried out, whatever code asks, and only the one is struck."""
    play = plays("clean")
    renames = [at for at, line in enumerate(play.calls, 1) if line.startswith("unlinkat!")]
    done = play.run(at=renames[0], do="errno", number=errno.ESTALE)
    there = look(play.place)
    play.reset()
    assert (done.status, done.error["code"]) == (7, "E0700"), done.err
    assert os.strerror(errno.ESTALE) in done.error["message"]
    assert there == play.before
