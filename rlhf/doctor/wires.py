"""Network interfaces that gloo and NCCL would use."""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhf.doctor.finding import Finding, error, ok, warning


@dataclass(frozen=True, kw_only=True, slots=True)
class Wires:
    """One host's way to others."""

    host: str
    resolved: tuple[str, ...]
    """Addresses that the host's name stands for here; none when it stands for nothing."""
    interfaces: Mapping[str, tuple[str, ...]]
    """Interface that is up -> its addresses."""
    infiniband: tuple[str, ...] = ()
    gloo: str = ""
    """GLOO_SOCKET_IFNAME."""
    nccl: str = ""
    """NCCL_SOCKET_IFNAME."""
    num_hosts: int = 1

    @property
    def comparable(self) -> dict[str, str]:
        """What should be the same on all hosts."""
        return {"InfiniBand devices": ", ".join(self.infiniband)}

    @property
    def gloo_takes(self) -> str:
        """Interface that gloo would use; empty when there is none."""
        if self.gloo:
            return next((name for name in self.gloo.split(",") if name in self.interfaces), "")
        owners = (name for address in self.resolved for name, own in self.interfaces.items() if address in own)
        return next(owners, "")

    @property
    def nccl_takes(self) -> tuple[str, ...]:
        """Interfaces that NCCL may open its first connections on."""
        named = [name for name in self.interfaces if not name.startswith(("lo", "docker"))] or list(self.interfaces)
        if not self.nccl:
            return tuple(named)
        rule = self.nccl.lstrip("^=")
        parts = tuple(part.lstrip("=") for part in rule.split(","))
        exact = "=" in self.nccl
        hit = {name for name in self.interfaces if (name in parts if exact else name.startswith(parts))}
        return tuple(sorted(set(self.interfaces) - hit if self.nccl.startswith("^") else hit))


def probe_wires(environment: Mapping[str, str], *, num_hosts: int) -> Wires:
    """This host's interfaces; asks the resolver for its own name."""
    host = socket.gethostname()
    try:
        resolved = tuple(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    except OSError:
        resolved = ()
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    kinds = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: tuple(entry.address.partition("%")[0] for entry in entries if entry.family in kinds)
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }
    return Wires(
        host=host,
        resolved=resolved,
        interfaces={name: own for name, own in addresses.items() if own},
        infiniband=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        gloo=environment.get("GLOO_SOCKET_IFNAME", ""),
        nccl=environment.get("NCCL_SOCKET_IFNAME", ""),
        num_hosts=num_hosts,
    )


def judge_wires(wires: Wires) -> list[Finding]:
    """Findings, the good ones too. That a host has no way out matters to jobs of several hosts alone."""
    subject, found = "network", []
    there = ", ".join(f"{name} {own[0]}" for name, own in wires.interfaces.items()) or "none"
    for variable, value, is_there in (
        ("GLOO_SOCKET_IFNAME", wires.gloo, bool(wires.gloo_takes)),
        ("NCCL_SOCKET_IFNAME", wires.nccl, bool(wires.nccl_takes)),
    ):
        if value and not is_there:
            cure = f"unset it, or set it to one of {', '.join(wires.interfaces)}"
            found.append(error(subject, f"{variable}={value} names no interface that is up; there are {there}", cure))
    if not wires.gloo:
        found += _judge_name(wires)
    if wires.num_hosts > 1 and set(wires.nccl_takes) <= {"lo"}:
        found.append(error(subject, "nothing but the loopback is up", "bring up the network between the hosts"))
    taken = f"gloo {wires.gloo_takes or 'by route'}, NCCL {', '.join(wires.nccl_takes) or 'none'}"
    bands = f"; InfiniBand {', '.join(wires.infiniband)}" if wires.infiniband else ""
    return [ok(subject, f"{wires.host}: {there}; {taken}{bands}"), *found]


def _judge_name(wires: Wires) -> list[Finding]:
    if not wires.resolved:
        text = f"the host's name {wires.host} stands for no address here"
    elif all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in wires.resolved):
        text = f"the host's name {wires.host} stands for the loopback alone ({', '.join(wires.resolved)})"
    else:
        return []
    if wires.num_hosts == 1:
        return [ok("network", f"{text}: fine for a job of one host")]
    cure = "mend /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts"
    return [warning("network", text, cure)]
