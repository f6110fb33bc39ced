import pytest

from geartrain.data.folder import find_data
from geartrain.errors import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("GEARTRAIN_DATA", raising=False)
    (tmp_path / "sst").mkdir()
    (tmp_path / "sst" / "train.txt").write_text("(2 a)\n")
    return tmp_path


def test_an_explicit_folder_goes_before_the_variable(folder, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_DATA", "/nowhere")
    assert find_data(folder, "sst/train.txt") == folder


def test_the_variable_is_used_when_no_folder_is_given(folder, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_DATA", str(folder))
    assert find_data(None, "sst/train.txt") == folder


@pytest.mark.parametrize(("value", "state"), [(None, "not set"), ("", "empty")])
def test_without_a_folder_the_message_says_what_to_put_where(folder, monkeypatch, value, state):
    if value is not None:
        monkeypatch.setenv("GEARTRAIN_DATA", value)
    with pytest.raises(DataError) as caught:
        find_data(None, "sst/train.txt")
    message = str(caught.value)
    for piece in (state, "--data", "$GEARTRAIN_DATA", "sst/train.txt", "nlp.stanford.edu"):
        assert piece in message


def test_every_missing_or_empty_file_is_named_at_once(folder):
    (folder / "sst" / "dev.txt").touch()
    (folder / "sst" / "test.txt").mkdir()
    with pytest.raises(DataError) as caught:
        find_data(folder, "sst/train.txt", "sst/dev.txt", "sst/test.txt", "qm9/x.npz")
    message = str(caught.value)
    assert "lacks 3 of 4" in message
    assert "sst/dev.txt is empty" in message
    assert "sst/test.txt is not a regular file" in message
    assert "qm9/x.npz is missing" in message
    assert "sst/train.txt is" not in message
    assert caught.value.path == folder


@pytest.mark.parametrize(("name", "fault"), [("none", "does not exist"), ("file", "not a folder")])
def test_a_folder_that_is_none_is_refused(folder, name, fault):
    (folder / "file").write_text("x")
    with pytest.raises(DataError, match=fault):
        find_data(folder / name, "sst/train.txt")
