"""Other ways from a training layout into an engine's, by formula: bytes that a rank receives, memory at its peak.

Source: HybridFlow (arXiv:2409.19256), table of transition overheads. t, p, d are the training sizes, tg the engine's tp
(and one stage); M the bytes of the model. The formulas take all weights as evenly cut; norms and padding are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlhf.config.parallel import ParallelConfig
from rlhf.preflight.link_time import Bandwidths, gather_seconds
from rlhf.preflight.sizes import EngineSizes
from rlhf.reshard.topology import Topology

EVEN_EXPERTS = "experts cut as all other weights (the formula knows tp, pp and dp only)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of the model's bytes M on each rank."""

    volume: Fraction
    """Received in one transition."""
    peak: Fraction
    """Parameters held at the peak."""
    redundant: Fraction
    """Training shard kept beside the engine's parameters without being part of them."""


def deepspeed_chat(t: int, p: int, d: int) -> Shares:
    """ZeRO-3 over all t*p*d ranks: the whole model is gathered on each, then cut by tensor parallelism."""
    ranks = t * p * d
    return Shares(volume=Fraction(ranks - 1, ranks), peak=Fraction(1), redundant=Fraction(1, ranks))


def full_gather(t: int, p: int) -> Shares:
    """All-gather over the t*p ranks of a replica, then cut: "HybridFlow-V" of the paper, verl and slime today."""
    return Shares(volume=Fraction(t * p - 1, t * p), peak=Fraction(1), redundant=Fraction(1, t * p))


def hybridflow(t: int, p: int, tg: int, pg: int = 1) -> Shares:
    """All-gather inside micro-data-parallel groups of t*p / (tg*pg) ranks; the training shard is part of the result."""
    return Shares(volume=Fraction(t * p - tg * pg, tg * pg * t * p), peak=Fraction(1, tg * pg), redundant=Fraction(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """One way, for given layouts."""

    name: str
    key: str
    shares: Shares | None
    """None where it cannot be done."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks that gather from one another."""
    misfits: tuple[str, ...]
    """What it assumes and the layouts do not give."""

    def seconds(self, model_bytes: int, topology: Topology, bandwidths: Bandwidths) -> float | None:
        """Least seconds, see `gather_seconds`; None where the groups are not those that would gather."""
        if self.shares is None or EVEN_EXPERTS in self.misfits:
            return None
        held = self.shares.volume * model_bytes / max(1, len(self.groups[0]) - 1)
        return gather_seconds(self.groups, float(held), topology, bandwidths)


def schemes(parallel: ParallelConfig, engines: EngineSizes, *, moe: bool = False) -> tuple[Scheme, ...]:
    """The three of the table for a pair of layouts. `moe`: whether experts are cut unlike the rest."""
    t, p, d = parallel.tp, parallel.pp, parallel.dp
    apart = [] if set(engines.ranks) <= set(parallel.ranks) else ["engines on the training ranks"]
    experts = [EVEN_EXPERTS] if moe else []
    return (
        Scheme(
            name="full all-gather (verl, slime)",
            key="full_gather",
            shares=full_gather(t, p),
            groups=_blocks(parallel, t, p),
            misfits=(*apart, *experts),
        ),
        _hybridflow(parallel, engines, [*apart, *experts]),
        Scheme(
            name="DeepSpeed-Chat",
            key="deepspeed_chat",
            shares=deepspeed_chat(t, p, d),
            groups=(tuple(parallel.ranks),),
            misfits=("a model trained by ZeRO-3 on as many ranks, not by Megatron", *apart),
        ),
    )


def _hybridflow(parallel: ParallelConfig, engines: EngineSizes, misfits: Sequence[str]) -> Scheme:
    t, p, tg = parallel.tp, parallel.pp, engines.tp
    needs = list(misfits)
    if t % tg:
        needs.append(f"an engine's tp that divides the training's, so that shards nest (tp {tg}, {t})")
    if set(engines.ranks) != set(parallel.ranks) and "engines on the training ranks" not in needs:
        needs.append("an engine on every training rank")
    return Scheme(
        name="HybridFlow (micro-dp groups)",
        key="hybridflow",
        shares=None if t % tg else hybridflow(t, p, tg),
        groups=() if t % tg else _blocks(parallel, t // tg, p),
        misfits=tuple(needs),
    )


def _blocks(parallel: ParallelConfig, tp: int, pp: int) -> tuple[tuple[int, ...], ...]:
    """Groups of tp neighbours along tp times pp stages, replica by replica."""
    t, p = parallel.tp, parallel.pp
    return tuple(
        tuple(
            parallel.first_rank + (replica * p + stage + up) * t + shard + along
            for up in range(pp)
            for along in range(tp)
        )
        for replica in range(parallel.dp)
        for stage in range(0, p, pp)
        for shard in range(0, t, tp)
    )
