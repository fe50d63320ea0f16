"""An upload that several workers fill: each sends the parts of the shares that it claims, and one completes it.

    upload.begin_share(7, over=False)        # from now on `write` fills the parts of that share
    record = upload.end_share()              # all its parts are sent; the record is for the worker that commits

    for record in records: upload.take(record)
    upload.lost()                            # shares whose parts are missing in the store, or differ from what was sent
    upload.finish(digests, check)            # as `Upload`

All workers send to the same multipart upload of an object: the first one creates a record of its id, which only one can
do. Some parts have holes that a share can't fill, since the CRC covers parts of other shares. These are held: stored
unfinished next to the records, and sent by the worker that commits, as are the parts that no move fills. Committing
twice is harmless: objects that carry the plan's note are left as they are. Only the removal of an old output
(`--force`) requires that a worker is certainly the only one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckpt_tool.errors import CkptError, InternalError, StorageError
from ckpt_tool.plan.plan import Plan
from ckpt_tool.plan.schedule import Unit
from ckpt_tool.run.blocks import Sources
from ckpt_tool.run.checksum import ChecksummedRange
from ckpt_tool.run.shares import NOBODY, Shares
from ckpt_tool.run.store_objects import StoredObject, UploadPart
from ckpt_tool.run.upload import DONE, PLAN, Upload, last_of
from ckpt_tool.storage.output.replaced import RECORD, ReplacedOutput
from ckpt_tool.storage.stores.multipart import NO_UPLOAD, md5
from ckpt_tool.storage.stores.output_store import OutputStore
from ckpt_tool.storage.stores.store_claims import AT_ONCE
from ckpt_tool.storage.stores.store_claims import PLAN as BEGUN

_MOST = 0.75  # the next share is claimed when so much of the present one is done
Record = dict[str, Any]
Span = tuple[int, int]


class ShareUpload(Upload):
    """The output of one plan in `bucket`, of which this worker fills shares.

    Args:
        records: the place of the workers' records.
        order: the plan's numbered units, sorted by object and position (`in_order_of_files`).

    Attributes, set by the caller:
        nearly: called when most of a share is done.
        sole: is this worker certainly the only one that commits, now? Called before an old output is removed.
    """

    def __init__(
        self,
        plan: Plan,
        bucket: OutputStore,
        records: OutputStore,
        sources: Sources,
        order: Sequence[tuple[int, Unit]],
        *,
        memory: int,
        force: bool,
        replaced: ReplacedOutput | None = None,
    ) -> None:
        super().__init__(plan, bucket, sources, memory=memory, force=force, replaced=replaced)
        self._records_here = records
        self.shares = Shares(plan, self.objects, order)
        self._share = NOBODY
        self._held: list[tuple[int, int, str]] = []
        self.gathered = 0  # bytes of the share's parts that are whole
        self.nearly: Callable[[], None] = lambda: None  # called when most of a share is done
        self.sole: Callable[[], bool] = lambda: False

    # -- a share ------------------------------------------------------------------------------------------------------

    def begin_share(self, number: int, order: Sequence[Unit], *, over: bool) -> None:
        """Fill the parts of a share from now on. Raises StorageError E2711 as `begin`.

        Args:
            order: the units that are going to be moved.
            over: another worker has begun the share, and may have sent parts, which are then not sent again.
        """
        self._share = number
        self.gathered = 0
        self._open.clear()
        for item in self.objects:
            item.forget()
        self._check_memory(order)
        if over:
            files = sorted({file for unit in order for file in unit.files})
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(self._see_sent, (self.objects[file] for file in files)))

    def _known_upload(self, item: StoredObject) -> str:
        """The id of the object's upload that a worker has begun, "" if none has."""
        known = self._records_here.get(_upload_key(item))
        return "" if known is None else known.decode()

    def _see_sent(self, item: StoredObject) -> None:
        if not item.upload:
            item.upload = self._known_upload(item)
        if item.upload:
            item.before = self._bucket.parts(self._key(item), item.upload)

    def end_share(self) -> Record:
        """Send the remaining parts of the share, hold those with unknown holes. Returns the share's record."""
        self._drain()
        held = sorted(self._open)
        for key in held:
            if self._open[key].left or key[1] not in self.objects[key[0]].done:
                raise InternalError(f"{self.objects[key[0]].path}: part {key[1]} lacks {self._open[key].left} bytes")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            digests = list(pool.map(self._hold, (self._open[key] for key in held)))
        self._open.clear()
        return {
            "parts": [
                [item.number, number, etag] for item in self.objects for number, etag in sorted(item.etags.items())
            ],
            "held": [[*key, digest] for key, digest in zip(held, digests, strict=True)],
            "crcs": [row for item in self.objects for row in _crcs(item)],
        }

    def _hold(self, part: UploadPart) -> str:
        self._records_here.put(_held_key(part.file, part.number), part.data, {}, new=False)
        return md5(part.data).hex()

    def _takes(self, file: int, part: int) -> bool:
        return self.shares.owner(file, part) == self._share

    def _send_part(self, item: StoredObject, part: UploadPart) -> None:
        if item.upload == DONE:  # a share whose record was lost, of an object that is there
            item.etags[part.number + 1] = ""
        else:
            super()._send_part(item, part)

    def _whole(self, item: StoredObject, part: UploadPart) -> None:
        nbytes = len(part.data)
        super()._whole(item, part)
        if self._share == NOBODY:
            return
        with self._lock:
            before = self.gathered
            self.gathered = self.gathered + nbytes
        most = _MOST * self.shares[self._share].nbytes
        if before < most <= self.gathered:
            self.nearly()

    def _begin_upload(self, item: StoredObject) -> str:
        """The id of the object's upload that all workers use: this worker's if it is the first to record one."""
        key = _upload_key(item)
        there = self._records_here.get(key)
        if there is None:
            if self._records_here.get(BEGUN) is None:  # removed at the end of a run: nothing may be begun any more
                raise _ended(self._bucket.display(self._key(item)))
            mine = self._bucket.begin(self._key(item), self._notes)
            if self._records_here.create(key, mine.encode()):
                return mine
            there = self._records_here.get(key)
            # Another worker was quicker: its upload is used, and this one is discarded.
            if there != mine.encode():
                self._bucket.abort(self._key(item), mine)
        if there is None:
            raise _ended(self._bucket.display(self._key(item)))
        return there.decode()

    # -- the commit ---------------------------------------------------------------------------------------------------

    def committed(self) -> bool:
        """Does the complete output of this plan exist?"""
        return is_committed(self._plan, self._bucket)

    def begin_commit(self) -> None:
        """Prepare for `take`. Objects that a worker completed before it died count as done."""
        self._share = NOBODY
        self._open.clear()
        self._held.clear()
        there = self._bucket.objects()
        for item in self.objects:
            item.forget()
            if self._key(item) in there and self._is_ours(item):
                item.upload = DONE

    def _is_ours(self, item: StoredObject) -> bool:
        return self._bucket.note(self._key(item), PLAN) == self._id

    def take(self, record: Record) -> None:
        """Add the record of a share that was sent."""
        for file, number, etag in record["parts"]:
            # Part numbers of a store begin with 1.
            self.objects[file].done.add(number - 1)
            self.objects[file].etags[number] = etag
        for file, at, nbytes, *piece in record["crcs"]:
            self.objects[file].pieces[at, nbytes].append(ChecksummedRange(*piece))
        for file, number, digest in record["held"]:
            self.objects[file].done.add(number)
            self._held.append((file, number, digest))

    def lost(self) -> set[int]:
        """The shares with a part that, according to the store's listing, is missing or differs from what was sent."""

        def differing(item: StoredObject) -> list[int]:
            """The numbers of those parts of one object."""
            there = self._bucket.parts(self._key(item), self._upload_of(item))
            return [number for number, etag in item.etags.items() if number not in there or there[number].etag != etag]

        sent = [item for item in self.objects if item.etags and item.upload != DONE]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(differing, sent))
        return {
            self.shares.owner(item.number, number - 1)
            for item, numbers in zip(sent, found, strict=True)
            for number in numbers
        }

    def finish(self, digests: Sequence[str] | None, check: Callable[[Upload], None]) -> None:
        """As `Upload.finish`, for the shares added with `take`."""
        for item in self.objects:
            self._join_pieces(item)
        for file, number, digest in self._held:
            if self.objects[file].upload != DONE:
                self._send_held(self.objects[file], number, digest)
        super().finish(digests, check)
        self._abort_others()

    def _join_pieces(self, item: StoredObject) -> None:
        """Compute the CRCs of spans whose bytes have all been written. Others contain parts that no move fills, which
        are still to be made."""
        for span in list(item.pieces):
            pieces = item.pieces[span]
            item.seen[span] = sum(piece.stop - piece.start for piece in pieces)
            if span[1] and item.seen[span] == span[1]:
                item.known.update(dict.fromkeys(item.spans[span], item.crc(span)))

    def _send_held(self, item: StoredObject, number: int, digest: str) -> None:
        data = self._records_here.get(_held_key(item.number, number))
        start, stop = item.bounds(number)
        if data is None or len(data) != stop - start or md5(data).hex() != digest:
            raise StorageError(
                f"part {number} of {item.path}, which was put aside, is not there as it was",
                code=GONE,
                path=self._records_here.display(_held_key(item.number, number)),
                hint="ckpt clean URL --remove, then run the same command again",
            )
        part = UploadPart(item.number, number, start, bytearray(data), 0)
        self._fill_known(item, part)
        if part.holes:
            self._open[item.number, number] = part
        else:
            self._submit(part)

    def _complete(self, item: StoredObject) -> None:
        try:
            super()._complete(item)
        except CkptError as e:
            if e.code not in ("E0501", NO_UPLOAD) or not self._is_there_and_ours(item):
                raise
            item.upload = DONE  # another commits too

    def _is_there_and_ours(self, item: StoredObject) -> bool:
        return self._key(item) in self._bucket.objects() and self._is_ours(item)

    def _clear(self) -> None:
        """As `Upload._clear`. Raises if another worker may be committing too; objects that one has completed stay."""
        there = self._bucket.listing().objects
        ours = {self._key(item) for item in self.objects if item.upload == DONE}
        # Nothing of an old output would be removed: it does not matter who else commits.
        if self.single or not there.keys() - ours:
            return
        if not self.sole():
            raise _ended(self._bucket.shown)
        replaced = ReplacedOutput.from_json(self._records_here.get(RECORD)) or self._replaced
        gone = self._check_replaced({key: there[key] for key in there.keys() - ours}, replaced)
        kept = {item.path for item in self.objects if item.valued}
        last = self.objects[self.last].path
        for key in self._in_order_of_removal(gone - (kept - {last})):
            self._bucket.remove(key, etag=there[key].etag)

    def check_there(self) -> None:
        """As `Upload.check_there`. Called by the first worker, which records for the others what may be replaced."""
        super().check_there()
        if self._force and self._replaced.files:
            self._records_here.put(RECORD, self._replaced.to_json(), {}, new=False)

    def _abort_others(self) -> None:
        """Abort unused uploads of our objects: of workers that died after beginning one and before recording it."""
        keys = {self._key(item) for item in self.objects}
        for each in self._bucket.pending():
            if each.key in keys:
                self._bucket.abort(each.key, each.upload)

    def discard(self) -> None:
        """As `Upload.discard`, including what other workers have sent."""
        super().discard()
        self._abort_others()

    def sweep(self) -> None:
        """Remove what this worker may have written after the committing worker had cleaned up."""
        left = self._records_here.listing().objects
        if BEGUN in left:  # of another run
            return
        for item in self.objects:
            upload = self._known_upload(item) if _upload_key(item) in left else ""
            if upload:
                self._bucket.abort(self._key(item), upload)
        for key in left:
            self._records_here.remove(key)


