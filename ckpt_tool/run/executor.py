"""The executor: carries out a plan in bounded memory, with threads, and commits the output in one step.

Each thread takes units (shares of about 64 MiB) from a queue that prefers units whose output files no other thread is
writing. A unit is walked in blocks of 256 KiB (strided work: 1 MiB): fill from the sources, hash, cast, drain to the
outputs. The hash is over exactly the bytes that are written, so a digest that is right proves the values arrived; it is
computed on the way, which costs a tenth of the copy. With `verify="off"` runs go by `copy_file_range`, unhashed.

Memory: threads x (block + scratch), a few MiB each, whatever the checkpoint's size; what is stored transposed
takes up to `PANEL` more a thread, less where `memory` is less. A worker's failure stops the others and fails the run.
What is staged stays for the same command to go on with, unless it can't be trusted (a source that changed, bad input, a
failed fsync): then nothing is left.
"""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckpt_tool import compiled
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.progress import Progress, working_on
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import (
    CkptError,
    InputError,
    ReplicasDiffer,
    SourceChanged,
    UnsafeInput,
)
from ckpt_tool.plan.plan import Move, Plan
from ckpt_tool.plan.schedule import Unit, units
from ckpt_tool.run import replicas
from ckpt_tool.run.blocks import BlockReader, Sources, StagedFiles, Writer
from ckpt_tool.run.checksum import ChecksummedRange
from ckpt_tool.run.digest import root
from ckpt_tool.run.finish import check_records, copy_sidefiles, fill_patches, sync_all, write_all
from ckpt_tool.run.prefetch import Prefetch
from ckpt_tool.run.threads import Workers
from ckpt_tool.run.transposed import PANEL
from ckpt_tool.run.walk import ROOM, STRIDED_BLOCK, Mover, Movers, WalkBuffers, Walks, is_computed
from ckpt_tool.storage.descriptors import close_written
from ckpt_tool.storage.output.journal import PartStatus
from ckpt_tool.storage.output.replaced import ReplacedOutput
from ckpt_tool.storage.output.staging import Staging
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    from ckpt_tool.run.hashes import FileHashes
    from ckpt_tool.run.staged import Line
    from ckpt_tool.run.upload import Upload

WRITING = "writing"  # the phase in which values move
_SHARES = 4096  # that workers claim, at most
_PAUSE = 0.5  # seconds between two looks at others


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has written."""

    # of the values as read, over each move's line, but of what is made while it is read and rounded then
    digests: dict[TensorKey, str]
    digests_out: dict[TensorKey, str]  # as written
    overflows: dict[TensorKey, int]
    committed: bool
    parts: tuple[PartStatus, ...] = ()  # of a part that did not commit: how far each part is that has begun


Check = Callable[["Path | Upload", dict[TensorKey, str], dict[TensorKey, str]], None]  # staged, digests out and in


class SealWriter(Protocol):
    """Files that say what the others are, by their hashes: a signature, an attestation."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that lie in the output."""
        ...

    def files(self, hashes: Mapping[str, str], result: Result) -> Iterable[tuple[str, bytes]]:
        """(name, content) of each of `names`. hashes: path -> SHA-256 in hex of every other file. Called last of all
        before the commit."""
        ...


