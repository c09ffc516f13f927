from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lowtide.cli import demo
from lowtide.cli.demo import Outcome, Step, parse_step, run_limited
from lowtide.errors import BadArgument

MIB = 2**20


def test_steps_are_read_from_the_scripts_lines() -> None:
    loss = (1 / 3).hex()
    assert parse_step(f"step 2 {loss} 1.2500\n") == Step(loss_hex=loss, seconds=1.25)
    assert parse_step("loading data\n") is None
    assert parse_step("") is None


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "s.py"
    path.write_text(text)
    return [str(path)]


def test_a_run_reports_steps_exit_code_and_last_words(tmp_path: Path) -> None:
    seen: list[int] = []
    text = """
import sys
print("step 1 0x1p+0 0.5")
print("step 2 0x1p+1 0.7")
sys.stderr.write("a\\n\\nbye\\n\\n")
sys.exit(3)
"""
    outcome = run_limited(script(tmp_path, text), limit_bytes=None, on_step=lambda: seen.append(1))
    assert outcome.exit_code == 3
    assert outcome.losses == ("0x1p+0", "0x1p+1")
    assert outcome.step_s == 0.7
    assert outcome.last_words == "bye"
    assert len(seen) == 2
    assert outcome.peak_bytes > MIB


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not count data against RLIMIT_DATA")
def test_the_kernel_refuses_memory_beyond_the_limit(tmp_path: Path) -> None:
    arguments = script(tmp_path, "x = bytearray(200 * 2**20)\nprint('step 1 0x1p+0 0.1')\n")
    assert run_limited(arguments, limit_bytes=600 * MIB).exit_code == 0
    refused = run_limited(arguments, limit_bytes=100 * MIB)
    assert refused.exit_code == 1
    assert refused.last_words == "MemoryError"
    assert refused.steps == ()


def outcome(*losses: str, exit_code: int = 0) -> Outcome:
    steps = tuple(Step(loss_hex=loss, seconds=1.0) for loss in losses)
    return Outcome(exit_code=exit_code, steps=steps, peak_bytes=900 * MIB, last_words="killed")


STATS = {
    "peak_bytes": 300 * MIB,
    "budget_exact": True,
    "swapped_out_bytes": 5 * MIB,
    "swapped_in_bytes": 6 * MIB,
}


def test_identical_losses_are_success(capsys: pytest.CaptureFixture[str]) -> None:
    plain, managed = outcome("0x1p+0", "0x1p+1"), outcome("0x1p+0", "0x1p+1")
    assert demo._compare(plain, outcome(exit_code=1), managed, stats=STATS) == 0
    text = capsys.readouterr().out
    assert "yes" in text.splitlines()[-1]
    assert "5.00 MiB out, 6.00 MiB in" in text
    assert "advisory" not in text


def test_an_advisory_peak_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    plain, managed = outcome("0x1p+0", "0x1p+1"), outcome("0x1p+0", "0x1p+1")
    assert demo._compare(plain, outcome(exit_code=1), managed, stats=STATS | {"budget_exact": False}) == 0
    text = capsys.readouterr().out
    assert "300 MiB *\n" in text
    assert text.splitlines()[-1] == "* advisory: accounted in Python, not enforced"


def test_what_lowtide_says_while_it_starts_is_shown_at_once_and_the_rest_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = """
import sys
print("lowtide: building the native part, once (about 20 s)", file=sys.stderr, flush=True)
print("some library's warning", file=sys.stderr, flush=True)
print('{"usable": true}')
"""
    monkeypatch.setattr(demo, "_IDLE", program)
    lines: list[str] = []
    assert demo._idle(on_line=lines.append) == {"usable": True}
    assert lines == ["lowtide: building the native part, once (about 20 s)"]
    monkeypatch.setattr(demo, "_IDLE", "raise OSError('libtorch.so is missing')")
    with pytest.raises(BadArgument, match=r"does not run here \(OSError: libtorch.so is missing\)"):
        demo._idle(on_line=lines.append)


def test_losses_that_differ_in_the_last_bit_or_in_number_are_failure(capsys: pytest.CaptureFixture[str]) -> None:
    plain = outcome("0x1.0000000000000p+0", "0x1p+1")
    for managed in (outcome("0x1.0000000000001p+0", "0x1p+1"), outcome("0x1.0000000000000p+0")):
        assert demo._compare(plain, outcome(exit_code=1), managed, stats=STATS) == 1
        assert "NO" in capsys.readouterr().out


def test_the_training_script_is_plain_pytorch_and_repeats_exactly() -> None:
    assert "lowtide" not in demo._SCRIPT.read_text().partition('"""\n\nfrom __future__')[2]
    small = [str(demo._SCRIPT), "--steps=2", "--layers=1", "--width=48", "--tokens=16", "--batch=2"]
    first, second = (run_limited(small, limit_bytes=None) for _ in range(2))
    assert first.exit_code == 0, first.last_words
    assert len(first.losses) == 2
    assert first.losses == second.losses
    assert float.fromhex(first.losses[0]) > 0
