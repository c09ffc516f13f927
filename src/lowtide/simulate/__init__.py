"""The residency machine on a virtual clock: what a plan or a reactive policy would do on a machine, without one.

docs/simulator.md states the model and where it differs from the planner's and from the runtime.
"""

from lowtide.simulate.resources import Resources
from lowtide.simulate.run import Run, simulate_run
from lowtide.simulate.step import simulate

__all__ = ["Resources", "Run", "simulate", "simulate_run"]
