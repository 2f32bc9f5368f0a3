"""What a notebook shows of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shoal.display import console, notebook
from tests.display.test_panel import view


def test_a_notebook_shows_one_bar_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    handle = SimpleNamespace(update=lambda drawn: shown.append(("again", drawn)))

    def display(drawn: str, display_id: bool) -> Any:
        shown.append(("first", drawn))
        return handle

    module, inner = ModuleType("IPython"), ModuleType("IPython.display")
    shell = SimpleNamespace(kernel=None)
    module.get_ipython = lambda: shell  # type: ignore[attr-defined]
    inner.HTML, inner.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    bar = console.display(1.0)
    assert isinstance(bar, notebook.Bar)
    bar.show(view(steps=250, total=1000), False)
    bar.show(view(steps=2000, total=1000), True)
    bar.close()
    assert [how for how, _ in shown] == ["first", "again"]
    assert "width:25.0%" in shown[0][1]
    assert "step 250" in shown[0][1]
    assert "width:100.0%" in shown[1][1]
    del shell.kernel  # IPython in a terminal
    assert isinstance(console.display(1.0), console.Lines)


def test_results_are_html_without_markup_of_their_own(tmp_path: Path) -> None:
    curve = tmp_path / "curve.png"
    text = notebook.summary_html("solved <b>\nactor-0: busy", curve)
    assert "solved &lt;b&gt;" in text
    assert "<img" not in text
    curve.write_bytes(b"PNG")
    assert "data:image/png;base64,UE5H" in notebook.summary_html("solved", curve)
