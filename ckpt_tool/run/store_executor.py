"""The executor for outputs in an object store: as the only writer, or as one of several workers.

The only writer fills an `Upload`, object by object. Workers share no disk: each claims shares of the plan through
objects next to the output (`stores.store_claims`) and fills their parts (`run.share_upload`); the one that finds all
shares done commits, from the records that the others have written. Nothing is visible before everything has been sent.
Memory: that of the executor, and the parts that are not complete (`Upload.begin` raises if these are too many).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ckpt_tool.errors import (
    CkptError,
    InputError,
    OutputExists,
    ReplicasDiffer,
    SourceChanged,
    StorageError,
    UnsafeInput,
)
from ckpt_tool.run import replicas
from ckpt_tool.run.checksum import ChecksummedRange
from ckpt_tool.run.executor import WRITING, Executor, Result, RunState, Waits
from ckpt_tool.run.file_parts import in_order_of_files
from ckpt_tool.run.share_upload import GONE, ShareUpload
from ckpt_tool.run.shares import of_part
from ckpt_tool.run.upload import Upload
from ckpt_tool.storage.output.claims import Taken
from ckpt_tool.storage.stores.output_store import OutputStore, staging_url
from ckpt_tool.storage.stores.store_claims import StoreClaims, refuse_held

_LONGEST = 15.0  # seconds between two checks of other workers, at most: each check costs requests


class StoreExecutor(Executor):
    """One run of one plan into `bucket`. Arguments as `Executor`'s; `check` is given the `Upload`."""

    in_order = True  # so parts are filled one after the other, and few are in memory at once

    def __init__(self, bucket: OutputStore, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.bucket = bucket

    def _carry_out(self) -> Result:
        return self._send_shares() if self.part or self.worker else self._send()

    def _send(self) -> Result:
        """Write the output as its only writer."""
        records = self.bucket.at_url(staging_url(self.plan.destination))
        refuse_held(records, self.plan.destination)
        how = self.options
        upload = Upload(
            self.plan,
            self.bucket,
            self.sources,
            memory=how.memory,
            force=how.force,
            resume=how.resume,
            replaced=self._replaced,
        )
        state = RunState(in_order_of_files(self.plan, list(enumerate(self.units))))

        try:
            upload.begin([unit for _, unit in state.queue])
            if self.progress:
                self.progress.start(sum(unit.nbytes for _, unit in state.queue), WRITING)
            self.work(lambda room: upload.writer(), lambda line: None, state)
            self.sources.check()
            result = self._complete(upload, state)
        except (InputError, SourceChanged, UnsafeInput) as e:
            upload.discard()
            if isinstance(e, ReplicasDiffer):
                raise replicas.all_of_them(self.plan.moves, self.sources, e, threads=self.threads) from e
            raise
        finally:
            upload.close()

        if self.progress:
            self.progress.finish()
            if upload.spared:
                self.progress.note(f"{upload.spared} bytes were sent by an earlier run and are as they should be")

        return result

    def _complete(self, upload: Upload, state: RunState) -> Result:
        """Make the output visible, once all values have been sent."""
        digests, digests_out, overflows = self.digests(state)
        sums = (digests_out, digests) if self.hashing else ({}, {})

        def check(upload: Upload) -> None:
            self.sources.check()
            if self.check is not None:
                self.check(upload, *sums)

        # Values in the last object can't be read back before it is visible: then they are checked afterwards.
        blind = upload.blind
        upload.finish(list(digests_out.values()) if self.hashing else None, check)
        if blind and self.full:
            try:
                check(upload)
            except CkptError:
                upload.withdraw()
                raise
        return Result(*sums[::-1], overflows, committed=True)

    def _send_shares(self) -> Result:
        """Write the output as one of several workers that share no disk.

        Shares are claimed one by one, or follow from the part's number. The worker that finds all done commits.
        """
        records = self.bucket.at_url(staging_url(self.plan.destination))
        order = in_order_of_files(self.plan, list(enumerate(self.units)))
        how = self.options
        upload = ShareUpload(
            self.plan,
            self.bucket,
            records,
            self.sources,
            order,
            memory=how.memory,
            force=how.force,
            replaced=self._replaced,
        )
        sizes = [share.nbytes for share in upload.shares]
        mine = None if self.part is None else of_part(sizes, self.part)
        claims = StoreClaims(records, self.plan.identifier(), self.part or self.worker, sizes, mine)
        upload.sole = claims.commits_still
        upload.nearly = claims.ahead
        claims.moving = lambda: upload.gathered
        result = Result({}, {}, {}, committed=False)

        try:
            with claims:
                if claims.first:
                    try:
                        upload.check_there()
                    except OutputExists:
                        claims.clear()
                        raise
                upload.start()
                result = self._claim_shares(upload, claims)
        except ReplicasDiffer as e:
            raise replicas.all_of_them(self.plan.moves, self.sources, e, threads=self.threads) from e
        except (OutputExists, StorageError):  # expected if another worker has committed in the meantime
            if not upload.committed():
                raise
        finally:
            upload.close()

        # This worker may have created records after the committing one removed them all.
        if not result.committed:
            upload.sweep()
            if claims.gone and not upload.committed():
                raise StorageError(
                    "the records of the run are gone, and the output is not there",
                    code=GONE,
                    path=records.shown,
                    hint="the worker that was to commit has given up, and said why; or someone has cleaned up",
                )

        return result

    def _claim_shares(self, upload: ShareUpload, claims: StoreClaims) -> Result:
        waits = Waits(self.progress)
        own = set[int]()
        seen = set[int]()
        sizes = {number: upload.shares[number].nbytes for number in claims.mine}
        # Progress counts source bytes, shares count output bytes: the ratio converts them.
        moved = sum(unit.nbytes for unit in self.units) / max(1, sum(share.nbytes for share in upload.shares))
        if self.progress:
            self.progress.start(int(moved * sum(sizes.values())), WRITING)

        while True:
            taken = claims.take()
            if claims.gone:
                break
            # Progress counts shares of other workers as well, as they are done.
            others = claims.done - seen - own
            seen |= others
            self.advance(int(moved * sum(sizes.get(number, 0) for number in others)))
            if taken is not None:
                own.add(taken.number)
                claims.finish(taken.number, self._send_share(upload, taken))
            elif not claims.left() and claims.take_commit():
                return self._commit_shares(upload, claims)
            elif self.part is not None:
                return Result({}, {}, {}, committed=False, parts=tuple(claims.end(done=True)))
            else:
                what = "what other workers have claimed" if claims.left() else "the worker that commits"
                waits.a_while(f"waiting for {what}", longest=_LONGEST)

        return Result({}, {}, {}, committed=False)

    def _send_share(self, upload: ShareUpload, taken: Taken) -> dict[str, Any]:
        """Fill the parts of a share. Returns its record, from which the committing worker takes digests and CRCs."""
        works = list(upload.shares.work(taken.number))
        state = RunState([(number, work.unit) for number, work in enumerate(works)])
        leaves: list[Any] = []
        lost = Counter[str]()

        def record(line: dict[str, Any]) -> None:
            with state.lock:
                leaves.extend(line["leaves"])
                lost.update(line["overflows"] if works[line["unit"]].counts else {})

        upload.begin_share(taken.number, [work.unit for work in works], over=taken.over)
        self.work(lambda room: upload.writer(), record, state)
        sent = upload.end_share()
        self.sources.check()
        read = [[file, *piece] for file, pieces in state.source_pieces.items() for piece in pieces]
        return {"plan": self.plan.identifier(), **sent, "leaves": leaves, "overflows": lost, "sources": read}

    def _commit_shares(self, upload: ShareUpload, claims: StoreClaims) -> Result:
        """Commit the output from the records of all shares. May be repeated."""
        result = Result({}, {}, {}, committed=True)
        if not upload.committed():  # True if a worker committed and died before it removed the records
            while True:
                state, missing = self._take_records(upload, claims)
                if not missing:
                    break
                if self.progress:
                    self.progress.note(f"{len(missing)} shares are not in the store as they were sent: sent again")
                for number in sorted(missing):
                    claims.finish(number, self._send_share(upload, Taken(number, over=True)))
            try:
                result = self._complete(upload, state)
            except (InputError, SourceChanged, UnsafeInput):
                upload.discard()
                claims.clear()
                raise
        claims.clear()
        if self.progress:
            self.progress.finish()
        return result

    def _take_records(self, upload: ShareUpload, claims: StoreClaims) -> tuple[RunState, set[int]]:
        """Read the workers' records. Returns (their combined state, the shares that have to be sent again).

        These are shares without a record, and shares whose parts the store does not have as recorded.
        """
        state = RunState([])
        missing = set[int]()
        upload.begin_commit()
        for number, record in enumerate(claims.records()):
            if not record:
                missing.add(number)
                continue
            upload.take(record)
            self.gather_leaves([record], state)
            for file, *piece in record["sources"]:
                state.source_pieces.setdefault(file, []).append(ChecksummedRange(*piece))
        return state, missing | upload.lost()
