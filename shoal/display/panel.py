"""The live panel: the state of a run on a terminal."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderHook, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from shoal.display.console import readable

Cell: TypeAlias = tuple[str, Text]  # a label and its value

CELL: Final = 24  # columns of the longest label with the longest value
GAP: Final = 2
WIDEST: Final = 160  # columns; beyond this, labels would be too far from their values
TWO_COLUMNS: Final = 140  # columns from which the workers are shown beside the numbers
LEFT: Final = 3 * CELL + 2 * GAP  # columns of the numbers then
NARROW: Final = 70  # columns below which bars and words are left out
BAR: Final = 18  # columns of a worker's bar
ECHO: Final = 6  # columns left free after the last line: a terminal that writes ^C there must not wrap
MANY: Final = 8  # workers of one kind that are still listed one by one
METRICS: Final = 12
DASH: Final = "–"
LABEL, GOOD, BAD = "dim", "green", "bold red"  # legible on light and on dark
SPARKS: Final = "▁▂▃▄▅▆▇█"
USUAL: Final = ("policy_loss", "value_loss", "entropy", "gradient_norm")  # shown as dashes until there are metrics
ELSEWHERE: Final = ("lr", "lag", "queue")  # metrics with a fixed place


class Panel(RenderHook):
    """The panel on standard error, redrawn at every `show`; log lines appear above it."""

    def __init__(self, console: Console | None = None) -> None:
        """Draw on another console if one is given."""
        self.console = console or Console(stderr=True)
        self.view: Mapping[str, Any] | None = None
        self._drawn: list[int] = []  # width of each line on the screen
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        # Standard output to a file or a pipe must still get there.
        self._live = Live(self, console=self.console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())

    def show(self, view: Mapping[str, Any], last: bool = False) -> None:
        """Draw a new state, the last one like any other."""
        self.open()
        self.view = view
        self._live.refresh()

    def open(self) -> None:
        """Hide the cursor and redirect standard error above the panel."""
        if self._live.is_started:
            return
        stream = sys.stderr
        self.console.push_render_hook(self)
        self._live.start()
        # A handler keeps the stream it was created with, and would write into the panel.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                self._handlers.append((handler, stream))
                handler.setStream(sys.stderr)

    def close(self) -> None:
        """Leave the last state on the screen and the terminal as it was."""
        if not self._live.is_started:
            return
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers.clear()
        try:
            self._live.stop()
        finally:
            self.console.pop_render_hook()
        if self.view is not None and not self.console.is_terminal:
            self.console.line()  # a file gets the last state only, without its final newline

    def __enter__(self) -> Self:
        """Open the panel."""
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the panel, whatever happened."""
        self.close()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Also erase lines that the terminal has wrapped because it was made narrower."""
        wrapped = sum(max(0, (cells - 1) // self.console.width) for cells in self._drawn)
        up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
        return [Control(*up * wrapped), *renderables] if wrapped else renderables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the current size of the terminal."""
        if self.view is not None:
            lines = arrange(self.view, options.max_width, options.size.height)
            self._drawn = [line.cell_len for line in lines]
            yield Group(*lines)


def panel(view: Mapping[str, Any], width: int, height: int | None = None) -> Group:
    """A run's state, in lines that fit a terminal of this size."""
    return Group(*arrange(view, width, height))


def arrange(view: Mapping[str, Any], width: int, height: int | None) -> list[Text]:
    """The lines of the panel: the first arrangement that leaves a line of the height free."""
    width = min(width, WIDEST)
    room = sys.maxsize if height is None else max(height - 1, 1)
    head = [fit(Text(plain(view.get("title") or DASH), "bold"), width), progress(view, width)]
    foot = [*advice(view, width), problem(view, width)]
    # First many workers are summed up, then blank lines go, then the table of workers.
    for listed, spaced in ((MANY, True), (1, True), (1, False), (0, False)):
        blank = [Text()] if spaced else []
        body = arrange_body(view, width, listed, blank)
        if len(lines := [*head, *blank, *body, *blank, *foot]) <= room:
            break
    else:
        lines = [*head, *body[: max(room - len(head) - len(foot), 0)], *foot][:room]
    for line in lines:
        line.rstrip()  # nothing invisible may wrap when the terminal is made narrower
    lines[-1].truncate(width - ECHO, overflow="ellipsis")
    return lines


