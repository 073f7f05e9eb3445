"""Moving the actor's weights into the rollout engines."""

from dataclasses import dataclass

from rlhf.config.checks import at_least, one_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """Moving the actor's weights into the rollout engines."""

    bucket_bytes: int = 256 * 2**20
    """Most bytes in one bucket; two are under way, so a transfer needs at most twice as much beside the weights."""
    fanout: str = "direct"
    """direct: each rank takes what it needs across nodes by itself; node: each block crosses into a node once, and one
    of the node's ranks passes it on to the others."""
    near: bool = True
    """On CPUs, let ranks of one machine read each other's memory where the system allows it, not sockets."""
    verify: str = "sample"
    """What is compared after each transfer, by checksums of the weights on both sides: all; sample: a twentieth of
    every tensor, another each time, so that a wrong bit that stays is found within 20 (all after the first transfer
    and after a failure); none."""
    on_mismatch: str = "stop"
    """When the two sides differ: stop ends the run; quarantine sends everything again, then leaves engines that are
    still wrong out of this step (they are not asked), and ends the run when one is so 3 times in a row."""

    def __post_init__(self) -> None:
        at_least("sync.bucket_bytes", self.bucket_bytes, 4096)
        one_of("sync.fanout", self.fanout, ("direct", "node"))
        one_of("sync.verify", self.verify, ("all", "sample", "none"))
        one_of("sync.on_mismatch", self.on_mismatch, ("stop", "quarantine"))
