"""V9: codecs that round are for what only backward reads again, within the error that the problem states."""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Kind, Phase
from lowtide.errors import PlanError
from lowtide.plan.verify.shape import label


def check_rounding(plan: Plan, problem: Problem) -> None:
    """Raise `PlanError` for a swap through a codec that rounds where rounding is not allowed."""
    errors = {codec.name: codec.error_bound for codec in problem.codecs}
    rounded = [swap for swap in plan.swaps if errors.get(swap.codec, 0.0) > 0]
    if not rounded:
        return
    touches = problem.trace.touches()
    again = {op for one in plan.recomputes for op in one.ops}
    for swap in rounded:
        if errors[swap.codec] > problem.max_error:
            raise PlanError(
                f"V9: {label(swap)} goes through {swap.codec!r}, which is off by up to {errors[swap.codec]:.3g} of the "
                f"largest value; the problem admits {problem.max_error:.3g}: state a larger max_error, or leave it out"
            )
        _check_readers(swap, problem, touches[swap.gap.storage], again)


def _check_readers(swap: Swap, problem: Problem, touched: tuple[int, ...], again: set[int]) -> None:
    trace = problem.trace
    kind = trace.storages[swap.gap.storage].kind
    if kind is not Kind.ACTIVATION or trace.lives_on(swap.gap.storage):
        raise PlanError(f"V9: {label(swap)} is rounded by {swap.codec!r}, but its storage is not an activation: {kind}")
    for op in touched:
        if op >= swap.gap.before_op and trace.ops[op].phase is not Phase.BACKWARD:
            raise PlanError(
                f"V9: {label(swap)} is rounded by {swap.codec!r}, and operator {op}, '{trace.ops[op].name}', "
                f"reads it in {trace.ops[op].phase}: only backward may"
            )
        if op in again:
            raise PlanError(
                f"V9: {label(swap)} is rounded by {swap.codec!r}, and operator {op}, '{trace.ops[op].name}', "
                "which runs again, reads it"
            )
