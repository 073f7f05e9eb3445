"""Addresses of this machine."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from rlhf.dist.network import address_towards, interface_of, own_address


def test_the_address_of_an_interface_is_one_that_a_server_may_take():
    assert own_address("lo") == "127.0.0.1"
    assert own_address("lo,eth0") == "127.0.0.1"  # as NCCL and gloo may be given several
    address = own_address("")
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
        pass
    assert interface_of(address_towards("127.0.0.1")) == "lo"


def test_an_interface_without_ipv4_gives_an_ipv6_address_that_others_can_use(monkeypatch):
    entries = [
        SimpleNamespace(family=socket.AF_INET6, address=one) for one in ("fd00::2", "fe80::7:1%eth0", "fe80::7:2%eth0")
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": entries, "eth1": entries[1:], "eth2": []})
    assert own_address("eth0") == "fd00::2"
    assert own_address("eth1") == "fe80::7:1%eth0"
    with pytest.raises(OSError, match="interface eth2 is not here or has no address"):
        own_address("eth2")


def test_an_interface_that_is_not_here_is_named():
    with pytest.raises(OSError, match="interface nowhere0 is not here"):
        own_address("nowhere0")
