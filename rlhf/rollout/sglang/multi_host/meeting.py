"""How an engine's schedulers find one another, and on which interface they listen. Imports nothing of SGLang.

SGLang would open torch's TCP store on every interface of the host, where anybody may read and write: through it
strangers could become peers, whose pickles the schedulers read. Here an engine on one host meets by a file in its own
folder, and gloo and NCCL listen on the loopback interface. Hosts of one engine meet at a `StoreServer` in its leader's
host process, on the interface of the job and by a token that only the engine's processes know; by it they also seal
what they pickle for one another (`seals.py`).
"""

import json
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from rlhf.rollout.sglang.multi_host.store import GuardedStore
from rlhf.rollout.sglang.wire import Meeting

LOOPBACK = "lo"
SCHEME = "rlhf"
"""Of the URL by which a scheduler's process group finds a meeting."""
METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


def open_meeting(address: str) -> tuple[socket.socket, Meeting]:
    """A socket that listens on this host's address, for a `StoreServer`, and what others must know; on the leader.

    Raises:
        OSError: The address is not this host's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=128)
    return listening, Meeting(address, listening.getsockname()[1], secrets.token_hex(32))


def meeting_place(meeting: Meeting) -> str:
    """ADDRESS:PORT, as SGLang wants it."""
    return f"{f'[{meeting.address}]' if ':' in meeting.address else meeting.address}:{meeting.port}"


def environment_on_one_host(folder: Path) -> dict[str, str]:
    """Variables of the processes of an engine that lies on one host; `folder` is the engine's own, closed to others."""
    return {
        METHOD: f"file://{folder / 'meeting'}",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }


def environment_on_several_hosts(folder: Path, meeting: Meeting) -> dict[str, str]:
    """Variables of an engine's processes on one of its hosts; gloo and NCCL take the interfaces of the job.

    The token is left in the folder, the engine's own there: arguments and variables of processes may be seen by more.
    """
    path = folder / "meeting"
    path.touch(mode=0o600)
    path.write_text(json.dumps(asdict(meeting)))
    return {METHOD: f"{SCHEME}://{path}", "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}


def meet_by_token(seal: Callable[[str], None]) -> None:
    """From now on this process's torch knows the URLs of `environment_on_several_hosts`.

    seal: Called with the token before the first group that meets so is made; see `seals.py`.
    """

    def meet(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        parts = urlsplit(url)
        meeting = Meeting(**json.loads(Path(parts.path).read_text()))
        seal(meeting.token)
        asked = parse_qs(parts.query)
        store = GuardedStore(meeting.address, meeting.port, meeting.token)
        yield store, int(asked["rank"][0]), int(asked["world_size"][0])

    dist.register_rendezvous_handler(SCHEME, meet)
