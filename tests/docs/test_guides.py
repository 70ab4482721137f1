"""What the guides tell people to type is what the program takes, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain_ray import cli
from megatrain_ray.config.yaml_file import load_config

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "docs" / f"{name}.md" for name in ("quick_start", "fine_tune", "pretrain")]
PAGES = [
    ROOT / "README.md",
    *(page for name in ("benchmarks", "deploy", "docs") for page in sorted((ROOT / name).glob("*.md"))),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def configurations(folder: Path) -> None:
    """Write the guides' configurations, under the names that the guides give them, and link the repository's own."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder / "runs").mkdir()
    for page in GUIDES:
        names = re.findall(r"^`(runs/\w+\.yaml)`:$", page.read_text(), re.MULTILINE)
        for name, text in zip(names, blocks(page, "yaml"), strict=True):
            (folder / name).write_text(text)


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of every `megatrain` in a page's shell blocks."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["megatrain"]:
                yield words[1:]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_settings_in_commands_are_settings(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configurations(tmp_path)
    monkeypatch.chdir(tmp_path)
    checked = 0
    for command, *arguments in commands(page):
        if command in ("train", "plan"):
            load_config(Path(arguments[0]), arguments[1:])
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "docs" / "lora.md"], ids=lambda page: page.stem)
def test_commands_and_options_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", dict.fromkeys(cli.COMMANDS, lambda options: 0))
    for arguments in commands(page):
        assert cli.main(arguments) == 0, arguments


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings.

    They are in lower case, with hyphens for blanks; letters, digits and _ are kept.
    """
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        file = (page.parent / path) if path else page
        assert file.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"
