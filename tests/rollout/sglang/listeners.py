"""Who could speak to an engine's processes: their listening sockets, as the kernel names them."""

import ipaddress
import stat
from pathlib import Path

import psutil


def tree(host_pid: int) -> list[psutil.Process]:
    """The host and all that it has started."""
    host = psutil.Process(host_pid)
    return [host, *host.children(recursive=True)]


def addresses(processes: list[psutil.Process]) -> set[str]:
    """IP addresses that they listen on, by TCP or UDP."""
    found = [one for process in processes for one in process.net_connections("inet")]
    return {one.laddr.ip for one in found if one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)}


def socket_folders(processes: list[psutil.Process]) -> set[Path]:
    """Folders of the Unix sockets that have a name in the file system."""
    found = [one.laddr for process in processes for one in process.net_connections("unix")]
    return {Path(name).parent for name in found if name.startswith("/")}


def check_private(host_pid: int, folder: Path) -> None:
    """No other machine reaches an engine's processes, and no other user those that listen by Unix sockets."""
    processes = tree(host_pid)
    assert len(processes) >= 2, processes  # host, scheduler
    found = addresses(processes)
    assert found, "gloo listens: an empty answer would be one that could not be read"
    assert all(ipaddress.ip_address(one).is_loopback for one in found), found
    check_closed(processes, folder)


def check_closed(processes: list[psutil.Process], folder: Path) -> None:
    """Unix sockets lie in the engine's folder, if there are any, and no other user gets there."""
    assert socket_folders(processes) <= {folder}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == psutil.Process().uids().real
