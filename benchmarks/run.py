"""Compare Lowtide with stock PyTorch and the other ways of saving memory, interleaved in one run.

Each round starts one fresh process for each contender in turn, so that what the machine does meanwhile hits all alike;
every ratio is taken within its round. Results go to a JSON file; `benchmarks/table.py` makes a table of it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from benchmarks import kernel_swap
from benchmarks.floor import smallest_budget
from benchmarks.jobs import ROOT, Answer, Job, launch
from benchmarks.results import RESULTS_VERSION, Entrant, environment, summary
from lowtide.core.units import parse_bytes

MODEL_NAMES = ("vgg16", "gpt", "resnet50", "bert")
MORE_NAMES = ("vgg16_linear", "vgg16_linear_zero_last")
CONTENDERS = (
    "stock",
    "tcmalloc",
    "lowtide",
    "swaps",
    "unpressed",
    "before",
    "checkpoint",
    "as_checkpoint",
    "naive",
    "kernel_swap",
)
# Only if somebody asks: Lowtide as it was, from another checkout; Lowtide that only swaps, or in checkpoint's memory.
_UNASKED = ("before", "swaps", "as_checkpoint")
# Above the peak by more than what a caching allocator keeps beside it.
_UNPRESSED_FACTOR = 1.5
_EXACT = ("stock", "tcmalloc", "lowtide", "swaps", "before", "naive")
_RIVALS = ("checkpoint", "naive", "kernel_swap")


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; exit with 1 if a promise that can be checked here was broken."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _stop)
    results: dict[str, Any] = {"version": RESULTS_VERSION, "settings": _settings(options), "models": {}}
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lowtide-benchmark-", dir=options.spill) as spill:
        for model in options.models:
            comparison = Comparison(model, options, Path(spill), console)
            measured = comparison.measure()
            results.setdefault("environment", environment(**comparison.versions(measured), spill=Path(spill)))
            for lines in comparison.rounds():
                results["models"][model] = {**comparison.facts(measured), "contenders": lines}
                _write(options.out, results)
            if options.floor:
                results["models"][model]["floor"] = comparison.floor(measured)
                _write(options.out, results)
            broken += [f"{model}: {text}" for text in broken_promises(results["models"][model]["contenders"])]
    console.print(
        f"results in {options.out}; make a table with: python benchmarks/table.py {options.out}", soft_wrap=True
    )
    for text in broken:
        console.print(f"broken promise: {text}", style="bold red")
    return 1 if broken else 0


def broken_promises(lines: list[dict[str, Any]]) -> list[str]:
    """Return what must not happen and did: other losses than stock's, or a transfer without pressure."""
    found = []
    for line in lines:
        if line["contender"] in _EXACT and line.get("losses_identical") is False:
            found.append(f"{line['key']} computed other losses than stock")
        if line["key"] == "unpressed" and line.get("moved_bytes_total", 0) > 0:
            found.append(f"unpressed moved {line['moved_bytes_total']} bytes although everything fits")
        if line["contender"] == "lowtide" and line.get("peak_reserved_bytes", 0) > line["budget_bytes"]:
            found.append(f"{line['key']} used {line['peak_reserved_bytes']} of {line['budget_bytes']} bytes")
    return found