@dataclass(slots=True)
class RunState:
    """What the threads share."""

    queue: list[tuple[int, Unit]]
    waiting: Counter[int] = field(default_factory=Counter)  # output file -> bytes of the queue that go to it
    busy: dict[int, frozenset[int]] = field(default_factory=dict)
    leaves: dict[int, dict[int, bytes]] = field(default_factory=dict)  # move -> first leaf -> hashes
    leaves_out: dict[int, dict[int, bytes]] = field(default_factory=dict)
    overflows: dict[int, int] = field(default_factory=dict)
    source_pieces: dict[int, list[ChecksummedRange]] = field(default_factory=dict)
    output_pieces: dict[int, list[ChecksummedRange]] = field(default_factory=dict)
    hashes: FileHashes | None = None
    error: BaseException | None = None
    stop: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a plan is carried out."""

    # threads, memory: bounds (memory in bytes); threads are lowered until the buffers fit
    threads: int | None = None
    memory: int = 1 << 30
    verify: str = "quick"  # `off`, `quick` or `full`; digests are computed unless `off`
    resume: bool = True  # go on from what an earlier run has staged
    force: bool = False  # replace what is there
    fsync: bool = True  # wait for the disk before the commit
    allow_lossy: bool = False  # casts may overflow, and are counted


class Executor:
    """One run of one plan, whose output grows in a staging folder. `StoreExecutor` has those that grow in a store.

    Args:
        trees: the sources by the root that the plan names.
        part: (i, n) where this run moves share i of n, from 1.
        worker: its name, where it is one of any number that claim what they move.
        check: called with the staged output and the written digests before the commit; raises to refuse it.
        movers: who moves the units (`device/walk.py`), the CPU if None.
        seal: what is added to a whole output in a folder; then every file is hashed on the way.
        replaced: what may be removed of the output that is there, with `options.force`.
    """

    in_order = False  # are units moved in their order, whatever files other threads are writing?

    def __init__(
        self,
        plan: Plan,
        trees: Mapping[str, Tree],
        options: RunOptions = RunOptions(),  # frozen
        *,
        part: tuple[int, int] | None = None,
        worker: str | None = None,
        progress: Progress | None = None,
        check: Check | None = None,
        movers: Movers | None = None,
        seal: SealWriter | None = None,
        replaced: ReplacedOutput | None = None,
    ) -> None:
        self.plan = plan
        self.options = options
        self.part = part
        self.worker = worker
        self.progress = progress
        self.check = check
        self.sources = Sources(plan.sources, dict(trees))
        self.hashing = options.verify != "off"
        self.full = options.verify == "full"
        per_thread = 4 * STRIDED_BLOCK
        wanted = options.threads or min(os.cpu_count() or 1, 8)
        self.threads = max(1, min(wanted, options.memory // per_thread))
        if movers is not None:
            self.threads = max(1, min(self.threads, movers.threads))

        self._movers = movers
        self._seal = seal
        self._replaced = replaced
        self._panel = max(STRIDED_BLOCK, min(PANEL, options.memory // self.threads - per_thread))
        self.units = units(plan.moves)
        self._names = [file.path for file in plan.outputs]
        self._record_starts: dict[int, set[int]] = {}
        for record in plan.records:
            self._record_starts.setdefault(record.file, set()).add(record.offset)

        self._patch_starts: dict[int, frozenset[int]] = {}
        for number, (file, arrays) in enumerate(zip(plan.outputs, plan.arrays, strict=True)):
            if any(patch.kind == "crc32" for patch in file.patches):
                self._patch_starts[number] = frozenset(array.offset for array in arrays)

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Carry the plan out and commit. With a part, only the last one to finish commits (`committed` says)."""
        if not self.worker and (self.part is None or self.part[0] == 1):
            replicas.look_ahead(self.plan.moves, self.sources, whole=self.full, threads=self.threads)
        return self._carry_out()

    def _carry_out(self) -> Result:
        plan = self.plan
        sealed = self._seal.names if self._seal else ()
        staging = Staging(
            Path(plan.destination),
            "+".join((plan.identifier(), *sealed)),  # what another seal has left there is not this run's
            [*self._names, *sealed],
            resume=self.options.resume,
            force=self.options.force,
            replaced=self._replaced,
            part=self.part or self.worker,
        )
        with staging:
            try:
                return self._run_claims(staging) if self.worker else self._run(staging)
            except ReplicasDiffer as e:
                staging.discard()
                raise replicas.all_of_them(plan.moves, self.sources, e, threads=self.threads) from e
            except (InputError, SourceChanged, UnsafeInput):
                staging.discard()  # what was staged can't be trusted, or will never be finished
                raise
            except CkptError:
                if staging.failed_sync or not staging.worth_keeping:
                    staging.discard()
                raise

    def _run(self, staging: Staging) -> Result:
        self._prepare(staging)
        own_units = self._list_own_units()
        state = RunState(list(own_units))
        done = self._take_up(staging, state)
        if self._seal is not None:
            self._hash_on_the_way(staging, state, own_units)
        total = sum(unit.nbytes for _, unit in own_units)
        staging.begin(len(own_units), total)
        if self.progress:
            self.progress.start(total - done, WRITING)
        self._move(staging, state)
        self.sources.check()
        if self.part is not None:
            staging.record({"part": True})
            journals = staging.close_part()
            if journals is None or not all(journal and journal[-1].get("part") for journal in journals):
                return Result({}, {}, {}, committed=False, parts=tuple(staging.statuses()))
            own_numbers = {number for number, _ in own_units}
            self._take_over(staging, state, [line for journal in journals for line in journal], own_numbers)
        result = self._finish(staging, state)
        if self.progress:
            self.progress.finish()
        return result

    def _run_claims(self, staging: Staging) -> Result:
        """As one of any number of workers: what is claimed is done, until all is; one of them commits."""
        self._prepare(staging, heads=False)
        shares = _share_out(self.units)
        state = RunState([])
        own_numbers = set[int]()
        total = sum(unit.nbytes for unit in self.units)
        staging.begin(len(self.units), total)
        if self.progress:
            self.progress.start(total, WRITING)

        waits = Waits(self.progress)
        done_shares = set[int]()
        with staging.claims(len(shares)) as claims:
            while not staging.gone:
                others = claims.done() - done_shares
                done_shares |= others
                self.advance(sum(unit.nbytes for number in others for _, unit in shares[number]))
                taken = claims.take(self.threads)
                if taken:
                    state.queue[:] = [pair for share in taken for pair in shares[share.number]]
                    own_numbers |= {number for number, _ in state.queue}
                    if any(share.over for share in taken) and self.hashing:
                        self.advance(self._sift(staging, state, staging.lines()))
                    self._move(staging, state)
                    self.sources.check()
                    for share in taken:
                        claims.finish(share.number)
                        done_shares.add(share.number)
                elif claims.left():
                    waits.a_while("waiting for what other workers have claimed")
                elif claims.take_commit():
                    self._take_over(staging, state, staging.lines(), own_numbers)
                    result = self._finish(staging, state)
                    if self.progress:
                        self.progress.finish()
                    return result
                else:
                    waits.a_while("waiting for the worker that commits")

        return Result({}, {}, {}, committed=False)

    def _hash_on_the_way(self, staging: Staging, state: RunState, mine: Sequence[tuple[int, Unit]]) -> None:
        """Take the files' hashes while the queue is moved, in the order in which that goes best."""
        from ckpt_tool.run.file_parts import in_order_of_files
        from ckpt_tool.run.hashes import FileHashes

        state.hashes = FileHashes(self.plan, staging, self.threads)
        waiting = {number for number, _ in state.queue}
        for number, unit in mine:
            if number not in waiting:
                state.hashes.landed(unit, later=True)
        state.queue[:] = in_order_of_files(self.plan, state.queue)

    def _list_own_units(self) -> list[tuple[int, Unit]]:
        """This part's units, numbered."""
        if self.part is None:
            return list(enumerate(self.units))

        from ckpt_tool.run.shares import of_part

        numbers = of_part([unit.nbytes for unit in self.units], self.part)
        return [(number, self.units[number]) for number in numbers]

    def _prepare(self, staging: Staging, *, heads: bool = True) -> None:
        """Make and preallocate every file, and write the bytes that are known already. Safe to repeat, but for heads
        that another has filled the holes of."""
        for file in self.plan.outputs:
            fd = staging.create(file.path, file.size)
            try:
                for offset, data in file.literals if heads else ():
                    write_all(fd, data, offset, file.path)
            finally:
                close_written(fd, staging.path / file.path)

    # -- going on from a journal ----------------------------------------------------------------------------------

    def _take_up(self, staging: Staging, state: RunState) -> int:
        """Take units off the queue that an earlier run finished, after hashing what it wrote. Returns their bytes."""
        if self.part is None and staging.went_on:
            self._clear_gaps(staging)
        if not self.hashing or not staging.resumed:
            return 0
        if self.progress:
            self.progress.start(0, "checking what an earlier run wrote")
        done = self._sift(staging, state, staging.resumed, self.advance)
        if self.progress:
            self.progress.finish()
            self.progress.note(f"{done} bytes were written by an earlier run and are as they should be")
        return done

    def _take_over(self, staging: Staging, state: RunState, journal: Sequence[Line], mine: AbstractSet[int]) -> None:
        """What others staged, all but the units `mine`, looked at again now that none of them is at work: heads are
        written again, units that are not what their journals say are moved again. Unhashed runs (`verify="off"`)
        believe the journals."""
        self._prepare(staging)
        self._clear_gaps(staging)
        if not self.hashing:
            return
        state.queue[:] = [(number, unit) for number, unit in enumerate(self.units) if number not in mine]
        self._sift(staging, state, journal)
        if state.queue:
            if self.progress:
                self.progress.note(f"{len(state.queue)} units of other parts are not as they were written: moved again")
            self._move(staging, state)
            self.sources.check()

    def _sift(
        self,
        staging: Staging,
        state: RunState,
        journal: Sequence[Line],
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> int:
        """Take those units off the queue that are staged as the journal says. Returns their bytes."""
        from ckpt_tool.run.staged import intact

        lines = {line["unit"]: line for line in journal if type(line.get("unit")) is int}
        files = StagedFiles(staging.open, self._names)
        found = intact(
            self.plan.moves,
            state.queue,
            lines,
            files,
            threads=self.threads,
            room=_fd_room(self.threads),
            panel=self._panel,
            advance=advance,
        )
        done = sum(unit.nbytes for number, unit in state.queue if number in found)
        self.gather_leaves((lines[number] for number in found), state)
        state.queue[:] = [(number, unit) for number, unit in state.queue if number not in found]
        return done

    def _clear_gaps(self, staging: Staging) -> None:
        """Zeros where nobody writes, whatever someone has left there."""
        from ckpt_tool.run.staged import Gaps

        gaps = Gaps(self.plan)
        reader = BlockReader(StagedFiles(staging.open, self._names), 1, {})
        try:
            for number, file in enumerate(self.plan.outputs):
                for offset, nbytes in gaps.stray(number, reader):
                    write_all(reader.fd(number), bytes(nbytes), offset, file.path)
        finally:
            reader.close()

    def gather_leaves(self, lines: Iterable[Line], state: RunState) -> None:
        for line in lines:
            for move, first, text, out_first, out_text in line.get("leaves", ()):
                if text:  # in a share shorter than a leaf none may begin: `first` is then another share's leaf
                    state.leaves.setdefault(move, {})[first] = b64decode(text)
                if out_text:
                    state.leaves_out.setdefault(move, {})[out_first] = b64decode(out_text)
            for move, count in line.get("overflows", {}).items():
                state.overflows[int(move)] = state.overflows.get(int(move), 0) + count

    # -- the threads ------------------------------------------------------------------------------------------------

    def _move(self, staging: Staging, state: RunState) -> None:
        """Move all units of the queue into the staging folder."""
        record = staging.record if self.hashing else lambda line: None
        self.work(lambda room: Writer(staging, self._names, room, self._patch_starts), record, state)

    def work(self, writer: Callable[[int], Writer], record: Callable[[dict[str, Any]], None], state: RunState) -> None:
        """Move all units of the queue. writer: makes a thread's, with so many descriptors. record: of a unit done."""
        count = max(1, min(self.threads, len(state.queue)))
        for _, unit in state.queue:
            for file in unit.files:
                state.waiting[file] += unit.nbytes
        room = _fd_room(count)

        def stop(interruption: BaseException) -> None:  # the entry point says which signal it was
            state.stop = True

        Workers(partial(self._worker, partial(writer, room), record, state, room), count).run(stop)
        if state.error is not None:
            raise state.error

    def _worker(
        self, new_writer: Callable[[], Writer], record: Callable[[dict[str, Any]], None], state: RunState, room: int
    ) -> None:
        reader = BlockReader(self.sources, room, self._record_starts, panel=self._panel)
        writer = new_writer()
        block = memoryview(bytearray(ROOM))
        scratch = memoryview(bytearray(STRIDED_BLOCK))
        thread = threading.get_ident()
        mover = None
        prefetch = self._prefetch_units(state, reader, thread)

        def advance(nbytes: int) -> None:
            self.advance(nbytes)
            prefetch.passed(nbytes)

        job = WalkBuffers(reader, writer, block, scratch, self.hashing, lambda: state.stop, advance)
        try:
            mover = Walks(job, self.plan.moves) if self._movers is None else self._movers.open(job, self.plan.moves)
            for taken in prefetch:
                working_on(self.progress, self._names[min(taken[1].files, default=0)])
                line = self._move_unit(taken, mover, state)
                if line is not None:
                    record(line)
                    if state.hashes is not None:
                        state.hashes.landed(taken[1])
        except BaseException as e:  # handed to the main thread, which raises it
            with state.lock:
                state.error = state.error or e
                state.stop = True
        finally:
            with state.lock:
                state.busy.pop(thread, None)
                for pieces, into in ((reader.pieces, state.source_pieces), (writer.pieces, state.output_pieces)):
                    for file, collected in pieces.items():
                        into.setdefault(file, []).extend(collected.take())
            try:
                if mover is not None:
                    mover.close()
                reader.close()
                writer.close()
            except (OSError, CkptError) as e:
                with state.lock:
                    state.error = state.error or e

    def _prefetch_units(self, state: RunState, reader: BlockReader, thread: int) -> Prefetch[tuple[int, Unit]]:
        """A thread's units. Of a store the next one's bytes are asked for before one is over; a card reads in its own
        way."""
        moves = self.plan.moves
        is_remote = self._movers is None and self.sources.has_remote_files

        def take() -> tuple[int, Unit] | None:
            with state.lock:
                return None if state.stop else self._take_unit(state, thread)

        def expect(taken: tuple[int, Unit], then: bool) -> None:
            if is_remote:
                reader.expect(((moves[index], start, stop) for index, start, stop in taken[1].items), then=then)

        return Prefetch(take, expect, lambda taken: taken[1].nbytes, early=is_remote)

    def _take_unit(self, state: RunState, thread: int) -> tuple[int, Unit] | None:
        """A unit whose output files no other thread is writing, of those the one for the file with the most to come, so
        that no file is left for all threads at the end; else the first."""
        state.busy.pop(thread, None)
        if not state.queue:
            return None
        taken = {file for files in state.busy.values() for file in files}
        index = 0
        most_waiting = -1
        for place, (_, unit) in enumerate(state.queue[:256] if not self.in_order else ()):
            if unit.files & taken:
                continue
            waiting = max(map(state.waiting.__getitem__, unit.files), default=0) if len(unit.files) <= 8 else 0
            if waiting > most_waiting:
                index = place
                most_waiting = waiting
        number, unit = state.queue.pop(index)
        for file in unit.files:
            state.waiting[file] -= unit.nbytes
        state.busy[thread] = unit.files
        return number, unit

    def _move_unit(self, taken: tuple[int, Unit], mover: Mover, state: RunState) -> dict[str, Any] | None:
        """Move one unit. Returns its journal line; None when the run was stopped in it."""
        number, unit = taken
        walked = mover.move_unit(unit.items)
        if walked is None:
            return None
        leaves = []
        hashes = []
        overflows = dict[str, int]()
        for (index, _, _), walk in zip(unit.items, walked, strict=True):
            if walk.lost:
                overflows[str(index)] = overflows.get(str(index), 0) + walk.lost
            if self.hashing:
                source = walk.source_leaves
                out = walk.out_leaves
                leaves.append(
                    [index, source.first, b64encode(source.leaves).decode(), out.first, b64encode(out.leaves).decode()]
                )
                hashes.append(walk.hash_written())
        line = {"unit": number, "bytes": unit.nbytes, "hashes": hashes, "leaves": leaves, "overflows": overflows}
        with state.lock:
            self.gather_leaves([line], state)
        return line

    def advance(self, nbytes: int) -> None:
        if self.progress:
            self.progress.advance(nbytes)

    # -- the end ------------------------------------------------------------------------------------------------------

    def digests(self, state: RunState) -> tuple[dict[TensorKey, str], dict[TensorKey, str], dict[TensorKey, int]]:
        """(of what was read, of what was written, overflows of casts), and what hangs on all values having moved is
        raised: overflows that are not allowed, damaged records."""
        moves = self.plan.moves
        digests = {
            move.key: _root(move.dtype.name, move, state.leaves.get(i, {}))
            for i, move in enumerate(moves)
            if not is_computed(move, self.sources.remote)
        }
        digests_out = {
            move.key: _root(move.dtype_out.name, move, state.leaves_out.get(i, {})) for i, move in enumerate(moves)
        }
        overflows = {moves[i].key: count for i, count in sorted(state.overflows.items()) if count}
        if overflows and not self.options.allow_lossy:
            raise InputError(
                f"{sum(overflows.values())} finite values overflow in the cast",
                code="E0350",
                key=str(next(iter(overflows))),
                hint="choose a wider --dtype, or --allow-lossy",
                faults=[f"{key}: {count} values" for key, count in overflows.items()],
            )
        if self.hashing:
            check_records(self.plan, self.sources, state.source_pieces)
        return digests, digests_out, overflows

    def _finish(self, staging: Staging, state: RunState) -> Result:
        if self.progress:
            for why in compiled.notes:
                self.progress.note(why, detail=True)
        digests, digests_out, overflows = self.digests(state)
        copy_sidefiles(self.plan, self.sources, staging)
        fill_patches(self.plan, staging, state.output_pieces, list(digests_out.values()) if self.hashing else None)
        if self.progress:
            self.progress.finish()
        digested = (digests, digests_out) if self.hashing else ({}, {})
        if self.check is not None:
            self.check(staging.path, *digested[::-1])
        self.sources.check()
        result = Result(*digested, overflows, committed=True)
        added = self._add_seal(staging, state.hashes, result) if self._seal is not None and state.hashes else []
        if self.options.fsync:
            self._sync(staging, added)
        staging.commit(single=self.plan.single)
        if self.progress and staging.left is not None:
            self.progress.note(f"{staging.left} could not be removed; the output is complete: ckpt clean removes it")
        return result

    def _sync(self, staging: Staging, added: Sequence[str]) -> None:
        """Wait for the disk, file by file."""
        sizes = {file.path: file.size for file in self.plan.outputs}
        if self.progress:
            self.progress.finish()
            self.progress.start(sum(sizes.values()), "waiting for the disk")

        def done(name: str) -> None:
            working_on(self.progress, name)
            self.advance(sizes.get(name, 0))

        sync_all(staging, [*self._names, *added], done)

    def _add_seal(self, staging: Staging, hashes: FileHashes, result: Result) -> list[str]:
        """Hash what is left and write the files of the seal. Returns their names."""
        if self.progress:
            self.progress.start(hashes.left, "hashing")
        found = hashes.finish(self.advance)
        names = list[str]()
        for name, data in self._seal.files(found, result) if self._seal else ():
            fd = staging.create(name, len(data))
            try:
                write_all(fd, data, 0, name)
            finally:
                close_written(fd, staging.path / name)
            names.append(name)
        return names


def _root(dtype: str, move: Move, leaves: dict[int, bytes]) -> str:
    return root(dtype, move.line_shape, b"".join(leaves[first] for first in sorted(leaves)))


class Waits:
    """Pauses between two looks at what others do, with a line for people at the first of each kind."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._said = ""
        self._pause = _PAUSE

    def a_while(self, why: str, longest: float = 0.0) -> None:
        """longest: up to which the pauses grow, and are not of one length."""
        if why != self._said:
            self._pause = _PAUSE
            if self._progress:
                self._progress.note(why)
            self._said = why
        time.sleep(self._pause * random.uniform(0.5, 1.0) if longest else _PAUSE)
        self._pause = min(1.5 * self._pause, longest)


def _share_out(units: Sequence[Unit]) -> list[list[tuple[int, Unit]]]:
    """The units, numbered, in at most `_SHARES` shares of neighbours: what workers claim."""
    numbered = list(enumerate(units))
    most = ceil_div(len(units), _SHARES) or 1
    return [numbered[at : at + most] for at in range(0, len(numbered), most)]


def _fd_room(threads: int) -> int:
    """Descriptors that one thread may keep open on each side, from the process's limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1024
    return max(1, min(64, (soft - 16) // (2 * threads)))
