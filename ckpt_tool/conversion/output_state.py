"""Reports the progress of an output that several processes write, into a hidden folder next to it or into a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ckpt_tool.plan.plan import Plan
from ckpt_tool.storage.output.destination import Place, RemotePlace, place_of
from ckpt_tool.storage.output.journal import PartStatus
from ckpt_tool.storage.output.marks import was_committed
from ckpt_tool.storage.output.staging import statuses_of


class OutputState(NamedTuple):
    """The progress of an output."""

    there: bool  # does the output exist?
    parts: Sequence[PartStatus]  # the progress of each process; empty before the first starts and after the commit
    done: int = 0  # bytes of the whole, whoever moved them; 0 where only the parts say
    of: int = 0  # bytes of the whole, whoever moved them; 0 where only the parts say

    @property
    def moved(self) -> int:
        """Bytes that are done."""
        return max(self.done, sum(part.nbytes for part in self.parts))


def output_state(place: Place) -> OutputState:
    """Raises StorageError where it can't be looked at."""
    if not isinstance(place, RemotePlace):
        return OutputState(os.path.lexists(place), statuses_of(place))
    from ckpt_tool.storage.stores.output_store import output_store, staging_url
    from ckpt_tool.storage.stores.store_claims import done_of, statuses

    bucket = output_store(place.url)
    records = bucket.at_url(staging_url(place.url))
    done = done_of(records)
    if done is None:
        return OutputState(bool(bucket.objects()), ())
    return OutputState(True, statuses(records), *done)


def is_committed(plan: Plan) -> bool:
    """Is the output complete, written by processes that shared this plan? False on file systems that store neither
    marks nor fractions of seconds.

    In a store, this also removes the records of a process that died right after the commit.
    """
    place = place_of(plan.destination)
    if isinstance(place, Path):
        return was_committed(place, plan.identifier())
    from ckpt_tool.run.share_upload import is_committed
    from ckpt_tool.storage.stores.output_store import output_store, staging_url
    from ckpt_tool.storage.stores.store_claims import plan_of, remove_records

    bucket = output_store(place.url)
    committed = is_committed(plan, bucket)
    if committed:
        records = bucket.at_url(staging_url(place.url))
        if plan_of(records) == plan.identifier():
            remove_records(records)
    return committed
