"""The live panel: every figure has its place, at every size, and the terminal is left as it was."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading

import pytest
from rich.cells import cell_len
from rich.console import Console

from shoal.display.panel import Panel, count, duration, figure, panel, sparkline

WIDTHS = (40, 80, 160, 250)


def view(actors=2, **changes):
    """A run in full swing."""
    actor = {"working": 0.4, "waits": {"parameters.fetch": 0.5, "store.put": 0.1}, "restarts": 0}
    losses = {"policy_loss": -0.01234, "value_loss": 3.2, "entropy": 0.512, "gradient_norm": 41.5}
    counts = {"steps": 450_000, "total": 1_000_000, "updates": 2812, "episodes": 1789, "faults": 3}
    times = {"seconds": 3723.4, "left": 4551.0, "steps_per_s": 12345.6, "updates_per_s": 77.123}
    scores = {"return": 312.456, "length": 298.2, "target": 475.0}
    return {
        **(counts | times | scores),
        "title": "impala on CartPole-v1 · processes · runs/CartPole-v1_impala_1790000000",
        "checkpoint": {"steps": 400_000, "age": 75.0},
        "evaluations": [{"steps": n, "mean": float(n), "scores": [n], "metrics": {}} for n in (20, 480, 410)],
        "metrics": {**losses, "lag": 1.26, "queue": 0.72, "lr": 0.0006},
        "workers": {
            "learner": {"working": 0.93, "waits": {"store.get": 0.05, "journal.learned": 0.01}, "restarts": 0},
            **{f"actor-{index}": actor for index in range(actors)},
            "evaluator": {"working": 0.02, "waits": {"parameters.fetch": 0.98}, "restarts": 0},
        },
        "problem": "actor-1: no disk",
        **changes,
    }


def on_nodes(count, away=()):
    """Two workers on each of some nodes, beside a learner that is not."""
    state = {"working": 0.5, "waits": {"store.put": 0.25}, "moves_per_s": 30.0}
    places = {f"group-{index}/gradient-{member}": f"node-{index}" for index in range(count) for member in (0, 1)}
    remote = {name: {**state, "node": node, "away": node in away} for name, node in places.items()}
    return view(0, workers={"learner": {"working": 0.9, "waits": {}}, **remote})


def extreme():
    """A run whose numbers leave every bound."""
    numbers = {"a_metric_with_a_very_long_name_indeed": -1.2345e-300, "value_loss": float("nan"), "lag": float("inf")}
    worker = {"working": float("nan"), "waits": {"a.very.long.name.of.a.call" * 3: 7.0, "b": None}, "restarts": 10**9}
    counts = dict.fromkeys(("steps", "total", "updates", "episodes", "faults"), 10**12)
    times = {"seconds": 1e12, "left": float("inf"), "steps_per_s": 1e300, "updates_per_s": -1e-300}
    return {
        "title": "a title without end " * 30,
        "problem": "a\nproblem\x1b[2Jof\tmany 行行行行 " * 20,
        **(counts | times | dict.fromkeys(("return", "length", "target"), -1e18)),
        "checkpoint": {"steps": 10**14, "age": 1e15},
        "evaluations": [{"steps": n, "mean": (-1.0) ** n * 10.0 ** (n % 300)} for n in range(2000)],
        "metrics": {**numbers, **{f"metric_{n}": 10.0**n for n in range(-40, 40)}, "queue": -3.0, "lr": float("-inf")},
        "workers": {"a worker with quite a long name for a worker": worker, **{f"node{n}": worker for n in range(20)}},
    }


def lines_of(state, width, height=None):
    """The lines of the panel, as a console of that width writes them."""
    console = Console(file=io.StringIO(), width=width, height=100)
    console.print(panel(state, width, height))
    return console.file.getvalue().splitlines()


def value_of(lines, label):
    """What stands behind a label."""
    found = re.search(rf"(?:^|  ){re.escape(label)} +(.+?)(?:  |$)", "\n".join(lines), re.MULTILINE)
    assert found, f"no {label!r} in\n" + "\n".join(lines)
    return found[1]


NOTHING = {**dict.fromkeys(view()), "metrics": {}, "workers": {}, "evaluations": []}
STATES = {
    "full": view(),
    "empty": NOTHING,
    "without keys": {},
    "many": view(256),
    "nodes": on_nodes(3, ("node-1",)),
    "extreme": extreme(),
}


@pytest.mark.parametrize("width", [*WIDTHS, 41, 59, 69, 70, 100, 139, 140, 159, 12])
@pytest.mark.parametrize("name", STATES)
def test_no_line_is_wider_than_the_terminal(name, width):
    lines = panel(STATES[name], width).renderables
    assert max(line.cell_len for line in lines) <= width
    assert lines[-1].cell_len <= width - 6  # the cursor stands there, and a terminal writes ^C
    assert [line.plain for line in lines] == lines_of(STATES[name], width)
    assert not re.search(r"[\x00-\x1f]", "".join(line.plain for line in lines))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", STATES)
def test_a_line_of_the_terminal_stays_free(name, width):
    for height in (1, 2, 3, 8, 14, 20, 24, 50):
        assert 1 <= len(lines_of(STATES[name], width, height)) <= max(height - 1, 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_has_its_place(width):
    lines = lines_of(view(), width)
    told = """
        elapsed = 1:02:03; time left = 1:15:51; updates = 2,812; steps/s = 12,346; updates/s = 77.12;
        episodes = 1,789; training return = 312.46; mean length = 298 steps; faults = 3; checkpoint step = 400,000;
        checkpoint age = 0:01:15; queue fill = 72 % ━━━╸─; last evaluation = 410.00; best evaluation = 480.00;
        target = 475.00; policy loss = -0.0123; value loss = 3.2000; entropy = 0.5120; gradient norm = 41.50;
        learning rate = 6.0e-04; policy lag = 1.3 versions"""
    expected = dict(pair.strip().split(" = ") for pair in told.split(";"))
    assert {label: value_of(lines, label) for label in expected} == expected
    assert re.search(r"evaluations +3  ▁█▇", "\n".join(lines))
    assert "450,000 / 1,000,000" in "".join(lines)
    assert (lines[1][:8], lines[-1]) == (" 45 % ━━", "last warning  actor-1: no disk")


def test_a_usual_run_fits_a_usual_terminal():
    lines = lines_of(view(), 80)
    assert len(lines) < 24
    assert lines == lines_of(view(), 80, 24)
    assert "learner     93 % ━━━━━━━━━━━━━━━━╸─  waits   5 % for store.get" in lines
    assert "actor-1     40 % ━━━━━━━───────────  waits  50 % for parameters.fetch" in lines
    wide = lines_of(view(), 160)
    assert len(wide) < len(lines) - 4
    assert any("steps/s" in line and "learner" in line and "store.get" in line for line in wide)


def test_many_actors_share_a_line():
    busy = {"working": 0.9, "waits": {"store.put": 1.0}, "restarts": 2}
    state = view(256)
    state["workers"] = {**state["workers"], "actor-7": busy, "actor-8": {**busy, "working": 0.1}}
    lines = lines_of(state, 80)
    (line,) = (line for line in lines if "actors" in line)
    assert line.startswith("256 actors  min  10 mean  40 max  90  4 restarts, waits  50 % for param")
    assert not [line for line in lines if line.startswith("actor-")]
    assert len(lines) < 24
    assert "256 actors  min  10 mean  40 max  90" in lines_of(state, 40)


def test_a_few_actors_have_a_line_each_where_there_is_room():
    names = [line.split()[0] for line in lines_of(view(8), 80) if line.startswith("actor-")]
    assert names == [f"actor-{index}" for index in range(8)]
    lines = lines_of(view(8), 80, 24)
    assert any(line.startswith("8 actors") for line in lines)
    assert lines[2] == ""  # the lines are moved together only when that is not enough
    assert any(line.startswith("9 actors") for line in lines_of(view(9), 80))


def test_a_short_terminal_loses_the_workers_first_and_keeps_the_problem():
    lines = lines_of(view(), 80, 12)
    assert not [line for line in lines if "learner" in line]
    assert value_of(lines, "policy lag") == "1.3 versions"
    assert lines[-1] == "last warning  actor-1: no disk"
    for height in range(1, 30):
        names = [line.split()[0] for line in lines_of(view(3), 80, height) if line]
        assert len({"worker", "learner", "evaluator"} & {*names}) in (0, 3)
    lines = lines_of(view(), 80, 7)
    assert len(lines) == 6
    assert value_of(lines, "steps/s") == "12,346"
    assert lines[-1] == "last warning  actor-1: no disk"


def test_nodes_are_lines_with_the_rates_of_their_workers():
    lines = lines_of(on_nodes(2, away=("node-1",)), 100)
    (one,), (other,) = ([line for line in lines if line.startswith(f"on node-{index} ")] for index in (0, 1))
    assert one.endswith("min  50 mean  50 max  50  60.00 moves/s, waits  25 % for store.put")
    assert "disconnected, 60.00 moves/s" in other
    (worker,) = [line for line in lines if line.startswith("group-1/gradient-0 ")]
    assert "disconnected, 30.00 moves/s, waits  25 % for store.put" in worker
    (learner,) = [line for line in lines if line.startswith("learner ")]
    assert "moves/s" not in learner
    assert not [line for line in lines_of(view(), 100) if line.startswith("on ")]


def test_many_nodes_are_summed_up():
    lines = lines_of(on_nodes(20), 100)
    assert [line.split("  ")[0] for line in lines if "moves/s" in line] == ["40 group/gradients", "20 nodes"]
    assert [line for line in lines if line.startswith("20 nodes") and "1,200 moves/s" in line]


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_missing_is_a_dash(width):
    for state in (NOTHING, {}):
        lines = lines_of(state, width)
        for label in ("time left", "training return", "best evaluation", "target", "policy loss", "policy lag"):
            assert value_of(lines, label) == "–"
        assert lines[-1] == "last warning  –"
        assert not re.search(r"None|nan", "\n".join(lines))


def test_what_is_not_a_number_and_what_reaches_the_target_are_marked():
    state = view(metrics={"value_loss": float("nan"), "lag": float("nan"), "queue": float("nan")})
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", no_color=False)
    console.print(panel(state, 80))
    assert value_of(lines_of(state, 80), "value loss") == "nan"
    assert "\x1b[1;31mnan" in console.file.getvalue()
    assert "\x1b[32m480.00" in console.file.getvalue()
    assert "\x1b[32m410.00" not in console.file.getvalue()


def test_values_out_of_bounds_do_no_harm():
    state = view(evaluations=[{"mean": float("nan")}, {"mean": 7.0}, {"mean": None}])
    assert value_of(lines_of(state, 80), "best evaluation") == "7.0000"
    assert value_of(lines_of(state, 80), "last evaluation") == "–"
    assert value_of(lines_of(view(metrics={"queue": 1.7}), 80), "queue fill") == "100 % ━━━━━"
    assert value_of(lines_of(view(metrics={"queue": -3.0}), 80), "queue fill") == "0 % ─────"
    lines = lines_of(view(metrics={f"metric_{index}": float(index) for index in range(30)}), 80)
    assert (value_of(lines, "metric 10"), value_of(lines, "more metrics")) == ("10.00", "19")
    lines = lines_of(view(workers={"a": {"working": 1.0}}), 80)
    assert lines[-4:-2] == ["worker  busy, % of time", f"a       100 % {'━' * 18}  –"]


def test_all_is_done_only_when_all_is_done():
    assert lines_of(view(steps=999_999), 80)[1].startswith(" 99 % ")
    assert lines_of(view(steps=290_000), 80)[1].startswith(" 29 % ")
    assert lines_of(view(steps=1_000_000), 80)[1].startswith("100 % ━")
    assert "─" not in lines_of(view(steps=1_000_100), 80)[1]
    assert lines_of(view(total=0), 80)[1].startswith("  – % ──")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_long_title_is_cut(width):
    line = lines_of(extreme(), width)[0]
    assert cell_len(line) == min(width, 160)
    assert line.endswith("…")
    assert lines_of(view(title="[bold]x[/] [/y]"), width)[0] == "[bold]x[/] [/y]"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_panel_does_not_jitter(width):
    metrics = {name: -value / 7e4 for name, value in view()["metrics"].items()}
    later = view(steps=7, steps_per_s=7.0, updates=99, faults=0, left=None, checkpoint=None, metrics=metrics)
    labels = "time left|updates/s|episodes|faults|queue fill|target|entropy|policy lag|actor-0|waits|evaluator| / "

    def places(state):
        lines = lines_of(state, width)
        return [(row, found.start(), found[0]) for row, line in enumerate(lines) for found in re.finditer(labels, line)]

    assert places(view()) == places(later)
    assert len(places(view())) >= 11
    assert len({len(re.findall("[━╸─]", lines_of(state, width)[1])) for state in (view(), later)}) == 1


def test_numbers_are_short():
    numbers = (0.0, 0.00012, -0.00012, 0.5, -9.87654, 99.999, 999.99, 12345.6, -999_999, 1.5e6, 123.4e6, 1e12, -1e300)
    texts = [figure(number) for number in numbers]
    assert texts[:5] == ["0.0000", "1.2e-04", "-1.2e-04", "0.5000", "-9.8765"]
    assert texts[5:11] == ["100.00", "999.99", "12,346", "-999,999", "1.500 M", "123.4 M"]
    assert texts[11:] == ["1.000 T", "-1.0e+300"]
    assert [count(number) for number in (0, 999_999, 12_345_678, None)] == ["0", "999,999", "12.35 M", "–"]
    times = [duration(seconds) for seconds in (0, 59.9, 3600, 86399, 90061, float("nan"), -1)]
    assert times == ["0:00:00", "0:00:59", "1:00:00", "23:59:59", "1 d 01:01:01", "–", "0:00:00"]


def test_a_curve_shows_all_of_the_run():
    assert sparkline([0.0, 1.0, float("nan"), None, 7.0], 10) == "▁▂█"
    assert sparkline([3.0, 3.0], 10) == "▁▁"
    assert sparkline([float(n // 10) for n in range(80)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""


class Terminal(io.StringIO):
    """A terminal that knows the few movements that the panel makes."""

    def isatty(self):
        """It is one."""
        return True

    def screen(self):
        """What stands on it."""
        rows, row, column = [""], 0, 0
        for piece in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", self.getvalue()):
            if piece == "\r":
                column = 0
            elif piece == "\n":
                row, column = row + 1, 0
                rows += [""] * (row >= len(rows))
            elif piece == "\x1b[1A":
                row = max(row - 1, 0)
            elif piece == "\x1b[2K":
                rows[row] = ""
            elif not piece.startswith("\x1b"):
                rows[row] = rows[row][:column].ljust(column) + piece + rows[row][column + len(piece) :]
                column += len(piece)
        return [line.rstrip() for line in rows]

    def cursor_shown(self):
        """Whether the cursor can be seen, and was ever hidden."""
        changes = re.findall(r"\x1b\[\?25([lh])", self.getvalue())
        return changes[0] == "l" and changes[-1] == "h"


@pytest.fixture
def attach(monkeypatch):
    """Put a terminal in place of standard error; called within the test, because pytest changes it just before."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def put():
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return put


