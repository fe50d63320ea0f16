"""Writes an output to an object store: parts of objects are collected in memory and sent when they are complete.

A part is complete when every byte that moves write to it has arrived; the plan determines how many those are. Literals
are written into it first. Holes (CRCs, digests) delay a part until they are filled: the CRC of a record is joined from
its parts as they become complete, so the part with a record's head waits for the record's last part, and no part is
sent twice. Parts that no move touches are made at the end. Nothing is visible before every part has been sent; then the
objects are completed, the one without which the rest is no checkpoint last (`last_of`), if it does not exist already.

    upload.write(file, offset, view)     # from any thread, bytes in any order, each once
    upload.finish(digests, check)

Memory: the incomplete parts (`most_open` computes in advance how many bytes these take), and `QUEUE` bytes that are
being sent. Resuming: parts that the store has from an earlier run are compared by MD5 and not sent again; sources are
read again. `run.share_upload` lets several workers fill one output. What this does not do: outputs that are read back
as files.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import Queue

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.target import DIGEST_CHARS
from ckpt_tool.errors import InternalError, OutputExists, StorageError
from ckpt_tool.plan.copy import clip
from ckpt_tool.plan.plan import Plan
from ckpt_tool.plan.schedule import Unit, units
from ckpt_tool.run.blocks import BlockReader, FdCache, Sources, Spans, Writer
from ckpt_tool.run.checksum import ChecksummedRange, crc32
from ckpt_tool.run.file_parts import in_order_of_files
from ckpt_tool.run.store_objects import Hole, StoredObject, UploadPart, fill, objects_of, within
from ckpt_tool.storage.output.replaced import RECORD, ReplacedOutput, Stamp, some_of
from ckpt_tool.storage.stores.multipart import CONNECTIONS, ListedObject, Pending, Sent, md5
from ckpt_tool.storage.stores.output_store import OutputStore, staging_url
from ckpt_tool.storage.stores.store import Parts, Store, StoreEntry

QUEUE = 20 << 20  # bytes of complete parts that wait to be sent, at most
PLAN = "ckpt-plan"  # metadata key: objects of an output carry the plan's identifier


class Upload:
    """The output of one plan in `bucket`. Use `begin`, `write`, `finish`; `discard` or nothing after a failure.

    Args:
        memory: bytes that incomplete parts may take.
        force: replace an existing output, just before the commit, as far as `replaced` lists its files.
        resume: use what an earlier run has sent.
    """

    def __init__(
        self,
        plan: Plan,
        bucket: OutputStore,
        sources: Sources,
        *,
        memory: int,
        force: bool = False,
        resume: bool = True,
        replaced: ReplacedOutput | None = None,
    ) -> None:
        self._plan = plan
        self._bucket = bucket
        self._sources = sources
        self._memory = memory
        self._force = force
        self._resume = resume
        self._replaced = replaced or ReplacedOutput({})
        self._id = plan.identifier()
        self._notes = {PLAN: self._id}
        self.objects = objects_of(plan)
        self.last = last_of(plan)
        self.single = plan.single is not None
        self._there: dict[str, int] = {}  # key -> size of the objects that existed at the beginning
        self._open: dict[tuple[int, int], UploadPart] = {}
        self._lock = threading.RLock()
        self._queue = Queue[UploadPart | None]()
        self._room = threading.Condition()
        self._queued = 0
        self._error: BaseException | None = None
        self._senders: list[threading.Thread] = []
        self._spare = defaultdict[int, list[bytearray]](list)  # length -> zeroed buffers for further parts
        self.spared = 0  # bytes that an earlier run has sent and that were not sent again

    # -- beginning --------------------------------------------------------------------------------------------------

    def begin(self, order: Sequence[Unit]) -> None:
        """Check the destination and start the sending threads. order: the units, as they will be moved.

        Raises OutputExists, and StorageError E2711 if incomplete parts would take more than `memory` at once.
        """
        self._check_memory(order)
        self.check_there()
        pending = defaultdict[str, list[Pending]](list)
        for each in self._bucket.pending():
            pending[each.key].append(each)
        for item in self.objects:
            uploads = pending.pop(self._key(item), [])
            if uploads and uploads[-1].goes_on and self._resume and self._in_parts(item):
                item.upload = uploads.pop().upload
                item.before = self._bucket.parts(self._key(item), item.upload)
            for each in uploads:
                self._bucket.abort(self._key(item), each.upload)
        self.start()

    def start(self) -> None:
        """Start the sending threads."""
        for _ in range(CONNECTIONS):
            thread = threading.Thread(target=self._send, name="ckpt-send", daemon=True)
            thread.start()
            self._senders.append(thread)

    def _check_memory(self, order: Iterable[Unit]) -> None:
        need = most_open(self._plan, self.objects, order, self._takes)
        if need > self._memory:
            raise StorageError(
                f"parts of {len(self.objects)} objects would gather in {need} bytes of memory at once, and --memory "
                f"allows {self._memory}",
                code="E2711",
                path=self._plan.destination,
                hint=f"pass --memory {ceil_div(need, 1 << 30)}GiB, fewer ranks, or write to a local path and upload"
                " that",
            )

    def check_there(self) -> None:
        """Raise OutputExists (E0501) if an output exists that may not be replaced."""
        there = self._there = self._bucket.objects()
        if self._force or not there:
            return
        names = {self._key(item): item.size for item in self.objects}
        # Objects of an unfinished earlier run of the same plan are no obstacle: the last one is missing.
        ours = self._key(self.objects[self.last]) not in there and all(
            names.get(key) == nbytes and self._bucket.note(key, PLAN) == self._id for key, nbytes in there.items()
        )
        if not ours:
            raise OutputExists(
                f"{self._plan.destination} exists",
                code="E0501",
                path=self._plan.destination,
                hint="choose a new name, or --force to replace it",
            )

    def _key(self, item: StoredObject) -> str:
        return "" if self.single else item.path

    def _in_parts(self, item: StoredObject) -> bool:
        """Is the object sent in parts while values are moved? Small objects without values are put at the end."""
        return item.valued or item.size > item.step

    @property
    def blind(self) -> bool:
        """Are there values that can't be read back before the commit, since they are in the last object?"""
        last = self.objects[self.last]
        return last.valued and last.upload != DONE

    def withdraw(self) -> None:
        """Remove the last object: without it the others are no checkpoint."""
        self._bucket.remove(self._key(self.objects[self.last]))

    def writer(self) -> PartWriter:
        """A writer into this upload, for one thread."""
        return PartWriter(self)

    # -- gathering --------------------------------------------------------------------------------------------------

    def write(self, file: int, offset: int, view: memoryview | bytes) -> None:
        """Take the bytes of a move for byte `offset` of output file number `file`. From any thread, each byte once."""
        item = self.objects[file]
        view = memoryview(view)
        while view:
            number = offset // item.step
            if not self._takes(file, number):
                some = (number + 1) * item.step - offset
                view = view[some:]
                offset = offset + some
                continue
            with self._lock:
                part = self._open.get((file, number)) or self._begin_part(item, number)
            some = min(len(view), part.stop - offset)
            room = memoryview(part.data)  # assigning to a slice of a bytearray would copy the data twice
            room[offset - part.start : offset - part.start + some] = view[:some]
            with self._lock:
                part.left -= some
                if part.left < 0:
                    raise InternalError(f"{item.path}: more bytes written than planned in part {number}")
                whole = part.left == 0
            if whole:
                self._whole(item, part)
            view = view[some:]
            offset = offset + some

    def _takes(self, file: int, part: int) -> bool:
        """Does this upload fill the part? False for parts of other workers' shares."""
        return True

    def _begin_part(self, item: StoredObject, number: int) -> UploadPart:
        if number in item.done:
            raise InternalError(f"{item.path}: part {number} is written again")
        start, stop = item.bounds(number)
        spare = self._spare[stop - start]
        room = spare.pop() if spare else bytearray(stop - start)
        part = self._open[item.number, number] = UploadPart(item.number, number, start, room, item.moved.get(number, 0))
        for offset, data in within(item.literals, start, stop):
            part.data[offset - start : offset - start + len(data)] = data
        self._fill_known(item, part)
        return part

    def _fill_known(self, item: StoredObject, part: UploadPart) -> None:
        """Fill those holes of the part whose content is known, and count the others."""
        for hole in item.holes:
            if hole.offset < part.stop and part.start < hole.offset + hole.nbytes:
                if hole.offset in item.known:
                    fill(part, hole, item.known[hole.offset])
                else:
                    part.holes += 1

    def _whole(self, item: StoredObject, part: UploadPart) -> None:
        """Handle a part whose moved bytes have all arrived: add it to the CRCs of its records, then send the parts that
        have no open holes any more."""
        crcs = []
        for span in item.spans:
            low = max(span[0], part.start)
            high = min(sum(span), part.stop)
            if low < high:
                crcs.append(
                    (
                        span,
                        ChecksummedRange(low, high, crc32(memoryview(part.data)[low - part.start : high - part.start])),
                    )
                )

        with self._lock:
            item.done.add(part.number)
            ready = [part] if not part.holes else []
            for span, piece in crcs:
                item.pieces[span].append(piece)
                item.seen[span] += piece.stop - piece.start
                if item.seen[span] == span[1]:
                    crc = item.crc(span)
                    for offset in item.spans[span]:
                        ready += self._fill(item, Hole(offset, 4), crc)
            for each in ready:
                del self._open[item.number, each.number]

        for each in ready:
            self._submit(each)

    def _fill(self, item: StoredObject, hole: Hole, data: bytes) -> list[UploadPart]:
        """Set the content of a hole, for parts that are open and those begun later. Returns the parts to be sent
        now."""
        item.known[hole.offset] = data
        ready = []
        for number in item.parts_of(hole.offset, hole.offset + hole.nbytes):
            part = self._open.get((item.number, number))
            if part is not None:
                fill(part, hole, data)
                part.holes -= 1
                if not part.holes and number in item.done:
                    ready.append(part)
        return ready

    # -- sending ----------------------------------------------------------------------------------------------------

    def _submit(self, part: UploadPart) -> None:
        with self._room:
            # Blocks the writing threads while the store is slower than the sources: this bounds the memory.
            while self._queued and self._queued + len(part.data) > QUEUE and self._error is None:
                self._room.wait(0.5)
            self._queued += len(part.data)
        if self._error is not None:
            raise self._error
        self._queue.put(part)

    def _send(self) -> None:
        while (part := self._queue.get()) is not None:
            nbytes = len(part.data)
            try:
                if self._error is None:
                    self._send_part(self.objects[part.file], part)
            except BaseException as e:  # raised in the threads that write
                self._error = self._error or e
            # Buffers of full parts are reused; they must be zero, because padding is never written.
            if nbytes == self.objects[part.file].step:
                np.frombuffer(part.data, np.uint8).fill(0)
                self._spare[nbytes].append(part.data)
            with self._room:
                self._queued -= nbytes
                self._room.notify_all()
            self._queue.task_done()
            del part

    def _send_part(self, item: StoredObject, part: UploadPart) -> None:
        number = part.number + 1
        # MD5 and size equal: the part that an earlier run has sent is the same.
        before = item.before.get(number)
        if before is not None and before == Sent(md5(part.data).hex(), len(part.data)):
            item.etags[number] = before.etag
            with self._lock:
                self.spared += len(part.data)
            return
        upload = self._upload_of(item)
        item.etags[number] = self._bucket.part(self._key(item), upload, number, part.data)

    def _upload_of(self, item: StoredObject) -> str:
        # One upload per object, although several threads send its first parts at once.
        with item.beginning:
            if not item.upload:
                item.upload = self._begin_upload(item)
        return item.upload

    def _begin_upload(self, item: StoredObject) -> str:
        return self._bucket.begin(self._key(item), self._notes)

    def _drain(self) -> None:
        """Wait until all that was submitted has been sent."""
        with self._room:
            while self._queued and self._error is None:
                self._room.wait(0.5)
        if self._error is not None:
            raise self._error

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self, digests: Sequence[str] | None, check: Callable[[Upload], None]) -> None:
        """Make and send the remaining parts, check the output and make it visible.

        Args:
            digests: those of the moves, None if none were computed.
            check: called when all but the last object are visible; raises to refuse the output.
        """
        for item in self.objects:
            self._fill_digests(item, digests)

        # Files that contain the SHA-256 of others come after these, which must be visible to be read back.
        hashed = [item for item in self.objects if self._kinds(item, "sha256")]
        late = [self.objects[self.last]] + [item for item in hashed if item.number != self.last]
        for item in self.objects:
            if item not in hashed:
                self._rest(item)

        self._drain()
        if hashed:
            for item in self.objects:
                if item not in late:
                    self._complete(item)
            for item in hashed:
                self._fill_hashes(item)
                self._rest(item)
            self._drain()

        if self._force:
            self._clear()
        for item in sorted(self.objects, key=lambda item: (not item.valued, item.size)):
            if item.number != self.last:
                self._complete(item)

        check(self)
        self._complete(self.objects[self.last])
        if self._force and self._replaced.files:
            self._records().remove(RECORD)

    def _kinds(self, item: StoredObject, kind: str) -> list[tuple[int, int]]:
        return [(patch.offset, patch.of) for patch in self._plan.outputs[item.number].patches if patch.kind == kind]

    def _fill_digests(self, item: StoredObject, digests: Sequence[str] | None) -> None:
        for offset, of in self._kinds(item, "digest"):
            text = digests[of] if digests is not None else "-" * DIGEST_CHARS
            self._fill_late(item, Hole(offset, DIGEST_CHARS), text.encode())

    def _fill_late(self, item: StoredObject, hole: Hole, data: bytes) -> None:
        with self._lock:
            ready = self._fill(item, hole, data)
            for part in ready:
                del self._open[item.number, part.number]
        for part in ready:
            self._submit(part)

    def _rest(self, item: StoredObject) -> None:
        """Make the parts of an object that no move has touched."""
        if not self._in_parts(item) or item.upload == DONE:
            return
        self._copy(item)
        for number in range(item.parts):
            if number not in item.done and number not in item.moved:
                with self._lock:
                    part = self._begin_part(item, number)
                self._whole(item, part)

    def _copy(self, item: StoredObject) -> None:
        """Write the content of an object that is the copy of a side file."""
        for offset, data in self._copied(item):
            self.write(item.number, offset, data)

    def _copied(self, item: StoredObject) -> Iterator[tuple[int, bytes]]:
        copy_of = self._plan.outputs[item.number].copy_of
        if copy_of is None:
            return
        # Reversed, so that the first source wins if two have the same path.
        numbers = {file.path: number for number, file in reversed(list(enumerate(self._plan.sources)))}
        reader = BlockReader(self._sources, 1, {})
        offset = 0
        try:
            for data in reader.chunks(numbers[copy_of], 0, item.size):
                yield offset, data
                offset += len(data)
        finally:
            reader.close()

    def _content(self, item: StoredObject) -> bytearray:
        """The content of an object that is put with one request."""
        data = self.known(item, 0, item.size)
        for offset, some in self._copied(item):
            data[offset : offset + len(some)] = some
        return data

    def known(self, item: StoredObject, start: int, stop: int) -> bytearray:
        """Bytes [start, stop) of an object with its literals and filled holes; values are zeros."""
        data = bytearray(stop - start)
        for offset, some in within((*item.literals, *item.known.items()), start, stop):
            data[offset - start : offset - start + len(some)] = some
        return data

    def _fill_hashes(self, item: StoredObject) -> None:
        """Fill holes with the SHA-256 of other objects, which are read back from the store: a hash needs the bytes in
        order, and they were written in any."""
        for offset, of in self._kinds(item, "sha256"):
            other = self.objects[of]
            digest = hashlib.sha256()
            if self._in_parts(other):
                for data in self._bucket.read(self._key(other), other.size):
                    digest.update(data)
            else:
                digest.update(self._content(other))
            self._fill_late(item, Hole(offset, 64), digest.hexdigest().encode())

    def _complete(self, item: StoredObject) -> None:
        """Make one object visible, once. Without `force` the store refuses if another object exists there."""
        if item.upload == DONE:
            return
        key = self._key(item)
        new = not self._force and key not in self._there
        if self._in_parts(item):
            if len(item.etags) != item.parts:
                raise InternalError(f"{item.path}: {len(item.etags)} of {item.parts} parts were made")
            self._bucket.complete(key, self._upload_of(item), item.etags, self._notes, new=new)
        else:
            self._bucket.put(key, self._content(item), self._notes, new=new)
        item.upload = DONE

    def _clear(self) -> None:
        """Remove the old output. From here until the end the destination holds no checkpoint: the object that makes the
        old one a checkpoint is removed first, then every file that the new output does not overwrite."""
        if self.single:
            return
        there = self._bucket.listing().objects
        gone = self._check_replaced(there, self._replaced)
        kept = {item.path for item in self.objects if item.valued or item.upload == DONE}
        going = gone - kept | gone & {self.objects[self.last].path}
        if going:  # a run that is killed from here on leaves no checkpoint: the record says what may go
            self._records().put(RECORD, self._replaced.to_json(), {}, new=False)
        for key in self._in_order_of_removal(going):
            self._bucket.remove(key, etag=there[key].etag)

    def _records(self) -> OutputStore:
        """The place of records about the output, next to it."""
        return self._bucket.at_url(staging_url(self._plan.destination))

    def _check_replaced(self, there: Mapping[str, ListedObject], replaced: ReplacedOutput) -> set[str]:
        """The keys of existing objects that are to be removed. Raises OutputExists E2830 for an object that is not
        listed in `replaced` or has changed since, unless it belongs to the output."""
        ours = {self._key(item): item.size for item in self.objects}
        stamps = {key: Stamp.of_object(each.nbytes, each.etag) for key, each in there.items()}
        same = {key for key, stamp in stamps.items() if replaced.files.get(key) == stamp}
        strange = [key for key, each in there.items() if key not in same and ours.get(key) != each.nbytes]
        if strange:
            raise OutputExists(
                f"{self._plan.destination} changed while this run was writing: {some_of(strange)}",
                code="E2830",
                path=self._plan.destination,
                hint="see what writes there; the same command goes on from what was sent",
            )
        return same

    def _in_order_of_removal(self, keys: Iterable[str]) -> list[str]:
        """Sorts keys so that the object that makes the old output a checkpoint is first, if it has the new one's
        name."""
        last = self.objects[self.last].path
        return sorted(keys, key=lambda key: (key != last, key))

    def close(self) -> None:
        """End the sending threads."""
        for _ in self._senders:
            self._queue.put(None)

    def discard(self) -> None:
        """Abort the uploads of this run and remove its visible objects, so that nothing of it is left."""
        # Makes the sending threads drop what is in the queue.
        self._error = self._error or InternalError("discarded")
        self.close()
        for thread in self._senders:
            thread.join()
        for item in self.objects:
            key = self._key(item)
            if item.upload == DONE and key not in self._there:
                self._bucket.remove(key)
            elif item.upload and item.upload != DONE:
                self._bucket.abort(key, item.upload)


