"""Side `trl-grpo`: TRL's GRPOTrainer. `... trl_grpo MODEL_FOLDER WORK_FILE THREADS STEPS ANSWER_FILE`; as trl_ppo.

No critic and no reference: less work than PPO, shown beside it.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main(model: str, work_file: str, threads: str, steps: str, answer: str) -> None:
    """Train and write down what the steps took."""
    import torch  # noqa: PLC0415  # imports are reported as the side's own
    import transformers  # noqa: PLC0415
    import trl  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415

    torch.set_num_threads(int(threads))
    work = json.loads(Path(work_file).read_text(encoding="utf-8"))
    responses = len(work["ids"]) * work["samples"]
    began, scored, generated = list[float](), list[float](), list[float]()

    class Timed(trl.GRPOTrainer):
        """Notes when a rollout begins, how long sampling takes, and when training can begin."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began.append(time.perf_counter())
            found = super()._generate_and_score_completions(inputs)
            scored.append(time.perf_counter())
            count = int(found["completion_mask"].sum())
            assert count == responses * work["new_tokens"], f"{count} tokens were generated"
            return found

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = super()._generate_single_turn(*args, **kwargs)
            generated.append(time.perf_counter() - start)
            return found

    def share_of_even(completion_ids: Any = None, **_: Any) -> list[float]:
        return [sum(int(token) % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    trainer = Timed(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=share_of_even,
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(dir=Path(answer).parent),
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            shuffle_dataset=False,
            seed=0,
            num_generations=work["samples"],
            max_completion_length=work["new_tokens"],
            generation_kwargs={"min_new_tokens": work["new_tokens"]},
            per_device_train_batch_size=work["microbatch"],
            gradient_accumulation_steps=work["minibatch"] // work["microbatch"],
            steps_per_generation=responses // work["microbatch"],
            num_iterations=1,
            max_steps=int(steps) * responses // work["minibatch"],
            beta=0.0,
            learning_rate=work["lr"],
            lr_scheduler_type="constant",
            optim="adamw_torch",
            max_grad_norm=1.0,
            loss_type="grpo",
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        ),
        train_dataset=Dataset.from_dict({"prompt": work["texts"]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    ends = [*began[1:], time.perf_counter()]
    found = [
        {"total": end - start, "generate": took, "score": done - start - took, "train": end - done}
        for start, end, took, done in zip(began, ends, generated, scored, strict=True)
    ]
    versions = {"trl with GRPO": trl.__version__, "transformers of trl-grpo": transformers.__version__}
    Path(answer).write_text(json.dumps({"versions": versions, "steps": found}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
