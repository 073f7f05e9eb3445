"""Where a model comes from and how it is held in memory; how it is optimised."""

from dataclasses import dataclass, field

from rlhf.config.checks import at_least, between, more_than, one_of, refuse
from rlhf.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One model."""

    path: str
    """Hugging Face checkpoint folder (config.json, safetensors), or a hub id looked up in the local cache."""
    init: str = "checkpoint"
    """checkpoint: weights from path. random: weights drawn from the seed; only config.json of path is read. actor (of
    critic and reference): the actor's weights, sent from rank to rank; only config.json of path is read."""
    dtype: str = "float32"
    """Of parameters and activations: float32 or bfloat16 (bfloat16 keeps fp32 master weights in the optimizer)."""
    recompute: str = "none"
    """Activation recomputation: none, or full (every layer's activations are recomputed in the backward pass)."""

    def __post_init__(self) -> None:
        if not self.path.strip():
            refuse("model.path: empty; needs a checkpoint folder or a hub id; set model.path=FOLDER")
        one_of("model.init", self.init, ("checkpoint", "random", "actor"))
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        one_of("model.recompute", self.recompute, ("none", "full"))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW with Megatron's distributed optimizer."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    schedule: str = "constant"
    """After the warm-up: constant, linear or cosine decay to min_lr over decay_steps."""
    warmup_steps: int = 0
    """Optimizer steps from 0 to lr, linearly."""
    decay_steps: int = 0
    """Optimizer steps from lr to min_lr, counted after the warm-up; unused when schedule is constant."""
    weight_decay: float = 0.0
    """Decoupled decay per step, not applied to norms and biases."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 never clips."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks, bucket by bucket, while the last microbatch's backward pass runs."""
    overlap_param_gather: bool = False
    """Gather updated weights over data-parallel ranks during the next forward pass; needs overlap_grad_reduce, which
    cuts them into buckets."""

    def __post_init__(self) -> None:
        more_than("optim.lr", self.lr, 0.0)
        at_least("optim.min_lr", self.min_lr, 0.0)
        if self.min_lr > self.lr:
            refuse(f"optim.min_lr: {self.min_lr} is above optim.lr = {self.lr}; needs at most that; lower it")
        one_of("optim.schedule", self.schedule, ("constant", "linear", "cosine"))
        at_least("optim.warmup_steps", self.warmup_steps, 0)
        at_least("optim.decay_steps", self.decay_steps, 0 if self.schedule == "constant" else 1)
        at_least("optim.weight_decay", self.weight_decay, 0.0)
        between("optim.beta1", self.beta1, 0.0, 1.0)
        between("optim.beta2", self.beta2, 0.0, 1.0)
        more_than("optim.eps", self.eps, 0.0)
        at_least("optim.clip_grad", self.clip_grad, 0.0)
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            refuse(
                "optim.overlap_param_gather: true, but without optim.overlap_grad_reduce all weights are one bucket, "
                "whose gather overlaps with nothing; needs both; set optim.overlap_grad_reduce=true"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRoleConfig:
    """A model that is trained: the actor, or the critic."""

    model: ModelConfig
    """What it is."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Its layout and its pool of ranks."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """How it is trained."""
    microbatch_tokens: int = 8192
    """Most tokens in one forward pass on a data-parallel rank; a longer single sequence passes alone."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained, by their names in the checkpoint, in which * stands for any characters."""

    def __post_init__(self) -> None:
        at_least("microbatch_tokens", self.microbatch_tokens, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenRoleConfig:
    """A model that only scores: the reference."""

    model: ModelConfig
    """What it is."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Its layout and its pool of ranks."""
    microbatch_tokens: int = 16384
    """Most tokens in one forward pass on a data-parallel rank; a longer single sequence passes alone."""

    def __post_init__(self) -> None:
        at_least("microbatch_tokens", self.microbatch_tokens, 1)
