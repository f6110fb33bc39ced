"""A worker that steps common weights begins instances of whole updates together."""

from __future__ import annotations

import geartrain as gt
from geartrain.engine.instrument import Worked
from tests.rigs import turns
from tests.rigs.passes import processes
from tests.rigs.sessions import session_of

WORKERS, UPDATE, N = 5, 4, 400


class Fullness(gt.AbstractInstrument):
    """Rows and firings of the first map, which every instance comes by once."""

    def __init__(self) -> None:
        self.rows = self.firings = 0

    def on_worked(self, event: Worked) -> None:
        for use in event.nodes:
            if use.node.split("#")[0] == "start" and use.direction == "forward":
                self.rows += int(use.rows)
                self.firings += int(use.firings)


def test_firings_are_of_several_updates_though_each_is_stepped_by_itself() -> None:
    """As many workers as take one update of a part in a firing: so waves would be of one."""
    seen = Fullness()
    session = session_of(
        turns.graph_of(turns.model(), run="steps"),
        rules=gt.Rules(update_every=gt.Instances(UPDATE)),
        runtime=processes(WORKERS),
        sharing=gt.SharedWeights("each"),
        max_active=2 * UPDATE + 1,
        ramp=gt.Ramp(over=0),
        instruments=[seen],
    )
    fit = session.fit(turns.data(N), epochs=1)
    updates = fit.history[-1].updates.values()
    assert all(N // UPDATE - WORKERS + 1 <= n <= -(-N // UPDATE) for n in updates)
    assert seen.rows == N
    assert seen.rows / seen.firings > 1.5 * UPDATE, (seen.rows, seen.firings)
