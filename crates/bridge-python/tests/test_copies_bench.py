"""The picture of the bench of copies is one that browsers show."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

copies = pytest.importorskip("benches.copies")


def test_the_picture_names_a_case_as_it_is() -> None:
    row = copies.Row("(1<<24, 4) & more", 0.9, 0.5, None, None, 1.0, True)
    texts = [
        text.text for text in ElementTree.fromstring(copies.picture([row])).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"(1<<24, 4) & more", "90%", "50%"} <= set(texts)
