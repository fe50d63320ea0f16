"""The store that tests of stores run against (`s3_server`)."""

from __future__ import annotations

import http.client
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("S3_UPLOAD_PART_MIN_SIZE", "1")  # of moto: small fixtures have many parts

from s3_server import BUCKET, S3, Proxy


@pytest.fixture(scope="session")
def moto() -> Iterator[int]:
    """The port of a server that lasts as long as the tests."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3(moto: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    pytest.importorskip("obstore")
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{moto}", **keys)
    client.create_bucket(Bucket=BUCKET)
    proxy = Proxy(moto)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield S3(proxy, client)
    proxy.shutdown()
    proxy.server_close()
    http.client.HTTPConnection("127.0.0.1", moto).request("POST", "/moto-api/reset")
    client.close()
