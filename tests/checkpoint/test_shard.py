"""Files that are written in pieces are safetensors files, and damage to them is found."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lowtide.checkpoint.shard import DTYPES, ShardReader, ShardWriter, digest_of
from lowtide.checkpoint.tensor_bytes import read_in_pieces, to_fill
from lowtide.errors import CheckpointCorrupted, CheckpointError


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with ShardWriter(path, tensors.items()) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor, read_in_pieces(tensor))


def some_of_each_type() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    bits = torch.randint(0, 2, (3, 4), dtype=torch.uint8)
    return {str(dtype): bits.to(dtype) for dtype in DTYPES} | {"empty": torch.empty(0, 3), "one": torch.tensor(2.5)}


def test_the_official_reader_reads_what_was_written(tmp_path: Path) -> None:
    tensors = some_of_each_type() | {"large": torch.randn(3_000_000), "turned": torch.randn(700, 300).t()}
    write(tmp_path / "a.safetensors", tensors)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert digest_of(read_in_pieces(found)) == digest_of(read_in_pieces(tensor)), name


def test_what_was_written_is_read_into_tensors_of_any_layout(tmp_path: Path) -> None:
    tensors = {"large": torch.randn(3_000_000), "turned": torch.randn(700, 300).t(), "complex": torch.randn(2, 2) * 1j}
    write(tmp_path / "a.safetensors", tensors)
    with ShardReader(tmp_path / "a.safetensors") as reader:
        for name, tensor in tensors.items():
            into = torch.empty_like(tensor)
            with to_fill(into) as view:
                digest = digest_of(reader.pieces(reader.tensors[name], view))
            assert torch.equal(into, tensor)
            assert into.stride() == tensor.stride()
            assert digest == digest_of(read_in_pieces(tensor))


def test_payload_begins_at_a_page(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"a": torch.randn(5)})
    with ShardReader(tmp_path / "a.safetensors") as reader:
        assert reader.tensors["a"].begin % 4096 == 0


def test_nothing_added_or_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a", [("a", torch.ones(1))]):
        pass
    with pytest.raises(RuntimeError), ShardWriter(tmp_path / "b", [("a", torch.ones(1))]) as writer:
        writer.add("a", torch.ones(1), read_in_pieces(torch.ones(1)))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [0, 7, 8, 100, 4096 + 3])
def test_a_file_that_is_cut_off_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"a": torch.randn(5)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointCorrupted, match=r"a\.safetensors is damaged"):
        ShardReader(path)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a":{"dtype":"F32","shape":[1]}}', b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,99]}}'],
)
def test_a_header_that_says_nonsense_is_refused(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(CheckpointCorrupted):
        ShardReader(path)


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot open"):
        ShardReader(tmp_path / "none")
