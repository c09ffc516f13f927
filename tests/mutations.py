"""The audit of the hosted systems: what makes each of them itself is taken out by one line, and a test has to fail.

    python tests/mutations.py                  all of them
    python tests/mutations.py capuchin pooch   those of some systems
    python tests/mutations.py --list

A mutation is a text that occurs once in a file of the package, and what it is replaced by. It is applied to a copy; the
tests named beside it run against that copy, and one of them has to fail. What survives is printed, and the exit code
is 1 then. `tests/test_mutations.py` holds the list itself against the package.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lowtide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One line taken out of a system: `claim` says what is not true any more."""

    system: str
    claim: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the file's text with the mutation in it."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.system}: {self.old!r} occurs {count} times in {self.file}: mend tests/mutations.py"
            )
        return text.replace(self.old, self.new)


class Verdict(StrEnum):
    """What became of a mutation."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"
    """No test ran: the mutation, or the list of its tests, is wrong."""


def _policy(system: str, claim: str, old: str, new: str, *tests: str, file: str = "") -> Mutation:
    named = tests or (f"tests/plan/policies/test_{system}.py",)
    return Mutation(
        system=system, claim=claim, file=file or f"plan/policies/{system}.py", old=old, new=new, tests=named
    )


MUTATIONS: tuple[Mutation, ...] = (
    # ---- Capuchin
    _policy(
        "capuchin",
        "writes are not booked on the link",
        "        self._out.book(timing.out_start_s, one.write_s)\n",
        "",
    ),
    _policy(
        "capuchin",
        "reads are not booked on the link",
        "            self._back.book(in_start_s, one.read_s)\n",
        "",
    ),
    _policy("capuchin", "MSPS does not count bytes", "one.nbytes / seconds", "1 / seconds"),
    _policy(
        "capuchin",
        "MSPS does not count seconds",
        "return inf if seconds <= 0 else one.nbytes / seconds",
        "return inf if seconds <= 0 else one.nbytes",
    ),
    _policy(
        "capuchin",
        "a late read is not triggered earlier",
        "_earlier(swap, facts) if at in late else swap",
        "swap",
    ),
    _policy(
        "capuchin",
        "the smallest free time comes first",
        "key=lambda pair: -pair[1].free_s)",
        "key=lambda pair: pair[1].free_s)",
    ),
    # ---- PoocH
    _policy(
        "pooch",
        "the exhaustive search of what was waited for is left out",
        "for count in range(1, len(longest) + 1)",
        "for count in range(0)",
    ),
    _policy(
        "pooch",
        "the greedy search is left out",
        "            for gap in self._waited_for(best):\n",
        "            for gap in ():\n",
    ),
    _policy(
        "pooch",
        "the search that begins with the latest maps kept is left out",
        "self._starts = STARTS if start is None",
        "self._starts = STARTS[:1] if start is None",
    ),
    _policy(
        "pooch",
        "the published search is left out",
        "self._starts = STARTS if start is None",
        "self._starts = STARTS[1:] if start is None",
    ),
    _policy(
        "pooch", "nothing is recomputed", "found = [search.recompute(one) for one in found]", "found = list(found)"
    ),
    # ---- Meng
    _policy(
        "meng",
        "fitness without the distance of the next use",
        "(earliest_s - peak_s) ** 2 / uses_left**2 + (allocated_s - peak_s) ** 2",
        "(allocated_s - peak_s) ** 2",
    ),
    _policy(
        "meng",
        "fitness without the distance of the allocation",
        "(earliest_s - peak_s) ** 2 / uses_left**2 + (allocated_s - peak_s) ** 2",
        "(earliest_s - peak_s) ** 2 / uses_left**2",
    ),
    _policy("meng", "fitness without the uses left", "/ uses_left**2", ""),
    _policy("meng", "short lives are swapped too", " and lifetime_s > LEAST_LIFETIME_S", ""),
    _policy("meng", "another bandwidth is assumed", "ASSUMED_BYTES_PER_S = 16e9", "ASSUMED_BYTES_PER_S = 4e9"),
    # ---- moDNN
    _policy(
        "modnn",
        "reads are not late",
        "comfort_bytes=target_bytes, margin=0.0)",
        "comfort_bytes=target_bytes, margin=9.0)",
    ),
    _policy("modnn", "hardly any target is tried", "TARGETS = 16", "TARGETS = 2"),
    _policy("modnn", "the most recently used leaves", "gap = waiting[head]", "gap = waiting[-1 - head]"),
    # ---- SmartPool and AutoSwap
    _policy(
        "smartpool",
        "best fit is first fit",
        'tightest=fit == "best"',
        "tightest=False",
        "tests/plan/views/test_pools.py",
        file="plan/views/pools.py",
    ),
    _policy(
        "smartpool",
        "the smallest block is coloured first",
        "(-blocks[k].nbytes, blocks[k].first_op",
        "(blocks[k].nbytes, blocks[k].first_op",
        "tests/plan/views/test_pools.py",
        file="plan/views/pools.py",
    ),
    _policy(
        "autoswap",
        "the plan does not say where blocks lie",
        "layout=addresses(blocks, fit=self._fit)",
        "layout=()",
        "tests/simulate/test_arena.py",
    ),
    _policy(
        "autoswap",
        "blocks take the first hole whatever was asked for",
        "layout=addresses(blocks, fit=self._fit)",
        "layout=addresses(blocks)",
    ),
    _policy(
        "autoswap",
        "memory is free when a write begins",
        "found[swap.gap] = bisect_left(begin_s, free_s) - 1",
        "found[swap.gap] = swap.gap.after_op",
        "tests/simulate/test_arena.py",
    ),
    _policy(
        "autoswap",
        "nobody follows the layout",
        "        elif plan is not None and plan.layout:\n",
        "        elif plan is not None and False:\n",
        "tests/simulate/test_arena.py",
        file="simulate/recording.py",
    ),
    _policy(
        "autoswap",
        "two blocks may lie in one place",
        "        if span is not None and _free(taken, span):\n",
        "        if span is not None:\n",
        "tests/simulate/test_arena.py",
        file="simulate/arena.py",
    ),
    _policy("autoswap", "SWDOA is not scored again", 'self._area if score == "wdoa" else self._areas()', "self._area"),
    _policy(
        "autoswap",
        "AOA does not count bytes",
        "absence_s * left.nbytes[open_now], absence_s / left.nbytes[open_now]",
        "absence_s, absence_s",
    ),
    # ---- AccUDNN
    _policy("accudnn", "what is exposed is not exchanged", "            exposed |= late\n", ""),
    _policy(
        "accudnn",
        "what does not hide goes first",
        "one.slack_s < 0, not one.worthwhile",
        "one.slack_s >= 0, not one.worthwhile",
    ),
    # ---- TFLMS
    _policy("tflms", "all memory is used", "MEMORY_SHARE = 0.9", "MEMORY_SHARE = 1.0"),
    _policy(
        "tflms",
        "uses are not grouped",
        "gap.storage not in seen or gap.before_op - gap.after_op + 1 > knobs.swapin_groupby",
        "True",
    ),
    _policy("tflms", "the threshold is not looked at", "if far and apart", "if apart"),
    # ---- vDNN
    _policy(
        "vdnn",
        "the rungs with the leanest algorithms are left out",
        'yield trial(label, leanest(table), "leanest")',
        "yield from ()",
    ),
    _policy(
        "vdnn",
        "nobody waits for copies out",
        "landed_op=landing(ends, gap), arrived_op=arrived_op",
        "arrived_op=arrived_op",
    ),
    _policy(
        "vdnn",
        "nobody waits for copies back",
        "landed_op=landing(ends, gap), arrived_op=arrived_op",
        "landed_op=landing(ends, gap)",
    ),
    # ---- Layrub
    _policy(
        "layrub",
        "gradients have places of their own",
        "            tenants.setdefault(one.data, []).append(last[one.gradient])\n",
        "            pass\n",
    ),
    _policy(
        "layrub",
        "others may lie where a gradient is",
        "replace(block, last_op=max(tenant.last_op for tenant in tenants[block.of]))",
        "block",
        "tests/simulate/test_arena.py",
    ),
    _policy("layrub", "nobody waits for copies back", "                    arrived_op=arrived_op,\n", ""),
    _policy("layrub", "nobody waits for copies out", "                    landed_op=landing(ends, gap),\n", ""),
    # ---- vDNN++
    _policy("vdnn_pp", "copies are not compressed", "replace(swap, codec=self._codec)", "swap"),
    _policy("vdnn_pp", "it waits as vDNN does", "synchronous=False", "synchronous=True"),
    # ---- FlashNeuron
    _policy(
        "flashneuron", "the codec is not executed", "codec=sparse if one.csr else IDENTITY.name", "codec=IDENTITY.name"
    ),
    _policy("flashneuron", "the pool has one end", "reversed(holes) if high else holes", "holes"),
    # ---- MindSpore
    _policy("mindspore", "the heaviest gaps are kept", "(weight(trace, gap), gap))", "(-weight(trace, gap), gap))"),
    # ---- SwapAdvisor
    _policy(
        "swapadvisor", "nothing mutates", "bias + random.gauss(0, BIAS) if random.random() < rate else bias", "bias"
    ),
    _policy("swapadvisor", "a child is one of its parents", "child = crossed(one, other, self._random)", "child = one"),
    _policy(
        "swapadvisor",
        "biases are not crossed",
        "biases=tuple(pair[random.randrange(2)] for pair in zip(one.biases, other.biases, strict=True))",
        "biases=one.biases",
    ),
    _policy(
        "swapadvisor",
        "orders are not crossed",
        "order=crossed_orders(one.order, other.order, at=random.randint(1, max(1, len(one.order) - 1)))",
        "order=one.order",
    ),
    _policy("swapadvisor", "counts are not crossed", "*other.pools.counts[at:]", "*one.pools.counts[at:]"),
    _policy(
        "swapadvisor", "classes are not crossed", "*other.pools.classes[at:]), max)", "*one.pools.classes[at:]), max)"
    ),
    _policy("swapadvisor", "a full pool sends nobody out", "held[pool] > most and", "held[pool] > 10**9 and"),
    _policy(
        "swapadvisor",
        "operators keep their places",
        "            order = self._dependencies.moved(order, op, share=self._random.random())\n",
        "            pass\n",
    ),
    _policy(
        "swapadvisor",
        "what is overwritten may be read later",
        "            for earlier in since or [last]:\n",
        "            for earlier in [last]:\n",
        "tests/plan/views/test_reorder.py",
        file="plan/views/reorder.py",
    ),
    _policy(
        "swapadvisor",
        "memory stays as recorded in another order",
        "peak_bytes=trace.ops[op].peak_bytes - held[op] + alive[at]",
        "peak_bytes=trace.ops[op].peak_bytes",
        "tests/plan/views/test_reorder.py",
        file="plan/views/reorder.py",
    ),
    # ---- Li & Chapman
    _policy("li_chapman", "near objects leave as well", "return (near, -distance", "return (False, -distance"),
    _policy("li_chapman", "density does not count", "/ max(density.get(one.gap.storage, 1.0), 1e-9)", ""),
    # ---- the survey's algorithms
    _policy(
        "survey",
        "largest is least recently used",
        'order=oldest if settings.victim == "lru" else largest',
        "order=oldest",
    ),
    _policy("survey", "what was missed does not stay", "staying = before | missed", "staying = before"),
    _policy(
        "survey",
        "the interval begins with the swap-out",
        "swapped_out_s = facts.start_s[gap.after_op] + facts.link.write_s(nbytes)",
        "swapped_out_s = facts.start_s[gap.after_op]",
    ),
    _policy("survey", "late prefetches mark nothing", 'span.lane is Lane.STALL and span.cause == "arrival"', "False"),
    _policy(
        "survey", "all kinds of steps share what was missed", "return tuple(op.name for op in trace.ops)", "return 0"
    ),
    _policy("survey", "trials are not run", "return waiting.pop(0)", "return plan"),
    _policy("survey", "the last trial stays", "return min(ran, key=lambda one: one[0])[1]", "return plan"),
    _policy(
        "survey",
        "(1) what leaves stays on the device",
        "        self.storage.add(record)\n",
        "        pass\n",
        "tests/simulate/test_equations.py",
        file="simulate/equations.py",
    ),
    _policy(
        "survey",
        "(4) nobody looks into storage",
        "assert not required & self.storage",
        "assert not required - required",
        "tests/simulate/test_equations.py",
        file="simulate/equations.py",
    ),
    _policy(
        "survey",
        "(1) what is freed stays on the device",
        "                self._free(storage)\n            self._op += 1",
        "                pass\n            self._op += 1",
        "tests/simulate/test_equations.py",
        file="simulate/equations.py",
    ),
    _policy(
        "survey",
        "(1) what is allocated was there before",
        "self._allocated[block.first_op].append(storage)",
        "self._allocated[0].append(storage)",
        "tests/simulate/test_equations.py",
        file="simulate/equations.py",
    ),
    _policy(
        "survey",
        "(5) nobody asks what makers need",
        "missing = required - made - self.device",
        "missing = required - required",
        "tests/simulate/test_equations.py",
        file="simulate/equations.py",
    ),
    _policy(
        "survey",
        "(5) the simulator does not ask for makers",
        "            self.state.equations.run_again(recipe.ops)\n",
        "            pass\n",
        "tests/simulate/test_equations.py",
        file="simulate/step.py",
    ),
    # ---- Li & Chapman, MindSpore: where the plan says it
    _policy(
        "li_chapman", "sparse objects are copied as well", "ahead = 1 if mode is Mode.EXPLICIT else 0", "ahead = 1"
    ),
    _policy(
        "li_chapman",
        "the oldest leaves first",
        "one.gap.storage)\n\n        need",
        "one.gap.after_op)[::2]\n\n        need",
    ),
    _policy("mindspore", "the disk is the host", "dict.fromkeys(found.disk, disk)", "dict.fromkeys(found.disk, host)"),
    _policy(
        "mindspore",
        "the slowest tier is the host",
        "key=lambda name: (-links[name].read_bytes_per_s, name)",
        "key=lambda name: (links[name].read_bytes_per_s, name)",
    ),
    # ---- unified memory's page model
    _policy(
        "unified_memory",
        "faults cost nothing",
        "move_s += faults * self._machine.page_fault_s + moved_bytes",
        "move_s += moved_bytes",
    ),
    _policy(
        "unified_memory", "the most recently used goes", "self._lru.popitem(last=False)", "self._lru.popitem(last=True)"
    ),
    # ---- predictors
    _policy(
        "paleo",
        "compute and traffic always overlap",
        "if shares.overlap else compute_s + memory_s",
        "if True else 0.0",
        "tests/estimate/test_predict.py",
        file="estimate/predict.py",
    ),
    _policy(
        "paleo",
        "compute and traffic never overlap",
        "max(compute_s, memory_s) if shares.overlap",
        "compute_s + memory_s if shares.overlap",
        "tests/estimate/test_predict.py",
        file="estimate/predict.py",
    ),
    _policy(
        "dnnmem",
        "blocks are not rounded",
        "        return _up(nbytes, 512)",
        "        return nbytes",
        "tests/estimate/predictors/test_allocators.py",
        file="estimate/predictors/allocators.py",
    ),
    _policy(
        "dnnmem",
        "neighbours are not joined",
        "        if chunk.before is not None and chunk.before.free:",
        "        if False and chunk.before is not None:",
        "tests/estimate/predictors/test_allocators.py",
        file="estimate/predictors/allocators.py",
    ),
    _policy(
        "dnnmem",
        "what is alive before the step is left out",
        "    if trace.static_bytes > known_bytes:",
        "    if False:",
        "tests/estimate/predictors/test_allocators.py",
        file="estimate/predictors/allocators.py",
    ),
    _policy(
        "daydream",
        "a task does not wait for its thread",
        "max((clock.get(task.thread, 0.0), *(ends",
        "max((0.0, *(ends",
        "tests/simulate/test_task_graph.py",
        file="simulate/task_graph.py",
    ),
    _policy(
        "daydream",
        "nobody waits for what is inserted",
        "({at} if place in before else set())",
        "set()",
        "tests/simulate/test_task_graph.py",
        file="simulate/task_graph.py",
    ),
    _policy(
        "daydream",
        "operators do not wait for transfers",
        "                    after.update(came)\n",
        "                    pass\n",
        "tests/simulate/test_task_graph.py",
        file="simulate/task_graph.py",
    ),
    # ---- recomputation
    _policy("chen", "every other point is kept", "points[:: max(1, ceil(sqrt(len(points))))]", "points[::2]"),
    _policy("chen", "segments are never closed", "                held = 0\n", "                pass\n"),
    _policy(
        "gruslys",
        "the first state is stored after half of the steps",
        "return min((y + cost(t - y, m - 1) + cost(y, m), y) for y in range(1, t))",
        "return (t // 2 + cost(t - t // 2, m - 1) + cost(t // 2, m), t // 2)",
    ),
    _policy(
        "kusumoto",
        "the block of a set counts once",
        "2 * (absent @ (self.member * self.nbytes).T)",
        "1 * (absent @ (self.member * self.nbytes).T)",
    ),
    _policy("kusumoto", "boundaries are not kept", "before + self.kept[i, j], far)", "before, far)"),
    _policy(
        "echo", "dear operators run again", "sorted(set(values.waiting()) - dear,", "sorted(set(values.waiting()),"
    ),
    _policy("echo", "a cone may take more than it frees", "delta_mem >= 0 and ", ""),
    _policy("echo", "cones may take any time", " and cones_s(values, gone | {k}) <= most_s", ""),
    _policy(
        "checkmate",
        "what is made needs no sources",
        "                    programme.at_least({**there(s, source), make[s][i]: -1.0}, 0.0)\n",
        "                    pass\n",
    ),
    _policy(
        "checkmate", "S is rounded at one half only", "THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)", "THRESHOLDS = (0.5,)"
    ),
    _policy(
        "checkmate",
        "the threshold is not looked at",
        "answer.kept[back][i] >= threshold",
        "answer.kept[back][i] >= 0.5",
    ),
    _policy(
        "checkmate",
        "the first threshold is taken",
        "for threshold in self._thresholds if answer",
        "for threshold in self._thresholds[:1] if answer",
    ),
    _policy(
        "layer_budgets", "the link takes everything", "    programme.at_least({**transfers, short: 1.0}, -link_s)\n", ""
    ),
    _policy(
        "layer_budgets",
        "the dearest goes first",
        "key=lambda one: (one.cheaper_s / one.one.nbytes, one.one.gap)",
        "key=lambda one: (-one.cheaper_s / one.one.nbytes, one.one.gap)",
    ),
    # ---- plans are followed
    _policy(
        "runtime",
        "no plan is followed",
        "            self._next_plan = followed\n",
        "            pass\n",
        "tests/bitwise/test_literature.py::test_losses_gradients_and_parameters_are_stocks[cnn-capuchin]",
        file="execute/tide/cpu.py",
    ),
)


def judge(mutation: Mutation, *, directory: Path, python: str = sys.executable) -> tuple[Verdict, str]:
    """Return what becomes of a mutation in a copy of the package below `directory`, and the first test that failed."""
    copy = directory / "lowtide"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        changed = copy / mutation.file
        changed.write_text(mutation.applied(changed.read_text()))
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--hypothesis-profile=ci", "--tb=no"]
        done = subprocess.run(
            [python, "-m", "pytest", *options, *mutation.tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(copy)
    failed = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    verdicts = {0: Verdict.SURVIVED, 1: Verdict.KILLED}
    return verdicts.get(done.returncode, Verdict.BROKEN), failed or done.stdout[-200:]


def main() -> int:
    """Judge the mutations that were asked for; return 1 if one of them survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("systems", nargs="*", help="only those of these systems")
    parser.add_argument("--list", action="store_true", help="print what would be tried")
    asked = parser.parse_args()
    chosen = [one for one in MUTATIONS if not asked.systems or one.system in asked.systems]
    if asked.list or not chosen:
        for one in chosen or MUTATIONS:
            print(f"{one.system}: {one.claim} ({one.file})")
        return 0 if chosen else 2
    alive = 0
    with tempfile.TemporaryDirectory() as directory:
        for one in chosen:
            verdict, why = judge(one, directory=Path(directory))
            alive += verdict is not Verdict.KILLED
            print(f"{verdict:9} {one.system}: {one.claim}  {why}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutations are killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
