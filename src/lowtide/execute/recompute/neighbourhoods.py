"""What it costs to make a record again with everything dropped that hangs together with it, as DTR estimates it.

Each record has a cost of its own: the calls that make it from other records. What is dropped forms components: a record
that is dropped joins those of its dropped neighbours, the records it is made from and those made from it; the cost of a
component is the sum of its members'. One that is made again takes its own cost out of its component, but does not split
it (Kirisame et al., ICLR 2021, the approximation with union-find): exact components would have to be walked whenever
memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    own_s: float
    sources: Sequence[int]
    made_from_it: list[int] = field(default_factory=list)
    component: int | None = None


class Neighbourhoods:
    """Costs of records. `own` says what a record costs by itself, and which records it is made from."""

    def __init__(self, own: Callable[[int], tuple[float, Sequence[int]]]) -> None:
        self._own = own
        self._nodes: dict[int, _Node] = {}
        self._waiting: list[tuple[int, int]] = []  # made from a record of which nothing is known yet
        self._parents: list[int] = []
        self._costs_s: list[float] = []

    def learn(self, records: Iterable[int]) -> None:
        """Have the costs of these records looked up, once each."""
        fresh = [record for record in records if record not in self._nodes]
        for record in fresh:
            own_s, sources = self._own(record)
            self._nodes[record] = _Node(own_s, sources)
            self._waiting.extend((source, record) for source in sources)
        if fresh:
            unknown = []
            for source, record in self._waiting:
                found = self._nodes.get(source)
                if found is None:
                    unknown.append((source, record))
                else:
                    found.made_from_it.append(record)
            self._waiting = unknown

    def cost_s(self, record: int) -> float:
        """Return what a record costs with all that is dropped around it."""
        node = self._nodes[record]
        return node.own_s + sum(self._costs_s[component] for component in self._around(node))

    def dropped(self, record: int) -> None:
        """Take note that a record was given up."""
        node = self._nodes.get(record)
        if node is None:
            return
        joined = len(self._parents)
        self._parents.append(joined)
        self._costs_s.append(node.own_s)
        node.component = joined
        for component in self._around(node):
            self._parents[component] = joined
            self._costs_s[joined] += self._costs_s[component]

    def remade(self, record: int) -> None:
        """Take note that a record is in memory again."""
        node = self._nodes.get(record)
        if node is not None and node.component is not None:
            self._costs_s[self._root(node.component)] -= node.own_s
            node.component = None

    def _around(self, node: _Node) -> set[int]:
        """Return the components next to a record."""
        neighbours = (self._nodes.get(record) for record in (*node.sources, *node.made_from_it))
        found = {self._root(one.component) for one in neighbours if one is not None and one.component is not None}
        return found - {node.component}

    def _root(self, component: int) -> int:
        while self._parents[component] != component:
            self._parents[component] = component = self._parents[self._parents[component]]
        return component
