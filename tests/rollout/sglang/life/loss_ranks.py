"""What the two ranks of a test do whose one engine, on SGLang itself, loses its processes while it is at work."""

import os
import re
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import FinishReason, PromptBatch, Rollout
from rlhf.dist.groups import GroupFactory
from rlhf.errors import EngineLostError
from rlhf.families.spec import ModelSpec
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.topology import Topology
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.answers import Answers
from rlhf.rollout.pool import EnginePool, store_of_job
from rlhf.rollout.sglang.engine import SGLangEngine
from rlhf.rollout.sglang.life.board import read_entries
from rlhf.rollout.sglang.weights.lasting import LastingSink
from rlhf.trainers.policy_sync import PolicySync
from rlhf.trainers.recovery import Losses, Recovery
from tests.reshard.toy import filled_params, full_tensors
from tests.rollout.sglang.errands import HangsOn
from tests.rollout.tiny import prompts

CPU = torch.device("cpu")
SAMPLING = SamplingConfig(max_new_tokens=60)
MAX_RUNNING = 4
"""A third of the rows of a call: when the first ones have ended, others are at work, and others wait."""
FOUND_WITHIN_S = 30.0


@dataclass
class Blow:
    """Something that befalls the engine, once; on its leader."""

    role: str
    what: str
    """The name of a signal, or hang."""
    told: str
    """A pattern of what people are to read."""
    in_sync: bool = False
    fell_at: float = field(default=0.0, init=False)

    def fall(self, engine: SGLangEngine) -> None:
        """Now, unless it has."""
        if self.fell_at:
            return
        self.fell_at = time.monotonic()
        if self.what == "hang":
            engine._alive.tell("ask_schedulers", HangsOn(int(self.role[-1])))
        else:
            os.kill(next(e.pid for e in read_entries(engine._folder) if e.role == self.role), signal.Signals[self.what])


LOST_IN_SYNC = r"engine_0: scheduler tp 0 \(pid \d+\) was ended by SIGKILL while it was at load_window; it is replaced"
BLOWS = (
    Blow("host", "SIGKILL", r"engine_0: host \(pid \d+\) was ended by SIGKILL while it was at sample; it is replaced"),
    Blow(
        "host", "SIGSTOP", r"engine_0: host \(pid \d+\) is stopped \(state T\) while it was at sample; it is replaced"
    ),
    Blow("scheduler tp 1", "hang", r"engine_0: scheduler tp 1 \(pid \d+\) hangs: it has not moved for 15 s .* sample;"),
    Blow("scheduler tp 0", "SIGKILL", LOST_IN_SYNC, in_sync=True),
)


class Job:
    """One rank's part of a job: actor, engine, and what keeps the engine at work."""

    def __init__(self, spec: ModelSpec, src: ModelLayout, dst: ModelLayout, folder: Path) -> None:
        factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=120))
        group, leaders = factory.cpu_group([(0, 1)]), factory.cpu_group([(0,)])
        assert group is not None
        self.leads, self.blow, self.said = dist.get_rank() == 0, None, []
        weights = {name: t.sin() * 0.05 for name, t in full_tensors(src.tensors).items()}
        self.actor = filled_params(src, dist.get_rank(), weights)
        config = RolloutConfig(
            engine="sglang",
            tp=2,
            kv_cache_tokens=2048,
            max_running=MAX_RUNNING,
            on_loss="replace",
            max_losses=len(BLOWS),
        )
        self.engine = self._engine(spec, config, group, folder)
        sync = WeightSync(
            src,
            dst,
            topology=Topology.blocks(2, ranks_per_node=2),
            group=group,
            windowed=True,
            bucket_bytes=2**18,
            engines=config.engines,
        )
        self.pool = EnginePool(
            self.engine,
            config,
            rank=dist.get_rank(),
            leaders_group=leaders,
            store=store_of_job("losses"),
            outlives_loss=True,
        )
        self.policy = PolicySync(sync, actor_params=lambda: self.actor, engine=self.engine, survives_loss=True)
        losses = Losses(
            config, rank=dist.get_rank(), group=group, say=lambda line: self.said.append((time.monotonic(), line))
        )
        self.recovery = Recovery(
            config,
            losses=losses,
            engine=self.engine,
            seen_lost=lambda: self.pool.lost,
            forget=self.policy.forget,
        )

    def _engine(self, spec: ModelSpec, config: RolloutConfig, group: ProcessGroup, folder: Path) -> SGLangEngine:
        return SGLangEngine(
            spec,
            config,
            tp_group=group,
            cpu_group=group,
            device=CPU,
            dtype=torch.float32,
            run_seed=3,
            eos_token_ids=(),
            log_folder=folder,
            on_progress=self._on_progress,
        )

    def _on_progress(self, done: int, total: int) -> None:
        """On the leader, again and again: in the middle of the rows."""
        if self.blow is not None and not self.blow.in_sync and MAX_RUNNING <= done < total:
            self.blow.fall(self.engine)

    def on_window(self, number: int) -> None:
        """On the leader: in the middle of a transfer."""
        if self.leads and self.blow is not None and self.blow.in_sync and number == 1:
            self.blow.fall(self.engine)

    def step(self, version: int, batch: PromptBatch) -> Rollout | None:
        """New weights, and a response to each row by them; as the trainer does it."""
        begun = Answers.empty()

        def ask(_: object) -> Rollout | bool | None:
            nonlocal begun
            reply = self.pool.ask(batch if self.leads else None, SAMPLING, begun=begun, is_lost=self.recovery.is_lost)
            if not self.pool.complete:
                begun = Answers.empty() if reply is None else Answers.concat([reply.answers, reply.begun])
                return None
            return True if reply is None else reply.answers.rollout(batch)

        answer = self.recovery.go(lambda: self.policy.update_weights(policy_version=version), ask)[1]
        return answer if isinstance(answer, Rollout) else None


