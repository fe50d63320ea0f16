"""S3 and what speaks it, Google Cloud Storage and Azure, through obstore (Rust's object_store).

Endpoints and credentials are found as the stores' own tools find them. obstore takes the variables and what the machine
gives (web identity, containers, instance metadata); of the AWS files this module adds the profile's keys, region and
endpoint, and a profile that logs in (SSO, a role, a process) is boto3's. A request is pinned by If-Match and by the
ETag and size of what came back, since not every server of S3's protocol knows If-Match. Variables: docs of object_store
(`AmazonS3ConfigKey`, `GoogleConfigKey`, `AzureConfigKey`); the files: AWS SDKs and Tools Reference Guide, "Shared
config and credentials files".

    S3_FAULTS: what a server's <Code> means for the person who has to do something about it
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from ckpt_tool.core.inner_path import STAGED
from ckpt_tool.core.installation import install_command
from ckpt_tool.core.urls import cause_without_secrets, hide_in_message, hide_secrets
from ckpt_tool.errors import StorageError, UsageError
from ckpt_tool.storage.stores.store import Again, ObjectChanged, Parts, StoreEntry, patiently

T = TypeVar("T")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
CONNECT = timedelta(seconds=5)  # how long a connection may take
STALL = timedelta(seconds=15)  # how long a body may send nothing
SOME = 256 << 10  # bytes of an answer per buffer: for buffers of whole answers malloc would map new pages each time
# Any other form makes the Rust client panic, which Python code can't catch as an Exception.
_ENDPOINT = re.compile(r"https?://(?:[^@/?#\s]*@)?(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::\d+)?(?:[/?#]\S*)?")
_FILE = re.compile(r"\.(safetensors|pt|pth|bin|ckpt|distcp|pdparams|pdopt|json|index|gguf|zip)$")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REGION = re.compile(r"<Region>([\w-]+)</Region>")
_RECORDS = re.compile(rf"/\.([^/]+){re.escape(STAGED)}(?:/.*)?$")


class Cloud(NamedTuple):
    """The words in which errors describe one of the three stores."""

    name: str
    keys: str  # the variables of its credentials, in words
    bucket: str
    place: str  # where it looks for the store


S3 = Cloud("s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE", "bucket", "AWS_ENDPOINT_URL")
_GS = Cloud("gs", "GOOGLE_APPLICATION_CREDENTIALS (or gcloud auth application-default login)", "bucket", "the URL")
AZURE = Cloud(
    "az",
    "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "container",
    "AZURE_STORAGE_ACCOUNT_NAME",
)
CLOUDS = {"s3": S3, "s3a": S3, "gs": _GS, "gcs": _GS, "az": AZURE, "azure": AZURE}
_KEY_FAULTS = {
    "InvalidAccessKeyId": "AWS_ACCESS_KEY_ID names no key that the store knows",
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY is not the secret of AWS_ACCESS_KEY_ID",
    "ExpiredToken": "AWS_SESSION_TOKEN has expired: log in again",
    "InvalidToken": "AWS_SESSION_TOKEN is not valid for AWS_ACCESS_KEY_ID",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
}
_NO_KEYS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "/metadata/identity", "computeMetadata")
_REGION_FAULTS = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
THROTTLES = ("SlowDown", "ServerBusy", "RequestLimitExceeded", "TooManyRequests", "Throttl")


class ObjectStore:
    """A place in a bucket. key: without slashes at its ends."""

    def __init__(self, store: Any, cloud: Cloud, bucket: str, key: str, shown: str) -> None:
        self._store = store
        self._cloud = cloud
        self._bucket = bucket
        self._base = key
        self._shown = shown
        self._listed: dict[str, StoreEntry] | None = None
        self._keys: dict[str, str] = {}  # name without secrets -> the key's last part, where it has a secret

    @classmethod
    def at(cls, url: str, shown: str = "") -> ObjectStore:
        """The place of an `s3://`, `gs://` or `az://` URL. shown: the URL as errors show it. Raises ImportError without
        obstore; UsageError E2502 for a URL without a bucket or with credentials in it, E2508 for settings that obstore
        refuses, E0247 for a profile that needs boto3."""
        scheme, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        cloud = CLOUDS[scheme.lower()]
        if not bucket:
            raise UsageError(
                f"the URL names no {cloud.bucket}",
                code="E2502",
                path=shown or url,
                hint=f"write {cloud.name}://{cloud.bucket.upper()}/PATH",
            )
        if "@" in bucket:
            raise UsageError(
                f"the URL has credentials before the {cloud.bucket}, which are not read from there",
                code="E2502",
                path=shown or url,
                hint=f"set {cloud.keys}",
            )
        return cls(_opened(cloud, bucket, shown or url), cloud, bucket, key.strip("/"), shown or url)

    # -- objects ----------------------------------------------------------------------------------------------------

    def single(self) -> StoreEntry | None:
        """The one object that the URL names, None for a folder of objects."""
        # Named like a file: one request for the object is cheaper than a listing.
        if self._base and _FILE.search(self._base):
            try:
                return self.look("")
            except FileNotFoundError:
                pass  # a folder may have such a name too, as out.ckpt
        self._listed = self._list()
        if self._listed or not self._base:
            return None
        return self.look("")

    def list(self) -> dict[str, StoreEntry]:
        """See `Store.list`. The listing that `single` needed is used once."""
        listed = self._listed
        self._listed = None
        return self._list() if listed is None else listed

    def _list(self) -> dict[str, StoreEntry]:
        import obstore

        prefix = f"{self._base}/" if self._base else ""
        found = dict[str, StoreEntry]()

        def ask() -> None:
            found.clear()
            for batch in obstore.list(self._store, self._base or None, chunk_size=1000):
                for meta in batch:
                    name = meta["path"].removeprefix(prefix)
                    if name and not (name.endswith("/") or (meta["size"] == 0 and name.endswith("_$folder$"))):
                        found[name] = _entry(meta)

        self._request(ask, "", "listing")
        return found

    def look(self, key: str) -> StoreEntry:
        """See `Store.look`."""
        import obstore

        return self._request(lambda: _entry(obstore.head(self._store, self._key(key))), key, "looking at")

    def get(self, key: str, start: int, stop: int, pinned: StoreEntry) -> Parts:
        """See `Store.get`."""
        import obstore

        options: dict[str, Any] = {"range": (start, stop)}
        if pinned.mark:
            options["if_match"] = f'"{pinned.mark}"'

        def ask() -> Parts:
            result = obstore.get(self._store, self._key(key), options=options)
            if _entry(result.meta) != pinned:
                raise ObjectChanged
            return [memoryview(some) for some in result.stream(min_chunk_size=SOME)]

        return self._request(ask, key, "reading", start)

    def parent(self, name: str) -> ObjectStore:
        """See `Store.parent`."""
        above, _, last = self._base.rpartition("/")
        store = self._at(above, self._shown.rstrip("/").rpartition("/")[0])
        store._keys[name] = last
        return store

    def below(self, folder: str) -> ObjectStore:
        """See `Store.below`."""
        return self._at(self._key(folder), f"{self._shown.rstrip('/')}/{folder}")

    def _at(self, key: str, shown: str) -> ObjectStore:
        return ObjectStore(self._store, self._cloud, self._bucket, key, shown)

    def _key(self, key: str) -> str:
        return "/".join(filter(None, (self._base, self._keys.get(key, key))))

    # -- what may go wrong ------------------------------------------------------------------------------------------

    def _request(self, ask: Callable[[], T], key: str, doing: str, offset: int | None = None) -> T:
        shown = f"{self._shown.rstrip('/')}/{key}" if key else self._shown
        try:
            return patiently(ask, shown=shown, faults=_errors(), judge=_judge)
        except _errors() as e:
            if type(e).__name__ in ("PreconditionError", "NotModifiedError"):
                raise ObjectChanged from e
            if isinstance(e, FileNotFoundError) and _code(e) != "NoSuchBucket":
                raise FileNotFoundError(shown) from e
            raise fault_of(e, self._cloud, self._bucket, shown, doing, offset) from cause_without_secrets(e)


def _errors() -> tuple[type[Exception], ...]:
    """The exceptions of obstore: its own classes, and Python's for missing objects and for settings."""
    from obstore.exceptions import BaseError

    return (BaseError, OSError, ValueError)


