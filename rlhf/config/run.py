"""A whole run: its parts, and the rules that join two parts."""

from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from rlhf.config.algorithm import PPOConfig, SFTConfig
from rlhf.config.checkpoint import CheckpointConfig
from rlhf.config.checks import at_least, between, folder_name, one_of, refuse
from rlhf.config.data import DataConfig, RewardConfig
from rlhf.config.job import JobConfig
from rlhf.config.mismatch import MismatchConfig
from rlhf.config.model import FrozenRoleConfig, TrainedRoleConfig
from rlhf.config.profile import ProfileConfig
from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.config.sync import SyncConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is reported, and where."""

    folder: str = "runs"
    """Run folders are made here: FOLDER/NAME."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb: bool = False
    """Report to Weights & Biases; offline unless WANDB_API_KEY is set."""
    wandb_project: str = "rlhf"
    """Project there."""
    console: str = "auto"
    """auto (live table on a terminal, plain lines elsewhere), live or plain."""
    samples_per_step: int = 4
    """Samples written to samples.jsonl at each step."""
    samples_every_steps: int = 0
    """Every so many steps all its rows, with tokens and numbers of each, go to samples/step_N.parquet; 0 never."""
    next_command: str = ""
    """Command that the report at the end of the run suggests; empty suggests none."""

    def __post_init__(self) -> None:
        one_of("log.console", self.console, ("auto", "live", "plain"))
        at_least("log.samples_per_step", self.samples_per_step, 0)
        at_least("log.samples_every_steps", self.samples_every_steps, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on the held-out problems."""

    every_steps: int = 0
    """Evaluate every so many steps; 0 only before the first and after the last."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """Distribution of the evaluated responses."""
    samples_per_prompt: int = 1
    """Responses to each held-out problem."""
    pass_k: int = 1
    """k of held_out/pass_at_k: how likely one of k responses solves a problem; at most samples_per_prompt."""
    solved_at: float = 1.0
    """A response counts as solved when its reward is at least this."""

    def __post_init__(self) -> None:
        at_least("eval.every_steps", self.every_steps, 0)
        if at_least("eval.samples_per_prompt", self.samples_per_prompt, 1):
            between("eval.pass_k", self.pass_k, 1, self.samples_per_prompt)
        if self.samples_per_prompt > 1 and self.sampling.temperature == 0.0:
            refuse(
                f"eval.samples_per_prompt: {self.samples_per_prompt} given, but eval.sampling.temperature = 0 gives "
                f"the same response each time; needs one sample or a temperature; set eval.sampling.temperature=1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PPORunConfig:
    """PPO with actor, critic, reference, rollout engines and a reward function."""

    name: str
    """Name of the run and of its folder."""
    trainer: str = "ppo"
    """Which loop runs: ppo, or sft (its keys differ)."""
    seed: int = 1
    """Of everything random in the run."""
    num_steps: int = 100
    """Steps: rollout, scoring, update."""
    actor: TrainedRoleConfig
    """The policy that is trained."""
    critic: TrainedRoleConfig
    """The value model; its model.path may be the actor's checkpoint or a reward model's."""
    reference: FrozenRoleConfig
    """The policy that the KL penalty holds on to."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Engines that sample responses."""
    data: DataConfig
    """Prompts."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scoring."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """The algorithm."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """Weights from actor to engines."""
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    """Log-probs of engines against the trainer's."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Held-out problems."""
    save_hf: str = ""
    """Folder for the trained actor as a Hugging Face checkpoint, written after the last step; empty saves none."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving the run so that it can go on, and going on."""
    job: JobConfig = field(default_factory=JobConfig)
    """Processes."""
    log: LogConfig = field(default_factory=LogConfig)
    """Reports."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Timelines of single steps."""

    def __post_init__(self) -> None:
        folder_name("name", self.name)
        one_of("trainer", self.trainer, ("ppo",))
        at_least("num_steps", self.num_steps, 1)
        self.profile.check_steps(self.num_steps)
        _check_source(self.actor)
        self._check_inheritance()
        self._check_rollout()
        self._check_lengths()
        self._check_eval()
        self.checkpoint.check_export(self.save_hf, Path(self.log.folder) / self.name)
        if self.reward.function.startswith("rlhf.reward.gym:") and self.data.source != "reasoning_gym":
            refuse(
                f"reward.function: {self.reward.function} scores reasoning_gym problems, but data.source "
                f"= {self.data.source}; needs a function that knows its rows; set reward.function=MODULE:FUNCTION"
            )
        if self.reward.timeout_s >= self.job.progress_limit_s:
            refuse(
                f"reward.timeout_s: {self.reward.timeout_s} is not less than job.progress_limit_s = "
                f"{self.job.progress_limit_s}, so a slow reward would look like a hung rank; lower the first"
            )
        if self.ppo.critic_warmup_steps >= self.num_steps:
            refuse(
                f"ppo.critic_warmup_steps: {self.ppo.critic_warmup_steps} of num_steps = {self.num_steps} leave no "
                f"step that trains the actor; lower the first or raise num_steps"
            )

    def _check_inheritance(self) -> None:
        for name, role in self.inheritors().items():
            if role.model.dtype != self.actor.model.dtype:
                refuse(
                    f"{name}.model.dtype: {role.model.dtype} differs from actor.model.dtype = "
                    f"{self.actor.model.dtype}, and weights are not cast on the way; set them alike, or "
                    f"{name}.model.init=checkpoint"
                )

    def _check_rollout(self) -> None:
        if self.rollout.sampling.temperature <= 0.0:
            refuse(
                "rollout.sampling.temperature: 0 samples the same response every time, and nothing can be learnt "
                "from it; needs more than 0; set rollout.sampling.temperature=1"
            )
        used = [("rollout.sampling", self.rollout.sampling)]
        if self.data.held_out:
            used.append(("eval.sampling", self.eval.sampling))
        for name, sampling in used:
            self.rollout.check_draws(name, sampling)
            if self.data.max_prompt_tokens + sampling.max_new_tokens > self.rollout.kv_cache_tokens:
                refuse(
                    f"rollout.kv_cache_tokens: {self.rollout.kv_cache_tokens} is less than data.max_prompt_tokens + "
                    f"{name}.max_new_tokens = {self.data.max_prompt_tokens} + {sampling.max_new_tokens}; "
                    f"raise the first or lower one of the others"
                )

    def _check_lengths(self) -> None:
        longest, penalty = self.rollout.sampling.max_new_tokens, self.ppo.length_penalty
        if self.ppo.shaping.truncated == "mask" and self.rollout.sampling.ignore_eos:
            refuse(
                "ppo.shaping.truncated: mask leaves no response over, for with rollout.sampling.ignore_eos = true all "
                "are cut off; set ppo.shaping.truncated=keep"
            )
        if penalty.min_tokens > longest:
            refuse(
                f"ppo.length_penalty.min_tokens: {penalty.min_tokens} is more than rollout.sampling.max_new_tokens = "
                f"{longest}, so that every response is too short; lower the first"
            )
        if penalty.max_tokens and penalty.max_tokens - penalty.cache_tokens >= longest:
            refuse(
                f"ppo.length_penalty.max_tokens: with cache_tokens = {penalty.cache_tokens} the penalty begins beyond "
                f"{penalty.max_tokens - penalty.cache_tokens} tokens, and no response is longer than "
                f"rollout.sampling.max_new_tokens = {longest}; lower the first or raise cache_tokens"
            )

    def _check_eval(self) -> None:
        if self.eval.every_steps and not self.data.held_out:
            refuse(
                f"eval.every_steps: {self.eval.every_steps} given, but data.held_out = 0 keeps no problems to evaluate "
                f"on; set eval.every_steps=0, or data.held_out=200"
            )

    @property
    def extra_prompts(self) -> int:
        """Prompts that a step asks beyond ppo.prompts_per_step."""
        return ceil(self.ppo.prompts_per_step * self.rollout.oversample)

    def inheritors(self) -> dict[str, TrainedRoleConfig | FrozenRoleConfig]:
        """The roles whose weights are the actor's at the start."""
        roles: dict[str, TrainedRoleConfig | FrozenRoleConfig] = {"critic": self.critic, "reference": self.reference}
        return {name: role for name, role in roles.items() if role.model.init == "actor"}

    def pools(self) -> dict[str, range]:
        """Ranks of each role."""
        return {
            "actor": self.actor.parallel.ranks,
            "critic": self.critic.parallel.ranks,
            "reference": self.reference.parallel.ranks,
            "rollout": self.rollout.ranks,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTRunConfig:
    """Supervised fine-tuning of one model, saved as a Hugging Face checkpoint."""

    name: str
    """Name of the run and of its folder."""
    trainer: str = "sft"
    """Which loop runs: sft, or ppo (its keys differ)."""
    seed: int = 1
    """Of everything random in the run."""
    num_steps: int = 100
    """Optimizer steps."""
    actor: TrainedRoleConfig
    """The model that is trained."""
    data: DataConfig
    """Rows with prompt and answer."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """The algorithm."""
    save_hf: str = ""
    """Folder for the trained model as a Hugging Face checkpoint; empty saves it inside the run folder."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving the run so that it can go on, and going on."""
    job: JobConfig = field(default_factory=JobConfig)
    """Processes."""
    log: LogConfig = field(default_factory=LogConfig)
    """Reports."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Timelines of single steps."""

    def __post_init__(self) -> None:
        folder_name("name", self.name)
        one_of("trainer", self.trainer, ("sft",))
        at_least("num_steps", self.num_steps, 1)
        _check_source(self.actor)
        self.profile.check_steps(self.num_steps)
        self.checkpoint.check_export(self.save_hf, Path(self.log.folder) / self.name)

    def pools(self) -> dict[str, range]:
        """Ranks of each role."""
        return {"actor": self.actor.parallel.ranks}


RunConfig = PPORunConfig | SFTRunConfig


def _check_source(actor: TrainedRoleConfig) -> None:
    if actor.model.init == "actor":
        refuse("actor.model.init: actor is for critic and reference; needs checkpoint or random; change it")


def check_world(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError unless the pools of a run cover ranks 0..world_size-1 and nothing more.

    Under `rlhf.config.checks.collecting` the fault is of the job's size, and does not put the roles' settings in doubt.
    """
    pools = config.pools()
    beyond = [f"{role} {r.start}..{r.stop - 1}" for role, r in pools.items() if r.stop > world_size]
    if beyond:
        refuse(
            f"job size: {world_size} ranks, but pools reach beyond them ({', '.join(beyond)}); "
            f"start {max(ranks.stop for ranks in pools.values())}, or lower the sizes or first_rank of these roles"
        )
    idle = sorted(set(range(world_size)) - {rank for ranks in pools.values() for rank in ranks})
    if idle:
        shown = idle if len(idle) <= 8 else f"{idle[:8]} and {len(idle) - 8} more"
        refuse(
            f"pools: ranks {shown} of {world_size} belong to no role; start fewer, or raise a role's dp "
            f"(now {', '.join(f'{role} {r.start}..{r.stop - 1}' for role, r in pools.items())})"
        )
