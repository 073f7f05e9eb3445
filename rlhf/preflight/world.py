"""Whether the pools of a run fit the ranks and hosts that it will get. Imports no torch."""

from rlhf.config.checks import Faults, refuse
from rlhf.config.run import RunConfig, check_world


def pools_are_known(faults: Faults) -> bool:
    """Whether no fault leaves it open which ranks a role has, so that rules of the whole job can be asked."""
    return not faults.doubts(r"(actor|critic|reference)(\.parallel(\..*)?)?|rollout(\.(tp|dp|first_rank|stride))?")


def check_hosts(config: RunConfig, world_size: int, *, nnodes: int) -> None:
    """Refuse unless the pools cover the ranks of the job and these divide over the hosts.

    Raises:
        ConfigError: They do not (see `rlhf.config.checks.refuse`).
    """
    check_world(config, world_size)
    if world_size % nnodes:
        refuse(f"--nnodes: {world_size} ranks on {nnodes} hosts; needs the same number on each; change one")
