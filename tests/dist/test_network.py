"""Addresses of this machine."""

import socket

import pytest

from rlhf.dist.network import address_towards, interface_of, own_address


def test_the_address_of_an_interface_is_one_that_a_server_may_take():
    assert own_address("lo") == "127.0.0.1"
    assert own_address("lo,eth0") == "127.0.0.1"  # as NCCL and gloo may be given several
    address = own_address("")
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
        pass
    assert interface_of(address_towards("127.0.0.1")) == "lo"


def test_an_interface_that_is_not_here_is_named():
    with pytest.raises(OSError, match="interface nowhere0 is not here"):
        own_address("nowhere0")
