"""Bytes that each role holds on each rank, and their sum where roles share ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf.config.checks import refuse
from rlhf.config.run import PPORunConfig, RunConfig
from rlhf.families.spec import ModelSpec
from rlhf.mcore.memory import model_bytes
from rlhf.preflight.roles import ModelRole, model_roles
from rlhf.preflight.text import GIB, gib, spans, table
from rlhf.reshard.layout import ITEM_BYTES
from rlhf.rollout.native.memory import engine_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What one role holds on one rank, in bytes but for the parameters."""

    role: str
    rank: int
    parameters: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    awake: int = 0
    """Only while responses are generated: keys and values, and on CPUs packed copies of the engine's weights."""
    activations: int = 0
    """Estimate of the largest forward and backward pass; only while the role works."""

    @property
    def always(self) -> int:
        """Held from the start to the end."""
        return self.weights + self.gradients + self.optimizer


def holdings(config: RunConfig, specs: Mapping[str, ModelSpec], *, with_engine: bool = True) -> list[Holding]:
    """Of every rank of every role whose model is known; layouts must be admissible.

    Engines other than the native one are left out, and all without `with_engine`.
    """
    found = []
    for role in model_roles(config, specs):
        of_stage = {}
        for rank in role.grid.ranks:
            stage = role.grid.coords(rank)["pp"]
            if stage not in of_stage:
                of_stage[stage] = _of_stage(role, stage)
            found.append(Holding(role=role.name, rank=rank, **of_stage[stage]))
    if with_engine and isinstance(config, PPORunConfig) and config.rollout.engine == "native" and "actor" in specs:
        dtype = config.actor.model.dtype
        engine = engine_bytes(specs["actor"], config.rollout, dtype=dtype, on_cpu=config.job.device == "cpu")
        found += [
            Holding(
                role="rollout",
                rank=rank,
                parameters=engine.weights // ITEM_BYTES[dtype],
                weights=engine.weights,
                awake=engine.awake,
            )
            for rank in config.rollout.ranks
        ]
    return found


def _of_stage(role: ModelRole, stage: int) -> dict[str, int]:
    told = model_bytes(
        role.spec,
        role.config.parallel,
        head=role.head,
        dtype=role.config.model.dtype,
        trainable=role.is_trained,
        stage=stage,
        frozen=role.frozen,
    )
    return {
        "parameters": told.parameters,
        "weights": told.weights,
        "gradients": told.gradients,
        "optimizer": told.optimizer,
        "activations": activation_bytes(role, stage),
    }


