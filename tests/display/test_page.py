"""The page: what it reads from a folder, who gets an answer, and what an answer holds."""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shoal.display.page import reading, watched
from shoal.display.page.film import Film, Frame
from shoal.display.page.reading import Curves, Lines
from shoal.display.page.server import Page, Server
from shoal.display.png import png
from shoal.playing import frames, serve
from tests.pace import seconds

PLAYER = """
import json, struct, sys
number = 0
while sys.stdin.buffer.read(1):
    number += 1
    facts = json.dumps({"trained": number}).encode()
    sys.stdout.buffer.write(struct.pack(">II", len(facts), 3) + facts + b"png")
    sys.stdout.buffer.flush()
"""


def row(steps: int, **metrics: float) -> str:
    counts = {"kind": "train", "steps": steps, "seconds": steps / 10, "return": 1.0, "length": 2.0}
    return json.dumps({**counts, "steps_per_s": 5.0, "updates_per_s": 1.0, "metrics": metrics}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder whose every text wants to be HTML, and whose numbers are not all finite."""
    folder = tmp_path / "<b>run"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        "algorithm: {name: ppo}\nenvironment: {id: '<i>'}\nengine: inline\nsteps: 100\n"
    )
    (folder / "metrics.jsonl").write_text(
        row(1, loss=math.nan, **{"<script>": 1.0}) + row(2, loss=math.inf) + row(3, loss=3)
    )
    worker = {
        "working": 0.5,
        "waits": {"store.put": 0.25, "x": math.nan},
        "node": "n1",
        "away": True,
        "moves_per_s": 2.0,
    }
    (folder / "status.json").write_text(
        json.dumps({"steps": 3, "metrics": {"lag": math.inf}, "workers": {"actor-0": worker}})
    )
    (folder / "log.txt").write_text("<script>alert(1)</script>\n\x1b[31mred\n")
    return folder


PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@pytest.fixture
def play(start: Any) -> Any:
    """What starts a player that sends a frame whenever it is asked for one."""
    return lambda folder, policy: start([sys.executable, "-c", PLAYER], **PIPES)


@pytest.fixture
def server(run: Path, play: Any) -> Iterator[Server]:
    page = Page([run], lambda folder: ["more actors"], play)
    with Server(page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    page.close()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=seconds(10))
    try:
        link.request(method, path, headers=headers)
        answer = link.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        link.close()


@pytest.mark.parametrize("path", ["/", "/state", "//state", "/wrong/state", "/wrong/", "/{token}x/state", "/é/state"])
def test_a_stranger_without_the_token_gets_nothing(server: Server, path: str) -> None:
    status, body, headers = ask(server, path.format(token=server.token).replace("é", "%C3%A9"))
    assert (status, body) == (403, b"")
    assert {*headers} == {"Content-Length", "Connection"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "NONSENSE"])
def test_nothing_can_be_written_or_probed(server: Server, method: str) -> None:
    assert ask(server, f"/{server.token}/state", method)[:2] == (403, b"")


def test_only_this_machine_s_own_names_are_answered(server: Server) -> None:
    path = f"/{server.token}/state"
    assert ask(server, path, Host="evil.example")[0] == 403
    assert ask(server, path, Host="127.0.0.1.evil.example")[0] == 403
    for host in ("localhost:9000", "127.0.0.1", "[::1]:80"):
        assert ask(server, path, Host=host)[0] == 200


@pytest.mark.parametrize(
    "path", ["config.yaml", "../config.yaml", "page.py", "x/page.js", "..%2fconfig.yaml", "page.js/"]
)
def test_no_file_but_those_of_the_page_is_served(server: Server, path: str) -> None:
    assert ask(server, f"/{server.token}/{path}")[:2] == (404, b"")


def test_the_page_and_its_parts_are_served_and_link_to_nothing_else(server: Server) -> None:
    for name in ("", "page.css", "page.js", "chart.js", "flow.js"):
        status, body, headers = ask(server, f"/{server.token}/{name}")
        assert status == 200
        assert b"https:" not in body
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers
    assert b"innerHTML" not in body


def test_the_state_is_json_whatever_the_folder_holds(server: Server) -> None:
    _, body, headers = ask(server, f"/{server.token}/state")
    (run,) = json.loads(body, parse_constant=pytest.fail)["runs"]
    assert (run["name"], run["title"]) == ("<b>run", "ppo on <i> · inline")
    assert run["metrics"] == {"lag": None}
    assert run["workers"][0]["waits"] == [["store.put", 0.25]]
    assert (run["workers"][0]["node"], run["workers"][0]["away"]) == ("n1", True)
    assert run["log"] == ["<script>alert(1)</script>", " [31mred"]
    assert run["advice"] == ["more actors"]
    assert ask(server, f"/{server.token}/state?have={headers['ETag']}")[0] == 204


def test_curves_leave_out_what_is_not_finite(server: Server) -> None:
    (run,) = json.loads(ask(server, f"/{server.token}/curves")[1], parse_constant=pytest.fail)
    assert run["train"]["columns"]["learner/loss"] == [None, None, 3.0]
    assert run["train"]["columns"]["steps"] == [1, 2, 3]


def test_links_out_of_the_folder_and_pipes_are_not_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    (run / "log.txt").unlink()
    (run / "log.txt").symlink_to(tmp_path / "secret")
    assert watched.tail(run) == []
    (run / "status.json").unlink()
    os.mkfifo(run / "status.json")
    seen = watched.Watched(run, lambda folder: ())
    assert seen.refresh()["workers"] == []
    seen.close()


@pytest.mark.parametrize(
    "content", ["[", "[]", "7", '{"workers": [1]}', '{"workers": {"a": 1}, "metrics": 2, "time": "x"}', "[" * 9000]
)
def test_a_spoiled_folder_is_shown_as_far_as_it_goes(run: Path, content: str) -> None:
    for name in ("status.json", "summary.json", "config.yaml"):
        (run / name).write_text(content)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(content + "\n" + '{"kind": "train", "steps": 1e999, "metrics": []}\n' + row(4))
    seen = watched.Watched(run, lambda folder: 1 / 0)  # type: ignore[arg-type, return-value]
    state = seen.refresh()
    assert seen.curves.rows == 4
    assert (state["unreadable"], state["advice"]) == (2, ["no advice: ZeroDivisionError: division by zero"])
    json.dumps(state, allow_nan=False)
    seen.close()


def test_rows_are_read_once_and_again_when_the_run_went_back(run: Path) -> None:
    curves = Curves(run)
    curves.refresh()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(row(4)[:20])
    curves.refresh()
    assert curves.rows == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write(row(4)[20:])
    curves.refresh()
    assert curves.rows == 4
    (run / "new").write_text(row(1) + row(2))
    (run / "new").replace(run / "metrics.jsonl")
    curves.refresh()
    assert curves.rows == 2
    curves.lines.close()


def test_curves_are_bounded_and_keep_their_means(tmp_path: Path) -> None:
    count = 5 * reading.POINTS
    (tmp_path / "metrics.jsonl").write_text("".join(row(step, loss=step % 2) for step in range(count)))
    curves = Curves(tmp_path)
    curves.refresh()
    told = curves.as_dict()["train"]
    assert told["each"] == 8
    assert reading.POINTS / 2 < len(told["columns"]["steps"]) <= reading.POINTS
    assert {*told["columns"]["learner/loss"]} == {0.5}
    assert told["columns"]["steps"][:2] == [3.5, 11.5]
    curves.lines.close()


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST", 100)
    monkeypatch.setattr(reading, "CHUNK", 64)
    (tmp_path / "file").write_text("a\n" + 500 * "x" + "\nb\n")
    lines, found = Lines(tmp_path, "file"), list[bytes]()
    assert lines.changed()
    while not lines.at_end():
        found += lines.read()
    assert found == [b"a", b"b"]
    lines.close()


def test_many_who_ask_do_not_multiply_the_reading(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, reads = Page([run]), list[str]()
    refresh = page.runs[0].refresh
    monkeypatch.setattr(page.runs[0], "refresh", lambda: reads.append("") or refresh())
    monkeypatch.setattr("shoal.display.page.server.FRESH", 1e9)
    for _ in range(50):
        page.state()
        page.curves()
    assert len(reads) == 1
    page.close()


def test_frames_are_served_while_somebody_looks_and_the_player_ends_with_the_page(server: Server) -> None:
    number = 0
    for _ in range(3):
        status, body, headers = ask(server, f"/{server.token}/frame?run=0&policy=newest&after={number}")
        while status == 202:
            status, body, headers = ask(server, f"/{server.token}/frame?run=0&policy=newest&after={number}")
        assert (status, body) == (200, b"png")
        assert json.loads(headers["X-Frame"])["number"] > number
        number = json.loads(headers["X-Frame"])["number"]
    assert ask(server, f"/{server.token}/frame?run=7&policy=newest")[:2] == (202, b"no such policy")


def test_a_policy_stands_still_when_nobody_looks(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.display.page.film.PAUSE", -1.0)
    monkeypatch.setattr("shoal.display.page.film.LEAVE", 0.01)
    started: list[subprocess.Popen[bytes]] = []
    film = Film(lambda: started.append(play(Path(), "")) or started[-1])
    assert isinstance(film.look(0, 0.0), str)
    film._thread.join(seconds(10))  # type: ignore[union-attr]
    assert started[0].returncode == 0
    assert isinstance(film.look(0, 0.0), str)
    film.close()


def test_a_player_that_fails_says_why(start: Any) -> None:
    words = [sys.executable, "-c", "import sys; sys.stdin.buffer.read(1)"]
    film = Film(lambda: start(words, **PIPES))
    film.look(0, 0.0)
    film._thread.join(seconds(10))  # type: ignore[union-attr]
    told = film.look(0, 0.0)
    assert not isinstance(told, Frame)
    assert "ended: it sent no whole frame" in told
    film.close()


def test_a_player_that_cannot_be_started_is_told_and_tried_again() -> None:
    def start() -> Any:
        raise OSError("no more processes")

    film = Film(start)
    film.look(0, 0.0)
    film._thread.join(seconds(10))  # type: ignore[union-attr]
    assert film.look(0, 0.0) == "the program that plays the policy ended: no more processes"
    film.close()


def test_a_score_that_is_no_number_is_told_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Played:
        """Environments that reward with nonsense."""

        fps, points = 12.0, [math.nan]

        def render(self) -> str:
            return "frame"

        def close(self) -> None:
            pass

    state = {"filmed.return_value": Played(), "policy.return_value.path": tmp_path, "policy.return_value.steps": 5}
    monkeypatch.setattr("shoal.run.Run", lambda run: Mock(**state))
    monkeypatch.setattr("shoal.workers.evaluator.play", lambda *_, **__: iter([[], [], []]))
    monkeypatch.setattr("shoal.playing.stamp", lambda path: ("", 0))
    told = frames(tmp_path, "newest")
    assert [facts["score"] for facts, _ in islice(told, 3)] == [0.0, None, None]
    told.close()  # type: ignore[attr-defined]


def test_a_player_gives_way_once_it_has_shown_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    sent: list[int] = []
    monkeypatch.setattr("shoal.playing.frames", lambda *_: [({"seconds": 0.0}, np.zeros((2, 2, 3), np.uint8))] * 3)
    monkeypatch.setattr("shoal.playing.idle", lambda: sent.append(len(sink.getvalue())))
    serve(tmp_path, "newest", io.BytesIO(b"..."), sink)
    assert sent == [len(sink.getvalue()) // 3]


STUBS = """
const fs = require("fs"), vm = require("vm");
const node = () => new Proxy(function () {}, {
  get: (target, name) => name in target ? target[name] : name === Symbol.toPrimitive ? () => "" : node(),
  set: (target, name, value) => { target[name] = value; return true; },
  apply: () => node(),
});
const found = {}, asked = [];
const document = new Proxy({hidden: false}, {get: (target, name) => name === "getElementById"
  ? id => found[id] = found[id] || node() : name in target ? target[name] : node()});
document.hidden = false;
async function fetch(address) {
  asked.push(address);
  if (address.startsWith("curves")) throw new Error("broken");
  const body = {runs: [{name: "catch", outcome: "training"}], plays: false};
  return {ok: true, status: 200, headers: {get: () => "tag"}, json: async () => body};
}
const context = vm.createContext({document, fetch, matchMedia: node(), setInterval: () => 0, setTimeout: () => 0,
  innerHeight: 0, URL: node(), COLOURS: ["red"], flow: node(), short: String, percent: String, Chart: node(), console});
vm.runInContext(fs.readFileSync(process.argv[2], "utf8").replace("  if (run) showRun(run);", ""), context);
setImmediate(() => console.log(JSON.stringify([vm.runInContext("state.runs.length", context), asked,
  found.link.textContent])));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_state_is_shown_although_the_curves_do_not_come(start: Any) -> None:
    script = Path(reading.__file__).with_name("page.js")
    process = start(["node", "-e", STUBS, str(script), str(script)], stdout=subprocess.PIPE)
    runs, asked, link = json.loads(process.communicate()[0])
    assert runs == 1
    assert asked == ["state?have=", "curves?have="]
    assert link.startswith("no connection")


def test_a_png_holds_its_pixels(tmp_path: Path) -> None:
    import av

    frame = np.random.default_rng(0).integers(0, 256, (31, 17, 3), np.uint8)
    (tmp_path / "image.png").write_bytes(png(frame))
    with av.open(str(tmp_path / "image.png")) as file:
        (found,) = (picture.to_ndarray(format="rgb24") for picture in file.decode(video=0))
    assert np.array_equal(found, frame)