GONE = "E2511"


def is_committed(plan: Plan, bucket: OutputStore) -> bool:
    """Does the complete output of this plan exist? True if its last object exists and carries the plan's note."""
    key = "" if plan.single is not None else plan.outputs[last_of(plan)].path
    return key in bucket.objects() and bucket.note(key, PLAN) == plan.identifier()


def _ended(shown: str) -> StorageError:
    return StorageError(
        "another worker has committed the output, or given it up",
        code=NO_UPLOAD,
        path=shown,
        hint="run the same command again: it says which",
    )


def _upload_key(item: StoredObject) -> str:
    return f"upload-{item.number}"


def _held_key(file: int, number: int) -> str:
    return f"held-{file}-{number}"


def _crcs(item: StoredObject) -> list[list[int]]:
    """[object, span's start and length, piece] for the written bytes of each span; one piece if it is complete."""
    rows = defaultdict[Span, list[ChecksummedRange]](list)
    for span, holes in item.spans.items():
        if span in item.pieces:
            rows[span] = item.pieces[span]
        elif span[1]:
            rows[span] = [ChecksummedRange(span[0], sum(span), int.from_bytes(item.known[holes[0]], "little"))]
    return [[item.number, *span, *piece] for span, pieces in rows.items() for piece in pieces]
