"""What a studied weight sync comes to, as text and as JSON, beside other ways to do the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf.config.parallel import ParallelConfig
from rlhf.preflight.link_time import Bandwidths, Slowest, slowest
from rlhf.preflight.schemes import Scheme, schemes
from rlhf.preflight.text import gib, spans, table
from rlhf.preflight.transition import Study, Transition
from rlhf.reshard.topology import Link

OURS = "rlhf (shard to shard)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One row of the comparison. Bytes of a rank; None where a way cannot be gone."""

    name: str
    key: str
    mean: float | None
    """Received, over the ranks that receive or hold an engine."""
    most: float | None
    peak: float | None
    redundant: float | None
    seconds: float | None
    misfits: tuple[str, ...] = ()


def ways(study: Study, bandwidths: Bandwidths) -> tuple[Way, ...]:
    """Ours, counted from the plan; then the others, by formula."""
    of, received = study.transition, [one.moved for one in study.certificate.ranks]
    takers = len(of.engines.ranks)
    ours = Way(
        name=OURS,
        key="ours",
        mean=sum(received) / takers,
        most=max(received),
        peak=study.engine_shard + study.staging,
        redundant=study.training_shard,
        seconds=slowest(study.certificate, bandwidths).seconds,
    )
    others = schemes(
        of.parallel,
        of.engines,
        moe=of.spec.num_experts > 0 and (of.parallel.ep, of.parallel.etp) != (1, of.parallel.tp),
    )
    return (ours, *(_way(scheme, study, bandwidths) for scheme in others))


def _way(scheme: Scheme, study: Study, bandwidths: Bandwidths) -> Way:
    of, shares = study.transition, scheme.shares
    volume = float(shares.volume * of.model_bytes) if shares else None
    return Way(
        name=scheme.name,
        key=scheme.key,
        mean=volume,
        most=volume,
        peak=float(shares.peak * of.model_bytes) if shares else None,
        redundant=float(shares.redundant * of.model_bytes) if shares else None,
        seconds=scheme.seconds(of.model_bytes, of.topology, bandwidths),
        misfits=scheme.misfits,
    )


def render(study: Study, bandwidths: Bandwidths) -> str:
    """The report."""
    return "\n\n".join([_head(study), _traffic(study, bandwidths), _comparison(study, bandwidths)])


def layout_text(parallel: ParallelConfig) -> str:
    """Sizes above 1, and the layers of uneven stages."""
    axes = ("tp", "pp", "vpp", "dp", "ep", "etp")
    sizes = " ".join(f"{axis}{size}" for axis in axes if (size := getattr(parallel, axis)) > 1) or "one rank"
    uneven = len(set(parallel.layers_per_stage)) > 1
    return sizes + (f" (stages of {_counts(parallel.layers_per_stage)} layers)" if uneven else "")


def _counts(stages: Sequence[int]) -> str:
    """`18/20/20/22`; of many stages that come in runs, `14 x 8, 2 x 7`."""
    if len(stages) <= 8:
        return "/".join(map(str, stages))
    runs: list[list[int]] = []
    for count in stages:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return ", ".join(f"{number} x {count}" for number, count in runs)


def engines_text(of: Transition) -> str:
    """How many of which size."""
    sizes = of.engines
    ep = f" ep{sizes.ep}" if sizes.ep > 1 else ""
    return f"{sizes.dp} {'engine' if sizes.dp == 1 else 'engines'} of tp{sizes.tp}{ep}"


def _head(study: Study) -> str:
    of = study.transition
    nodes = len(set(of.topology.nodes))
    shared = len(set(of.engines.ranks) & set(of.parallel.ranks))
    pools = {0: "pools apart", len(of.engines.ranks): "engines on training ranks"}
    return "\n".join(
        [
            f"{of.model}: {of.num_parameters:,} parameters, {gib(of.model_bytes)} in {of.dtype}",
            f"  from  {layout_text(of.parallel)} on ranks {spans(of.parallel.ranks)} (Megatron)",
            f"  to    {engines_text(of)} on ranks {spans(of.engines.ranks)} ({of.engine})",
            f"  {nodes} {'node' if nodes == 1 else 'nodes'} of {of.gpus_per_node}; "
            f"{pools.get(shared, f'{shared} ranks in both pools')}",
        ]
    )


