"""Models in their roles: weights, optimizer, and where a trained one is saved."""

from collections.abc import Callable
from pathlib import Path

from rlhf.checkpoint.convert.load import load_stored
from rlhf.checkpoint.hf_export import export_hf
from rlhf.config.model import FrozenRoleConfig, ModelConfig, TrainedRoleConfig
from rlhf.config.run import PPORunConfig
from rlhf.families.folder import has_safetensors, resolve_folder
from rlhf.families.frozen import changing_tensors, frozen_tensors
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import ModelGroups, make_groups
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.load import set_weights
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.optimizer import build_optimizer
from rlhf.mcore.params import current_params
from rlhf.mcore.transfer import Placed, transfer_layouts, transfer_weights
from rlhf.models.calls import RoleCalls
from rlhf.models.critic import Critic
from rlhf.models.policy import Policy
from rlhf.trainers.site import Site, note_once


def spec_of_role(model: ModelConfig) -> ModelSpec:
    """Of the checkpoint that a role names."""
    return read_spec(resolve_folder(model.path))


def make_model(
    role: TrainedRoleConfig | FrozenRoleConfig, groups: ModelGroups, head: Head, site: Site, seed: int
) -> MegatronModel | None:
    """The role's model, with its weights unless they are the actor's; None outside its pool."""
    if not groups.is_member:
        return None
    site.ranks.progress.tick(f"load {role.model.path}")
    spec = spec_of_role(role.model)
    patterns = role.freeze if isinstance(role, TrainedRoleConfig) else ()
    model = build_model(
        spec,
        role.model,
        role.parallel,
        groups,
        head=head,
        device=site.ranks.device,
        seed=seed,
        trainable=isinstance(role, TrainedRoleConfig),
        frozen=frozen_tensors(spec, patterns, head=head, where="freeze"),
        overlap_grad_reduce=isinstance(role, TrainedRoleConfig) and role.optim.overlap_grad_reduce,
        overlap_param_gather=isinstance(role, TrainedRoleConfig) and role.optim.overlap_param_gather,
        span=site.span,
    )
    if role.model.init == "checkpoint" and not has_safetensors(folder := resolve_folder(role.model.path)):
        load_stored(model, folder)
    elif role.model.init != "actor":
        set_weights(model, role.model)
    return model


def trained_tensors(actor: TrainedRoleConfig) -> frozenset[str] | None:
    """Tensors that training can change; None: all of them."""
    if not actor.freeze:
        return None
    return changing_tensors(spec_of_role(actor.model), actor.freeze, head=Head.LM, where="actor.freeze")


def make_policy(
    name: str,
    config: PPORunConfig,
    role: TrainedRoleConfig | FrozenRoleConfig,
    calls: RoleCalls,
    site: Site,
    actor: MegatronModel | None = None,
) -> Policy:
    """A language model in its role; `actor` gives it its weights if the config says so. Collective over the job."""
    groups = make_groups(role.parallel, site.ranks.groups)
    model = make_model(role, groups, Head.LM, site, config.seed)
    _inherit(name, config, role, actor, model, Head.LM, site)
    optimizer = build_optimizer(model, role.optim) if model and isinstance(role, TrainedRoleConfig) else None
    return Policy(
        name=name,
        groups=groups,
        model=model,
        optimizer=optimizer,
        calls=calls,
        temperature=config.rollout.sampling.temperature,
        microbatch_tokens=role.microbatch_tokens,
        phase=site.timers.phase,
        tick=site.ranks.progress.tick,
    )


def make_critic(config: PPORunConfig, calls: RoleCalls, site: Site, actor: MegatronModel | None) -> Critic:
    """The value model in its role. Collective over the job."""
    groups = make_groups(config.critic.parallel, site.ranks.groups)
    model = make_model(config.critic, groups, Head.VALUE, site, config.seed)
    _inherit("critic", config, config.critic, actor, model, Head.VALUE, site)
    return Critic(
        groups=groups,
        model=model,
        optimizer=build_optimizer(model, config.critic.optim) if model else None,
        calls=calls,
        microbatch_tokens=config.critic.microbatch_tokens,
        phase=site.timers.phase,
        tick=site.ranks.progress.tick,
    )


def make_exporter(
    role: TrainedRoleConfig, model: MegatronModel | None, groups: ModelGroups, site: Site
) -> Callable[[Path], None]:
    """Writes a model as a Hugging Face checkpoint. What it gives is collective over the model's pool."""

    def export(target: Path) -> None:
        if model is None:
            return
        export_hf(
            model.spec,
            megatron_layout(model.spec, role.parallel, head=model.head, dtype=role.model.dtype),
            current_params(model),
            target,
            head=model.head,
            source_folder=resolve_folder(role.model.path),
            group=groups.cpu,
            topology=site.topology,
            overwrite=True,
        )

    return export


def _placed(name: str, role: TrainedRoleConfig | FrozenRoleConfig, head: Head) -> Placed:
    return Placed(name=name, spec=spec_of_role(role.model), parallel=role.parallel, head=head, dtype=role.model.dtype)


def _inherit(
    name: str,
    config: PPORunConfig,
    role: TrainedRoleConfig | FrozenRoleConfig,
    actor: MegatronModel | None,
    model: MegatronModel | None,
    head: Head,
    site: Site,
) -> None:
    """Fill a role's new model from the actor's, where its config says so. Collective over the job."""
    if role.model.init != "actor":
        return
    group = site.ranks.groups.device_group([tuple(sorted({*config.actor.parallel.ranks, *role.parallel.ranks}))])
    text = ""
    if group is not None:
        site.ranks.progress.tick(f"{name} from the actor")
        certificate = transfer_weights(
            transfer_layouts(_placed("actor", config.actor, Head.LM), _placed(name, role, head)),
            actor,
            model,
            topology=site.topology,
            group=group,
            device=site.ranks.device,
            bucket_bytes=config.sync.bucket_bytes,
        )
        text = f"{name} from the actor: {certificate.render()}"
    note_once(site, text)