def _entry(meta: Any) -> StoreEntry:
    """The entry for obstore's metadata. ETags lose their quotes, which Azure's listings do not have."""
    mark = (meta["e_tag"] or "").removeprefix('"').removesuffix('"')
    return StoreEntry(meta["size"], mark, "" if mark else f"{meta['last_modified'].timestamp():.0f}")


def _code(error: BaseException) -> str:
    """The <Code> of the store's answer, "" if there is none."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _status(error: BaseException) -> int:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _judge(error: Exception) -> Again | None:
    """Decides about a retry: yes for server errors, throttling and broken connections, no for definite answers."""
    if isinstance(error, FileNotFoundError):
        return None
    text = _reason(error)
    status = _status(error)
    code = _code(error)
    if again := passing(status, code):
        return again
    if status or any(word in text for word in ("redirect", "builder error", *_NO_KEYS)):
        return None
    return Again("the store does not answer") if "error sending request" in text or "body error" in text else None


def passing(status: int, code: str, *, wait: float = 0.0) -> Again | None:
    """Why an answer of the store is worth a retry, None for errors that will not pass. wait: as in `Again`."""
    if status == 429 or any(code.startswith(word) for word in THROTTLES):
        return Again(f"the store asks for fewer requests ({code or status})", throttled=True, wait=wait)
    if status >= 500 and status != 501:  # 501, not implemented, will not pass
        return Again(f"the store answers {status}{f' {code}' if code else ''}", wait=wait)
    return None


def _reason(error: BaseException) -> str:
    """The message of an obstore error, without the dump of its objects that follows."""
    return hide_in_message(" ".join(str(error).partition("\n\nDebug source")[0].split()))


def fault_of(
    error: Exception, cloud: Cloud, bucket: str, shown: str, doing: str, offset: int | None = None
) -> StorageError:
    """A failure of the store as an error that names what to set."""
    denied = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    status = _status(error) or 403 * denied
    return fault(status, _code(error), _reason(error), cloud, bucket, shown, doing, offset)


def fault(
    status: int,
    code: str,
    text: str,
    cloud: Cloud,
    bucket: str,
    shown: str,
    doing: str,
    offset: int | None = None,
) -> StorageError:
    """The same from a status and the store's code and text; 0 and "" if the store sent none."""
    s3 = cloud.name == "s3"
    made: tuple[str, str, str]
    if any(word in text for word in _NO_KEYS):
        public = " (AWS_SKIP_SIGNATURE=true for a public bucket)" if s3 else ""
        made = "E2504", "no credentials for the store were found", f"set {cloud.keys}{public}"
    elif "redirect" in text or code in _REGION_FAULTS:
        region = _REGION.search(text)
        where = f"AWS_REGION={region[1]}" if region else "AWS_REGION to the bucket's region"
        made = "E2506", f"the {cloud.bucket} {bucket} is in another region", f"set {where}"
    elif code in ("NoSuchBucket", "ContainerNotFound") or status == 404:
        made = (
            "E2505",
            f"there is no {cloud.bucket} {bucket}",
            f"check the name, and that {cloud.place} leads to the store that has it",
        )
    elif status in (401, 403) or code in _KEY_FAULTS:
        why = _KEY_FAULTS.get(code, f"{code or status}: these credentials may not do this")
        made = "E2504", f"the store refused the credentials while {doing}: {why}", f"check {cloud.keys}"
    elif status in (301, 307, 400) and s3 and code in ("", "InvalidRequest"):
        made = "E2506", f"the store refused the request while {doing}: {status}", "set AWS_REGION and AWS_ENDPOINT_URL"
    elif not status and ("sending request" in text or "body error" in text or "builder" in text):
        setting = next((f"{name}={os.environ[name]}" for name in ENDPOINTS if os.environ.get(name)), "")
        endpoint = hide_secrets(setting)
        made = (
            "E2507",
            f"the store does not answer while {doing}: {text[-200:]}",
            f"is it up, and is {endpoint} right? then run the same command again"
            if endpoint
            else f"check the network, and {cloud.place}; then run the same command again",
        )
    else:
        made = "E0700", f"{doing} failed: {text[:300]}", "check the URL and the network, then try again"

    kind, message, hint = made
    return StorageError(message, code=kind, path=given_url(shown), offset=offset, hint=hint)


