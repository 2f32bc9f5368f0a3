"""The torch RPC link: what it refuses before anybody is asked."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch.distributed import rpc

from shoal.core.errors import ServiceLost, SettingsError
from shoal.transport import find, torchrpc
from shoal.transport.trust import Terms

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "not on this machine": ("192.0.2.1:7700", {"rank": 1, "world": 2, "trust": "folder"}, "say --insecure"),
    "no count": ("127.0.0.1:7700", {}, "torch RPC numbers its machines"),
    "a rank too many": ("127.0.0.1:7700", {"rank": 2, "world": 2}, "rank 2 of 2 is not possible"),
}


@pytest.mark.parametrize("case", [*WRONG])
def test_what_makes_no_sense_is_told_at_once(case: str) -> None:
    address, terms, told = WRONG[case]
    with pytest.raises(SettingsError, match=told):
        torchrpc.dial(address, Terms("node", link="torchrpc", **terms))


def test_on_loopback_no_other_interface_is_used_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*args: Any, **options: Any) -> None:
        raise RuntimeError(f"{os.environ['TP_SOCKET_IFNAME']} {os.environ['GLOO_SOCKET_IFNAME']}")

    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth0")
    monkeypatch.setattr(rpc, "init_rpc", begin)
    with pytest.raises(ServiceLost, match=r"does not answer: lo lo$"):
        torchrpc.dial("127.0.0.1:7700", Terms("node", link="torchrpc", rank=1, world=2))


def test_a_head_has_to_know_how_many_will_come() -> None:
    with pytest.raises(SettingsError, match=r"set network\.world"):
        torchrpc.listen("127.0.0.1:0", Terms("head", link="torchrpc"), True, lambda wire: None, lambda *_: None)


def test_an_unknown_link_is_told_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match="choose one of websocket, grpc, torchrpc; did you mean 'grpc'"):
        find("gprc")
