"""Azure's own emulator of its blobs on this machine: Azurite, of the npm package `azurite`."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import time
from pathlib import Path

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # everybody's
STARTING = 60.0  # seconds


def program() -> str | None:
    return shutil.which("azurite-blob")


class Azurite:
    """folder: where it keeps its data, port: of its blobs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self) -> None:
        """Returns when it answers."""
        folder = self._folder
        where = ["--location", str(folder), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        command = [program() or "azurite-blob", "--silent", "--disableTelemetry", "--skipApiVersionCheck", *where]
        with open(folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        began = time.monotonic()
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - began > STARTING:
                self.kill()
                raise RuntimeError((folder / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.1)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", f"/{ACCOUNT}?comp=list")
            return connection.getresponse().status < 500
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL: of the last seconds it has not written down which blocks it has."""
        self._process.kill()
        self._process.wait()
