"""Writing into a bucket that speaks S3's protocol: objects in parts, in any order, that appear when they are completed.

    bucket = Bucket.at("s3://b/out")
    upload = bucket.begin("model.safetensors", {"plan": "1f..."})
    etag = bucket.part("model.safetensors", upload, 7, data)          # any part, any number of times
    bucket.complete("model.safetensors", upload, {1: ..., 7: etag}, new=True)

A part travels with a checksum that the server holds against what came: its CRC-32 where the server says, when the
upload begins, that it knows checksums of whole objects; else its MD5. The part's MD5 is its ETag unless the bucket
encrypts with keys of a service: so what an earlier run has sent is known by its content. `new`: If-None-Match, an
object that is there is never replaced. boto3 does this: obstore sends parts in order alone, and lists none. It also
hands on `Retry-After`, which is obeyed. An answer may get lost: what is refused because it is there already is there by
our own request if it has our ETag. Source: Amazon S3 API reference (CreateMultipartUpload, UploadPart, ListParts,
CompleteMultipartUpload), user guide, "Checking object integrity": of checksums of whole objects (FULL_OBJECT) neither
the parts' own need to be known at the end, nor does a part need one.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from ckpt_tool.core.installation import install_command
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.urls import cause_without_secrets, hide_in_message
from ckpt_tool.errors import OutputExists, StorageError, UsageError
from ckpt_tool.storage.crc import crc32
from ckpt_tool.storage.stores.object_store import S3, Cloud, fault, passing
from ckpt_tool.storage.stores.seekable import Seekable
from ckpt_tool.storage.stores.store import Again, patiently

T = TypeVar("T")
# bytes of a part (S3 takes no less), parts of an object (S3 takes 10,000)
LEAST = 5 << 20
MOST_PARTS = 9000
CONNECTIONS = 8
AT_ONCE = 256 << 10  # bytes handed to a socket at once; a second's worth of a slow line, which has 5 s for it
_CRC = "crc32:"  # before the name of an upload whose parts are checked by CRC-32


def part_size(nbytes: int) -> int:
    """Bytes of each part of an object but the last: the same for every run."""
    return LEAST if nbytes <= LEAST * MOST_PARTS else ceil_div(nbytes, MOST_PARTS << 20) << 20


def md5(data: bytes | bytearray | memoryview) -> bytes:
    """MD5 as stores use it, against damage on the way and not against forgers."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def whole_etag(etags: Mapping[int, str]) -> str | None:
    """The ETag of an object of these parts, None where they are no MD5s."""
    try:
        digests = b"".join(bytes.fromhex(etags[number]) for number in sorted(etags))
    except ValueError:
        return None
    return f"{md5(digests).hex()}-{len(etags)}"


class Sent(NamedTuple):
    """A part that the store has."""

    etag: str  # as the store reports it, without quotes
    nbytes: int


class Pending(NamedTuple):
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload: str
    begun: str
    goes_on: bool = True  # can parts be added to it?


class ListedObject(NamedTuple):
    """An object in a listing."""

    nbytes: int
    modified: float  # seconds since 1970, by the store's clock
    etag: str


class StoreListing(NamedTuple):
    """The objects at a place and below it."""

    now: float  # the store's clock at the time of the listing, seconds since 1970
    objects: dict[str, ListedObject]  # by key


class PartBody(Seekable):
    """A part as a file object for boto3, which would copy plain bytes for every sending thread, and would send an
    ordinary file in pieces of 16 KiB."""

    def __init__(self, data: bytearray) -> None:
        super().__init__(len(data))
        self._data = memoryview(data)

    def read(self, size: int = -1) -> Any:
        """A slice of the part without a copy, which may be longer than `size`: the HTTP client sends whatever it
        gets."""
        some = self._data[self._at : self._at + (AT_ONCE if size >= 0 else len(self._data))]
        self._at += len(some)
        return some


class PutsWhole:
    """Writes small objects with one request each, using `_put` and `_holds`, which each store implements."""

    def put(self, key: str, data: bytes | bytearray, notes: Mapping[str, str], *, new: bool) -> None:
        """Write an object with one request. new: raise OutputExists if an object exists there, unless it came from this
        very call, in a request whose answer was lost."""
        try:
            self._put(key, data, notes, new=new)
        except OutputExists:
            if not self._holds(key, data):
                raise

    def create(self, key: str, data: bytes) -> bool:
        """Create a small object. Returns False if one exists.

        If the request was repeated because its answer was lost, the first attempt may have created the object: an
        existing object with the same bytes then counts as created.
        """
        try:
            self._put(key, data, {}, new=True)
        except OutputExists as e:
            again = e.__cause__ is not None and e.__cause__.__cause__ is not None  # see `patiently`
            return again and self.get(key) == data
        return True

    def _put(self, key: str, data: bytes | bytearray, notes: Mapping[str, str], *, new: bool) -> None:
        raise NotImplementedError

    def _holds(self, key: str, data: bytes | bytearray) -> bool:
        """Does an object with these bytes exist, written with one request?"""
        raise NotImplementedError

    def get(self, key: str) -> bytes | None:
        """The content of a small object, None if it does not exist."""
        raise NotImplementedError


class WritableBucket(PutsWhole):
    """A place in a bucket to write to. Keys are relative to it. Thread-safe."""

    def __init__(self, client: Any, bucket: str, base: str, shown: str) -> None:
        self._client = client
        self.name = bucket
        self._base = base
        self.shown = shown
        self._crcs = os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "").lower() != "when_required"
        self._by_crc = dict[str, bool]()  # upload -> has it CRCs? for uploads whose id does not show it

    @classmethod
    def at(cls, url: str) -> WritableBucket:
        """The place of an `s3://` URL. Raises UsageError: E0247 without boto3, E2502 for a URL without a bucket or
        path, E2508 for settings that boto3 refuses."""
        name, _, base = url.partition("://")[2].partition("/")
        if not name or not base.strip("/"):
            raise no_place(url, S3, name)
        try:
            import boto3
            from botocore.config import Config
        except ImportError as e:
            raise UsageError(
                f"writing to {url} needs the extra `remote`", code="E0247", hint=install_command("remote")
            ) from e
        settings = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=60,
            max_pool_connections=2 * CONNECTIONS,
            request_checksum_calculation="when_required",  # not every server knows the newer ones
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False},  # the MD5 is signed, so no SHA-256 is needed
        )
        from botocore.exceptions import BotoCoreError

        try:
            endpoint = os.environ.get("AWS_ENDPOINT") or None  # obstore's own spelling; boto3 knows the others
            region = os.environ.get("AWS_REGION") or None  # boto3 reads AWS_DEFAULT_REGION and the profile's
            client = boto3.client("s3", config=settings, endpoint_url=endpoint, region_name=region)
        except (BotoCoreError, ValueError) as e:
            reason = hide_in_message(str(e))
            raise UsageError(
                f"the store's settings can't be used: {reason}", code="E2508", path=url, hint=f"set {S3.keys}"
            ) from cause_without_secrets(e)
        return cls(client, name, base.strip("/"), url.rstrip("/"))

    # -- objects ----------------------------------------------------------------------------------------------------

    def objects(self) -> dict[str, int]:
        """Key -> bytes of the objects at the place ("" is the place itself) and below it."""
        return {key: each.nbytes for key, each in self.listing().objects.items()}

    def listing(self) -> StoreListing:
        """See `OutputStore.listing`."""
        found = dict[str, ListedObject]()
        now = 0.0
        for page in self._pages("list_objects_v2", Prefix=self._base):
            now = now or time_of(page["ResponseMetadata"]["HTTPHeaders"].get("date", ""))
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(self._base)
                if name == "" or (name.startswith("/") and len(name) > 1):
                    listed = ListedObject(entry["Size"], entry["LastModified"].timestamp(), entry["ETag"].strip('"'))
                    found[name.lstrip("/")] = listed
        return StoreListing(now, found)

    def note(self, key: str, name: str) -> str | None:
        """What `begin` or `put` noted on an object under a name."""
        head = self._request("head_object", key)
        value: str | None = head.get("Metadata", {}).get(name)
        return value

    def _put(self, key: str, data: bytes | bytearray, notes: Mapping[str, str], *, new: bool) -> None:
        condition = {"IfNoneMatch": "*"} if new else {}
        checked = base64.b64encode(md5(data)).decode()
        self._request("put_object", key, Body=bytes(data), ContentMD5=checked, Metadata=dict(notes), **condition)

    def read(self, key: str, nbytes: int) -> Iterator[bytes]:
        """An object's bytes in order, in pieces."""
        for at in range(0, nbytes, LEAST):
            end = min(at + LEAST, nbytes)
            with self._faults("get_object", key):
                yield self._patiently(partial(self._get, key, f"bytes={at}-{end - 1}"), key)

    def _get(self, key: str, piece: str) -> bytes:
        body: bytes = self._client.get_object(Bucket=self.name, Key=self._key(key), Range=piece)["Body"].read()
        return body

    def get(self, key: str) -> bytes | None:
        """See `OutputStore.get`."""
        from botocore.exceptions import ClientError

        def ask() -> bytes | None:
            try:
                body: bytes = self._client.get_object(Bucket=self.name, Key=self._key(key))["Body"].read()
            except ClientError as e:
                if _said(e)[1] == "NoSuchKey":
                    return None
                raise
            return body

        with self._faults("get_object", key):
            return self._patiently(ask, key)

    def remove(self, key: str, *, etag: str = "") -> None:
        """See `OutputStore.remove`."""
        condition = {"IfMatch": f'"{etag}"'} if etag else {}
        self._request("delete_object", key, **condition)

    # -- parts ------------------------------------------------------------------------------------------------------

    def begin(self, key: str, notes: Mapping[str, str]) -> str:
        """See `OutputStore.begin`."""
        with_crcs = self._begin_with_crcs(key, notes) if self._crcs else ""
        if with_crcs:
            return _CRC + with_crcs
        self._crcs = False
        upload: str = self._request("create_multipart_upload", key, Metadata=dict(notes))["UploadId"]
        return upload

    def _begin_with_crcs(self, key: str, notes: Mapping[str, str]) -> str:
        """An upload whose parts have CRC-32s, "" from a server that does not know them, or only those that the end
        would have to state again."""
        from botocore.exceptions import ClientError

        try:
            wanted = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
            answer = self._request("create_multipart_upload", key, Metadata=dict(notes), **wanted)
        except StorageError as e:
            if isinstance(e.__cause__, ClientError) and _said(e.__cause__)[0] in (400, 501):
                return ""
            raise
        upload: str = answer["UploadId"]
        if wanted.items() <= answer.items():
            return upload
        self.abort(key, upload)
        return ""

    def part(self, key: str, upload: str, number: int, data: bytearray) -> str:
        """Send part `number` (from 1). Returns its ETag."""
        if self._by_crc.get(upload, upload.startswith(_CRC)):
            checked = base64.b64encode(crc32(data).to_bytes(4, "big")).decode()
            sent = self._send(key, upload, number, data, ChecksumAlgorithm="CRC32", ChecksumCRC32=checked)
            if sent.get("ChecksumCRC32") == checked:  # it has looked, then
                return _etag_of(sent)
            self._by_crc[upload] = False
        return _etag_of(self._send(key, upload, number, data, ContentMD5=base64.b64encode(md5(data)).decode()))

    def _send(self, key: str, upload: str, number: int, data: bytearray, **checked: str) -> dict[str, Any]:
        return self._request(
            "upload_part", key, UploadId=_id(upload), PartNumber=number, Body=PartBody(data), **checked
        )

    def complete(self, key: str, upload: str, etags: Mapping[int, str], notes: Mapping[str, str], *, new: bool) -> None:
        """Make the object of its parts. notes: those of `begin`. new: raise OutputExists where there is one."""
        parts = [{"PartNumber": number, "ETag": f'"{etags[number]}"'} for number in sorted(etags)]
        condition = {"IfNoneMatch": "*"} if new else {}
        try:
            self._request(
                "complete_multipart_upload", key, UploadId=_id(upload), MultipartUpload={"Parts": parts}, **condition
            )
        except (OutputExists, StorageError) as e:
            if e.code not in ("E0501", NO_UPLOAD) or self._etag(key) != whole_etag(etags):
                raise

    def _holds(self, key: str, data: bytes | bytearray) -> bool:
        return self._etag(key) == md5(data).hex()

    def _etag(self, key: str) -> str:
        """Of the object that is there, "" where none is."""
        try:
            return _etag_of(self._request("head_object", key))
        except StorageError:
            return ""

    def abort(self, key: str, upload: str) -> None:
        """See `OutputStore.abort`."""
        try:
            self._request("abort_multipart_upload", key, UploadId=_id(upload))
        except StorageError as e:
            if e.code != NO_UPLOAD:
                raise

    def pending(self) -> list[Pending]:
        """Uploads at the place and below that were begun and not ended, the oldest first."""
        found = []
        for page in self._pages("list_multipart_uploads", Prefix=self._base):
            for entry in page.get("Uploads", ()):
                name = entry["Key"].removeprefix(self._base)
                if name == "" or name.startswith("/"):
                    goes_on = entry.get("ChecksumType") != "COMPOSITE"  # others': the end states every part's
                    begun = entry["Initiated"].isoformat()
                    found.append(Pending(name.lstrip("/"), entry["UploadId"], begun, goes_on))
        return sorted(found, key=lambda each: (each.begun, each.key))

    def parts(self, key: str, upload: str) -> dict[int, Sent]:
        """What the store has of an upload."""
        found = {}
        for page in self._pages("list_parts", Key=self._key(key), UploadId=_id(upload)):
            if page.get("ChecksumAlgorithm") == "CRC32":
                self._by_crc[upload] = True
            for entry in page.get("Parts", ()):
                found[int(entry["PartNumber"])] = Sent(entry["ETag"].strip('"'), int(entry["Size"]))
        return found

    # -- asking -----------------------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return f"{self._base}/{key}" if key else self._base

    def display(self, key: str) -> str:
        """See `OutputStore.display`."""
        return f"{self.shown}/{key}" if key else self.shown

    def at_url(self, url: str) -> WritableBucket:
        """See `OutputStore.at_url`."""
        base = url.partition("://")[2].partition("/")[2]
        return WritableBucket(self._client, self.name, base.strip("/"), url.rstrip("/"))

    def _request(self, operation: str, key: str, **more: Any) -> dict[str, Any]:
        """One request, made again where that helps; a part is read from its start each time."""
        body = more.get("Body")

        def ask() -> dict[str, Any]:
            if isinstance(body, PartBody):
                body.seek(0)
            answer: dict[str, Any] = getattr(self._client, operation)(Bucket=self.name, Key=self._key(key), **more)
            return answer

        with self._faults(operation, key):
            return self._patiently(ask, key)

    def _pages(self, operation: str, **more: Any) -> Iterator[dict[str, Any]]:
        """Each page of a listing. Not boto3's paginator: one that has failed once is at its end."""
        page: dict[str, Any] = {"IsTruncated": True}
        while page.get("IsTruncated"):
            with self._faults(operation, ""):
                ask = partial(getattr(self._client, operation), Bucket=self.name, **more)
                page = self._patiently(ask, "")
            yield page
            more |= {asks: page[given] for given, asks in _GOES_ON[operation].items() if given in page}

    def _patiently(self, ask: Callable[[], T], key: str) -> T:
        from botocore.exceptions import BotoCoreError, ClientError

        return patiently(ask, shown=self.display(key), faults=(BotoCoreError, ClientError, OSError), judge=_judge)

    @contextmanager
    def _faults(self, operation: str, key: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, OSError) as e:
            self._fail(e, _DOING[operation], key)

    def _fail(self, error: Exception, doing: str, key: str) -> NoReturn:
        status, code, text = _said(error)
        shown = self.display(key)
        if status in (409, 412) and code in ("PreconditionFailed", "ConditionalRequestConflict", ""):
            raise object_exists(shown) from error
        if code == "NoSuchUpload":
            raise StorageError(
                "the upload was completed or aborted by someone else",
                code=NO_UPLOAD,
                path=shown,
                hint="is another run writing the same output? else run the same command again",
            ) from error
        raise fault(status, code, text, S3, self.name, shown, doing) from error