def console():
    """A console on standard error."""
    return Console(stderr=True, width=80, height=50)


def test_the_last_state_stays_once_below_what_was_logged(attach):
    terminal = attach()
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    threads = threading.active_count()
    try:
        with Panel(console()) as shown:
            logging.getLogger("shoal").warning("logged before")
            shown.show(view(steps=1))
            shown.console.print("through the console")
            print("through standard error", file=sys.stderr)
            logging.getLogger("shoal").warning("logged [bold]meanwhile")
            shown.show(view(steps=2))
            assert threading.active_count() == threads
        assert handler.stream is sys.stderr is terminal
        logging.getLogger("shoal").warning("logged after")
    finally:
        logging.getLogger().removeHandler(handler)
    before = ["logged before", "through the console", "through standard error", "logged [bold]meanwhile"]
    assert terminal.screen() == [*before, *lines_of(view(steps=2), 80), "logged after", ""]
    assert terminal.cursor_shown()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_mended_after_an_error(attach, error):
    terminal = attach()

    def fail():
        with Panel(console()) as shown:
            shown.show(view())
            raise error

    with pytest.raises(error):
        fail()
    assert terminal.cursor_shown()
    assert terminal.screen() == [*lines_of(view(), 80), ""]
    assert sys.stderr is terminal


