"""Writing into a container of Azure's blobs: blocks in any order, that appear as a blob when their list is committed.

As `stores.multipart.WritableBucket`, with what differs: Azure knows no uploads. The blocks that were sent and not
committed
belong to the blob's name, and stay for a week. A block's name is its number and its MD5, so what an earlier run has
sent is known by its content, and two runs never take each other's blocks. Notes come with the commit. Blocks sent for
a blob that is there already are not found again: a run that replaces one sends all.

Source: Azure Blob Storage REST API (Put Block: names of one length, Content-MD5 is checked; Put Block List:
If-None-Match; List Blobs: include=uncommittedblobs). azure-storage-blob does this: obstore sends blocks in order alone,
and lists none.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

from ckpt_tool.core.installation import install_command
from ckpt_tool.core.urls import cause_without_secrets, hide_in_message
from ckpt_tool.errors import OutputExists, StorageError, UsageError
from ckpt_tool.storage.stores.multipart import (
    LEAST,
    ListedObject,
    PartBody,
    Pending,
    PutsWhole,
    Sent,
    StoreListing,
    md5,
    no_place,
    object_exists,
    time_of,
)
from ckpt_tool.storage.stores.object_store import AZURE, ENDPOINTS, fault, given_url, passing
from ckpt_tool.storage.stores.store import Again, patiently

T = TypeVar("T")
BLOCKS = "uncommitted blocks"  # the one upload that a blob may have
_DIGITS = 5  # of a block's number: a blob has 50,000 at most


class Container(PutsWhole):
    """A place in a container to write to. Keys are relative to it. Thread-safe."""

    def __init__(self, client: Any, name: str, base: str, shown: str) -> None:
        self._client = client
        self.name = name
        self._base = base
        self.shown = shown

    @classmethod
    def at(cls, url: str) -> Container:
        """The place of an `az://` URL. Raises UsageError: E0247 without azure-storage-blob, E2502 for a URL without a
        container or path, E2508 for settings that it refuses; StorageError E2504 where no credentials are found."""
        name, _, base = url.partition("://")[2].partition("/")
        if not name or not base.strip("/"):
            raise no_place(url, AZURE, name)

        try:
            from azure.storage.blob import ContainerClient
        except ImportError as e:
            raise UsageError(
                f"writing to {url} needs the extra `remote`", code="E0247", hint=install_command("remote")
            ) from e

        try:
            client = ContainerClient(
                _account(url),
                name,
                credential=_credential(url),
                retry_total=0,
                connection_timeout=5,
                read_timeout=60,
                max_single_put_size=LEAST,
            )
        except ValueError as e:
            reason = hide_in_message(str(e))
            raise UsageError(
                f"the store's settings can't be used: {reason}", code="E2508", path=url, hint=f"set {AZURE.keys}"
            ) from cause_without_secrets(e)

        return cls(client, name, base.strip("/"), url.rstrip("/"))

    # -- blobs ------------------------------------------------------------------------------------------------------

    def objects(self) -> dict[str, int]:
        """See `OutputStore.objects`."""
        return {key: blob.size for key, blob in self._listed().items()}

    def listing(self) -> StoreListing:
        """As `OutputStore.listing`."""
        said = list[str]()

        def heard(answer: Any) -> None:
            said.append(answer.http_response.headers.get("Date", ""))

        found = {
            key: ListedObject(blob.size, blob.last_modified.timestamp(), (blob.etag or "").strip('"'))
            for key, blob in self._listed(raw_response_hook=heard).items()
        }
        return StoreListing(time_of(said[0] if said else ""), found)

    def _listed(self, *include: str, **more: Any) -> dict[str, Any]:
        """The blobs at the place and below it. Folders are none: accounts with a hierarchy list them as empty blobs."""

        def ask() -> dict[str, Any]:
            listed = self._client.list_blobs(name_starts_with=self._base, include=["metadata", *include], **more)
            files = (blob for blob in listed if (blob.metadata or {}).get("hdi_isfolder") != "true")
            return {blob.name.removeprefix(self._base): blob for blob in files}

        found = self._request(ask, "", "listing")
        return {name.lstrip("/"): blob for name, blob in found.items() if name == "" or (name[0] == "/" and name[1:])}

    def note(self, key: str, name: str) -> str | None:
        """See `OutputStore.note`."""
        metadata = self._request(lambda: self._blob(key).get_blob_properties().metadata, key, "looking at")
        value: str | None = metadata.get(_word(name))
        return value

    def _put(self, key: str, data: bytes | bytearray, notes: Mapping[str, str], *, new: bool) -> None:
        body = bytes(data)
        ask = partial(
            self._blob(key).upload_blob,
            body,
            overwrite=not new,
            metadata=_metadata(notes),
            headers={"Content-MD5": _text(md5(body))},
        )
        self._request(ask, key, "writing")

    def _holds(self, key: str, data: bytes | bytearray) -> bool:
        try:
            blob = self._request(self._blob(key).get_blob_properties, key, "looking at")
        except StorageError:
            return False
        return bytes(blob.content_settings.content_md5 or b"") == md5(data)

    def read(self, key: str, nbytes: int) -> Iterator[bytes]:
        for at in range(0, nbytes, LEAST):
            ask = partial(self._piece, key, at, min(LEAST, nbytes - at))
            yield self._request(ask, key, "reading")

    def _piece(self, key: str, offset: int, nbytes: int) -> bytes:
        data: bytes = self._blob(key).download_blob(offset, nbytes).readall()
        return data

    def get(self, key: str) -> bytes | None:
        """As `OutputStore.get`."""
        try:
            data: bytes = self._request(lambda: self._blob(key).download_blob().readall(), key, "reading")
        except StorageError as e:
            if e.code != NOT_THERE:
                raise
            return None
        return data

    def remove(self, key: str, *, etag: str = "") -> None:
        """As `OutputStore.remove`."""
        from azure.core import MatchConditions

        condition = {"etag": f'"{etag}"', "match_condition": MatchConditions.IfNotModified} if etag else {}
        try:
            self._request(partial(self._blob(key).delete_blob, **condition), key, "removing")
        except StorageError as e:
            if e.code != NOT_THERE:
                raise

    # -- blocks -----------------------------------------------------------------------------------------------------

    def begin(self, key: str, notes: Mapping[str, str]) -> str:
        """The same for every blob: nothing is begun."""
        return BLOCKS

    def part(self, key: str, upload: str, number: int, data: bytearray) -> str:
        """Send block `number` (from 1). Returns its MD5 as an ETag."""
        digest = md5(data)

        def ask() -> None:
            self._blob(key).stage_block(
                _block(number, digest), PartBody(data), length=len(data), headers={"Content-MD5": _text(digest)}
            )

        self._request(ask, key, "sending a part")
        return digest.hex()

    def complete(self, key: str, upload: str, etags: Mapping[int, str], notes: Mapping[str, str], *, new: bool) -> None:
        """As `OutputStore.complete`: the blocks are committed in the order of their numbers."""
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        names = [_block(number, bytes.fromhex(etags[number])) for number in sorted(etags)]
        condition = {"match_condition": MatchConditions.IfMissing} if new else {}
        ask = partial(
            self._blob(key).commit_block_list,
            [BlobBlock(name) for name in names],
            metadata=_metadata(notes),
            **condition,
        )
        try:
            self._request(ask, key, "completing a blob")
        except (OutputExists, StorageError) as e:
            if e.code not in ("E0501", NO_BLOCKS) or self._blocks(key, "committed") != names:
                raise

    def abort(self, key: str, upload: str) -> None:
        """Let the blocks of a blob that is not there go: an empty list takes them along. Those of one that is there go
        by themselves in a week."""
        from azure.core import MatchConditions

        try:
            self._request(
                partial(self._blob(key).commit_block_list, [], match_condition=MatchConditions.IfMissing),
                key,
                "removing blocks",
            )
        except OutputExists:
            return
        self.remove(key)

    def pending(self) -> list[Pending]:
        """As `OutputStore.pending`: blobs of which only uncommitted blocks are there."""
        there = self._listed()
        found = [
            Pending(key, BLOCKS, blob.last_modified.isoformat() if blob.last_modified else "")
            for key, blob in self._listed("uncommittedblobs").items()
            if key not in there
        ]
        return sorted(found, key=lambda each: (each.begun, each.key))

    def parts(self, key: str, upload: str) -> dict[int, Sent]:
        """See `OutputStore.parts`."""
        found = {}
        for name, nbytes in self._sizes(key, "uncommitted").items():
            plain = base64.b64decode(name)
            # A block's name is the part's number and the 16 bytes of its MD5; others are not ours.
            if len(plain) == _DIGITS + 16 and plain[:_DIGITS].isdigit():
                found[int(plain[:_DIGITS])] = Sent(plain[_DIGITS:].hex(), nbytes)
        return found

    def _blocks(self, key: str, kind: str) -> list[str]:
        return list(self._sizes(key, kind))

    def _sizes(self, key: str, kind: str) -> dict[str, int]:
        """Name -> bytes of the blocks of a blob, in its order."""
        try:
            committed, waiting = self._request(partial(self._blob(key).get_block_list, "all"), key, "listing parts")
        except StorageError as e:
            if e.code != NOT_THERE:
                raise
            return {}
        return {each.id: each.size for each in (committed if kind == "committed" else waiting)}

    # -- asking -----------------------------------------------------------------------------------------------------

    def _blob(self, key: str) -> Any:
        return self._client.get_blob_client(f"{self._base}/{key}" if key else self._base)

    def display(self, key: str) -> str:
        """See `OutputStore.display`."""
        return f"{self.shown}/{key}" if key else self.shown

    def at_url(self, url: str) -> Container:
        """See `OutputStore.at_url`."""
        base = url.partition("://")[2].partition("/")[2]
        return Container(self._client, self.name, base.strip("/"), url.rstrip("/"))

    def _request(self, ask: Callable[[], T], key: str, doing: str) -> T:
        from azure.core.exceptions import AzureError

        try:
            return patiently(ask, shown=self.display(key), faults=(AzureError, OSError), judge=_judge)
        except (AzureError, OSError) as e:
            self._fail(e, doing, key)

    def _fail(self, error: Exception, doing: str, key: str) -> NoReturn:
        status, code, text = _said(error)
        shown = self.display(key)
        if status in (409, 412) and code in ("BlobAlreadyExists", "ConditionNotMet"):
            raise object_exists(shown) from error
        if code in ("InvalidBlockList", "InvalidBlockId", "InvalidBlobOrBlock"):
            raise StorageError(
                f"the store no longer has the blocks that were sent while {doing}: {code}",
                code=NO_BLOCKS,
                path=shown,
                hint="is another run writing the same output? else run the same command again",
            ) from error
        if status == 404 and code != "ContainerNotFound":
            raise StorageError(f"there is no blob {shown}", code=NOT_THERE, path=shown) from error
        raise fault(status, code, text, AZURE, self.name, shown, doing) from error


NO_BLOCKS = "E2509"
NOT_THERE = "E0702"


def _account(url: str) -> str:
    """The URL of the account, as obstore finds it: an endpoint of its own, or the account's name."""
    endpoint = next((os.environ[name] for name in ENDPOINTS if name.startswith("AZURE") and os.environ.get(name)), "")
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if not endpoint and not account:
        raise UsageError(
            "the store's settings can't be used: no account is named", code="E2508", path=url, hint=f"set {AZURE.keys}"
        )
    return endpoint or f"https://{account}.blob.core.windows.net"


