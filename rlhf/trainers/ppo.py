"""PPO, read aloud: prompts -> generate -> score -> experience -> update. Every rank runs every line."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from random import Random

from torch.distributed import ProcessGroup

from rlhf.config.run import PPORunConfig
from rlhf.data.batch import Experience, ScoredRollout
from rlhf.metrics.names import MismatchMetrics
from rlhf.metrics.timers import Timers
from rlhf.models.calls import RoleCalls
from rlhf.models.minibatches import Cut, UpdateReport
from rlhf.reshard.stats import ReshardStats
from rlhf.rollout.engine import RolloutEngine
from rlhf.trainers.checkpointing import Checkpoints
from rlhf.trainers.driver_state import DriverState, next_state
from rlhf.trainers.evaluation import Evaluation, EvaluationResult
from rlhf.trainers.experience import PPOModels, make_experience, policy_rows, value_rows
from rlhf.trainers.generation import Generated, Generation
from rlhf.trainers.losses import make_policy_loss, make_value_loss
from rlhf.trainers.mismatch.watch import MismatchWatch
from rlhf.trainers.ownership import Ownership
from rlhf.trainers.phases import Phases
from rlhf.trainers.policy_sync import PolicySync
from rlhf.trainers.profiler import StepProfiler
from rlhf.trainers.recovery import Recovery
from rlhf.trainers.reporter import Reporter
from rlhf.trainers.sample_dump import SampleDump
from rlhf.trainers.scoring import WRONG_WEIGHTS, Scorer, dropped
from rlhf.trainers.shaping import shape_rewards
from rlhf.trainers.step_stats import StepPart, samples_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOLoop:
    """The loop and all that it needs; built by rlhf.build."""

    config: PPORunConfig
    rank: int
    ownership: Ownership
    owners_group: ProcessGroup | None
    """gloo, over the ranks that own rows; None elsewhere."""
    everyone: ProcessGroup
    """gloo, over all ranks of the job."""
    generation: Generation
    engine: RolloutEngine | None
    """None on ranks outside the rollout pool."""
    policy_sync: PolicySync
    recovery: Recovery
    scorer: Scorer | None
    """None on ranks that own no rows."""
    models: PPOModels
    watch: MismatchWatch
    calls: RoleCalls
    phases: Phases
    timers: Timers
    profiler: StepProfiler
    evaluation: Evaluation
    save: Callable[[], None] | None
    """Writes the actor as a Hugging Face checkpoint; None when the config asks for none."""
    start: DriverState
    """Before the first step of this start of the run."""
    evaluates_first: bool
    """False where an earlier start of the run has done it."""
    checkpoints: Checkpoints
    reporter: Reporter
    sample_dump: SampleDump

    def run(self) -> None:
        """All steps, with an evaluation before the first and after the last. A stop request ends it between two."""
        state, last = self.start, self.config.num_steps
        with self.checkpoints, closing(self.engine) if self.engine else nullcontext(), self.reporter, self.sample_dump:
            self.reporter.started(self._evaluate(state) if self.evaluates_first else None, step=state.step)
            while state.step < last and not self.reporter.stop_agreed():
                began = state
                with self.profiler.step(began.step + 1), self.timers.phase("step"):
                    state, experience, part = self.step(began)
                self.sample_dump.step_done(state.step, experience, owners=self._owners())
                due = state.step == last or _due(state.step, self.config.eval.every_steps)
                self.reporter.step_done(began, part, experience.scored, self._evaluate(state) if due else None)
                self.checkpoints.step_done(state)
            self.checkpoints.finish(state)
            if self.save is not None:
                with self.timers.phase("save"):
                    self.save()

    def step(self, state: DriverState) -> tuple[DriverState, Experience, StepPart]:
        """One step: sample with the newest weights, score, learn.

        Returns the next state, this rank's rows, and its share of what happened.
        """
        config, owners = self.config.ppo, self._owners()
        with self.phases.rollout():
            sync, generated = self.recovery.go(
                lambda: self._sync(state),
                lambda sync: self.generation.step(
                    state, left_out=self._is_left_out(sync), is_lost=self.recovery.is_lost
                ),
            )
        with self.timers.phase("reward"):
            scored = self._score(generated)
            shaped = shape_rewards(scored, config, earlier=state.rewards, owners_group=self.owners_group)
        with self.phases.training():
            experience = make_experience(
                shaped, self.models, config, kl_coef=state.kl_coef, owners=owners, owners_group=self.owners_group
            )
            mismatch = self.watch.look(
                generated.rollout,
                experience.old_logprobs,
                state,
                left_out=self._is_left_out(sync),
                begun_tokens=generated.begun_tokens,
            )
            reports = self._update(state, experience, owners)
            self.calls.flush()
        part = self._part(experience, generated, sync, reports, mismatch)
        state = next_state(state, experience, self.config, left=generated.left, everyone=self.everyone)
        return state, experience, part

    def _update(
        self, state: DriverState, experience: Experience, owners: tuple[int, ...]
    ) -> tuple[UpdateReport | None, UpdateReport | None]:
        """Critic and actor learn; on disjoint pools at the same time."""
        config, draw = self.config.ppo, Random(f"{state.seed} update {state.step}")
        order = tuple(draw.sample(range(len(owners)), len(owners)))
        cut = Cut(
            num_rows=len(owners),
            minibatch_rows=config.minibatch_samples,
            epochs=config.epochs,
            seed=draw.getrandbits(32),
        )
        value_loss = make_value_loss(config.value_loss, returns_std=state.returns.std)
        critic = self.models.critic.update(value_rows(experience), value_loss, order=order, cut=cut, owners=owners)
        if not state.trains_actor(config):
            return critic.collect(), None
        actor = self.models.actor.update(
            policy_rows(experience), make_policy_loss(config), order=order, cut=cut, owners=owners
        )
        return critic.collect(), actor.collect()

    def _part(
        self,
        experience: Experience,
        generated: Generated,
        sync: ReshardStats | None,
        reports: tuple[UpdateReport | None, UpdateReport | None],
        mismatch: MismatchMetrics,
    ) -> StepPart:
        critic, actor = reports
        return StepPart(
            samples_of(experience, self.config.ppo, solved_at=self.config.eval.solved_at),
            actor=actor,
            critic=critic,
            sync=sync,
            rollout=generated.part,
            mismatch=mismatch,
            freed_bytes=self.phases.freed_bytes,
            engines_lost=self.recovery.num_losses,
        )

    def _owners(self) -> tuple[int, ...]:
        return self.ownership.owners(self.config.ppo.prompts_per_step, self.config.ppo.samples_per_prompt)

    def _sync(self, state: DriverState) -> ReshardStats | None:
        with self.timers.phase("rollout/sync"):
            return self.policy_sync.update_weights(policy_version=state.policy_version)

    def _is_left_out(self, sync: ReshardStats | None) -> bool:
        """Whether this rank's engine holds wrong weights."""
        return sync is not None and sync.leaves_out(self.rank)

    def _score(self, generated: Generated) -> ScoredRollout:
        if self.scorer is None:
            return ScoredRollout.empty()
        if not generated.answered:
            return dropped(generated.rollout, WRONG_WEIGHTS)
        return self.scorer.score(generated.rollout)

    def _evaluate(self, state: DriverState) -> EvaluationResult | None:
        if not self.config.data.held_out:
            return None
        with self.phases.evaluation():
            _, rollout = self.recovery.go(
                lambda: self.policy_sync.update_weights(policy_version=state.policy_version),
                lambda sync: self.evaluation.ask(leave_out=self._is_left_out(sync), is_lost=self.recovery.is_lost),
            )
            return self.evaluation.judge(state.step, rollout)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