def activation_bytes(role: ModelRole, stage: int) -> int:
    """Estimate of what a rank keeps of its microbatches between forward and backward, with flash attention.

    Of each layer: inputs of norms, projections, attention and MLP, divided over tp (sequence parallel); with full
    recomputation its input alone, and all of one layer at a time. A stage has pp - stage microbatches under way; with
    several chunks each chunk holds its own: (vpp - 1) pp + 2 (pp - stage - 1) + 1 passes of a chunk's share of layers.
    Where tp exceeds the KV heads, a rank has a whole KV head, and its group's fused rows beside its own. With experts,
    each token's input and activations once for each of its experts, as if they were chosen evenly.
    Source: arXiv:2205.05198, section 4, written out for gated MLPs and grouped queries; arXiv:2104.04473, section 2.2.
    """
    spec, parallel = role.spec, role.config.parallel
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    token = ITEM_BYTES[role.config.model.dtype] / parallel.tp
    layer_input = token * spec.hidden_size
    sharing = max(1, parallel.tp // spec.num_kv_heads)
    group = sharing * (queries + 2 * keys) if sharing > 1 else 0
    mlp = 3 * spec.ffn_size
    if spec.num_experts:
        mlp = spec.experts_per_token * (3 * spec.moe_ffn_size + 2 * spec.hidden_size)
    layer = token * (4 * spec.hidden_size + 3 * queries + 4 * sharing * keys + group + mlp)
    layers = parallel.stage_layers(spec.num_layers, where=f"{role.name}.parallel")[stage]
    under_way: float = parallel.pp - stage
    if parallel.vpp > 1:
        under_way = ((parallel.vpp - 1) * parallel.pp + 2 * (parallel.pp - stage - 1) + 1) / parallel.vpp
    if not role.is_trained:
        kept = layer
    elif role.config.model.recompute == "full":
        kept = layers * layer_input * under_way + 2 * layer
    else:
        kept = layers * layer * under_way + layer
    return int(kept * role.config.microbatch_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSum:
    """All roles of one rank together, in bytes."""

    rank: int
    always: int
    generating: int
    """With what engines hold while they are awake."""
    training: int
    """With the largest estimate of activations of any of its roles: they work one after the other."""


def sums(held: Sequence[Holding]) -> list[RankSum]:
    """By rank."""
    by_rank: dict[int, list[Holding]] = {}
    for one in held:
        by_rank.setdefault(one.rank, []).append(one)
    return [
        RankSum(
            rank=rank,
            always=(always := sum(one.always for one in ones)),
            generating=always + sum(one.awake for one in ones),
            training=always + max(one.activations for one in ones),
        )
        for rank, ones in sorted(by_rank.items())
    ]


def render_memory(held: Sequence[Holding]) -> str:
    """For each role the rank that holds most and the one that holds least; then the sums of ranks."""
    rows = [["role", "", "rank", "parameters", "weights", "gradients", "optimizer", "awake", "sum", "activations"]]
    for role in dict.fromkeys(one.role for one in held):
        mine = [one for one in held if one.role == role]
        most = max(mine, key=lambda one: (one.always + one.awake, -one.rank))
        least = min(mine, key=lambda one: (one.always + one.awake, one.rank))
        same = most.always + most.awake == least.always + least.awake
        rows += [_row("each" if same else "most", most)]
        rows += [] if same else [_row("least", least)]
    lines = [
        "memory of a rank by role",
        "  awake: while an engine generates, its KV cache above all; activations: an estimate of the largest pass",
        *table(rows),
    ]
    totals = sums(held)
    rows = [["all roles of a rank", "most", "on ranks", "least", "on ranks"]]
    for title, of in (
        ("always", lambda one: one.always),
        ("while engines are awake", lambda one: one.generating),
        ("while training, with activations", lambda one: one.training),
    ):
        most, least = max(map(of, totals)), min(map(of, totals))
        rows.append(
            [
                title,
                *(gib(most), spans(one.rank for one in totals if of(one) == most)),
                *(gib(least), spans(one.rank for one in totals if of(one) == least)),
            ]
        )
    return "\n".join([*lines, *table(rows)])


def _row(which: str, one: Holding) -> list[str]:
    parts = (one.weights, one.gradients, one.optimizer, one.awake, one.always + one.awake, one.activations)
    return [one.role, which, str(one.rank), f"{one.parameters:,}", *(gib(part) for part in parts)]


def check_fits(held: Sequence[Holding], *, gpu_memory_gib: float, staging_bytes: int) -> list[str]:
    """Refuse what a GPU cannot hold; notes on what is close to it."""
    limit, totals = gpu_memory_gib * GIB, sums(held)
    full = max(totals, key=lambda one: one.generating)
    if full.generating + staging_bytes > limit:
        refuse(
            f"--gpu-memory: rank {full.rank} holds {gib(full.generating + staging_bytes)} when its engine is awake "
            f"(roles {gib(full.always)}, KV cache and the like {gib(full.generating - full.always)}, staging of a sync "
            f"{gib(staging_bytes)}); needs less than {gpu_memory_gib:g} GiB; lower rollout.kv_cache_tokens, or raise "
            "tp, pp or dp of the roles on it"
        )
    busy = max(totals, key=lambda one: one.training)
    room = f"{gib(max(0, limit - busy.training))} of {gpu_memory_gib:g} GiB left"
    if busy.training > limit:
        return [
            f"memory: rank {busy.rank} is estimated at {gib(busy.training)} while it trains, above {gpu_memory_gib:g} "
            "GiB; lower microbatch_tokens, set model.recompute=full, or raise tp, pp or dp of the roles on it"
        ]
    return [
        f"memory: the fullest rank while training is {busy.rank}, {room} for what is not counted "
        "(libraries, communication buffers, fragments)"
    ]
