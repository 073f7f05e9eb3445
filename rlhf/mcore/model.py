"""A Megatron model on this rank: built from a spec and a layout, its weights not yet set."""

from collections.abc import Set
from dataclasses import dataclass, replace

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.families.admissible import check_layout
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.gpt import HiddenStatesGPT
from rlhf.mcore.groups import ModelGroups
from rlhf.mcore.layer_spec import make_layer_spec, prepare_megatron, uses_transformer_engine
from rlhf.mcore.layout import frozen_params, layers_before
from rlhf.mcore.param_names import local_name
from rlhf.mcore.param_sync import gather_before_use
from rlhf.mcore.spans import MegatronSpans
from rlhf.mcore.transformer_config import make_transformer_config
from rlhf.metrics.timers import SpanFn, no_span


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """This rank's stage and shard of a model: one chunk of layers, or several when the pipeline is virtual."""

    spec: ModelSpec
    parallel: ParallelConfig
    groups: ModelGroups
    head: Head
    config: TransformerConfig
    modules: tuple[HiddenStatesGPT, ...]
    """Of each chunk, in the order of the model."""
    chunks: tuple[nn.Module, ...]
    """What the schedules run: each module in Megatron's DistributedDataParallel when it is trained, else the module."""
    device: torch.device
    seed: int
    span: SpanFn = no_span
    """Names what is done with the model, for timelines."""

    @property
    def module(self) -> HiddenStatesGPT:
        """The module of a stage that is one chunk."""
        (module,) = self.modules
        return module

    @property
    def chunk(self) -> nn.Module:
        """What the schedules run of a stage that is one chunk."""
        (chunk,) = self.chunks
        return chunk


def build_model(
    spec: ModelSpec,
    model: ModelConfig,
    parallel: ParallelConfig,
    groups: ModelGroups,
    *,
    head: Head,
    device: torch.device,
    seed: int,
    trainable: bool,
    frozen: Set[str] = frozenset(),
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    span: SpanFn = no_span,
) -> MegatronModel:
    """Build this rank's part. On the ranks of the pool only; no communication.

    Weights are uninitialised memory until `load_weights` or `draw_weights` has run; make the optimizer after that.
    The gradients of a trainable model are sums over microbatches and replicas: nothing divides them.

    Args:
        spec: What the model is.
        model: How it is held in memory (dtype, recompute).
        parallel: Its layout.
        groups: Of this layout, from `make_groups`.
        head: What the last stage's hidden states are for.
        device: Where its weights live.
        seed: Of everything random in it: dropout, and weights that no checkpoint gives.
        trainable: Whether gradients are kept.
        frozen: Logical names of weights of a trainable model that are not trained, from `frozen_tensors`: they have no
            gradient and no optimizer state, and are not in the gradient norm.
        overlap_grad_reduce: Of a trainable model, like the next: as OptimConfig's.
        overlap_param_gather: Weights are then stale from a step to the next forward pass; see `current_params`.
        span: Names what is done with the model, for timelines; Megatron's own timers go there too.

    Raises:
        LayoutError: The layout cannot hold the model.
        PatchError: Megatron-Core is not the one that the patches were written for.
    """
    assert groups.collection is not None, f"rank {groups.rank} is outside the model's pool {groups.grid.ranks}"
    check_layout(spec, parallel, where="parallel")
    prepare_megatron(device)
    use_te = uses_transformer_engine(device)
    config = make_transformer_config(
        spec, model, parallel, pp_rank=groups.pp_rank, use_te=use_te, on_cpu=device.type == "cpu"
    )
    modules = tuple(
        HiddenStatesGPT(
            spec,
            config,
            make_layer_spec(qk_norm=spec.qk_norm, use_te=use_te, num_experts=spec.num_experts),
            head=head,
            collection=groups.collection,
            device=device,
            seed=seed,
            vp_stage=vp_stage,
        )
        for vp_stage in range(parallel.vpp)
    )
    chunks: tuple[nn.Module, ...] = modules
    if trainable:
        stays = frozen_params(spec, parallel, head=head, stage=groups.pp_rank, frozen=frozen)
        for module, before in zip(modules, layers_before(spec, parallel, groups.pp_rank), strict=True):
            _freeze(module, stays, before)
        ddp = _ddp_config(overlap_grad_reduce=overlap_grad_reduce, overlap_param_gather=overlap_param_gather)
        chunks = tuple(
            DistributedDataParallel(
                config, replace(ddp), module, disable_bucketing=vp_stage > 0, pg_collection=groups.collection
            )
            for vp_stage, module in enumerate(modules)
        )
        if overlap_grad_reduce:  # or the first microbatch's gradients would be reduced as if they were all
            no_sync = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = no_sync if parallel.vpp > 1 else no_sync[0]
    else:
        for module in modules:
            module.requires_grad_(False).eval()
    if span is not no_span:
        config.timers = MegatronSpans(span)
    return MegatronModel(spec, parallel, groups, head, config, modules, chunks, device, seed, span)


def _freeze(module: HiddenStatesGPT, frozen: Set[str], layers_before: int) -> None:
    for name, param in module.named_parameters():
        if local_name(name, layers_before) in frozen:
            param.requires_grad_(False)
    trains = any(param.requires_grad for param in module.parameters())
    if frozen and trains and module.pre_process and module.config.recompute_granularity == "full":
        # A recomputed layer hands gradients to its weights only if its input has one, and a frozen embedding has none.
        module.embedding.register_forward_hook(lambda _module, _input, out: _with_gradient(out))


def _with_gradient(embedded: Tensor) -> Tensor:
    return embedded.requires_grad_() if torch.is_grad_enabled() and embedded.is_leaf else embedded


def _ddp_config(*, overlap_grad_reduce: bool, overlap_param_gather: bool) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        check_for_nan_in_grad=False,
    )


def head_weight(model: MegatronModel) -> Tensor:
    """Weight that the loss applies to the hidden states. On last-stage ranks only.

    No communication, but when the optimizer's `overlap_param_gather` left it stale: then collective over dp.

    Returns:
        Lm head: [padded vocabulary / tp, H], this rank's rows (the embedding itself when tied on one stage).
        Value head: [1, H], the same on all tensor-parallel ranks; so is its gradient.
    """
    assert model.groups.is_last_stage, f"stage {model.groups.pp_rank} has no head"
    last = model.modules[-1]
    weight = last.output_layer.weight
    if weight is None:
        weight = last.shared_embedding_or_output_weight()
    gather_before_use(model.chunks[-1], weight)
    return weight
