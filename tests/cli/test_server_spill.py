"""`--spill redis://...` in the verbs that take a spill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.cli import main
from tests.tiers.resp_server import RespServer, resp_server


@pytest.fixture
def server() -> Iterator[RespServer]:
    with resp_server() as server:
        yield server


def with_password(server: RespServer) -> str:
    return f"redis://:s3cret@127.0.0.1:{server.port}"


def test_doctor_asks_the_server(server: RespServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--spill", with_password(server)]) == 0
    out = capsys.readouterr().out
    (spill,) = (finding for finding in json.loads(out) if finding["what"] == "spill")
    assert spill["verdict"] == "ok"
    assert spill["detail"] == f"redis://127.0.0.1:{server.port} answers, moved natively"
    assert "s3cret" not in out
    assert not server.values


def test_doctor_fails_where_nobody_answers(server: RespServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.stop()
    assert main(["doctor", "--json", "--spill", server.url]) == 1
    (spill,) = (finding for finding in json.loads(capsys.readouterr().out) if finding["what"] == "spill")
    assert spill["verdict"] == "fail"
    assert "Connection refused" in spill["detail"]


def test_probe_measures_the_server(server: RespServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--json", "--spill", with_password(server)]) == 0
    out = capsys.readouterr().out
    told = json.loads(out)
    assert told["spill"] == server.url
    assert told["file"] is None
    assert told["links"]["spill"]["write_bytes_per_s"] > 0
    assert server.count(b"SETRANGE") > 0
    assert "s3cret" not in out
    assert not server.values


@pytest.mark.slow
def test_run_spills_there_and_does_not_show_the_password(
    server: RespServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(4):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(4, 256)).sum().backward()\n"
        "    optimizer.step()\n"
        "print('trained')\n"
    )
    assert main(["run", "--budget", "6MiB", "--spill", with_password(server), str(script)]) == 0
    told = capfd.readouterr()
    assert "trained" in told.out
    assert "s3cret" not in told.out + told.err
    assert f"spill to redis://127.0.0.1:{server.port}" in told.err
    assert any(words[0] in (b"SET", b"SETRANGE") and words[-1] == b"..." for words in server.seen), "nothing left"
    assert not server.values


def test_a_bad_url_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('it must not run')")
    assert main(["run", "--budget", "1GiB", "--spill", "redis://:s3cret@h?sokets=2", str(script)]) == 2
    error = capsys.readouterr().err
    assert "unknown option 'sokets'" in error
    assert error.count("\n") == 1
    assert "s3cret" not in error
