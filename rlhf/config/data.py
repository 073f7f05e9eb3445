"""Where prompts come from, and what scores the responses."""

from dataclasses import dataclass, field

from rlhf.config.checks import at_least, more_than, one_of, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """A source of prompts: a file of rows, or a reasoning_gym task."""

    source: str
    """jsonl, parquet, or reasoning_gym."""
    path: str = ""
    """File of rows (jsonl, parquet)."""
    prompt_key: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages ({role, content})."""
    answer_key: str = "answer"
    """Field with the reference answer; rows without it have an empty one."""
    task: str = ""
    """Name of the reasoning_gym task."""
    task_options: dict[str, object] = field(default_factory=dict)
    """Options of the reasoning_gym task, such as {min_digits: 1}."""
    task_size: int = 10000
    """Problems drawn from the reasoning_gym task; the sequence is endless for most tasks."""
    chat_template: bool = True
    """Wrap prompts in the tokenizer's chat template (as one user message); needs a tokenizer that has one."""
    system_prompt: str = ""
    """System message of the chat template; empty sends none."""
    max_prompt_tokens: int = 1024
    """Longest prompt, in tokens, template included."""
    overlong: str = "drop"
    """A longer prompt is dropped and counted (drop), cut at its left end (truncate), or ends the run (error)."""
    shuffle: bool = True
    """Draw rows in an order that depends on the run's seed and the epoch; False keeps the file's order."""
    held_out: int = 200
    """Problems kept for evaluation, disjoint by content from those trained on; 0 evaluates nothing."""

    def __post_init__(self) -> None:
        one_of("data.source", self.source, ("jsonl", "parquet", "reasoning_gym"))
        one_of("data.overlong", self.overlong, ("drop", "truncate", "error"))
        if self.source == "reasoning_gym" and not self.task:
            refuse("data.task: empty; data.source = reasoning_gym needs a task; set data.task=chain_sum")
        if self.source != "reasoning_gym" and not self.path:
            refuse(f"data.path: empty; data.source = {self.source} needs a file; set data.path=FILE")
        at_least("data.max_prompt_tokens", self.max_prompt_tokens, 1)
        at_least("data.task_size", self.task_size, 1)
        at_least("data.held_out", self.held_out, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """The reward function and what happens when it fails."""

    function: str = "rlhf.reward.gym:score"
    """`package.module:function` or `path/file.py:function`; (prompt_record, response_text) -> float or RewardResult."""
    timeout_s: float = 10.0
    """Longest time for one response, in seconds; a call that hangs, in C too, is ended."""
    workers: int = 1
    """Reward processes on each rank that owns rows."""
    on_error: str = "drop"
    """When a reward raises, hangs or is not finite: drop (no loss from the row), zero (score 0), fail (end the run)."""

    def __post_init__(self) -> None:
        more_than("reward.timeout_s", self.timeout_s, 0.0)
        at_least("reward.workers", self.workers, 1)
        one_of("reward.on_error", self.on_error, ("drop", "zero", "fail"))
        if ":" not in self.function:
            refuse(
                f"reward.function: {self.function!r} given; needs package.module:function or path/file.py:function; "
                "change it"
            )
