"""The executor: carries out a plan in bounded memory, with threads, and commits the output in one step.

Each thread takes units (shares of about 64 MiB) from a queue that prefers units whose output files no other thread is
writing. A unit is walked in blocks of 256 KiB (strided work: 1 MiB): fill from the sources, hash, cast, drain to the
outputs. The hash is over exactly the bytes that are written, so a digest that is right proves the values arrived; it is
computed on the way, which costs a tenth of the copy. With `verify="off"` runs go by `copy_file_range`, unhashed.

Memory: threads x (block + scratch), a few MiB each, whatever the checkpoint's size; what is stored transposed
takes up to `PANEL` more a thread, less where `memory` is less. A thread's failure stops the others and fails the run.
The staging folder is then kept, and the same command resumes from it, unless its content can't be trusted (a source
that changed, bad input, a failed fsync): then it is removed.
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
_SHARES = 4096  # at most so many shares of the plan, each of which one worker claims
_PAUSE = 0.5  # seconds between two checks of what other workers have done


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has written."""

    # Digests of the values as read, over each move's line. Tensors that are computed and rounded while they are read
    # have none: there is no source file whose digest could be compared.
    digests: dict[TensorKey, str]
    digests_out: dict[TensorKey, str]  # digests of the values as written
    overflows: dict[TensorKey, int]  # finite values beyond the range of the cast; tensors without any are left out
    committed: bool
    parts: tuple[PartStatus, ...] = ()  # when this part did not commit: the progress of each part that has begun


# Called with the staged output, the digests as written and the digests as read.
Check = Callable[["Path | Upload", dict[TensorKey, str], dict[TensorKey, str]], None]


class SealWriter(Protocol):
    """Writes files that list the hashes of all other files of an output: a signature, an attestation."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files that it adds to the output."""
        ...

    def files(self, hashes: Mapping[str, str], result: Result) -> Iterable[tuple[str, bytes]]:
        """Yields (name, content) for each of `names`; called as the last step before the commit.

        Args:
            hashes: path -> SHA-256 in hex of every other file.
            result: the digests of the run.
        """
        ...