def _credential(url: str) -> Any:
    """The account's key, a shared access signature, or what azure-identity finds (a login, a managed identity)."""
    environ = os.environ
    if key := environ.get("AZURE_STORAGE_ACCOUNT_KEY"):
        try:
            base64.b64decode(key, validate=True)
        except ValueError as e:
            raise UsageError(
                f"the store's settings can't be used: {e}",
                code="E2508",
                path=url,
                hint="set AZURE_STORAGE_ACCOUNT_KEY to a key of the account, which is base64",
            ) from e
        return {"account_name": environ.get("AZURE_STORAGE_ACCOUNT_NAME", ""), "account_key": key}
    if token := environ.get("AZURE_STORAGE_SAS_TOKEN"):
        return token.lstrip("?")
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as e:
        raise StorageError(
            "no credentials for the store were found",
            code="E2504",
            path=given_url(url),
            hint=f"set {AZURE.keys}; for a login or a managed identity: pip install azure-identity",
        ) from e
    return DefaultAzureCredential()


def _block(number: int, digest: bytes) -> str:
    return _text(b"%0*d" % (_DIGITS, number) + digest)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _word(name: str) -> str:
    """A note's name as Azure allows it: an identifier of C#."""
    return name.replace("-", "_")


def _metadata(notes: Mapping[str, str]) -> dict[str, str]:
    return {_word(name): value for name, value in notes.items()}


def _said(error: Exception) -> tuple[int, str, str]:
    """(HTTP status, the store's code, text) of a failure; 0 and "" where the store said nothing."""
    status = getattr(error, "status_code", None) or 0
    code = getattr(error, "error_code", None) or ""
    text = hide_in_message(str(error))
    if type(error).__name__ == "ClientAuthenticationError" and not status:
        text = f"169.254.169.254 {text}"  # as obstore says it: azure-identity found no login
    elif not status:
        text = f"error sending request: {text}"
    return int(status), str(getattr(code, "value", code)), text


def _judge(error: Exception) -> Again | None:
    status, code, _ = _said(error)
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    after = headers.get("Retry-After", "")
    wait = float(after) if after.isdigit() else 0.0
    if again := passing(status, code, wait=wait):
        return again
    if type(error).__name__ == "ClientAuthenticationError":
        return None
    if code in ("Md5Mismatch", "RequestBodyIncomplete"):
        return Again(f"the store answers {status} {code}", wait=wait)
    return None if status else Again("the store does not answer")
