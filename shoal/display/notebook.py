"""Runs in a notebook: a progress bar while they train, and their results as HTML."""

from __future__ import annotations

import base64
import html
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.display.console import progress_line

BAR = (
    '<div style="max-width:60em"><div style="background:#8884;border-radius:4px;overflow:hidden">'
    '<div style="width:{share:.1f}%;background:#4c78a8;height:10px"></div></div>'
    '<div style="font-family:monospace;font-size:90%">{text}</div></div>'
)


def inside() -> bool:
    """Whether this is a notebook, whose kernel can show HTML."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Bar:
    """One progress bar that is drawn again and again in its place."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self.handle: Any = None

    def show(self, view: Mapping[str, Any], last: bool) -> None:
        """Draw the bar and the line below it."""
        from IPython.display import HTML, display

        share = min(100 * view["steps"] / view["total"], 100)
        drawn = HTML(BAR.format(share=share, text=html.escape(progress_line(view))))
        if self.handle is None:
            self.handle = display(drawn, display_id=True)
        else:
            self.handle.update(drawn)

    def close(self) -> None:
        """The bar stays."""


def summary_html(text: str, curve: Path) -> str:
    """The results of a run, with its learning curve where there is one."""
    head, *lines = text.splitlines()
    parts = [f"<b>{html.escape(head)}</b>", *(html.escape(line) for line in lines)]
    picture = ""
    if curve.is_file():
        data = base64.b64encode(curve.read_bytes()).decode()
        picture = f'<br><img alt="learning curve" style="max-width:100%" src="data:image/png;base64,{data}">'
    return f'<div style="font-size:90%">{"<br>".join(parts)}{picture}</div>'