class Comparison:
    """All contenders on one model."""

    def __init__(self, model: str, options: argparse.Namespace, spill: Path, console: Console) -> None:
        self._options = options
        self._spill = spill
        self._console = console
        self._entrants: dict[str, Entrant] = {}
        self._job = Job(
            model=model,
            contender="stock",
            spill=str(spill),
            steps=options.steps,
            warmup_steps=options.warmup,
            threads=options.threads,
            vocabulary=options.vocabulary,
            classes=options.classes,
            scale=options.scale,
            disk_bytes_per_s=options.throttle,
        )

    def measure(self) -> dict[str, Any]:
        """Return stock's static, peak and floor bytes, from a pass of its own, and enter the contenders."""
        measured = self._count("stock")
        static_bytes, peak_bytes = measured["static_bytes"], measured["peak_bytes"]
        chosen = self._options.contenders
        self._enter("stock", contender="stock").counted = measured
        if "tcmalloc" in chosen:
            self._enter("tcmalloc", contender="tcmalloc")
        self._enter_shares(static_bytes, peak_bytes)
        if "unpressed" in chosen:
            self._enter("unpressed", contender="lowtide", budget_bytes=int(_UNPRESSED_FACTOR * peak_bytes))
            if "before" in chosen:
                self._enter("before unpressed", contender="before", budget_bytes=int(_UNPRESSED_FACTOR * peak_bytes))
        for contender in ("checkpoint", "naive"):
            if contender in chosen:
                self._enter(contender, contender=contender).counted = self._count(contender)
        if "as_checkpoint" in chosen:
            budget_bytes = self._count("checkpoint")["peak_bytes"]
            self._enter("as_checkpoint", contender="lowtide", budget_bytes=budget_bytes)
        if "kernel_swap" in chosen:
            for share in self._options.shares[:1]:  # it is slow, and slower still below that
                key = f"kernel_swap@{share:g}"
                self._enter(key, contender="kernel_swap", share=share, limit_of=f"lowtide@{share:g}")
        return measured

    def _enter_shares(self, static_bytes: int, peak_bytes: int) -> None:
        """Enter what runs at each share of what activations add."""
        chosen = self._options.contenders
        for share in self._options.shares:
            budget_bytes = int(static_bytes + share * (peak_bytes - static_bytes))
            if "lowtide" in chosen or "kernel_swap" in chosen:
                self._enter(f"lowtide@{share:g}", contender="lowtide", share=share, budget_bytes=budget_bytes)
            for policy in self._options.policies:
                key = f"{policy}@{share:g}"
                self._enter(key, contender="lowtide", policy=policy, share=share, budget_bytes=budget_bytes)
            for contender in ("swaps", "before"):
                if contender in chosen:
                    self._enter(f"{contender}@{share:g}", contender=contender, share=share, budget_bytes=budget_bytes)

    def rounds(self) -> Any:
        """Run round after round; yield every contender's line after each."""
        with ExitStack() as stack:
            swapping = [entrant for entrant in self._entrants.values() if entrant.contender == "kernel_swap"]
            if swapping:
                self._add_swap(stack, swapping)
            for index in range(self._options.rounds):
                free = [entrant for entrant in self._entrants.values() if entrant.limit_of is None]
                # Another contender opens each round; a limit is known only after the one it copies has run.
                turn = index % len(free)
                for entrant in [*free[turn:], *free[:turn], *swapping]:
                    if entrant.contender in _RIVALS and index >= self._options.rival_rounds:
                        continue
                    answer = self._run(entrant)
                    entrant.answers.append(answer)
                    self._tell(index, entrant, answer)
                yield [summary(entrant, self._entrants["stock"]) for entrant in self._entrants.values()]

    def floor(self, measured: dict[str, Any]) -> dict[str, Any]:
        """Return the smallest budget that works."""
        job = replace(self._job, steps=2, warmup_steps=1)
        return smallest_budget(job, floor_bytes=measured["floor_bytes"], report=self._say)

    def facts(self, measured: dict[str, Any]) -> dict[str, Any]:
        """Return the model's own facts."""
        kept = ("title", "parameters", "static_bytes", "peak_bytes", "floor_bytes", "floor_op")
        return {name: measured[name] for name in kept}

    @staticmethod
    def versions(measured: dict[str, Any]) -> dict[str, Any]:
        """Return what the workers ran with."""
        return {"torch_version": measured["torch"], "threads": measured["threads"]}

    def _enter(self, key: str, **fields: Any) -> Entrant:
        entrant = self._entrants[key] = Entrant(key=key, **fields)
        return entrant

    def _count(self, contender: str) -> dict[str, Any]:
        self._say(f"counting live bytes: {contender}")
        answer = launch(replace(self._job, contender=contender, count_live=True, warmup_steps=1, steps=2))
        if answer.failure is not None:
            raise SystemExit(f"cannot count {contender}'s live bytes on {self._job.model}: {answer.failure}")
        return answer.facts

    def _add_swap(self, stack: ExitStack, swapping: list[Entrant]) -> None:
        nbytes = self._entrants["stock"].counted["peak_bytes"] + (2 << 30)
        try:
            stack.enter_context(kernel_swap.swap_file(self._spill, nbytes=nbytes))
        except kernel_swap.KernelSwapUnavailable as error:
            for entrant in swapping:
                entrant.skipped = str(error)

    def _run(self, entrant: Entrant) -> Answer | None:
        if entrant.skipped is not None:
            return None
        if entrant.limit_of is None:
            source = str(self._options.before or "") if entrant.contender == "before" else ""
            return launch(
                replace(
                    self._job,
                    contender=entrant.contender,
                    budget_bytes=entrant.budget_bytes,
                    policy=entrant.policy,
                    source=source,
                )
            )
        owner = self._entrants[entrant.limit_of].answers[-1]
        if owner is None or owner.failure is not None:
            return Answer(facts={}, failure=f"no limit to set: {entrant.limit_of} failed in this round")
        limit_bytes = owner.facts["rss_peak_bytes"]
        entrant.limits_bytes.append(limit_bytes)
        try:
            with kernel_swap.memory_limit(nbytes=limit_bytes) as prefix:
                out_before, in_before = kernel_swap.swapped_bytes()
                answer = launch(replace(self._job, contender="stock"), prefix=prefix)
                out_after, in_after = kernel_swap.swapped_bytes()
        except kernel_swap.KernelSwapUnavailable as error:
            entrant.skipped = str(error)
            return None
        # The kernel counts for the machine and the whole process, so the average includes the warm-up.
        steps = self._job.steps + self._job.warmup_steps
        moved = {
            "moved_out_bytes_total": out_after - out_before,
            "moved_in_bytes_total": in_after - in_before,
            "moved_out_bytes_per_step": (out_after - out_before) / steps,
            "moved_in_bytes_per_step": (in_after - in_before) / steps,
        }
        return Answer(facts={**answer.facts, **moved}, failure=answer.failure)

    def _tell(self, index: int, entrant: Entrant, answer: Answer | None) -> None:
        if answer is None:
            text = f"skipped: {entrant.skipped}"
        elif answer.failure is not None:
            text = f"failed: {answer.failure}"
        else:
            text = " ".join(f"{step_s:.2f}" for step_s in answer.facts["step_s"]) + " s"
        self._say(f"round {index + 1}/{self._options.rounds} {entrant.key}: {text}")

    def _say(self, text: str) -> None:
        self._console.print(f"{self._job.model}: {text}", highlight=False, markup=False, soft_wrap=True)


