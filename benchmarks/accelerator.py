"""Compare ways of fitting a training into device memory, on the simulated accelerator, interleaved in one run.

    python benchmarks/accelerator.py --out benchmarks/results/accelerator.json --page docs/benchmarks-accelerator.md

For each model the unmanaged training is measured first: its bytes give the budget, its phases and Lowtide's traffic the
link that could hide that traffic. Then, on that link and on a preset's, each round starts one fresh process for each
contender in turn; every ratio is taken within its round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from benchmarks.accelerator_jobs import WORKER, DeviceJob, Link
from benchmarks.accelerator_results import Entrant, asked_of, broken_promises, goals, phases_of, summary
from benchmarks.accelerator_table import SCRIPT, markdown
from benchmarks.jobs import ROOT, Answer, launch
from benchmarks.pages import write_page
from benchmarks.results import environment

RESULTS_VERSION = 1
MODEL_NAMES = ("gpt", "vgg16")
CONTENDERS = ("unmanaged", "lowtide", "save_on_cpu", "one_block_ahead", "checkpoint")
HIDING = "hiding"
# The link that could hide the traffic takes this share of each phase's compute to move it.
TRAFFIC_SHARE = 0.6
_CLOSE = 0.05
_MOST_PASSES = 4
_CAPACITY_BYTES = 6 << 30


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; exit with 1 if a promise that can be checked here was broken."""
    options = _parser().parse_args(arguments)
    # One core computes, the other is left to the copies, the host program and the interpreter.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    console = Console(stderr=True)
    results: dict[str, Any] = {"version": RESULTS_VERSION, "settings": _settings(options), "models": {}}
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lowtide-benchmark-", dir=options.spill) as spill:
        for model in options.models:
            comparison = Comparison(model, options, Path(spill), console)
            facts = results["models"][model] = comparison.measure()
            versions = {"torch_version": facts.pop("torch"), "threads": facts.pop("threads")}
            results.setdefault("environment", environment(**versions, spill=Path(spill)))
            facts["links"] = {}
            for name in options.links:
                link = comparison.link(name)
                for lines in comparison.rounds(name, link):
                    facts["links"][name] = {**asdict(link), "contenders": lines}
                    _write(options.out, results)
                broken += [f"{model}, {name}: {text}" for text in broken_promises(lines)]
                for text, met in goals(lines, hides=name == HIDING):
                    console.print(f"{model}, {name}: {'met' if met else 'MISSED'}: {text}", soft_wrap=True)
    if options.page is not None:
        write_page(markdown(results), options.page, script=SCRIPT)
    for text in broken:
        console.print(f"broken promise: {text}", style="bold red")
    return 1 if broken else 0