DONE = "done"  # in place of an upload's id: the object is complete and visible


class PartWriter(Writer):
    """Writes regions into an upload. For one thread."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._scratch = bytearray()
        self._regions = ()
        self._spans = Spans(())
        self.pieces = {}
        self.fds = _NoDescriptors(lambda number: -1, 1)

    def is_checksummed(self, file: int) -> bool:
        """True: CRCs are taken of parts in memory, so every byte must be written through this process."""
        return True

    def pwrite(self, file: int, offset: int, view: memoryview, *, count: bool = True) -> None:
        """Add the bytes to the upload."""
        self._upload.write(file, offset, view)

    def close(self) -> None:
        """Nothing is held."""


class _NoDescriptors(FdCache):
    """Invalid descriptors: callers that try `os.pwrite` first fail and fall back on `PartWriter.pwrite`."""

    def __getitem__(self, number: int) -> int:
        return -1


class Seen:
    """A view of the store as it will be after the commit, for checks before it. Objects that do not exist yet appear
    with their literals and filled holes; their values read as zeros."""

    def __init__(self, upload: Upload, store: Store, base: str = "") -> None:
        self._upload = upload
        self._store = store
        self._base = base
        self._coming = {
            item.path.removeprefix(base): item
            for item in upload.objects
            if item.upload != DONE and item.path.startswith(base)
        }

    def single(self) -> StoreEntry | None:
        """See `Store.single`."""
        if not self._upload.single:
            return None
        item = self._upload.objects[0]
        return self._store.single() if item.upload == DONE else self._entry(item)

    def parent(self, name: str) -> Store:
        """See `Store.parent`."""
        return self if self._coming else self._store.parent(name)

    def below(self, folder: str) -> Seen:
        """See `Store.below`."""
        return Seen(self._upload, self._store.below(folder), f"{self._base}{folder}/")

    def list(self) -> dict[str, StoreEntry]:
        """See `Store.list`; with the objects still to come."""
        there = {} if self._upload.single else self._store.list()
        return {**there, **{path: self._entry(item) for path, item in self._coming.items()}}

    def look(self, key: str) -> StoreEntry:
        """See `Store.look`; with the objects still to come."""
        item = self._coming.get(key)
        return self._entry(item) if item else self._store.look(key)

    def get(self, key: str, start: int, stop: int, pinned: StoreEntry) -> Parts:
        """See `Store.get`; with the objects still to come."""
        item = self._coming.get(key)
        if item is None:
            return self._store.get(key, start, stop, pinned)
        return [memoryview(self._upload.known(item, start, stop))]

    def _entry(self, item: StoredObject) -> StoreEntry:
        return StoreEntry(item.size, "coming")


# -- before ----------------------------------------------------------------------------------------------------------


def last_of(plan: Plan) -> int:
    """The number of the object that is written last: without it the others are no checkpoint.

    The only file that holds values; of several, what describes them: an index, DCP's metadata, the longest of the files
    without values; where there is none, the first of those with values.
    """
    valued = [number for number, arrays in enumerate(plan.arrays) if len(arrays)]
    plain: list[int] = []
    for number, file in enumerate(plan.outputs):
        is_stamped = any(patch.kind == "sha256" for patch in file.patches)
        if file.copy_of is None and number not in valued and not is_stamped:
            plain.append(number)
    if plain and len(valued) != 1:
        return max(plain, key=lambda number: (plan.outputs[number].size, -number))
    return valued[0] if valued else 0


def most_open(
    plan: Plan,
    objects: Sequence[StoredObject],
    order: Iterable[Unit],
    takes: Callable[[int, int], bool] = lambda *_: True,
) -> int:
    """The largest number of bytes that incomplete parts take at once, if units are moved in this order.

    takes: does this worker fill part (object, number) at all?
    """
    # The first and the last unit that writes to each part, as positions in the order.
    first: dict[tuple[int, int], int] = {}
    final: dict[tuple[int, int], int] = {}
    for at, unit in enumerate(order):
        for index, start, stop in unit.items:
            move = plan.moves[index]
            for region in move.outputs:
                item = objects[region.file]
                for part in clip(region, start, stop):
                    for number in item.parts_of(part.offset, part.offset + part.reach(move.item_out)):
                        if takes(region.file, number):
                            first.setdefault((region.file, number), at)
                            final[region.file, number] = at

    # A part with the hole of a CRC stays open until the last part that the CRC covers is complete.
    for item in objects:
        for span, holes in item.spans.items():
            until = max((final.get((item.number, n), 0) for n in item.parts_of(span[0], sum(span))), default=0)
            for offset in holes:
                for number in item.parts_of(offset, offset + 4):
                    if (item.number, number) in final:
                        final[item.number, number] = max(final[item.number, number], until)

    # A sweep over the order: bytes that are begun (+) and finished (-) at each unit.
    change = defaultdict[int, int](int)
    for (file, number), at in first.items():
        low, high = objects[file].bounds(number)
        change[at] += high - low
        change[final[file, number] + 1] -= high - low

    most = now = 0
    for at in sorted(change):
        now += change[at]
        most = max(most, now)

    return most


def memory_of(plan: Plan) -> int:
    """Bytes of memory that sending the plan's output takes, in addition to the buffers of the threads."""
    objects = objects_of(plan)
    return (
        most_open(plan, objects, [unit for _, unit in in_order_of_files(plan, list(enumerate(units(plan.moves))))])
        + QUEUE
    )