def _stop(*_signal: object) -> NoReturn:
    raise SystemExit("stopped")


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    kept = (
        *("shares", "rounds", "rival_rounds", "steps", "warmup", "contenders", "policies", "vocabulary", "classes"),
        *("scale", "throttle"),
    )
    return {name: getattr(options, name) for name in kept}


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a share: write a number above 0 and up to 1")
    return share


def _rate(text: str) -> float:
    try:
        return float(parse_bytes(text.removesuffix("/s")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a rate: write one such as 300MB/s") from error


def _parser() -> argparse.ArgumentParser:
    defaults = asdict(Job(model="", contender="", spill=""))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=(*MODEL_NAMES, *MORE_NAMES), default=list(MODEL_NAMES))
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=[name for name in CONTENDERS if name not in _UNASKED],
    )
    parser.add_argument(
        "--shares", nargs="+", type=_share, default=[0.6, 0.45], help="budget = static + share x (peak - static)"
    )
    parser.add_argument("--policies", nargs="+", default=[], help="Lowtide with these policies too, at each share")
    parser.add_argument("--throttle", type=_rate, default=None, help="the rate of Lowtide's disk each way: 300MB/s")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each contender")
    parser.add_argument("--rival-rounds", type=int, default=1, help="processes for each of the slow rivals")
    parser.add_argument("--steps", type=int, default=defaults["steps"], help="measured steps of a process")
    parser.add_argument("--warmup", type=int, default=defaults["warmup_steps"], help="steps before the measured ones")
    parser.add_argument("--floor", action="store_true", help="also search the smallest budget that works")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "latest.json")
    parser.add_argument("--spill", type=Path, default=None, help="directory on the disk to spill to")
    parser.add_argument("--before", type=Path, default=None, help="src directory of the checkout to compare with")
    parser.add_argument("--threads", type=int, default=None, help="compute threads; PyTorch's default if not given")
    parser.add_argument("--vocabulary", type=int, default=defaults["vocabulary"], help="words of the GPT")
    parser.add_argument("--classes", type=int, default=defaults["classes"], help="classes of the image models")
    parser.add_argument("--scale", type=int, default=1, help="divide every batch by this, for a quick try")
    return parser


if __name__ == "__main__":
    sys.exit(main())