@dataclass(slots=True)
class RunState:
    """What the threads of a run share."""

    queue: list[tuple[int, Unit]]  # (number, unit) still to be moved
    waiting: Counter[int] = field(default_factory=Counter)  # output file -> bytes of the queue that go to it
    busy: dict[int, frozenset[int]] = field(default_factory=dict)  # thread -> the output files that it is writing
    leaves: dict[int, dict[int, bytes]] = field(default_factory=dict)  # move -> first leaf -> hashes
    leaves_out: dict[int, dict[int, bytes]] = field(default_factory=dict)
    overflows: dict[int, int] = field(default_factory=dict)  # move -> finite values that overflowed in the cast
    source_pieces: dict[int, list[ChecksummedRange]] = field(
        default_factory=dict
    )  # source file -> CRCs of what was read
    output_pieces: dict[int, list[ChecksummedRange]] = field(default_factory=dict)
    hashes: FileHashes | None = None
    error: BaseException | None = None
    stop: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a plan is executed."""

    threads: int | None = None  # at most so many; fewer if their buffers would not fit into `memory`
    memory: int = 1 << 30  # bytes that all buffers together may take
    verify: str = "quick"  # `off`, `quick` or `full`; digests are computed unless `off`
    resume: bool = True  # continue from what an earlier run has staged
    force: bool = False  # replace an output that exists
    fsync: bool = True  # wait for the disk before the commit
    allow_lossy: bool = False  # values that overflow in a cast are counted, not an error


class Executor:
    """One run of one plan, written to a staging folder on a file system. `StoreExecutor` writes to an object store.

    Args:
        trees: the sources by the root that the plan names.
        part: (i, n) when this run moves part i of n, counted from 1.
        worker: the name of this worker, when several workers claim shares of the plan at run time.
        check: called with the staged output and the written digests before the commit; raises to refuse it.
        movers: moves the units, on a GPU for example (`device/walk.py`); the CPU if None.
        seal: writes signature files into the finished output; every file is then hashed while it is written.
        replaced: the files of an existing output that may be removed, with `options.force`.
    """

    in_order = False  # True: units are taken in queue order, even if another thread is writing the same file

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
        per_thread = 4 * STRIDED_BLOCK  # block and scratch of a walk, scratch of its reader and its writer
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

        # A CRC is taken per record, so readers and writers must know at which bytes a record begins.
        self._record_starts: dict[int, set[int]] = {}
        for record in plan.records:
            self._record_starts.setdefault(record.file, set()).add(record.offset)

        self._patch_starts: dict[int, frozenset[int]] = {}
        for number, (file, arrays) in enumerate(zip(plan.outputs, plan.arrays, strict=True)):
            if any(patch.kind == "crc32" for patch in file.patches):
                self._patch_starts[number] = frozenset(array.offset for array in arrays)

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Execute the plan and commit the output. With parts, only the part that finishes last commits; `committed` of
        the result is True for that one alone."""
        # One process is enough: small replicas are compared before the run by the first part alone.
        if not self.worker and (self.part is None or self.part[0] == 1):
            replicas.look_ahead(self.plan.moves, self.sources, whole=self.full, threads=self.threads)
        return self._carry_out()

    def _carry_out(self) -> Result:
        plan = self.plan
        sealed = self._seal.names if self._seal else ()
        staging = Staging(
            Path(plan.destination),
            "+".join((plan.identifier(), *sealed)),  # a run with another seal must not resume from this staging folder
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
                staging.discard()  # the staged bytes can't be trusted, or the same plan will never succeed
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

        # The part that closes its journal last finds all others complete: it checks their work and commits.
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
        """Run as one of any number of workers: claim shares and move them until none is left. One worker commits."""
        self._prepare(staging, heads=False)
        shares = _share_out(self.units)
        state = RunState([])
        own_numbers = set[int]()
        total = sum(unit.nbytes for unit in self.units)
        staging.begin(len(self.units), total)
        if self.progress:
            self.progress.start(total, WRITING)

        waits = Waits(self.progress)
        done_shares = set[int]()  # by any worker: progress counts the whole output

        with staging.claims(len(shares)) as claims:
            while not staging.gone:
                others = claims.done() - done_shares
                done_shares |= others
                self.advance(sum(unit.nbytes for number in others for _, unit in shares[number]))
                taken = claims.take(self.threads)
                if taken:
                    state.queue[:] = [pair for share in taken for pair in shares[share.number]]
                    own_numbers |= {number for number, _ in state.queue}
                    # A share taken over from a dead worker may be partly staged; its journal is checked first.
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
        """Hash every output file while it is written: the queue is sorted by file, because SHA-256 needs a file's bytes
        from start to end."""
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
        """Create and preallocate every output file, and write the literals (headers, padding) that the plan contains.

        heads: False leaves the literals out. Writing them again would reset holes in them that another worker has
        filled already; everything else may be repeated.
        """
        for file in self.plan.outputs:
            fd = staging.create(file.path, file.size)
            try:
                for offset, data in file.literals if heads else ():
                    write_all(fd, data, offset, file.path)
            finally:
                close_written(fd, staging.path / file.path)

    # -- resuming from a journal ----------------------------------------------------------------------------------

    def _take_up(self, staging: Staging, state: RunState) -> int:
        """Remove units from the queue that an earlier run finished, once what it wrote has been hashed and found equal.
        Returns the bytes of those units."""
        # Parts leave the padding alone: another part may be writing. Whoever commits clears it.
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
        """Check what other parts or workers have staged, now that none of them is running, and repair it.

        Literals are written again, and units whose staged bytes do not match their journal line are moved again.
        Runs without hashes (`verify="off"`) trust the journals.

        Args:
            journal: the lines of all parts.
            mine: units that this run moved itself; they are not checked again.
        """
        self._prepare(staging)
        self._clear_gaps(staging)
        if not self.hashing:
            return
        # All units of others are suspect until `_sift` has found their bytes in the files.
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
        """Remove units from the queue whose staged bytes match the journal. Returns the bytes of those units."""
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
        """Write zeros to the padding that no move or literal covers, in case an interrupted run wrote there."""
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
        """Add the leaf hashes and overflow counts of journal lines to `state`."""
        for line in lines:
            for move, first, text, out_first, out_text in line.get("leaves", ()):
                if text:  # empty if no leaf begins in the share (it is shorter than a leaf): `first` belongs to another
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
        """Move all units of the queue, on several threads.

        Args:
            writer: makes the writer of one thread, given how many descriptors it may keep open.
            record: called with the journal line of each unit that is done.
        """
        # No more threads than units: each one costs buffers and descriptors.
        count = max(1, min(self.threads, len(state.queue)))
        for _, unit in state.queue:
            for file in unit.files:
                state.waiting[file] += unit.nbytes
        room = _fd_room(count)

        def stop(interruption: BaseException) -> None:  # the command's entry point reports which signal it was
            state.stop = True

        Workers(partial(self._worker, partial(writer, room), record, state, room), count).run(stop)
        if state.error is not None:
            raise state.error

    def _worker(
        self, new_writer: Callable[[], Writer], record: Callable[[dict[str, Any]], None], state: RunState, room: int
    ) -> None:
        reader = BlockReader(self.sources, room, self._record_starts, panel=self._panel)
        writer = new_writer()
        # Allocated once per thread: all walks of the thread use the same buffers.
        block = memoryview(bytearray(ROOM))
        scratch = memoryview(bytearray(STRIDED_BLOCK))
        thread = threading.get_ident()
        mover = None
        prefetch = self._prefetch_units(state, reader, thread)

        def advance(nbytes: int) -> None:
            self.advance(nbytes)
            # The next unit is requested when little of this one is left.
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
        """Yields the units of one thread. With sources in a store, the bytes of the next unit are requested before the
        present one is finished; movers on a GPU do their own prefetching."""
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
        """Take the next unit for a thread, None if the queue is empty. Called with the lock held.

        Prefers units whose output files no other thread is writing, and among them the file with the most bytes to
        come: otherwise one large file would remain at the end, with all threads writing to it. Else the first unit.
        """
        state.busy.pop(thread, None)
        if not state.queue:
            return None
        taken = {file for files in state.busy.values() for file in files}
        index = 0
        most_waiting = -1
        # Only the head of the queue is searched: this runs under the lock, once per unit.
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
        """Move one unit. Returns its journal line, None if the run was stopped before the unit was finished."""
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
        """Report `nbytes` more bytes of progress."""
        if self.progress:
            self.progress.advance(nbytes)

    # -- the end ------------------------------------------------------------------------------------------------------

    def digests(self, state: RunState) -> tuple[dict[TensorKey, str], dict[TensorKey, str], dict[TensorKey, int]]:
        """Returns (digests as read, digests as written, overflows in casts) once all units have been moved.

        Raises InputError E0350 for overflows if `allow_lossy` is off, and CorruptFile for records whose CRC is wrong.
        """
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
        # Digests are holes in some formats, so patches come after all values, and the check of the output after the
        # patches.
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
        """fsync every file, with progress."""
        sizes = {file.path: file.size for file in self.plan.outputs}
        if self.progress:
            self.progress.finish()
            self.progress.start(sum(sizes.values()), "waiting for the disk")

        def done(name: str) -> None:
            working_on(self.progress, name)
            self.advance(sizes.get(name, 0))

        sync_all(staging, [*self._names, *added], done)

    def _add_seal(self, staging: Staging, hashes: FileHashes, result: Result) -> list[str]:
        """Finish the hashes of all files and write the files of the seal. Returns their names."""
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
    """Pauses between two checks of other workers' progress. The reason is reported once, when it changes."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._said = ""
        self._pause = _PAUSE

    def a_while(self, why: str, longest: float = 0.0) -> None:
        """Sleep for `_PAUSE` seconds. With `longest`, pauses grow up to that many seconds and are randomised, so that
        workers do not query the store at the same moment."""
        if why != self._said:
            self._pause = _PAUSE
            if self._progress:
                self._progress.note(why)
            self._said = why
        time.sleep(self._pause * random.uniform(0.5, 1.0) if longest else _PAUSE)
        self._pause = min(1.5 * self._pause, longest)


def _share_out(units: Sequence[Unit]) -> list[list[tuple[int, Unit]]]:
    """Splits the numbered units into at most `_SHARES` shares of consecutive units: a share is what a worker claims."""
    numbered = list(enumerate(units))
    most = ceil_div(len(units), _SHARES) or 1
    return [numbered[at : at + most] for at in range(0, len(numbered), most)]


def _fd_room(threads: int) -> int:
    """Descriptors that one thread may keep open for sources, and as many for outputs, from RLIMIT_NOFILE."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1024
    return max(1, min(64, (soft - 16) // (2 * threads)))  # 16 stay free for all other files of the process
