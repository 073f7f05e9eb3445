"""Side `trl`: TRL's PPOTrainer. `... trl_ppo MODEL_FOLDER WORK_FILE THREADS STEPS ANSWER_FILE`; imports TRL and torch.

Two things are bent to do the work asked for: the reward is read off the token ids at no cost, and each forward pass
takes a whole minibatch, since this trainer steps the optimizer at every microbatch when a rollout is all of its data.
It takes old log-probs from generation, where our side computes them anew.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(model: str, work_file: str, threads: str, steps: str, answer: str) -> None:
    """Train and write down what the steps took."""
    import torch  # noqa: PLC0415  # imports are reported as the side's own
    import transformers  # noqa: PLC0415
    import trl  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # noqa: PLC0415

    torch.set_num_threads(int(threads))
    work = json.loads(Path(work_file).read_text(encoding="utf-8"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token_id = 0  # this trainer needs one that does not end a text
    responses = len(work["ids"]) * work["samples"]

    class EvenShare(torch.nn.Module):
        """A reward model whose last hidden state is the running count of even ids."""

        base_model_prefix = "counter"

        class Counter(torch.nn.Module):
            """Stands for the transformer."""

            def forward(self, input_ids: Any = None, **_: Any) -> SimpleNamespace:
                """Hidden states [batch, tokens, 1]."""
                return SimpleNamespace(hidden_states=[(input_ids % 2 == 0).float().cumsum(1)[..., None]])

        def __init__(self) -> None:
            super().__init__()
            self.counter = EvenShare.Counter()
            self.unused = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

        def score(self, hidden: Any) -> Any:
            """Reward at each position."""
            return hidden / hidden.shape[1]

    def load(kind: Any, **more: Any) -> Any:
        return kind.from_pretrained(model, dtype=torch.float32, **more)

    clock = _Clock(torch)
    ppo_trainer.batch_generation = clock.around_generation(ppo_trainer.batch_generation)
    ppo_trainer.forward = clock.before_training(ppo_trainer.forward)
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=tempfile.mkdtemp(dir=Path(answer).parent),
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
            per_device_train_batch_size=work["minibatch"],
            gradient_accumulation_steps=responses // work["minibatch"],
            num_mini_batches=responses // work["minibatch"],
            local_rollout_forward_batch_size=work["minibatch"],
            num_ppo_epochs=1,
            total_episodes=int(steps) * responses,
            response_length=work["new_tokens"],
            temperature=1.0,
            kl_coef=work["kl_coef"],
            learning_rate=work["lr"],
            lr_scheduler_type="constant",
            optim="adamw_torch",
            num_sample_generations=0,
            missing_eos_penalty=None,
        ),
        processing_class=tokenizer,
        model=load(transformers.AutoModelForCausalLM),
        ref_model=load(transformers.AutoModelForCausalLM),
        reward_model=EvenShare(),
        value_model=load(transformers.AutoModelForSequenceClassification, num_labels=1),
        train_dataset=Dataset.from_dict({"input_ids": [row for row in work["ids"] for _ in range(work["samples"])]}),
    )

    class AtStepEnd(transformers.TrainerCallback):
        """Tells the clock."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """One rollout and all its updates are done."""
            clock.step_ended()

    trainer.add_callback(AtStepEnd())
    optimizer_steps = _count_calls(getattr(trainer.optimizer, "optimizer", trainer.optimizer))
    trainer.train()
    expected = int(steps) * responses // work["minibatch"]
    assert len(optimizer_steps) == expected, f"{len(optimizer_steps)} optimizer steps; the work has {expected}"
    assert set(clock.new_tokens) == {responses * work["new_tokens"]}, f"{clock.new_tokens} tokens were generated"
    versions = {"trl": trl.__version__, "transformers of trl": transformers.__version__}
    Path(answer).write_text(json.dumps({"versions": versions, "steps": clock.steps}), encoding="utf-8")


class _Clock:
    """When the parts of a step begin and end, seen from the functions that the trainer calls."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.steps: list[dict[str, float]] = []
        self.new_tokens: list[int] = []
        self._began = self._generated = self._trains = 0.0

    def around_generation(self, generate: Any) -> Any:
        """Sampling; a step begins with it."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._began, self._trains = time.perf_counter(), 0.0
            found = generate(*args, **kwargs)
            self._generated = time.perf_counter()
            self.new_tokens.append(found[1].shape[0] * found[1].shape[1])
            return found

        return timed

    def before_training(self, forward: Any) -> Any:
        """The first forward pass with gradients is where training begins."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._torch.is_grad_enabled() and not self._trains:
                self._trains = time.perf_counter()
            return forward(*args, **kwargs)

        return timed

    def step_ended(self) -> None:
        """A step ends."""
        now = time.perf_counter()
        self.steps.append(
            {
                "total": now - self._began,
                "generate": self._generated - self._began,
                "score": self._trains - self._generated,
                "train": now - self._trains,
            }
        )


def _count_calls(optimizer: Any) -> list[None]:
    """Grows by one at each step of the optimizer."""
    calls, step = list[None](), optimizer.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return step(*args, **kwargs)

    optimizer.step = counted
    return calls


if __name__ == "__main__":
    main(*sys.argv[1:])
