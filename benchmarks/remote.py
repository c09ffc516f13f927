"""How fast tensors leave to a Redis server on this machine and return, beside the server's own benchmark tool.

    python -m benchmarks.remote --write

Starts a redis-server on the loopback. Each way is measured with the same number of sockets and the same size of
value: `redis-benchmark` sets and gets random keys, as many as Lowtide uses, with several depths of pipelining; Lowtide
makes tensors leave to the server and return, by the movers that training uses. They take turns; the table has the
medians. All do it twice, and the second time counts: then the server has its memory. What is measured with TLS goes
through Python's ssl. Needs redis-server and redis-benchmark.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from benchmarks.pages import table, write_page
from lowtide.memory.ranges import RangeMemory
from lowtide.tiers import open_medium

_PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto-tiers.md"
_MIB = 1 << 20
_TENSOR_BYTES = 32 * _MIB
_PIPELINES = (1, 4, 16)


def main() -> None:
    """Measure, and print the table or write it into the docs."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mib", type=int, default=768, help="how much leaves and returns, in MiB")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--sockets", type=int, default=2)
    arguments.add_argument("--chunk-kib", type=int, default=512)
    arguments.add_argument("--write", action="store_true", help="put the table into docs/howto-tiers.md")
    stated = arguments.parse_args()
    for tool in ("redis-server", "redis-benchmark", "openssl"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is not installed: apt-get install redis-server openssl")
    with tempfile.TemporaryDirectory() as directory, server(Path(directory)) as (port, tls_port):
        query = f"sockets={stated.sockets}&chunk={stated.chunk_kib}KiB"
        plain = f"redis://127.0.0.1:{port}?{query}"
        tls = f"rediss://127.0.0.1:{tls_port}?{query}&ssl_ca_certs={directory}/cert.pem"
        ways = {"lowtide": plain, "lowtide, TLS": tls}
        seen: dict[str, list[tuple[float, float]]] = {}
        for _ in range(stated.rounds):
            for pipeline in _PIPELINES:
                rates = redis_benchmark(port, stated, pipeline=pipeline)
                seen.setdefault(f"redis-benchmark -P {pipeline}", []).append(rates)
            for name, url in ways.items():
                seen.setdefault(name, []).append(lowtide_rates(url, nbytes=stated.mib * _MIB))
    medians = {
        name: tuple(statistics.median(rate[way] for rate in rates) for way in (0, 1)) for name, rates in seen.items()
    }
    text = report(medians, stated)
    print(text)
    if stated.write:
        write_page(text, _PAGE, script="remote.py")


def report(medians: dict[str, tuple[float, ...]], stated: argparse.Namespace) -> str:
    """Return the table: rates, and what they are of the best of the server's own tool."""
    own = [rates for name, rates in medians.items() if name.startswith("redis-benchmark")]
    best = [max(rates[way] for rates in own) for way in (0, 1)]
    rows = [
        [name, *(f"{rates[way] / 1e9:.2f} GB/s ({rates[way] / best[way]:.0%})" for way in (0, 1))]
        for name, rates in medians.items()
    ]
    version = subprocess.run(["redis-server", "--version"], check=True, capture_output=True, text=True).stdout
    release = next(word[2:] for word in version.split() if word.startswith("v="))
    facts = (
        f"Redis {release} on the same machine ({platform.machine()}, {os.cpu_count()} cores), {stated.sockets} "
        "sockets, "
        f"values of {stated.chunk_kib} KiB, {stated.mib} MiB each way, medians of {stated.rounds} rounds; "
        "in brackets the share of the tool's best.\n\n"
    )
    return facts + table(["", "out (SET)", "back (GET)"], rows)


def redis_benchmark(port: int, stated: argparse.Namespace, *, pipeline: int) -> tuple[float, float]:
    """Return the bytes per second that the server's own tool sets and gets."""
    value = stated.chunk_kib << 10
    keys = stated.mib * _MIB // value
    command = ["redis-benchmark", "-p", str(port), "-t", "set,get", "-d", str(value), "-c", str(stated.sockets)]
    command += ["-n", str(keys), "-r", str(keys), "-P", str(pipeline), "--csv"]
    for _ in range(2):  # the second finds the keys there, as the steps of a training do
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    subprocess.run(["redis-cli", "-p", str(port), "flushall"], check=True, capture_output=True)
    rows = {row["test"]: float(row["rps"]) for row in csv.DictReader(io.StringIO(done.stdout))}
    return rows["SET"] * value, rows["GET"] * value


def lowtide_rates(url: str, *, nbytes: int) -> tuple[float, float]:
    """Return the bytes per second at which tensors leave to a tier and return, of a process of its own."""
    code = f"from benchmarks.remote import move_tensors; print(move_tensors({url!r}, nbytes={nbytes}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    out, back = json.loads(done.stdout.splitlines()[-1])
    return out, back


def move_tensors(url: str, *, nbytes: int) -> list[float]:
    """Make tensors leave to a tier and return, and check them; return both rates."""
    memory = RangeMemory({"spill": open_medium(url)}, least_bytes=64 << 10)
    memory.open(2 * nbytes)
    tensors = [torch.full((_TENSOR_BYTES // 4,), float(index)) for index in range(nbytes // _TENSOR_BYTES)]
    for _ in range(2):  # the second finds the keys there, as the steps of a training do
        for tensor in tensors:
            tensor.add_(1)  # else what is on the server already would not be written again
        begun = time.perf_counter()
        memory.native.leave_all()
        memory.native.settle()
        left = time.perf_counter()
        for tensor in tensors:
            assert memory.native.fetch(tensor._cdata) == 0
        memory.native.settle()
        back = time.perf_counter()
    assert all(bool((tensor == index + 2).all()) for index, tensor in enumerate(tensors))
    counted = memory.usage().counted
    assert counted.written == counted.read == 2 * nbytes
    memory.close()
    return [nbytes / (left - begun), nbytes / (back - left)]


@contextmanager
def server(directory: Path) -> Iterator[tuple[int, int]]:
    """Start a redis-server that keeps nothing, and yield its ports, plain and with TLS."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(int(probe.getsockname()[1]))
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    make += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        f"{directory}/key.pem",
        "-out",
        f"{directory}/cert.pem",
    ]
    subprocess.run(make, check=True, capture_output=True)
    options = ["--port", str(ports[0]), "--tls-port", str(ports[1]), "--tls-auth-clients", "no", "--save", ""]
    options += ["--tls-cert-file", f"{directory}/cert.pem", "--tls-key-file", f"{directory}/key.pem"]
    options += ["--tls-ca-cert-file", f"{directory}/cert.pem", "--bind", "127.0.0.1", "--dir", str(directory)]
    process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", ports[1])):
                break
            time.sleep(0.05)
        yield ports[0], ports[1]
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
