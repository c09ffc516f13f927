"""Codecs in a row, by what they map; and those that other packages bring."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from lowtide.codecs import Codec, Exactness, Stats, codec, codec_names
from lowtide.errors import BadArgument
from lowtide.testing.codecs import CodecTests, round_trip, some_values


class TestCastThenZeros(CodecTests):
    def make_codec(self) -> Codec:
        return codec("bf16+zvc2")


class TestBlosc(CodecTests):
    """What is left is measured, not modelled."""

    def make_codec(self) -> Codec:
        pytest.importorskip("blosc2")
        return codec("blosc2")

    def test_the_ratio_is_what_the_model_says(self) -> None:
        assert self.make_codec().ratio_model(Stats()) == 1.0
        assert self.make_codec().encode(np.ones(1 << 16, np.float32)).nbytes < 4_000


class TestThreeInARow(CodecTests):
    def make_codec(self) -> Codec:
        pytest.importorskip("blosc2")
        return codec("fp16+zvc2+blosc2_zstd")

    def test_the_ratio_is_what_the_model_says(self) -> None:
        model = self.make_codec().ratio_model(Stats(density=0.5))
        assert model == codec("fp16+zvc2").ratio_model(Stats(density=0.5)) == 0.5 * (0.5 + 1 / 16)


def test_a_chain_is_named_and_exact_as_its_parts_are() -> None:
    assert codec("zvc+blosc2").exactness is Exactness.BITS
    assert codec("bf16+zvc2").exactness is Exactness.BOUND
    assert codec("bf16+zvc2").name == "bf16+zvc2"
    assert codec("zvc") is codec("zvc")
    values = np.maximum(some_values(10_000, density=1.0), 0)
    assert codec("bf16+zvc2").encode(values).nbytes < 0.3 * values.nbytes
    assert np.array_equal(round_trip(codec("bf16+zvc2"), values), round_trip(codec("bf16"), values))


def test_parts_stand_in_the_order_of_what_they_map() -> None:
    with pytest.raises(BadArgument, match="'zvc' takes an array, and the codec before it makes bytes"):
        codec("pack32+zvc")
    with pytest.raises(BadArgument, match="'fp16' takes an array"):
        codec("blosc2+fp16")
    with pytest.raises(BadArgument, match=r"bf16\+binarize rounds twice"):
        codec("bf16+binarize")


def test_unknown_codecs_are_named_with_the_known_ones() -> None:
    assert {"zvc", "fp16", "pack32", "blosc2"} <= set(codec_names())
    with pytest.raises(BadArgument, match=r"unknown codec 'zip': choose one of zvc, .*fp16"):
        codec("zvc+zip")


def test_a_library_that_is_not_installed_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    with pytest.raises(BadArgument, match=r"pip install 'lowtide\[codecs\]'"):
        codec("blosc2").encode(np.ones(8, np.float32))


PLUGIN = """
import numpy as np
from lowtide.codecs import ZeroValue

class Reversed:
    name = "reversed"

    def max_encoded_nbytes(self, nbytes):
        return nbytes

    def encode_bytes(self, raw):
        return raw[::-1].copy()

    def decode_bytes(self, blob, *, out):
        out[:] = blob[::-1]

class NoCodec:
    name = "broken"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package on the path that brings codecs."""
    (tmp_path / "tidecodecs.py").write_text(PLUGIN)
    info = tmp_path / "tidecodecs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tidecodecs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lowtide.codecs]\nreversed = tidecodecs:Reversed\nbroken = tidecodecs:NoCodec\n"
        "gone = tidecodecs:Missing\nzvc = tidecodecs:Reversed\nother = tidecodecs:Reversed\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    codec.cache_clear()
    yield tmp_path
    codec.cache_clear()


def test_an_installed_package_brings_codecs(installed: Path) -> None:
    assert "reversed" in codec_names()
    values = some_values(1_000)
    chain = codec("zvc+reversed")
    assert chain.name == "zvc+reversed"
    assert np.array_equal(round_trip(chain, values), values)
    assert np.array_equal(chain.encode(values)[8:], codec("zvc").encode(values)[::-1])


def test_a_built_in_name_is_not_taken_over(installed: Path) -> None:
    assert type(codec("zvc")).__name__ == "ZeroValue"
    assert codec_names().count("zvc") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "'broken' of tidecodecs is a NoCodec, which is not a Codec: it lacks bound, decode, encode"),
        ("gone", "'gone' of tidecodecs cannot be loaded: .*Missing.*: install its dependencies"),
        ("other", "'other' of tidecodecs calls itself 'reversed'"),
    ],
)
def test_a_codec_that_is_none_is_refused(installed: Path, name: str, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        codec(name)
