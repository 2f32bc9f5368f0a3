"""Benchmarks that a user runs on his own machines: `shoal bench`."""

from __future__ import annotations

from typing import Any

from shoal.core.errors import ShoalError


def library() -> Any:
    """The library that tells what processes use, or an error that names the extra."""
    try:
        import psutil
    except ImportError as error:
        raise ShoalError("benchmarks need: pip install 'shoal[bench]'") from error
    return psutil