def _traffic(study: Study, bandwidths: Bandwidths) -> str:
    found, worst = study.certificate, slowest(study.certificate, bandwidths)
    most_in = max(found.ranks, key=lambda one: one.moved)
    most_out = max(found.ranks, key=lambda one: sum(one.sent.values()))
    rows, bounds = [["link", "bytes", "lower bound", "share"]], found.bound_by_link()
    total = max(1, sum(found.bytes_by_link().values()))
    rows += [
        [
            link.value,
            gib(count),
            gib(bounds[link]) if link is not Link.SAME_RANK else "-",
            f"{100 * count / total:.0f}%",
        ]
        for link, count in found.bytes_by_link().items()
    ]
    return "\n".join(
        [
            f"certificate: {gib(found.moved)} between ranks, lower bound {gib(found.bound)}, ratio {found.ratio:.3f}"
            f" (across nodes {found.far_ratio:.3f}, fanout {study.transition.fanout})",
            *table(rows),
            f"  most received {gib(most_in.moved)} (rank {most_in.rank}), "
            f"most sent {gib(sum(most_out.sent.values()))} (rank {most_out.rank})",
            f"  staging at most {gib(study.staging)} a rank",
            _prediction(worst, bandwidths),
            f"planned and proved in {study.seconds:.1f} s",
        ]
    )


def _prediction(worst: Slowest, bandwidths: Bandwidths) -> str:
    at = f"{bandwidths.intra_node_gbps:g} Gb/s inside a node and {bandwidths.inter_node_gbps:g} Gb/s across, each way"
    if worst.seconds == 0:
        return f"  nothing to wait for at {at}"
    return (
        f"  at least {worst.seconds:.3g} s at {at}: rank {worst.rank} is the slowest, {worst.direction} of its link "
        f"{worst.link.value.removeprefix('same ')}"
    )


def _comparison(study: Study, bandwidths: Bandwidths) -> str:
    of, found = study.transition, ways(study, bandwidths)
    rows = [["of a rank", "receives", "at most", "peak parameters", "redundant", "seconds"]]
    for way in found:
        figures = [gib(one) if one is not None else "-" for one in (way.mean, way.most, way.peak, way.redundant)]
        rows.append([way.name, *figures, f"{way.seconds:.3g}" if way.seconds is not None else "-"])
    lines = [
        f"beside other ways, by the formulas of arXiv:2409.19256 with M = {gib(of.model_bytes)}",
        *table(rows),
        *(f"  {way.name} assumes {'; '.join(way.misfits)}: not so here" for way in found if way.misfits),
        *_remarks(found, of.model_bytes),
    ]
    return "\n".join(lines)


def _remarks(found: Sequence[Way], model_bytes: int) -> list[str]:
    by_key = {way.key: way for way in found}
    ours, nested = by_key["ours"], by_key["hybridflow"]
    lines = [
        "  verl and slime gather bucket by bucket today: the same volume, at a peak of an engine's shard and a bucket",
        "  peak: of the engine's parameters and what the transfer needs beside them; redundant: the training shard, "
        "where it stays beside them",
    ]
    less = (ours.mean or 0.0) - (nested.mean or 0.0)
    if nested.mean is not None and not nested.misfits and less > 0.01 * model_bytes:
        lines.append(
            f"  HybridFlow receives {gib(less)} less: its engines take ranks that lie apart, so "
            "that each rank's training shard is part of its engine's; those of --dst take neighbours"
        )
    return lines


def as_json(study: Study, bandwidths: Bandwidths) -> Mapping[str, object]:
    """Everything of the report as plain data; bytes are whole numbers."""
    of, found, worst = study.transition, study.certificate, slowest(study.certificate, bandwidths)
    return {
        "model": of.model,
        "num_parameters": of.num_parameters,
        "model_bytes": of.model_bytes,
        "dtype": of.dtype,
        "src": {axis: getattr(of.parallel, axis) for axis in ("tp", "pp", "vpp", "dp", "ep", "etp", "first_rank")}
        | {"layers_per_stage": list(of.parallel.chunk_layers(of.spec.num_layers, where="--src"))},
        "dst": {axis: getattr(of.engines, axis) for axis in ("tp", "dp", "ep", "first_rank", "stride")}
        | {"engine": of.engine},
        "gpus_per_node": of.gpus_per_node,
        "moved": found.moved,
        "bound": found.bound,
        "ratio": found.ratio,
        "fanout": of.fanout.value,
        "bound_across_nodes": found.far_bound,
        "by_link": {link.value: count for link, count in found.bytes_by_link().items()},
        "ranks": [
            {
                "rank": one.rank,
                "bound": one.bound,
                "received": {link.value: count for link, count in one.received.items()},
                "sent": {link.value: count for link, count in one.sent.items()},
            }
            for one in found.ranks
        ],
        "staging_bytes": study.staging,
        "predicted": {
            "seconds": worst.seconds,
            "rank": worst.rank,
            "link": worst.link.value,
            "direction": worst.direction,
            "intra_node_gbps": bandwidths.intra_node_gbps,
            "inter_node_gbps": bandwidths.inter_node_gbps,
        },
        "ways": [
            {
                "name": way.key,
                "received_mean": way.mean,
                "received_most": way.most,
                "peak": way.peak,
                "redundant": way.redundant,
                "seconds": way.seconds,
                "misfits": list(way.misfits),
            }
            for way in ways(study, bandwidths)
        ],
        "planning_seconds": study.seconds,
    }
