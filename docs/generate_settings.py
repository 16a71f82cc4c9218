"""Writes settings.md, which is `megatune explain --all`, rl-settings.md, and both in Chinese."""

from __future__ import annotations

from pathlib import Path

from megatune.plan.explain.settings import rl_page, settings_page

DOCUMENTS = {
    "settings.md": settings_page,
    "settings.zh.md": lambda: settings_page("zh"),
    "rl-settings.md": rl_page,
    "rl-settings.zh.md": lambda: rl_page("zh"),
}


def render(name: str) -> str:
    """The whole page of this name."""
    return DOCUMENTS[name]()


if __name__ == "__main__":
    for document in DOCUMENTS:
        Path(__file__).with_name(document).write_text(render(document), encoding="utf-8")
