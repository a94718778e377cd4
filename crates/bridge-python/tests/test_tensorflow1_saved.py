"""Saved models in sessions of the real TensorFlow 1.15, on tensors of PyTorch on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import truebridge as tb
from graphs import HOST

torch: Any = pytest.importorskip("torch")

#: The model that ``saved_models.py`` beside it saves with 1.15.
SAVED = Path(__file__).parents[2] / "bridge-tensorflow/tests/data/saved1"
open_saved = tb.tensorflow1.Session.of_saved_model


def test_variables_are_restored_and_run_on_the_memory_of_torch() -> None:
    images = torch.tensor([[0.0, 1, 0], [1, 1, 2]])
    with open_saved(SAVED, config=HOST) as session:
        assert session.outputs == ["scores"]
        (scores,) = session.run({"images": images}, "torch")
    assert scores.tolist() == [[12, 23], [20, 34]]


def test_a_table_is_filled_from_the_asset() -> None:
    with open_saved(str(SAVED), "look_up", tags=["serve"], config=HOST) as session:
        (squares,) = session.run({"keys": torch.tensor([3, 7, 1])}, "torch")
    assert squares.tolist() == [9, -1, 1]


def refused(call: Callable[[], object], words: str, kind: str) -> None:
    with pytest.raises(tb.BridgeError, match=words) as caught:
        call()
    assert caught.value.kind == kind


def test_what_cannot_be_opened_says_why() -> None:
    refused(lambda: open_saved(SAVED, "train"), 'has no signature "train": it has look_up', "argument")
    refused(lambda: open_saved(SAVED, tags=["train"]), "no graph with the tags", "argument")
    refused(lambda: open_saved(SAVED.parent), "name the folder of a saved model", "argument")


def test_an_input_is_fed_as_it_was_saved() -> None:
    with open_saved(SAVED, config=HOST) as session:
        refused(lambda: session.run({}), "the input images is not fed", "argument")
        refused(lambda: session.run({"images": torch.ones(2, 4)}), r"has the shape \[\?, 3\]", "argument")
        refused(lambda: session.run({"image": torch.ones(2, 3)}), "no input image: it has images", "argument")
