"""Runs a plan with every rank a thread of this process."""

from concurrent.futures import ThreadPoolExecutor

import torch

from rlhf.reshard.bucket import buckets_of, messages_of
from rlhf.reshard.execute import LocalParams, Params, execute
from rlhf.reshard.plan import Plan
from rlhf.reshard.staging import Staging
from rlhf.reshard.transport import MemoryHub, Traffic


def run_plan(plan: Plan, src_params: dict, dst_params: dict, *, bucket_bytes: int) -> dict[int, Traffic]:
    """Execute all ranks' parts; returns each rank's traffic."""
    hub = MemoryHub(plan.topology)

    def run(rank: int) -> Traffic:
        part, transport = plan.of(rank), hub.transport(rank)
        buckets = buckets_of(*messages_of(plan, part, bucket_bytes), max(1, bucket_bytes // plan.src.item_bytes))
        staging = Staging(plan.src.dtype)
        src = LocalParams(plan.src_index, rank, src_params[rank], side="source")
        dst = LocalParams(plan.dst_index, rank, dst_params[rank], side="destination")
        cpu = torch.device("cpu")
        into = Params(part, src, dst, cpu)
        execute(buckets, src=src, dst=into, transport=transport, staging=staging, device=cpu)
        assert staging.used_bytes <= staging.num_bytes <= 2 * max(bucket_bytes, 2 * plan.src.item_bytes)
        return transport.traffic

    with ThreadPoolExecutor(len(plan.ranks)) as pool:
        running = {rank: pool.submit(run, rank) for rank in plan.ranks}
        return {rank: future.result() for rank, future in running.items()}