def _etag_of(answer: Mapping[str, Any]) -> str:
    etag: str = answer["ETag"]
    return etag.strip('"')


def _id(upload: str) -> str:
    return upload.removeprefix(_CRC)


def time_of(header: str) -> float:
    """Seconds since 1970 of an answer's `Date`; where a proxy took that away, this machine's."""
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(header).timestamp()
    except ValueError:
        return time.time()


def no_place(url: str, cloud: Cloud, bucket: str) -> UsageError:
    """What to raise for a URL that can't be written to."""
    return UsageError(
        f"{url} names no {f'place in the {cloud.bucket}' if bucket else cloud.bucket}",
        code="E2502",
        path=url,
        hint=f"write {cloud.name}://{cloud.bucket.upper()}/PATH",
    )


def object_exists(shown: str) -> OutputExists:
    """What to raise where an object came to be that is not to be replaced."""
    return OutputExists(
        f"{shown} exists",
        code="E0501",
        path=shown,
        hint="another run has written it, or it was there: choose a new name, or --force to replace it",
    )


NO_UPLOAD = "E2509"
_DOING = {  # as errors say it
    "list_objects_v2": "listing",
    "head_object": "looking at",
    "get_object": "reading",
    "put_object": "writing",
    "delete_object": "removing",
    "create_multipart_upload": "beginning an upload",
    "upload_part": "sending a part",
    "complete_multipart_upload": "completing an upload",
    "abort_multipart_upload": "aborting an upload",
    "list_multipart_uploads": "listing uploads",
    "list_parts": "listing parts",
}
_GOES_ON = {  # what a page says of the next one -> how that is asked for
    "list_objects_v2": {"NextContinuationToken": "ContinuationToken"},
    "list_multipart_uploads": {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"},
    "list_parts": {"NextPartNumberMarker": "PartNumberMarker"},
}


def _said(error: Exception) -> tuple[int, str, str]:
    """(HTTP status, the store's code, text) of a failure; 0 and "" where the store said nothing."""
    answer = getattr(error, "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = answer.get("Error", {}).get("Code", "")
    region = answer.get("Error", {}).get("Region", "")
    text = f"{hide_in_message(str(error))}{f' <Region>{region}</Region>' if region else ''}"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        text = f"169.254.169.254 {text}"  # as obstore says it: it looks there last
    elif not status:
        text = f"error sending request: {text}"
    return int(status), "" if str(code).isdigit() else str(code), text


def _judge(error: Exception) -> Again | None:
    status, code, text = _said(error)
    if "169.254.169.254" in text or type(error).__name__ in ("ParamValidationError", "NoRegionError"):
        return None
    answer = getattr(error, "response", None) or {}
    after = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", "")
    wait = float(after) if after.isdigit() else 0.0
    if again := passing(status, code, wait=wait):
        return again
    if code in ("RequestTimeout", "BadDigest"):
        return Again(f"the store answers {status} {code}", wait=wait)
    return None if status else Again("the store does not answer")
