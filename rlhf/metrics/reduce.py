"""Numbers of all ranks brought together. The only file of the package that knows torch.distributed."""

import torch.distributed as dist

from rlhf.metrics.spread import MinMeanMax


def reduce_over_ranks(values: dict[str, float], group: dist.ProcessGroup) -> dict[str, MinMeanMax]:
    """Min, mean and max of each number over the ranks of a gloo group that have it, the same on all of them.

    Collective over `group`: all its ranks must call, with any keys; a rank may have none. One all-gather of a few
    kilobytes a rank; the keys come back sorted.

    Raises:
        ValueError: The group is not a CPU group (an all-gather there would wait inside NCCL).
    """
    if dist.get_backend(group) != "gloo":
        raise ValueError(f"reduce_over_ranks: group has backend {dist.get_backend(group)}; needs a gloo group")
    gathered: list[dict[str, float]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, {key: float(value) for key, value in values.items()}, group=group)
    by_key: dict[str, dict[int, float]] = {}
    for rank, mine in zip(dist.get_process_group_ranks(group), gathered, strict=True):
        for key, value in mine.items():
            by_key.setdefault(key, {})[rank] = value
    return {key: MinMeanMax.of(by_key[key]) for key in sorted(by_key)}
