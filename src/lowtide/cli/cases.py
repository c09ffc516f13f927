"""What the commands about recorded steps share: which trace, which policies, budgets and machines, checked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lowtide.cli.checks import similar_file
from lowtide.cli.output import warn
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument, BudgetTooSmall, PlanError, TraceError

if TYPE_CHECKING:
    from lowtide.core.machine import Machine
    from lowtide.core.plan import Problem
    from lowtide.core.trace import Trace
    from lowtide.report import Settled

F = TypeVar("F", bound=Callable[..., Any])

ALLOCATORS = ("arena", "pytorch", "bfc")


def model_options(function: F) -> F:
    """Add what changes how a step is simulated: --keep-times, --no-recompute and --allocator."""
    for option in (
        click.option(
            "--allocator",
            type=click.Choice(ALLOCATORS),
            help="Also show the peak that this kind of allocator would reserve.",
        ),
        recompute_option,
        click.option("--keep-times", is_flag=True, help="Keep the trace's operator times on every machine."),
    ):
        function = option(function)
    return function


def recompute_option(function: F) -> F:
    """Add --no-recompute."""
    return click.option("--no-recompute", is_flag=True, help="Swap only: no policy may run operators again.")(function)


def read_trace(path: Path) -> Trace:
    """Return the trace in a file."""
    from lowtide.core.serialize import load_trace

    if path.suffix == ".py":
        raise BadArgument(
            f"{path} is a script, and this command reads a trace: record one with 'lowtide capture -o step.trace "
            f"{path}', then pass step.trace"
        )
    try:
        return load_trace(path)
    except FileNotFoundError:
        meant = similar_file(path) or f": make one with 'lowtide capture -o {path} script.py'"
        raise BadArgument(f"trace {path} does not exist{meant}") from None
    except OSError as error:
        raise BadArgument(f"trace {path} cannot be read ({error.strerror or error}): check the path") from None
    except TraceError as error:
        raise BadArgument(f"{error}; a trace is made with 'lowtide capture -o FILE script.py'") from None


def read_machine(name: str | None) -> Machine:
    """Return the machine of that name; None is this one, measured by 'lowtide probe' or assumed."""
    if name is not None:
        from lowtide.cli.models import find_machine

        return find_machine(name)
    from lowtide.estimate.calibrate import assumed_machine, load_machine

    return load_machine() or assumed_machine()


def warn_of_mixed_times(trace: Trace, machines: Sequence[Machine], *, keep_times: bool) -> None:
    """Say so where operators take the times of one machine, and transfers those of another."""
    if not keep_times or not trace.timed_for:
        return
    for machine in machines:
        if machine.name != trace.timed_for:
            warn(
                f"the trace's operator times were predicted for {trace.timed_for}, and its transfers take the time "
                f"they take on {machine.name}: pass --machine {trace.timed_for} to use one machine for both"
            )


def read_machines(text: str | None) -> list[Machine]:
    """Return the machines that a list names; None is this one."""
    if text is None:
        return [read_machine(None)]
    found: dict[str, Machine] = {}
    for name in words(text, what="--machines"):
        machine = read_machine(name)
        if found.setdefault(machine.name, machine) != machine:
            raise BadArgument(f"two machines are named {machine.name!r}: rename one of them in its file")
    return list(found.values())


def read_policies(text: str) -> list[str]:
    """Return the policies that a list such as "auto,vdnn" names, or all of them."""
    from lowtide import registry

    if text.strip().lower() == "all":
        # The product first, so that reports show it on top.
        names = sorted(registry.policy_names(), key=lambda name: name != "auto")
    else:
        names = [registry.registered_name(name) for name in words(text, what="--policies")]
    for name in names:
        registry.policy(name)
    return list(dict.fromkeys(names))


def words(text: str, *, what: str) -> list[str]:
    """Return the parts of a list separated by commas, each once."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise BadArgument(f"{what} is empty: write a list separated by commas")
    return found


def check_budget(text: str | None) -> None:
    """Refuse a budget that cannot be read, before anything slow begins."""
    if text is not None and not text.strip().endswith("%"):
        from lowtide.memory.budget import parse_budget

        parse_budget(text)


def budget_for(text: str, trace: Trace) -> int:
    """Return the bytes that a budget states: bytes, "auto", or a share such as "60%" of what activations add."""
    if text.strip().endswith("%"):
        from lowtide.report.case import budget_of

        return budget_of(text, static_bytes=trace.static_bytes, peak_bytes=trace.peak_bytes)
    from lowtide.memory.budget import parse_budget

    return parse_budget(text).fast_bytes


def check_floor(trace: Trace, *, budgets_bytes: Sequence[int], machines: Sequence[Machine] = ()) -> None:
    """Refuse budgets of which no plan can meet a single one: what operators read in place need not fit."""
    from lowtide.report.case import can_place

    budget_bytes, op = max(budgets_bytes), trace.floor_op()
    if budget_bytes < trace.floor_bytes() and not any(can_place(trace, machine) for machine in machines):
        raise BudgetTooSmall(
            budget_bytes=budget_bytes,
            needed_bytes=trace.floor_bytes(),
            op="the step" if op is None else op.name,
            place="" if op is None else op.place,
        )


def verified(problem: Problem, policy: str) -> Settled:
    """Return a policy's plan, verified, and the step that follows; refuse a policy that cannot meet the budget."""
    from lowtide import registry
    from lowtide.plan import verify
    from lowtide.report import settle

    try:
        settled = settle(problem, registry.policy(policy))
        # A reactive policy decides when memory runs out: it predicts nothing, and there is nothing to verify.
        if settled.plan.prediction is not None and not settled.bound:
            verify.check(settled.plan, problem)
    except (BudgetTooSmall, PlanError) as error:
        budget = format_bytes(problem.budget_bytes)
        raise PlanError(f"policy {policy} has no plan for {budget}: {error}") from error
    return settled


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal's stderr while cases are done; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
