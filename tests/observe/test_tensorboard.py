import math
import sys
from dataclasses import replace

import pytest

from geartrain.errors import GeartrainError
from geartrain.observe.tensorboard import TensorBoard


class Writer:
    """Stands in for SummaryWriter: keeps the scalars."""

    def __init__(self):
        self.scalars, self.is_closed = [], False

    def add_scalar(self, tag, value, at):
        self.scalars.append((tag, value, at))

    def flush(self):
        pass

    def close(self):
        self.is_closed = True


@pytest.fixture
def writer(monkeypatch):
    writer = Writer()
    monkeypatch.setattr("geartrain.observe.tensorboard._writer_class", lambda _: lambda _: writer)
    return writer


def test_epochs_and_progress_become_scalars(writer, tmp_path, told):
    told.tell(TensorBoard(tmp_path), *told.run_events())
    scalars = {(tag, at): value for tag, value, at in writer.scalars}
    assert scalars["train/loss", 2] == 0.5
    assert scalars["valid/accuracy", 2] == 0.82
    assert scalars["staleness/branch/mean", 2] == 2.5
    assert scalars["staleness/branch/max", 2] == 4
    assert scalars["updates/leaf", 3] == 40
    assert scalars["speed/instances_per_second", 1] == 200
    assert scalars["running/train/loss", 300] == 0.8123
    assert ("running/train/loss", 200) in scalars  # the end of epoch 2 ...
    assert writer.is_closed


def test_what_is_not_finite_is_left_out(writer, tmp_path, told):
    TensorBoard(tmp_path).on_progress(
        told.progress(0, loss=math.nan, instances_per_second=math.inf)
    )
    tags = {tag for tag, _, _ in writer.scalars}
    assert tags == {"running/train/in_flight", "running/train/accuracy", "running/train/staleness"}


def test_data_without_length_goes_on_counting_over_epochs(writer, tmp_path, told):
    board = TensorBoard(tmp_path)
    board.on_epoch_ended(told.epoch_ended(1, instances=70))
    writer.scalars.clear()
    board.on_progress(told.progress(5, epoch=2, total=None))
    assert {at for _, _, at in writer.scalars} == {75}


def test_event_files_read_back(tmp_path, told):
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told.tell(TensorBoard(tmp_path / "tb"), *told.run_events())
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    values = [(point.step, point.value) for point in events.Scalars("valid/accuracy")]
    assert values == [(1, pytest.approx(0.70)), (2, pytest.approx(0.82)), (3, pytest.approx(0.79))]


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(GeartrainError, match=r"pip install 'geartrain\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_evaluations_within_an_epoch_stand_at_thousandths_of_epochs(writer, tmp_path, told):
    board = TensorBoard(tmp_path)
    board.on_epoch_ended(replace(told.epoch_ended(1), epoch=0.25))
    board.on_epoch_ended(told.epoch_ended(1))
    at = {tag: step for tag, _, step in writer.scalars}
    assert at["fractions/train/loss"] == 250
    assert at["train/loss"] == 1
