"""The page of the architectures: what it counts, and where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.architectures.page import BEGIN, END, summary, text, write_docs
from benchmarks.architectures.trial import Outcome
from benchmarks.zoo.page import DOCS

LEARNT = Outcome("resnet18", 2.3, 0.3, (), ("spike",))
STOOD = Outcome("lcnet_050", 2.3, 2.3, (), ())
ALARMED = Outcome("ViT", 2.3, 0.3, ("spike at 12 in net.head: The gradient of layer net.head jumped.",), ())
FAILED = Outcome("Swin", float("nan"), float("nan"), (), (), "ValueError: size")


def test_what_does_not_learn_or_cannot_be_trained_is_counted_apart() -> None:
    found = summary([LEARNT, STOOD, ALARMED, FAILED])
    assert found == "3 trained, 2 of them learn, 1 with an alert; 1 could not be trained"
    assert summary([LEARNT]) == "1 trained, 1 of them learn, 0 with an alert; 0 could not be trained"


def test_the_table_names_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_docs({"torchvision 0.28": [LEARNT, ALARMED], "timm 1.0": [STOOD, FAILED]}, 0, page)
    written = page.read_text(encoding="utf-8")
    assert "old" not in written
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "| torchvision 0.28 | 2 | 2 | 1 | resnet18, ViT (**spike at 12 in net.head**) |" in written
    assert "| timm 1.0 | 2 | 0 | 0 | lcnet_050 (does not learn), Swin (could not be trained) |" in written
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="no place for the architectures"):
        write_docs({"timm 1.0": [STOOD]}, 0, page)


def test_the_page_has_a_place_for_it() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert page.index(BEGIN) < page.index(END)
    assert "Measured on" in text({"timm 1.0": [STOOD]}, 0)
