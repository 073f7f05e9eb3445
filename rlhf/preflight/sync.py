"""Bytes of one weight sync, planned and proved for the whole job in this process."""

from collections.abc import Sequence

from rlhf.config.run import PPORunConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.transfer import Placed, transfer_layouts
from rlhf.preflight.roles import ModelRole
from rlhf.preflight.text import gib
from rlhf.reshard.check import Certificate, certify
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Fanout, Topology
from rlhf.rollout.native.engine import NativeEngine
from rlhf.rollout.sglang.engine import SGLangEngine


def sync_certificate(config: PPORunConfig, spec: ModelSpec, topology: Topology) -> Certificate:
    """Of the transfer from the actor's layout to the engines' (of this package); seconds for hundreds of ranks.

    Raises:
        LayoutError: The layouts cannot hold the model.
    """
    return certify(make_plan(*sync_layouts(config, spec), topology, fanout=Fanout(config.sync.fanout)))


def sync_layouts(config: PPORunConfig, spec: ModelSpec) -> tuple[ModelLayout, ModelLayout]:
    """(source, destination)."""
    dtype = config.actor.model.dtype
    engine = SGLangEngine if config.rollout.engine == "sglang" else NativeEngine
    return (
        megatron_layout(spec, config.actor.parallel, head=Head.LM, dtype=dtype),
        engine.layout_of(spec, config.rollout, dtype=dtype),
    )


def start_certificates(config: PPORunConfig, models: Sequence[ModelRole], topology: Topology) -> dict[str, Certificate]:
    """Of the one transfer from the actor to each role that starts from it; of roles whose model is known.

    Raises:
        LayoutError: The actor's weights do not fit the role.
    """
    placed = {
        one.name: Placed(
            name=one.name,
            spec=one.spec,
            parallel=one.config.parallel,
            head=one.head,
            dtype=one.config.model.dtype,
        )
        for one in models
    }
    if "actor" not in placed:
        return {}
    return {
        name: certify(make_plan(*transfer_layouts(placed["actor"], placed[name]), topology))
        for name in config.inheritors()
        if name in placed
    }


def render_sync(found: Certificate, what: str = "one weight sync") -> str:
    """A few lines."""
    by_link = ", ".join(f"{link.value} {gib(count)}" for link, count in found.bytes_by_link().items())
    most_in = max(found.ranks, key=lambda one: one.moved)
    most_out = max(found.ranks, key=lambda one: sum(one.sent.values()))
    return "\n".join(
        [
            f"{what}: {gib(found.moved)} between ranks, lower bound {gib(found.bound)}, ratio {found.ratio:.3f}",
            f"  {by_link}; across nodes at least {gib(found.far_bound)}",
            f"  most received {gib(most_in.moved)} (rank {most_in.rank}), "
            f"most sent {gib(sum(most_out.sent.values()))} (rank {most_out.rank})",
        ]
    )
