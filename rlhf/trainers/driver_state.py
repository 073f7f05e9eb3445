"""What a resume needs to go on as if nothing had happened, beside weights and optimizer states. Nothing else holds any.

Every rank holds an equal state. A step returns the next one; nobody changes the one it was given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

import torch
from torch.distributed import ProcessGroup

from rlhf.algos.kl import kl_estimate
from rlhf.algos.kl_controller import next_kl_coef
from rlhf.algos.running import RunningMoments
from rlhf.config.algorithm import PPOConfig
from rlhf.config.run import PPORunConfig
from rlhf.data.batch import Experience
from rlhf.dist.agree import gather
from rlhf.errors import CheckpointError

NOTHING_YET = RunningMoments()


@dataclass(frozen=True, slots=True)
class StepTally:
    """What the rows of one rank add to the state; those of all ranks add up to the step's."""

    rewards: RunningMoments
    """Rewards before normalisation, of rows that count."""
    returns: RunningMoments
    """Of tokens that count."""
    kl: RunningMoments
    """KL summed over a response, of rows that count."""
    left: tuple[int, ...] | None = None
    """Prompts that were begun and are to be asked again; None on ranks that own no rows."""

    @staticmethod
    def of(experience: Experience, config: PPOConfig, *, left: tuple[int, ...] | None = None) -> "StepTally":
        """Of this rank's rows, maybe none. No communication."""
        shaped = experience.shaped
        return StepTally(
            rewards=RunningMoments.of(shaped.adjusted[shaped.counts]),
            returns=RunningMoments.of(experience.returns.values[experience.loss_mask.values]),
            kl=RunningMoments.of(response_kl(experience, config)[shaped.counts]),
            left=left,
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """Prompts of a step, by their places in the stream."""

    asked: tuple[int, ...]
    """Ascending; those of state.begun_prompts are the first."""
    waiting: tuple[int, ...]
    """Of state.begun_prompts, those that must wait for another step."""
    prompts_taken: int
    """The cursor afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverState:
    """The state between two steps."""

    seed: int
    """Of the run; what is random in a step follows from it and from the counters below."""
    step: int = 0
    """Steps done; also the number of the next one, counted from 0."""
    prompts_taken: int = 0
    """Cursor: position in the endless stream of prompts from which the next step takes its own."""
    begun_prompts: tuple[int, ...] = ()
    """Prompts before the cursor whose responses are not finished, ascending; the next step asks them first. What
    engines have of them is not part of the state: after a resume they are answered from their beginning."""
    responses: int = 0
    """Responses sampled for training."""
    policy_version: int = 0
    """Steps that have trained the actor: the version of its weights."""
    kl_coef: float
    """Weight of the KL penalty in the next step."""
    rewards: RunningMoments = NOTHING_YET
    """Of all steps, as in StepTally; stays empty unless shaping.normalize is running."""
    returns: RunningMoments = NOTHING_YET
    """Of all steps, as in StepTally; stays empty unless value_loss.clip is relative."""

    @staticmethod
    def start(config: PPORunConfig) -> "DriverState":
        """The state before the first step."""
        return DriverState(seed=config.seed, kl_coef=config.ppo.kl_coef)

    def draw(self, num_prompts: int) -> Draw:
        """What a step asks that is to ask so many prompts: begun ones first."""
        cursor = self.prompts_taken + max(0, num_prompts - len(self.begun_prompts))
        new = range(self.prompts_taken, cursor)
        return Draw((*self.begun_prompts[:num_prompts], *new), self.begun_prompts[num_prompts:], cursor)

    def after(self, tallies: Sequence[StepTally], config: PPOConfig, *, extra_prompts: int = 0) -> "DriverState":
        """The state after a step, given the tallies of all ranks; those may be missing if nothing depends on them.

        `extra_prompts`: so many more were asked than prompts_per_step.
        """
        draw = self.draw(config.prompts_per_step + extra_prompts)
        left = next((tally.left for tally in tallies if tally.left is not None), ())
        controller, kl = config.kl_controller, RunningMoments.merged(tally.kl for tally in tallies)
        kl_coef, rewards, returns = self.kl_coef, self.rewards, self.returns
        if controller.kind == "adaptive" and self.trains_actor(config):  # else it is near because it stands still
            kl_coef = next_kl_coef(
                kl_coef, kl.mean, target=controller.target, horizon=controller.horizon, num_samples=kl.count
            )
        if config.shaping.normalize == "running":
            rewards = rewards + RunningMoments.merged(tally.rewards for tally in tallies)
        if config.value_loss.clip == "relative":
            returns = returns + RunningMoments.merged(tally.returns for tally in tallies)
        return replace(
            self,
            step=self.step + 1,
            prompts_taken=draw.prompts_taken,
            begun_prompts=tuple(sorted(left + draw.waiting)),
            responses=self.responses + config.samples_per_step,
            policy_version=self.policy_version + self.trains_actor(config),
            kl_coef=kl_coef,
            rewards=rewards,
            returns=returns,
        )

    def trains_actor(self, config: PPOConfig) -> bool:
        """Whether the next step trains the actor, or the critic alone."""
        return self.step >= config.critic_warmup_steps

    def to_dict(self) -> dict[str, object]:
        """Plain numbers and dicts of them, ready for JSON; floats keep every bit."""
        return asdict(self)

    @staticmethod
    def from_dict(plain: Mapping[str, object]) -> "DriverState":
        """Inverse of to_dict.

        Raises:
            CheckpointError: A number is missing, unknown, or not finite.
        """
        values = _checked("driver state", plain, DriverState)
        for name in ("rewards", "returns"):
            values[name] = RunningMoments(**_checked(f"driver state: {name}", values[name], RunningMoments))
        begun = values["begun_prompts"]
        if not isinstance(begun, list | tuple) or not all(type(prompt) is int for prompt in begun):
            raise CheckpointError(
                f"driver state: begun_prompts is {begun!r:.80}; needs places in the stream of prompts; take another "
                "checkpoint"
            )
        return DriverState(**values | {"begun_prompts": tuple(begun)})


def next_state(
    state: DriverState,
    experience: Experience,
    config: PPORunConfig,
    *,
    left: tuple[int, ...] | None,
    everyone: ProcessGroup,
) -> DriverState:
    """The state after a step, equal on all ranks.

    Collective over `everyone` (gloo, all ranks of the job) if what the step measured, or left unanswered, changes the
    next one; it is the last thing that a step does, since it waits for all. `left`: see StepTally.
    """
    needs_all = config.ppo.needs_moments or config.rollout.tail == "continue"
    tallies = gather(StepTally.of(experience, config.ppo, left=left), everyone) if needs_all else []
    return state.after(tallies, config.ppo, extra_prompts=config.extra_prompts)


def response_kl(experience: Experience, config: PPOConfig) -> torch.Tensor:
    """float32 [B]: the KL estimate summed over the tokens of each response that count."""
    mask = experience.loss_mask
    kl = kl_estimate(experience.old_logprobs.values, experience.ref_logprobs.values, estimator=config.kl_estimator)
    return torch.zeros(len(mask)).index_add_(0, mask.row_ids(), kl.masked_fill(~mask.values, 0.0))


def _checked(where: str, plain: object, cls: type) -> dict[str, Any]:
    """The values of a dataclass, all there and its numbers finite."""
    sections = {f.name for f in fields(cls) if f.type not in (int, float)}
    names = [f.name for f in fields(cls)]
    if not isinstance(plain, Mapping) or sorted(plain) != sorted(names):
        found = sorted(plain) if isinstance(plain, Mapping) else plain
        raise CheckpointError(f"{where}: holds {found}; needs {names}; take a checkpoint of this version")
    for name, value in plain.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number and name not in sections:
            raise CheckpointError(f"{where}: {name} is {value!r}; needs a finite number; take another checkpoint")
    return dict(plain)
