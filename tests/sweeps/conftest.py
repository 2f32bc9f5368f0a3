"""Sweeps and seeds over runs that only pretend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.runs import launching
from tests.pretended import Pretended


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let runs pretend to learn by a function of settings and steps; returns what was started and stopped."""
    monkeypatch.setattr(launching, "stop", lambda processes: None)

    def use(objective: Callable[[dict[str, Any], int], float | None], killed_after: int = 10**9) -> list[Any]:
        log: list[Any] = []
        monkeypatch.setattr(Pretended, "log", log, raising=False)
        monkeypatch.setattr(Pretended, "killed_after", killed_after)
        monkeypatch.setattr(launching, "start", lambda job: Pretended(job, objective))
        return log

    return use