class Comparison:
    """All contenders on one model."""

    def __init__(self, model: str, options: argparse.Namespace, spill: Path, console: Console) -> None:
        self._options = options
        self._console = console
        self._job = DeviceJob(
            model=model,
            contender="unmanaged",
            spill=str(spill),
            steps=options.steps,
            warmup_steps=options.warmup,
            threads=options.threads,
            vocabulary=options.vocabulary,
            scale=options.scale,
            capacity_bytes=_CAPACITY_BYTES,
            recompute=options.recompute,
        )
        self._phases_s: dict[str, float] = {}
        self._budget_bytes = 0
        self._excess_bytes = 0  # what must be away at the peak

    def measure(self) -> dict[str, Any]:
        """Return the unmanaged training's bytes and the budget made of them."""
        answer = self._must(self._job)
        steps = answer.facts["steps"]
        static_bytes = steps[-1]["static_bytes"]
        peak_bytes = max(step["peak_bytes"] for step in steps)
        self._phases_s = phases_of(steps)
        self._budget_bytes = int(static_bytes + self._options.share * (peak_bytes - static_bytes))
        self._excess_bytes = peak_bytes - self._budget_bytes
        self._job = replace(self._job, budget_bytes=self._budget_bytes, host_bytes=2 * peak_bytes)
        counted = self._must(replace(self._job, contender="lowtide", steps=1))
        kept = {name: answer.facts[name] for name in ("title", "parameters", "torch", "threads")}
        return {
            **kept,
            "static_bytes": static_bytes,
            "peak_bytes": peak_bytes,
            "budget_bytes": self._budget_bytes,
            "floor_bytes": counted.facts["floor_bytes"],
        }

    def link(self, name: str) -> Link:
        """Return the link to compare on: a preset's, or the one on which the traffic takes a share of compute."""
        if name != HIDING:
            return Link(**self._must(replace(self._job, contender="probe", policy=name)).facts)
        link = self._hiding(self._excess_bytes, self._excess_bytes)
        for _ in range(_MOST_PASSES):
            # Of a plan that only swaps: one that may recompute would move the less, the slower the link.
            steps = self._must(replace(self._on(link, "lowtide"), recompute=False)).facts["steps"]
            asked = asked_of(steps)
            # A plan for another link may move other bytes.
            again = self._hiding(asked["forward"]["out"], asked["backward"]["in"])
            near = abs(again.d2h_bytes_per_s / link.d2h_bytes_per_s - 1) < _CLOSE
            link = again
            if near:
                break
        return link

    def _hiding(self, out_bytes: int, in_bytes: int) -> Link:
        return Link(
            d2h_bytes_per_s=out_bytes / (TRAFFIC_SHARE * self._phases_s["forward"]),
            h2d_bytes_per_s=in_bytes / (TRAFFIC_SHARE * self._phases_s["backward"]),
            latency_s=self._options.latency,
        )

    def rounds(self, name: str, link: Link) -> Iterator[list[dict[str, Any]]]:
        """Run round after round; yield every contender's line after each."""
        entrants = [Entrant(key=contender, contender=contender) for contender in self._options.contenders]
        entrants += [
            Entrant(key=f"lowtide:{policy}", contender="lowtide", policy=policy) for policy in self._options.policies
        ]
        for entrant in entrants:
            if entrant.contender == "lowtide":
                entrant.budget_bytes = self._budget_bytes
        for index in range(self._options.rounds):
            turn = index % len(entrants)
            for entrant in [*entrants[turn:], *entrants[:turn]]:
                answer = launch(self._on(link, entrant.contender, policy=entrant.policy), worker=WORKER)
                entrant.answers.append(answer)
                text = answer.failure or " ".join(f"{step['step_s']:.2f}" for step in answer.facts["steps"]) + " s"
                self._say(f"{name}, round {index + 1}/{self._options.rounds}, {entrant.key}: {text}")
            unmanaged = next(entrant for entrant in entrants if entrant.contender == "unmanaged")
            lines = [summary(entrant, unmanaged, link) for entrant in entrants]
            base = lines[entrants.index(unmanaged)]
            for line in lines:
                if "step_s" in line and "step_s" in base:
                    line["traffic_share"] = _traffic_share(line["asked_bytes"], base["phases_s"], link)
            yield lines

    def _on(self, link: Link, contender: str, *, policy: str = "auto") -> DeviceJob:
        return replace(self._job, contender=contender, policy=policy, **asdict(link))

    def _must(self, job: DeviceJob) -> Answer:
        self._say(f"measuring: {job.contender}")
        answer = launch(job, worker=WORKER)
        if answer.failure is not None:
            raise SystemExit(f"cannot measure {job.contender} on {job.model}: {answer.failure}")
        return answer

    def _say(self, text: str) -> None:
        self._console.print(f"{self._job.model}: {text}", highlight=False, markup=False, soft_wrap=True)


def _traffic_share(asked: dict[str, dict[str, int]], phases_s: dict[str, float], link: Link) -> dict[str, float]:
    """Return how long the link is busy in each phase, over the unmanaged training's compute there."""
    return {
        phase: max(ways["out"] / link.d2h_bytes_per_s, ways["in"] / link.h2d_bytes_per_s) / phases_s[phase]
        for phase, ways in asked.items()
    }


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    kept = ("share", "rounds", "steps", "warmup", "contenders", "policies", "links", "vocabulary", "scale", "latency")
    return {name: getattr(options, name) for name in (*kept, "recompute")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODEL_NAMES, default=list(MODEL_NAMES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--policies", nargs="*", default=[], help="further policies to run Lowtide with")
    parser.add_argument("--links", nargs="+", default=[HIDING, "v100"], help=f"{HIDING!r}, or names of presets")
    parser.add_argument("--recompute", action="store_true", help="let Lowtide run operators again")
    parser.add_argument("--share", type=float, default=0.45, help="budget = static + share x (peak - static)")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each contender")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a process")
    parser.add_argument("--warmup", type=int, default=3, help="steps before; Lowtide's plan is final in the third")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--latency", type=float, default=1e-5, help=f"seconds to start a copy on the {HIDING} link")
    parser.add_argument("--vocabulary", type=int, default=2048, help="words of the GPT")
    parser.add_argument("--scale", type=int, default=1, help="divide every batch by this, for a quick try")
    parser.add_argument("--spill", type=Path, default=None, help="directory on the disk to spill to")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "accelerator.json")
    parser.add_argument("--page", type=Path, default=None, help="put the tables into this page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