def test_a_state_that_cannot_be_drawn_does_not_keep_the_terminal(attach):
    terminal = attach()
    shown = Panel(console())
    with pytest.raises(TypeError):
        shown.show(view(steps_per_s="fast"))
    with pytest.raises(TypeError):
        shown.close()
    assert terminal.cursor_shown()
    assert sys.stderr is terminal


def test_showing_opens_and_closing_twice_is_once(attach):
    terminal = attach()
    with Panel(console()) as shown:
        pass
    assert terminal.screen() == [""]
    assert terminal.cursor_shown()
    shown.close()
    shown.show(view(), last=True)
    shown.close()
    shown.close()
    shown.console.size = (40, 50)
    shown.console.print(end="")  # no longer erases anything
    assert terminal.screen() == [*lines_of(view(), 80), ""]
    assert terminal.cursor_shown()


def test_standard_output_in_a_file_stays_there(attach, monkeypatch):
    terminal = attach()
    monkeypatch.setattr(sys, "stdout", file := io.StringIO())
    with Panel(console()) as shown:
        shown.show(view())
        print("a result")
    assert file.getvalue() == "a result\n"
    assert "a result" not in terminal.getvalue()


@pytest.mark.parametrize(("width", "height"), [(160, 40), (40, 24), (80, 10), (60, 50)])
def test_a_new_size_is_filled_at_once(attach, width, height):
    terminal = attach()
    with Panel(console()) as shown:
        shown.show(view())
        shown.console.size = (width, height)
        terminal.truncate(terminal.seek(0))
        shown.console.print("a line")  # no new state is needed
        now = lines_of(view(), width, height)
        assert terminal.screen() == ["a line", *now]
        # A narrower terminal has wrapped what stood there; all of it goes.
        before = sum(-(-max(cell_len(line), 1) // width) for line in lines_of(view(), 80))
        assert terminal.getvalue().count("\x1b[1A") == before - 1
        terminal.truncate(terminal.seek(0))
        shown.show(view())
        assert terminal.screen() == now
        assert terminal.getvalue().count("\x1b[1A") == len(now) - 1


@pytest.mark.parametrize("plain", [False, True])
def test_colours_can_be_refused(attach, monkeypatch, plain):
    terminal = attach()
    monkeypatch.setenv("NO_COLOR", "1" if plain else "")
    with Panel(console()) as shown:
        shown.show(view())
    assert bool(re.search(r"\x1b\[(?:\d+;)*(?:3|4|9|10)\d[;m]", terminal.getvalue())) != plain
    assert terminal.screen() == [*lines_of(view(), 80), ""]


def test_a_file_gets_the_last_state_only(monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with Panel(console()) as shown:
        shown.show(view(steps=1))
        shown.show(view(steps=2))
    assert file.getvalue().splitlines() == lines_of(view(steps=2), 80)
    assert file.getvalue().endswith("\n")