def given_url(url: str) -> str:
    """The URL of the output, if `url` is one of the records that workers keep next to it; else `url` itself.

    >>> given_url("s3://bucket/run/.out.ckpt-partial/claim-1")
    's3://bucket/run/out'
    """
    return _RECORDS.sub(r"/\1", url)


def describe_credentials(url: str) -> str:
    """Describes where the credentials for a store's URL come from, without their values. Sends no request."""
    scheme = url.partition("://")[0].lower()
    cloud = CLOUDS.get(scheme)
    if cloud is None:
        return ""
    variables = {
        "s3": ("AWS_SKIP_SIGNATURE", "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS"),
        "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    }[cloud.name]
    variable = next((name for name in variables if os.environ.get(name)), None)
    if variable is not None:
        return f"credentials of the store: found in {variable}; a dry run does not try them"
    if cloud is S3:
        settings = _profile()
        if "access_key_id" in settings or "provider" in settings:
            name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
            return f"credentials of the store: found in the AWS profile {name}; a dry run does not try them"
    return (
        f"credentials of the store: none in the environment or in files, so a role of this machine is needed; else "
        f"set {cloud.keys}"
    )


# -- opening ------------------------------------------------------------------------------------------------------


def _opened(cloud: Cloud, bucket: str, url: str) -> Any:
    from obstore import store as stores

    config: dict[str, Any] = _profile() if cloud is S3 else {}
    provider = config.pop("provider", None)
    endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), config.get("endpoint", ""))
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        raise UsageError(
            f"the endpoint {hide_secrets(endpoint)!r} is no URL of a server",
            code="E2508",
            path=url,
            hint=f"write it as https://HOST or http://HOST:PORT; it is in {cloud.place}, or in the AWS profile",
        )
    client = {
        "connect_timeout": CONNECT,
        "read_timeout": STALL,
        "timeout": timedelta(minutes=5),
        "allow_http": endpoint.startswith("http://"),
    }
    kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[cloud.name]
    more = {"credential_provider": provider} if provider is not None else {}
    try:
        return kind(
            bucket,
            config=config or None,
            client_options=client,
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=30)},
            **more,
        )
    except _errors() as e:
        raise UsageError(
            f"the store's settings can't be used: {_reason(e)[:300]}",
            code="E2508",
            path=url,
            hint=f"set {cloud.keys}",
        ) from cause_without_secrets(e)


