"""Every block of Python in README.md, CONTRIBUTING.md and docs/*.md runs. A reader has a model, data, a loss.

A page's blocks run one after the other, and know what those before them have made. One that cannot run says so on its
fence (```python no-run).
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning as L
import quick

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```$", flags=re.DOTALL | re.MULTILINE)
NOT_RUN = 3
"""Blocks in all that may say that they cannot run. Judgement: an example that no one runs soon lies."""


def blocks(page: Path, *, run: bool) -> list[str]:
    """The page's blocks that are to be run, or not to be, with line numbers as on the page."""
    text = page.read_text(encoding="utf-8")
    found = [match for match in FENCE.finditer(text) if (match["info"].strip() != "no-run") is run]
    return ["\n" * text.count("\n", 0, match.start("code")) + match["code"] for match in found]


class Net(L.LightningModule):
    """A small residual classifier of images, whose modules have the names that the pages use."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.layer2 = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layer3 = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True))
        self.layer4 = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.layer3(self.layer2(self.encoder(images)))
        return self.head((maps + self.layer4(maps)).mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fixtures() -> dict[str, Any]:
    """What a reader has: anew for each block."""
    torch.manual_seed(0)
    model = Net()
    images, labels = torch.rand(6, 3, 8, 8), torch.randint(10, (6,))
    return {
        "L": L,
        "torch": torch,
        "nn": nn,
        "Trainer": L.Trainer,
        "model": model,
        "images": images,
        "labels": labels,
        "loader": DataLoader(TensorDataset(images, labels), batch_size=3),
        "loss_function": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-2),
    }


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", quick.cases([page.name for page in PAGES], ("README.md", "interventions.md")))
def test_the_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    (page,) = (page for page in PAGES if page.name == name)
    for code in blocks(page, run=True):
        known |= fixtures()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
            exec(compile(code, str(page), "exec"), known)
        if page.name == "README.md" and "watch" in known:
            assert known["watch"].verdict.steps > 0


def test_readme_has_code_that_is_run() -> None:
    assert len(blocks(ROOT / "README.md", run=True)) >= 3


def test_few_blocks_are_not_run_and_those_are_python() -> None:
    left = [(page.name, code) for page in PAGES for code in blocks(page, run=False)]
    assert len(left) <= NOT_RUN, left
    for name, code in left:
        compile(code, name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        where, _, anchor = link.partition("#")
        if where.startswith(("http:", "https:", "mailto:")):
            continue
        assert not where or (page.parent / where).exists(), link
        if not where:
            assert anchor in headings, link


def test_every_picture_is_shown_and_has_what_makes_it() -> None:
    folder = ROOT / "docs" / "pictures"
    shown = {
        link
        for page in PAGES
        for link in re.findall(r"!\[[^\]]+\]\((?:docs/)?(pictures/[^)]+)\)", page.read_text("utf-8"))
    }
    pictures = [*folder.glob("*.png"), *folder.glob("*.svg")]
    assert shown == {f"pictures/{picture.name}" for picture in pictures}
    scripts = {script.stem for script in folder.glob("*.py")}
    makers = [
        next((script for script in scripts if f"{picture.stem}_".startswith(f"{script}_")), picture.name)
        for picture in pictures
    ]
    assert set(makers) == scripts, "tab.py makes tab.png and tab_dark.png"


def test_a_block_is_found_by_its_fence(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n```python no-run\ny = (\n```\n```sh\nls\n```\n")
    assert blocks(page, run=True) == ["\n\nx = 1\n"]
    assert blocks(page, run=False) == ["\n\n\n\n\ny = (\n"]
