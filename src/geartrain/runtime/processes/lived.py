"""What ``keep="auto"`` has counted and chosen in a worker, for the graph of the parent.

    parent's graph ─► pass ─► a worker counts, and chooses ─► what has changed ─► parent's graph

Every pass makes the graph anew in its workers: what came of one is known to the next by this alone.
"""

from __future__ import annotations

from typing import Any, final

from geartrain.graph.graph import Graph


@final
class Lived:
    """What a worker's nodes go through in a pass.

    Args:
        graph: As it came.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, self._before = graph, _now(graph)

    def document(self) -> dict[str, Any]:
        """By name of the node: firings and rows of this pass, and what is chosen if it is news."""
        found: dict[str, Any] = {}
        for name, (firings, rows, *chosen) in _now(self._graph).items():
            firings_before, rows_before, *before = self._before[name]
            if [firings, rows, *chosen] != self._before[name]:
                news = chosen if chosen != before else None
                found[name] = [firings - firings_before, rows - rows_before, news]
        return found


def take_lived(graph: Graph, document: Any) -> None:
    """Add what one worker's nodes have gone through to what is known of them here.

    Args:
        graph: Of the parent.
        document: Of ``Lived``.
    """
    counted: set[int] = set()  # operators of one class count together
    for through in graph.throughs():
        if through.name not in document:
            continue
        firings, rows, news = document[through.name]
        experience = through.experience
        done = experience.done
        if id(done) not in counted:
            counted.add(id(done))
            done.firings, done.rows = max(0, done.firings + firings), max(0, done.rows + rows)
        if news is not None:
            experience.chosen, experience.story = news


def _now(graph: Graph) -> dict[str, list[Any]]:
    return {
        through.name: [
            *(through.experience.done.firings, through.experience.done.rows),
            *(through.experience.chosen, through.experience.story),
        ]
        for through in graph.throughs()
    }