def _profile() -> dict[str, Any]:
    """What the AWS files say and no variable does: keys, region and endpoint of the profile, or boto3's credentials for
    one that logs in."""
    environ = os.environ
    from configparser import Error, RawConfigParser

    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    said: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        parser = RawConfigParser()
        path = os.path.expanduser(environ.get(variable) or file)
        try:
            with open(path, encoding="utf-8") as opened:
                parser.read_file(opened)
        except FileNotFoundError:
            continue
        except (OSError, Error, UnicodeError) as e:
            # The text of a parser's exception quotes the line, which may hold a key.
            lines = [number for number, _ in getattr(e, "errors", ())] or [getattr(e, "lineno", None)]
            where = f" in line {lines[0]}" if lines[0] is not None else ""
            raise UsageError(
                f"the AWS settings can't be read: {type(e).__name__}{where}",
                code="E2508",
                path=path,
                hint="correct the file",
            ) from None
        if parser.has_section(section):
            said.update(parser.items(section))
    explicit = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    if explicit and not said:
        raise UsageError(
            f"the AWS files have no profile {explicit}", code="E2508", hint="correct AWS_PROFILE, or aws configure"
        )
    config: dict[str, Any] = {}
    if "region" in said and not (environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")):
        config["region"] = said["region"]
    if "endpoint_url" in said and not any(environ.get(variable) for variable in ENDPOINTS):
        config["endpoint"] = said["endpoint_url"]
    if environ.get("AWS_ACCESS_KEY_ID") or environ.get("AWS_SKIP_SIGNATURE"):
        return config
    if "aws_access_key_id" in said and "role_arn" not in said:
        config["access_key_id"] = said["aws_access_key_id"]
        config["secret_access_key"] = said.get("aws_secret_access_key", "")
        if said.get("aws_session_token"):
            config["session_token"] = said["aws_session_token"]
    elif any(word in said for word in ("sso_session", "sso_start_url", "role_arn", "credential_process")):
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError as e:
            raise UsageError(
                f"the AWS profile {name} logs in through boto3, which is not installed",
                code="E0247",
                hint=install_command("remote"),
            ) from e
        config["provider"] = Boto3CredentialProvider()
    return config
