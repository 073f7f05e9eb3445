"""Which address and interface of this node lead to another one. Sends nothing; knows no torch."""

import socket

import psutil


def address_towards(host: str) -> str:
    """This node's address on the network that leads to `host`, a name or an address.

    Raises:
        OSError: The name is unknown here, or there is no way to it.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # of a datagram socket: picks the route, sends nothing
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """Name of the interface that has the address; empty when none has."""
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in found):
            return name
    return "lo" if address.startswith("127.") and "lo" in psutil.net_if_addrs() else ""


def check_port(port: int) -> None:
    """Whether a server could listen on the port.

    Raises:
        OSError: It is taken, or not ours to take.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        probe.listen()


def check_rendezvous(endpoint: str, *, is_host: bool) -> str:
    """This node's address on the network of HOST_0:PORT, which is there and, on host 0 itself, free.

    Raises:
        OSError, ValueError: It cannot be used from here.
    """
    host, _, port = endpoint.rpartition(":")
    address = address_towards(host)
    if is_host:
        check_port(int(port))
    return address


def own_address(interface: str) -> str:
    """This node's address on an interface, or, where none is named, the one that its host name leads to.

    Raises:
        OSError: There is no such interface, it has no address, or the name leads nowhere.
    """
    if not interface:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    name = interface.split(",")[0]
    entries = psutil.net_if_addrs().get(name, ())
    found = [entry.address for entry in entries if entry.family == socket.AF_INET]
    # An address of the link alone (fe80::1%eth0) comes last: to another node, the name behind it may mean nothing.
    six = [entry.address for entry in entries if entry.family == socket.AF_INET6]
    for address in (*found, *sorted(six, key=lambda one: one.startswith("fe80:"))):
        return str(address)
    raise OSError(f"interface {name} is not here or has no address")
