"""Ray itself: connecting to a cluster or starting one, and what workers ask of it."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

from shoal.core.errors import SettingsError, ShoalError
from shoal.engines.options import Room

TOKEN = "if it wants a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on its machines"
PLENTY = 1024  # CPUs of a Ray of our own: as on other engines, the machine's cores are shared by all who want them


def library() -> Any:
    """Ray, if it is installed."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError:
        raise ShoalError("engine ray needs Ray: pip install 'shoal[ray]'") from None
    return ray


def connect(address: str) -> tuple[Any, bool]:
    """Connect to a Ray cluster, or start one; False: the program was connected already, and stays so."""
    if not address:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # even a Ray of our own listens to the network
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run tells nobody
    ray = library()
    if ray.is_initialized():
        return ray, False
    if address.startswith("ray://"):
        raise SettingsError("ray.address: start the run on a machine of the cluster, and give the address HOST:PORT")
    settings: dict[str, Any] = {"logging_level": logging.ERROR, "namespace": f"shoal-{os.getpid()}"}
    if address:
        settings["address"] = address
        check_reachable(address)
    else:
        settings |= {"address": "local", "num_cpus": PLENTY, "include_dashboard": False}
        # Ray's own server would keep a note of every call, up to a hundred thousand of them.
        quiet = {"prestart_worker_first_driver": False, "task_events_report_interval_ms": 0}
        settings |= {"_node_ip_address": "127.0.0.1", "_system_config": quiet}
    try:
        with handlers_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on Ray's own settings
            ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        ray.shutdown()
        if address:
            raise ShoalError(f"the Ray cluster at {address} did not let us in: {error}\n{TOKEN}") from None
        raise ShoalError(f"Ray does not start on this machine: {error}") from None
    return ray, True


def check_reachable(address: str) -> None:
    """Say at once that nobody is there, which Ray finds out in minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        if address != "auto":
            raise SettingsError(f"ray.address: {address!r} is not HOST:PORT, nor auto")
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ShoalError(f"no Ray cluster at {address}: {error}") from None


@contextmanager
def handlers_kept() -> Any:
    """Keep the program's own answer to SIGTERM, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def role_of(worker: str) -> str:
    """A worker's name without its group and its number."""
    return re.sub(r"-\d+$", "", worker.rpartition("/")[2])


def request(room: Room, worker: str) -> dict[str, float]:
    """The resources that a worker asks for."""
    role = role_of(worker)
    asked = {"CPU": room.cpus.get(role, 1.0), "GPU": room.gpus.get(role, 0.0), **room.custom.get(role, {})}
    return {name: amount for name, amount in asked.items() if amount}


def check_room(ray: Any, wanted: Mapping[str, Mapping[str, float]], apart: int) -> None:
    """Refuse at once what the cluster could not give even if it were idle; so many workers want a machine each."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    problems = []
    for worker, asked in wanted.items():
        if not any(all(node.get(name, 0.0) >= amount for name, amount in asked.items()) for node in nodes):
            problems.append(f"no machine of it has {_told(asked)} for {worker}")
    for name in sorted({name for asked in wanted.values() for name in asked}):
        need = sum(asked.get(name, 0.0) for asked in wanted.values())
        have = sum(node.get(name, 0.0) for node in nodes)
        if need > have:
            problems.append(f"{len(wanted)} workers ask for {need:g} {name} together, it has {have:g}")
    if apart > len(nodes):
        problems.append(f"STRICT_SPREAD wants a machine for each of {apart} workers, it has {len(nodes)}")
    if problems:
        raise ShoalError(
            f"the Ray cluster has too little: {'; '.join(problems)}. Lower ray.cpus, ray.gpus or ray.custom, "
            "take fewer workers, or add machines"
        )


def _told(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