def lose_and_replace(spec: ModelSpec, src: ModelLayout, dst: ModelLayout, folder: Path) -> None:
    """Each blow falls in a step with weights of its own, which has the rows of a step without one."""
    torch.set_num_threads(1)
    job, batch = Job(spec, src, dst, folder), prompts(samples=2)
    plain = LastingSink.hand_over

    def hand_over(sink: LastingSink, number: int) -> None:
        plain(sink, number)
        job.on_window(number)

    LastingSink.hand_over = hand_over
    try:
        for version, blow in enumerate(BLOWS):
            for param in job.actor.values():
                param.mul_(1.01)
            job.blow, job.said[:] = blow, []
            found = job.step(version, batch)
            _is_found(job, blow, num_losses=version + 1)
            job.blow = None
            _is_whole(found, job.pool.generate(batch if job.leads else None, SAMPLING), batch, version)
        _closed_at_work(job, batch)
    finally:
        LastingSink.hand_over = plain
        job.engine.close()


def _is_found(job: Job, blow: Blow, *, num_losses: int) -> None:
    assert job.recovery.num_losses == num_losses
    ((at, line),) = job.said
    assert re.search(blow.told, line), line
    if job.leads:
        assert blow.fell_at
        assert at - blow.fell_at < FOUND_WITHIN_S, f"{line} after {at - blow.fell_at:.1f} s"


def _is_whole(found: Rollout | None, undisturbed: Rollout | None, batch: PromptBatch, version: int) -> None:
    """Each row once, by the weights of the step, as without a loss."""
    if found is None or undisturbed is None:
        assert found is undisturbed, "both ranks ask both"
        return
    assert found.prompts.sample_ids.tolist() == batch.sample_ids.tolist()
    assert found.responses.lengths.eq(SAMPLING.max_new_tokens).all()
    assert found.finish_reasons.eq(FinishReason.LENGTH).all()
    assert found.policy_versions.values.eq(version).all()
    assert found.responses.values.tolist() == undisturbed.responses.values.tolist()
    # fp32, in batches of other sizes
    torch.testing.assert_close(found.rollout_logprobs.values, undisturbed.rollout_logprobs.values, atol=1e-4, rtol=0)


def _closed_at_work(job: Job, batch: PromptBatch) -> None:
    """Its leader closes the engine while rows run: nothing of it is left."""
    engine, folder = job.engine, job.engine._folder
    processes = [psutil.Process(entry.pid) for entry in read_entries(folder)] if job.leads else []
    assert len(processes) == 3 * job.leads  # a host, two schedulers

    def close(done: int, total: int) -> None:
        if 0 < done < total:
            engine.close()

    job._on_progress = close
    engine._on_progress = close
    with pytest.raises(EngineLostError, match="its processes have ended"):
        engine.generate(batch if job.leads else None, SAMPLING)
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert folder is None or not folder.exists()
