"""How an engine's schedulers find one another, and on which interface they listen. Imports nothing of SGLang.

SGLang would open torch's TCP store on every interface of the host, where anybody may read and write: through it
strangers could become peers, whose pickles the schedulers read. Here an engine on one host meets by a file in its own
folder, and gloo and NCCL listen on the loopback interface.
"""

from pathlib import Path

LOOPBACK = "lo"


def environment_on_one_host(folder: Path) -> dict[str, str]:
    """Variables of the processes of an engine that lies on one host; `folder` is the engine's own, closed to others."""
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder / 'meeting'}",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }
