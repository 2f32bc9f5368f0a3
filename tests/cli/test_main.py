"""The command line as a user meets it: what it prints, what it writes, and how it answers mistakes."""

from __future__ import annotations

import json
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import av
import pytest

import shoal
from shoal.cli.main import main
from shoal.transport.trust import fingerprint
from tests.pace import seconds

CONFIGS = Path(__file__).parents[2] / "configs"
CARTPOLE = str(CONFIGS / "ppo_cartpole.yaml")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of a policy for Catch."""
    config = {
        "environment": {"id": "Catch"},
        "algorithm": {"name": "ppo", "unroll": 16, "lr": 3e-3, "network": {"hidden": [16], "lstm": 8}},
        "engine": "inline",
        "actors": 1,
        "threads": 1,
        "steps": 2000,
        "evaluation": {"every": 500, "episodes": 5},
    }
    return shoal.train(config, tmp_path_factory.mktemp("runs") / "catch").directory


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run a command in an empty folder; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()  # typer ends every command by an exit
        told = capsys.readouterr()
        return ended.value.code or 0, told.out, told.err

    return run


SLIPS = {
    ("trian",): "train",
    ("resum", "latest"): "resume",
    ("train", CARTPOLE, "--run-dri", "x"): "--run-dir",
    ("train", "ppo_cartpol.yaml"): "No such file",
    ("train", CARTPOLE, "stesp=100"): "steps",
    ("train", CARTPOLE, "algorithm.lrr=1e-3"): "lr",
    ("train", CARTPOLE, "algorithm.name=pppo"): "ppo",
    ("train", CARTPOLE, "engine=procesess"): "processes",
    ("train", CARTPOLE, "device=gpu"): "cuda",
    ("train", CARTPOLE, "evaluation.episode=3"): "episodes",
    ("train", CARTPOLE, "environment.id=CartPole-v11"): "CartPole-v1",
    ("train", CARTPOLE, "environment.id=ALE/Pog-v5"): "ALE/Pong-v5",
    ("train", CARTPOLE, "steps"): "key=value",
    ("train", CARTPOLE, "steps=many"): "integer",
    ("evaluate", "latest"): "runs/ has none",
    ("list", "algorithm"): "algorithms",
    ("config", CARTPOLE, "checkpoints.kep=2"): "keep",
    ("node",): "--listen, --join or a file",
    ("node", "--init", "--folder", "t", "--name", "http://node1"): "neither a host name nor an address",
    ("node", "--init", "--folder", "t", "--for", "u"): "there is no trust folder t",
    ("node", "--join", "127.0.0.1:7700", "--link", "gprc"): "did you mean 'grpc'",
    ("bench", "engines", "proceses"): "did you mean 'processes'",
    ("bench", "scale", "--env", "chess"): "choose one of cartpole, pong",
    ("bench", "scale", "--actors", "1,x"): "give whole numbers from 1 up",
}


@pytest.mark.parametrize("words", SLIPS, ids=" ".join)
def test_a_slip_is_answered_with_what_is_right(shell: Any, words: tuple[str, ...]) -> None:
    code, _, errors = shell(*words)
    assert code == 2, errors
    assert SLIPS[words] in errors
    assert "Traceback" not in errors


def test_evaluate_tells_figures_and_draws_them(shell: Any, trained: Path) -> None:
    code, output, _ = shell("evaluate", trained, "--episodes", 7)
    assert code == 0
    assert "mean return" in output
    assert "95 % interval" in output
    assert "median" in output
    assert (trained / "plots" / "returns_best.png").read_bytes().startswith(b"\x89PNG")
    code, output, _ = shell("evaluate", trained, "--episodes", 7, "--checkpoint", "newest", "--json")
    told = json.loads(output)
    assert len(told["scores"]) == told["episodes"] == 7
    assert told["low"] <= told["mean"] <= told["high"]


def test_the_same_seed_plays_the_same_episodes(trained: Path) -> None:
    run = shoal.Run(trained)
    assert run.evaluate(6, seed=1).scores == run.evaluate(6, seed=1).scores
    assert run.evaluate(30, seed=1).scores != run.evaluate(30, seed=2).scores


def test_play_films_whole_episodes(shell: Any, trained: Path, tmp_path: Path) -> None:
    code, output, _ = shell("play", trained, "--video", "film.mp4", "--episodes", 2)
    assert (code, output) == (0, "video: film.mp4\n")
    with av.open(str(tmp_path / "film.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 1 + 2 * 9 + 1  # nine actions, and the step between episodes


def test_a_film_has_a_greatest_length(shell: Any, trained: Path, tmp_path: Path) -> None:
    code, _, _ = shell("play", trained, "--video", "film.mp4", "--seconds", 1)
    assert code == 0
    with av.open(str(tmp_path / "film.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == 5


def test_plot_draws_one_run_or_compares_several(shell: Any, trained: Path, tmp_path: Path) -> None:
    assert shell("plot", trained, "--out", "one.png")[0] == 0
    assert shell("plot", trained, trained, "--out", "several.png")[0] == 0
    for name in ("one.png", "several.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_one_metric_is_plotted_and_the_run_is_a_table(shell: Any, trained: Path, tmp_path: Path) -> None:
    assert shell("plot", trained, "--metric", "value_loss", "--out", "loss.png")[0] == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    code, _, errors = shell("plot", trained, "--metric", "value_los")
    assert code == 2
    assert "did you mean 'value_loss'?" in errors
    code, out, _ = shell("table", trained, "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["episode"] > 0


def test_the_latest_run_is_found_and_so_is_a_name_in_runs(shell: Any, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "catch").symlink_to(trained)
    for name in ("latest", "catch", "runs/catch"):
        assert shell("plot", name, "--out", "x.png")[0] == 0
    code, _, errors = shell("plot", "cach")
    assert code == 2
    assert "did you mean 'catch'?" in errors


@pytest.mark.parametrize("what", [None, "algorithms", "engines", "stores", "environments"])
def test_list_names_what_there_is(shell: Any, what: str | None) -> None:
    code, output, _ = shell("list", *([what] if what else []))
    assert code == 0
    expected = {"algorithms": "impala", "engines": "processes", "stores": "queue", "environments": "ALE/Pong-v5"}
    for name, word in expected.items():
        assert (word in output) == (what in (None, name))


def test_help_names_every_command_and_each_has_a_sentence(shell: Any) -> None:
    code, output, _ = shell("--help")
    assert code == 0
    for name in ("train", "resume", "evaluate", "play", "plot", "config", "list", "node", "bench", "doctor"):
        assert name in output
        assert len(shell(name, "--help")[1]) > 200


def test_node_makes_trust_for_this_machine_and_for_others(shell: Any, tmp_path: Path) -> None:
    words = ("node", "--init", "--folder", "trust")
    code, output, _ = shell(*words, "--name", "node1", "--name", "10.0.0.1")
    assert code == 0
    assert f"created {tmp_path}/trust: ca.key, ca.pem, node.key, node.pem, token" in output
    assert "for node1, 10.0.0.1, localhost, 127.0.0.1, ::1; valid until " in output
    assert f"fingerprint: {fingerprint(tmp_path / 'trust' / 'node.pem')}" in output
    assert "shoal node --init --folder trust --for DIR" in output
    code, output, _ = shell(*words, "--for", "other", "--name", "node2")
    assert code == 0
    assert f"created {tmp_path}/other: ca.pem, node.key, node.pem, token" in output
    assert f"fingerprint: {fingerprint(tmp_path / 'other' / 'node.pem')}" in output
    assert "copy this folder to ~/.shoal/trust on the other machine" in output
    assert (tmp_path / "trust" / "token").read_text() not in output
    code, _, errors = shell(*words)
    assert code == 2
    assert "already exists, and nothing in it is overwritten" in errors


def test_node_takes_part_in_the_run_of_a_file(shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setattr("shoal.engines.node.work", lambda *args: heard.append(args))
    network = {"listen": "127.0.0.1:7700", "link": "grpc", "trust": "folder"}
    plan = {"environment": {"id": "CartPole-v1"}, "algorithm": {"name": "impala"}, "engine": "cluster"}
    (tmp_path / "run.yaml").write_text(json.dumps({**plan, "network": network}))
    assert shell("node", "run.yaml", "--slots", "3", "--name", "one")[0] == 0
    listen, join, terms, slots, *_ = heard[0]
    assert (listen, join, slots) == ("", "127.0.0.1:7700", 3)
    assert (terms.name, terms.link, terms.trust, terms.insecure) == ("one", "grpc", "folder", False)


def test_node_refuses_a_pin_in_plain_text(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setattr("shoal.engines.node.work", lambda *args: heard.append(args))
    code, _, errors = shell("node", "--join", "10.0.0.1:7700", "--pin", "00" * 32, "--insecure")
    assert (code, heard) == (2, [])
    assert "--insecure turns TLS off" in errors


def test_node_takes_the_name_of_this_machine_and_the_folder_in_the_home(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    code, output, _ = shell("node", "--init")
    assert code == 0
    assert f"created {tmp_path}/.shoal/trust:" in output
    assert "for node7, localhost" in output


def test_a_folder_holds_what_a_person_looks_for(trained: Path) -> None:
    for name in ("config.yaml", "provenance.json", "log.txt", "metrics.jsonl", "summary.txt", "summary.json"):
        assert (trained / name).read_text()
    assert (trained / "plots" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((trained / "tensorboard").iterdir())
    assert (trained / "checkpoints" / "best" / "weights.safetensors").exists()
    assert "done: 2," in (trained / "summary.txt").read_text()
    assert "evaluation at step" in (trained / "log.txt").read_text()


def test_a_policy_acts_on_what_its_environment_shows(trained: Path) -> None:
    from shoal.envs.toy import Catch

    policy, world = shoal.load(trained), Catch()
    scores = []
    for seed in range(5):
        observation, _ = world.reset(seed=seed)
        policy.reset()
        ended, total = False, 0.0
        while not ended:
            observation, reward, ended, _, _ = world.step(policy.act(observation))
            total += reward
        scores.append(total)
    assert set(scores) <= {1.0, -1.0}
    assert {int(policy.act(observation, explore=True)) for _ in range(200)} <= {0, 1, 2}
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        policy.act([1, 2, 3])


def test_objects_print_usefully(trained: Path) -> None:
    run = shoal.Run(trained)
    assert "ppo on Catch" in repr(run)
    assert str(trained) in repr(run)
    assert "ppo for Catch" in repr(run.policy())
    assert "parameters" in repr(run.policy())
    picture = run.plot()
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert str(picture).endswith("curve.png")
    assert Path(picture) == picture.path


def test_settings_are_no_run(trained: Path) -> None:
    with pytest.raises(shoal.core.errors.SettingsError, match="is a file: give the folder of a run"):
        shoal.load(CARTPOLE)
    with pytest.raises(shoal.core.errors.SettingsError, match="is not a run"):
        shoal.load(CONFIGS)


def page(stream: Any) -> tuple[str, urllib.request.OpenerDirector]:
    """The address that a program printed, and who asks there without a proxy."""
    said = next((line for line in stream if "page: " in line), "nothing")
    return said.partition("page: ")[2].strip(), urllib.request.build_opener(urllib.request.ProxyHandler({}))


def test_the_page_of_a_run_shows_its_folder_and_its_policy_playing(command: Any, trained: Path) -> None:
    process = command("watch", trained)
    address, opener = page(process.stdout)
    (run,) = json.load(opener.open(address + "state", timeout=seconds(10)))["runs"]
    assert (run["name"], run["outcome"], run["live"]) == ("catch", "done", False)
    assert run["steps"] >= 2000
    with pytest.raises(urllib.error.HTTPError, match="403"):
        opener.open(address.replace(urlsplit(address).path, "/state"), timeout=seconds(10))
    frame = address + "frame?run=0&policy=best"
    while (answer := opener.open(frame, timeout=seconds(30))).status == 202:
        assert answer.read() == b"the policy is being loaded"
    assert answer.read(4) == b"\x89PNG"
    assert json.loads(answer.headers["X-Frame"])["trained"] > 0
    process.terminate()
    assert process.wait(seconds(20)) == 0


def test_a_run_can_be_watched_while_it_trains_and_its_page_ends_with_it(command: Any, tmp_path: Path) -> None:
    words = ("engine=inline", "actors=1", "threads=1", "steps=1000000000", "log_every=0.1")
    process = command("train", CARTPOLE, *words, "--run-dir", tmp_path / "run", "--watch")
    address, opener = page(process.stderr)
    (run,) = json.load(opener.open(address + "state", timeout=seconds(10)))["runs"]
    assert (run["outcome"], run["live"]) == ("training", True)
    process.send_signal(signal.SIGINT)
    assert process.wait(seconds(30)) == 0
    with pytest.raises(urllib.error.URLError, match="refused"):
        opener.open(address, timeout=seconds(10))
    written = (tmp_path / "run" / "log.txt").read_text()
    assert "the page is open" in written
    assert urlsplit(address).path not in written  # the token is for who sees the terminal