def arrange_body(view: Mapping[str, Any], width: int, listed: int, blank: Sequence[Text]) -> list[Text]:
    """The numbers, with the workers beside or below them."""
    beside = width >= TWO_COLUMNS and listed > 0
    column = LEFT if beside else width
    table = workers(view.get("workers") or {}, width - LEFT - 2 * GAP if beside else width, listed)
    left = [*grid(figures(view, width), column), evaluations(view, column), *blank, *grid(metrics(view), column)]
    if not beside:
        return [*left, *(blank if table else ()), *table]
    rows = zip_longest(left, table, fillvalue=Text())
    return [Text.assemble(fit(one.copy(), column), " " * 2 * GAP, other) for one, other in rows]


def progress(view: Mapping[str, Any], width: int) -> Text:
    """The fraction of the steps that is done, as a bar."""
    steps, total = view.get("steps") or 0, view.get("total") or 0
    done = share(steps / total) if total > 0 else None
    # Rounded down: 100 % appears only when it is reached.
    front = f"{percent(None if done is None else (100 * steps // total) / 100)} "
    back = "" if width < NARROW else f"  {of_total(view)} steps"
    return fit(Text.assemble(front, bar(done, width - len(front) - len(back)), back), width)


def of_total(view: Mapping[str, Any]) -> str:
    """The steps done and to do, the first as wide as the second."""
    steps, total = view.get("steps"), view.get("total")
    write = count if max(steps or 0, total or 0) >= 1e10 else whole
    return f"{write(steps):>{len(write(total))}} / {write(total)}"


def figures(view: Mapping[str, Any], width: int) -> list[Cell]:
    """Time, speed, training, checkpoint and evaluation."""
    saved, target = view.get("checkpoint") or {}, view.get("target")
    means = [result.get("mean") for result in view.get("evaluations") or ()]
    best = max(filter(finite, means), default=None)
    length, faults = view.get("length"), view.get("faults")
    cells: list[tuple[str, str | Text]] = [
        ("elapsed", duration(view.get("seconds"))),
        ("time left", duration(view.get("left"))),
        ("updates", count(view.get("updates"))),
        ("steps/s", figure(view.get("steps_per_s"))),
        ("updates/s", figure(view.get("updates_per_s"))),
        ("episodes", count(view.get("episodes"))),
        ("training return", figure(view.get("return"))),
        ("mean length", DASH if length is None else f"{count(length)} steps"),
        ("faults", Text(count(faults), BAD if faults else "")),
        ("checkpoint step", count(saved.get("steps"))),
        ("checkpoint age", duration(saved.get("age"))),
        ("queue fill", gauge((view.get("metrics") or {}).get("queue"), 5)),
        ("last evaluation", reached(means[-1] if means else None, target)),
        ("best evaluation", reached(best, target)),
        ("target", figure(target)),
    ]
    if width < NARROW:  # the bar has no room for them
        cells.insert(0, ("steps", of_total(view)))
    return [(label, styled(value)) for label, value in cells]


def metrics(view: Mapping[str, Any]) -> list[Cell]:
    """Losses and whatever else the learner measures."""
    values = view.get("metrics") or {}
    names = [name for name in values if name not in ELSEWHERE] or USUAL
    cells = [(readable(plain(name)), styled(figure(values.get(name)))) for name in names]
    if len(cells) > METRICS:
        cells = [*cells[: METRICS - 1], ("more metrics", styled(count(len(cells) - METRICS + 1)))]
    lag = values.get("lag")
    lag_text = DASH if lag is None else f"{lag:.1f} versions" if finite(lag) else figure(lag)
    return [*cells, (readable("lr"), styled(figure(values.get("lr")))), (readable("lag"), styled(lag_text))]


