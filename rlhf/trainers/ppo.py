"""PPO, read aloud: prompts -> generate -> score -> experience -> update. Every rank runs every line."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from torch.distributed import ProcessGroup

from rlhf.config.run import PPORunConfig
from rlhf.data.batch import Experience, PromptBatch, Rollout, ScoredRollout
from rlhf.data.prompts import PromptSource
from rlhf.metrics.timers import Timers
from rlhf.models.calls import RoleCalls
from rlhf.models.minibatches import Cut, UpdateReport
from rlhf.reshard.weight_sync import ReshardStats
from rlhf.rollout.engine import RolloutEngine
from rlhf.trainers.evaluation import Evaluation, EvaluationResult
from rlhf.trainers.experience import PPOModels, make_experience, policy_rows, value_rows
from rlhf.trainers.losses import make_policy_loss, make_value_loss
from rlhf.trainers.ownership import Ownership
from rlhf.trainers.phases import Phases
from rlhf.trainers.policy_sync import PolicySync
from rlhf.trainers.reporter import Reporter
from rlhf.trainers.scoring import Scorer
from rlhf.trainers.step_stats import StepPart, samples_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOLoop:
    """The loop and all that it needs; built by rlhf.build."""

    config: PPORunConfig
    rank: int
    ownership: Ownership
    owners_group: ProcessGroup | None
    """gloo, over the ranks that own rows; None elsewhere."""
    prompts: PromptSource | None
    """None on ranks that own no rows, like the scorer."""
    engine: RolloutEngine | None
    """None on ranks outside the rollout pool."""
    policy_sync: PolicySync
    scorer: Scorer | None
    models: PPOModels
    calls: RoleCalls
    phases: Phases
    timers: Timers
    evaluation: Evaluation
    save: Callable[[], None] | None
    """Writes the actor as a Hugging Face checkpoint; None when the config asks for none."""
    reporter: Reporter

    def run(self) -> None:
        """All steps, with an evaluation before the first and after the last."""
        last = self.config.num_steps
        with self.reporter:
            self.reporter.started(self._evaluate(0))
            for step in range(last):
                if self.reporter.stop_agreed():
                    break
                with self.timers.phase("step"):
                    experience, part = self.step(step)
                done = step + 1
                due = done == last or _due(done, self.config.eval.every_steps)
                self.reporter.step_done(done, part, experience.scored, self._evaluate(done) if due else None)
            if self.save is not None:
                with self.timers.phase("save"):
                    self.save()

    def step(self, step: int) -> tuple[Experience, StepPart]:
        """One step: sample with the newest weights, score, learn. Returns this rank's share of what happened."""
        config, owners = self.config.ppo, self._owners()
        prompts = self._prompts(step)
        with self.phases.rollout():
            sync = self._sync(step)
            rollout = self._generate(prompts)
        with self.timers.phase("reward"):
            scored = self.scorer.score(rollout) if self.scorer else ScoredRollout.empty()
        with self.phases.training():
            experience = make_experience(scored, self.models, config, owners=owners, owners_group=self.owners_group)
            critic_report, actor_report = self._update(step, experience, owners)
            self.calls.flush()
        samples = samples_of(experience, config, solved_at=self.config.eval.solved_at)
        return experience, StepPart(samples, actor=actor_report, critic=critic_report, sync=sync)

    def _update(
        self, step: int, experience: Experience, owners: tuple[int, ...]
    ) -> tuple[UpdateReport | None, UpdateReport | None]:
        """Critic and actor learn; on disjoint pools at the same time."""
        config, draw = self.config.ppo, Random(f"{self.config.seed} update {step}")
        order = tuple(draw.sample(range(len(owners)), len(owners)))
        cut = Cut(
            num_rows=len(owners),
            minibatch_rows=config.minibatch_samples,
            epochs=config.epochs,
            seed=draw.getrandbits(32),
        )
        critic = self.models.critic.update(
            value_rows(experience), make_value_loss(config), order=order, cut=cut, owners=owners
        )
        if step < config.critic_warmup_steps:
            return critic.collect(), None
        actor = self.models.actor.update(
            policy_rows(experience), make_policy_loss(config), order=order, cut=cut, owners=owners
        )
        return critic.collect(), actor.collect()

    def _owners(self) -> tuple[int, ...]:
        return self.ownership.owners(self.config.ppo.prompts_per_step, self.config.ppo.samples_per_prompt)

    def _prompts(self, step: int) -> PromptBatch:
        """Prompts that this rank owns in a step."""
        engine = self.ownership.engine_led_by(self.rank)
        if engine is None or self.prompts is None:
            return PromptBatch.empty()
        return self.prompts.rows_of(step, engine, len(self.ownership.leaders))

    def _sync(self, steps_done: int) -> ReshardStats | None:
        with self.timers.phase("rollout/sync"):
            return self.policy_sync.update_weights(policy_version=self.config.ppo.policy_version(steps_done))

    def _generate(self, prompts: PromptBatch) -> Rollout:
        if self.engine is None:
            return Rollout.empty()
        with self.timers.phase("rollout/generate"):
            return self.engine.generate(prompts, self.config.rollout.sampling) or Rollout.empty()

    def _evaluate(self, steps_done: int) -> EvaluationResult | None:
        if not self.config.data.held_out:
            return None
        with self.phases.evaluation():
            self.policy_sync.update_weights(policy_version=self.config.ppo.policy_version(steps_done))
            return self.evaluation.run(steps_done)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
