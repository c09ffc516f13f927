"""Torch's headers, for each minor version that a wheel has a library for, and for one processor.

They are read out of the wheels on the package index, some megabytes of each: a library is compiled against them alone.
`torch_headers.json` has the hash of every set, so that nobody compiles what was not looked at; `--pin` writes it anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import urllib.request
import zipfile
from pathlib import Path
from urllib.parse import urljoin

INDEX = "https://pypi.org/simple/torch/"
PINS = Path(__file__).with_name("torch_headers.json")


class Remote(io.RawIOBase):
    """A file on a server that answers requests for parts of it."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            self._size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # of any buffer: this is called with one
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        asked = urllib.request.Request(self._url, headers={"Range": f"bytes={self._at}-{end - 1}"})
        with urllib.request.urlopen(asked) as answer:
            if answer.status != 206:
                raise OSError(f"{self._url}: the server sends whole files only")
            part = answer.read()
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def wheel_url(version: str) -> str:
    with urllib.request.urlopen(INDEX) as answer:
        page = answer.read().decode()
    pattern = rf'href="([^"#]*/torch-{re.escape(version)}-cp311-cp311-manylinux[^"#]*x86_64\.whl)'
    found = re.search(pattern, page)
    if found is None:
        raise SystemExit(f"the index has no wheel of torch {version} for CPython 3.11 on Linux, x86-64")
    return urljoin(INDEX, found[1])


def fetch(version: str, into: Path) -> str:
    """Put `include` of a version of torch there, and return its hash."""
    wheel = zipfile.ZipFile(io.BufferedReader(Remote(wheel_url(version)), 4 << 20))
    files = [file for file in wheel.infolist() if file.filename.startswith("torch/include/") and not file.is_dir()]
    for file in sorted(
        files, key=lambda file: file.header_offset
    ):  # as they come: whatever is skipped is fetched again
        target = into / Path(file.filename).relative_to("torch")
        if ".." in target.parts:
            raise SystemExit(f"{file.filename} is outside of the wheel")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(wheel.read(file))
    return hash_of(into / "include")


def hash_of(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(directory)}\n".encode())
    return digest.hexdigest()


def fetch_all(into: Path) -> None:
    """Put the headers of every pinned version there; those that are there already stay."""
    for version, pinned in json.loads(PINS.read_text()).items():
        done = into / version / "sha256"
        if done.exists() and done.read_text() == pinned:
            continue
        print(f"headers of torch {version}", flush=True)
        found = fetch(version, into / version)
        if found != pinned:
            raise SystemExit(f"the headers of torch {version} are not those of {PINS.name}: {found}")
        done.write_text(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--pin"]:
        import tempfile

        pins = {}
        for wanted in sys.argv[2:]:
            with tempfile.TemporaryDirectory() as scratch:
                pins[wanted] = fetch(wanted, Path(scratch))
                print(wanted, pins[wanted], flush=True)
        PINS.write_text(json.dumps(pins, indent=1) + "\n")
    else:
        fetch_all(Path(sys.argv[1]))
