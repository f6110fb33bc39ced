"""A worker that is asked how things stand says at once that it has nothing to do."""

from geartrain.runtime.processes.patience import IDLE_S, Patience


def test_nobody_waits_at_the_end_of_a_pass_and_each_does_in_the_middle():
    patience = Patience()
    assert patience.seconds == IDLE_S > 0
    patience.asked()
    assert patience.seconds == 0.0  # for all rounds of the end, not the first alone
    assert patience.seconds == 0.0
    patience.fired(letters=True)
    assert patience.seconds == 0.0  # what was left of an update has come
    patience.fired(letters=False)
    assert patience.seconds == IDLE_S
    patience.fired(letters=True)
    assert patience.seconds == IDLE_S
