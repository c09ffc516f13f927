"""Integer programmes, solved by HiGHS: the one solver here, loaded when the first is solved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import inf
from typing import Any

import numpy as np

from lowtide.errors import BadArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a solver found: the value of every variable, the objective, a bound that nothing beats, and what it took."""

    values: tuple[float, ...]
    objective: float
    bound: float
    seconds: float
    solver: str

    @property
    def gap(self) -> float:
        """How far the objective may be from the best there is, as a share of it."""
        return max(0.0, (self.objective - self.bound) / abs(self.objective)) if self.objective else 0.0

    def told(self) -> str:
        """Return the solver, the gap and the time in words, for a plan's notes."""
        return f"{self.solver}: objective {self.objective:.6g} s, gap {self.gap:.2%}, {self.seconds:.2f} s"


def has_solver() -> bool:
    """Tell whether programmes can be solved: the solver may be missing where a package was installed without it."""
    return find_spec("highspy") is not None


class Programme:
    """A linear objective over variables with bounds, to be made as small as its rows allow."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._upper: list[float] = []
        self._integer: list[bool] = []
        self._rows: list[tuple[dict[int, float], float]] = []

    def variable(self, *, cost: float = 0.0, upper: float = inf, integer: bool = False) -> int:
        """Return a new variable from 0 to `upper`."""
        self._cost.append(cost)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._cost) - 1

    def choice(self, *, cost: float = 0.0) -> int:
        """Return a new variable that is 0 or 1."""
        return self.variable(cost=cost, upper=1.0, integer=True)

    def at_least(self, terms: Mapping[int, float], least: float) -> None:
        """Demand that a sum of variables, each times a factor, reaches `least`."""
        self._rows.append((dict(terms), least))

    def solve(self, *, seconds: float, gap: float, relaxed: bool = False) -> Solution | None:
        """Return the best values found in so many seconds, within a gap (None: none was found, or there are none).

        `relaxed`: a choice may be anything from 0 to 1.
        """
        try:
            highspy: Any = import_module("highspy")  # its stubs are not complete, and it may be absent
        except ImportError:
            raise BadArgument(
                "HiGHS is missing, which solves integer programmes here: install it with pip install highspy"
            ) from None
        model = highspy.Highs()
        model.setOptionValue("output_flag", False)
        model.setOptionValue("time_limit", float(seconds))
        model.setOptionValue("mip_rel_gap", float(gap))
        model.setOptionValue("threads", 1)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._cost), len(self._rows)
        lp.col_cost_ = np.array(self._cost)
        lp.col_lower_ = np.zeros(len(self._cost))
        lp.col_upper_ = np.array([min(upper, highspy.kHighsInf) for upper in self._upper])
        lp.row_lower_ = np.array([least for _, least in self._rows])
        lp.row_upper_ = np.full(len(self._rows), highspy.kHighsInf)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lengths = [len(terms) for terms, _ in self._rows]
        lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        lp.a_matrix_.index_ = np.array([k for terms, _ in self._rows for k in terms], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([factor for terms, _ in self._rows for factor in terms.values()], dtype=float)
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[whole] for whole in self._integer]
        model.passModel(lp)
        begun_s = time.perf_counter()
        model.run()
        took_s = time.perf_counter() - begun_s
        info = model.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if not found:
            return None
        bound = info.objective_function_value if relaxed else info.mip_dual_bound
        return Solution(
            values=tuple(model.getSolution().col_value),
            objective=info.objective_function_value,
            bound=bound,
            seconds=took_s,
            solver=f"HiGHS {model.version()}",
        )