def evaluations(view: Mapping[str, Any], width: int) -> Text:
    """The number of evaluations, and their means as a curve."""
    means = [result.get("mean") for result in view.get("evaluations") or ()]
    front = f" {count(len(means)):>7}  "
    curve = sparkline(means, width - len("evaluations") - len(front))
    return fit(Text.assemble(("evaluations", LABEL), front, (curve or DASH, GOOD if curve else "")), width)


def problem(view: Mapping[str, Any], width: int) -> Text:
    """The last fault or warning."""
    text = " ".join(plain(view.get("problem") or "").split())
    return fit(Text.assemble(("last warning", LABEL), "  ", (text, "red") if text else DASH), width)


def advice(view: Mapping[str, Any], width: int) -> list[Text]:
    """The first piece of advice, where there is any."""
    found = view.get("advice") or ()
    more = f" ({len(found) - 1} more: shoal explain)" if len(found) > 1 else ""
    return [fit(Text.assemble(("advice", LABEL), "  ", plain(found[0]), (more, LABEL)), width)] if found else []


def workers(states: Mapping[str, Mapping[str, Any]], width: int, listed: int) -> list[Text]:
    """A line per worker and node: how busy it is and what it waits for.

    Kinds with more than `listed` members are summed up in one line each; with 0 there is no table.
    """
    if not states or not listed:
        return []
    kinds: dict[str, list[str]] = {}
    for name in states:
        kinds.setdefault(re.sub(r"\W?\d+(?=/|$)", "", name) or name, []).append(name)
    rows: list[tuple[str, list[Mapping[str, Any]]]] = []
    for kind, names in kinds.items():
        if len(names) > listed:
            rows.append((f"{len(names)} {kind}s", [states[name] for name in names]))
        else:
            rows.extend((name, [states[name]]) for name in names)
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for state in states.values():
        if node := state.get("node"):
            nodes.setdefault(f"on {node}", []).append(state)
    rows += nodes.items() if len(nodes) <= listed else [(f"{len(nodes)} nodes", [*chain(*nodes.values())])]
    first = max(len("worker"), min(max(len(name) for name, _ in rows), width // 4))
    heads = ("busy ", "waits for") if width < NARROW else ("busy, % of time", "")
    lines = [fit(Text(f"{'worker':<{first}}{' ' * GAP}{heads[0]}{' ' * GAP}{heads[1]}", LABEL), width)]
    return [*lines, *(worker(name, members, first, width) for name, members in rows)]


def worker(name: str, members: Sequence[Mapping[str, Any]], first: int, width: int) -> Text:
    """One line of the table, for a worker or for all of a kind."""
    working = [part for state in members if (part := share(state.get("working"))) is not None]
    restarts = sum(state.get("restarts") or 0 for state in members)
    mean = sum(working) / len(working) if working else None
    narrow = width < NARROW
    if len(members) > 1:
        least, most = (extreme(working, default=None) for extreme in (min, max))
        busy = Text("min {:.3} mean {:.3} max {:.3}".format(*map(percent, (least, mean, most))))
    else:
        busy = Text(percent(mean)) if narrow else gauge(mean, BAR)
    again = f"{count(restarts)} restart{'s' if restarts != 1 else ''}, " if restarts and not narrow else ""
    again += "disconnected, " if any(state.get("away") for state in members) else ""
    rate = sum(state.get("moves_per_s") or 0.0 for state in members)
    elsewhere = f"{figure(rate)} moves/s, " if members[0].get("node") and not narrow else ""
    line = Text.assemble(fit(Text(plain(name)), first), " " * GAP, busy, " " * GAP)
    if width - line.cell_len >= 12:  # below this, names would be unreadable
        line.append(again, BAD).append(elsewhere).append(longest_wait(members, narrow))
    return fit(line, width)


def longest_wait(members: Sequence[Mapping[str, Any]], narrow: bool) -> str:
    """What workers wait for most, and the fraction of their time that it takes."""
    waits: dict[str, float] = {}
    for state in members:
        for what, part in (state.get("waits") or {}).items():
            waits[what] = waits.get(what, 0.0) + (share(part) or 0.0)
    what, total = max(waits.items(), key=lambda item: item[1], default=("", 0.0))
    if total <= 0:
        return DASH
    text = percent(total / len(members)), plain(what)
    return " ".join(text) if narrow else "waits {} for {}".format(*text)


def grid(cells: Sequence[Cell], width: int) -> list[Text]:
    """Cells side by side, as many as there is room for."""
    columns = max(1, (width + GAP) // (CELL + GAP))
    each = (width - GAP * (columns - 1)) // columns
    lines = []
    for start in range(0, len(cells), columns):
        row = Text(" " * GAP).join(lay(*cell, each) for cell in cells[start : start + columns])
        lines.append(fit(row, width))
    return lines


def lay(label: str, value: Text, width: int) -> Text:
    """A label on the left and its value on the right."""
    room = max(width - value.cell_len - 1, 0)
    return fit(Text.assemble(fit(Text(label, LABEL), room), " ", value), width)


def fit(text: Text, width: int) -> Text:
    """Cut with an ellipsis, or fill with spaces, to the width."""
    text.truncate(max(width, 0), overflow="ellipsis", pad=True)
    return text


def gauge(value: float | None, width: int) -> Text:
    """A fraction as a percentage and a bar."""
    return Text.assemble(percent(value), " ", bar(value, width))


def bar(value: float | None, width: int) -> Text:
    """A fraction as a line, part of which is heavy, in steps of half a column; readable without colours."""
    width = max(width, 0)
    halves = math.floor((share(value) or 0.0) * 2 * width)
    heavy = "━" * (halves // 2) + "╸" * (halves % 2)
    return Text.assemble((heavy, GOOD), ("─" * (width - len(heavy)), LABEL))


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Numbers as a curve of at most `width` columns; where there are more numbers, a column is a mean."""
    numbers = [value for value in values if value is not None and finite(value)]
    size = min(len(numbers), max(width, 0))
    pieces = [numbers[i * len(numbers) // size : (i + 1) * len(numbers) // size] for i in range(size)]
    points = [sum(piece) / len(piece) for piece in pieces]
    low, high = min(points, default=0.0), max(points, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((point - low) * scale)] for point in points)


def reached(value: float | None, target: float | None) -> Text:
    """A score, highlighted when it reaches the target."""
    good = value is not None and target is not None and value >= target
    return Text(figure(value), GOOD) if good else styled(figure(value))


def styled(value: str | Text) -> Text:
    """A value as text, highlighted when it is NaN or infinite."""
    if isinstance(value, Text):
        return value
    return Text(value, BAD if value in ("nan", "inf", "-inf") else "")


def figure(value: float | None) -> str:
    """A number in at most eight columns."""
    if value is None:
        return DASH
    size = abs(value)
    if size >= 1000 or not finite(value):
        return count(value)
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.2f}" if size >= 10 else f"{value:.4f}"


def count(value: float | None) -> str:
    """A whole number, from a million up with four digits and a unit."""
    if value is None or not finite(value):
        return DASH if value is None else str(float(value))
    for prefix, unit in (("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15)):
        scaled = value / unit
        if 1 <= abs(scaled) < 1000:
            digits = 3 - (abs(scaled) >= 10) - (abs(scaled) >= 100)
            return f"{scaled:.{digits}f} {prefix}"
    return whole(value) if abs(value) < 1e6 else f"{value:.1e}"


def whole(value: float | None) -> str:
    """A whole number with all its digits."""
    return f"{value:,.0f}" if value is not None and finite(value) else DASH


def percent(value: float | None) -> str:
    """A fraction as a percentage, always five columns."""
    part = share(value)
    return f"{DASH:>3} %" if part is None else f"{100 * part:3.0f} %"


def duration(seconds: float | None) -> str:
    """Days, if any, then hours, minutes and seconds."""
    if seconds is None or not finite(seconds):
        return DASH
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days:,} d {hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"


def share(value: float | None) -> float | None:
    """A fraction clipped to [0, 1]; None: unknown."""
    return None if value is None or value != value else min(max(float(value), 0.0), 1.0)


def finite(value: float | None) -> bool:
    """Whether this is a finite number."""
    return value is not None and math.isfinite(value)


def plain(text: Any) -> str:
    """Text without characters that would move the cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))
