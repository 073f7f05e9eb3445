"""Lengths of sequences that a plan is made for: a histogram, a file of them, or a guess from the config."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rlhf.config.run import PPORunConfig, RunConfig
from rlhf.errors import ConfigError

WHERE = "--lengths"
FORMS = (
    "needs TOKENS:WEIGHT,... such as 256:40,1024:40,4096:20, or a file with a length a line, or a run's samples.jsonl"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and response together, in tokens, with a weight each."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    source: str
    """Where they come from, for the report."""

    def draw(self, count: int, *, seed: int) -> tuple[int, ...]:
        """So many lengths, each as often as its weight says (to one), in an order drawn from the seed."""
        total = sum(self.weights)
        edges, so_far = [], 0.0
        for weight in self.weights:
            so_far += weight
            edges.append(round(count * so_far / total))
        found, start = [], 0
        for length, stop in zip(self.tokens, edges, strict=True):
            found += [length] * (stop - start)
            start = stop
        Random(seed).shuffle(found)
        return tuple(found)


def read_lengths(given: str) -> Lengths:
    """From the value of --lengths.

    Raises:
        ConfigError: It is neither of the forms.
    """
    path = Path(given)
    if path.is_file():
        found = _of_samples(path) if path.suffix == ".jsonl" else _of_lines(path)
        if not found:
            raise ConfigError(f"{WHERE}: {path} holds no lengths; {FORMS}; give another file")
        return Lengths(tuple(found), (1.0,) * len(found), f"{len(found):,} from {path}")
    pairs = [part.split(":") for part in given.split(",")]
    try:
        tokens, weights = zip(*((int(length), float(weight)) for length, weight in pairs), strict=True)
    except ValueError as error:
        raise ConfigError(f"{WHERE}: {given!r} given; {FORMS}; change it") from error
    if min(tokens) < 2 or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise ConfigError(f"{WHERE}: {given!r} given; needs lengths of at least 2 and weights above 0; change it")
    return Lengths(tokens, weights, f"--lengths {given}")


def guess_lengths(config: RunConfig) -> Lengths:
    """Prompts of half their limit, responses spread evenly up to theirs; of fine-tuning, rows up to the prompt's."""
    prompt = max(1, config.data.max_prompt_tokens // 2)
    if isinstance(config, PPORunConfig):
        longest = config.rollout.sampling.max_new_tokens
        source = (
            f"guessed: prompts of {prompt} tokens (half of data.max_prompt_tokens), responses spread evenly over "
            f"1..{longest} (rollout.sampling.max_new_tokens)"
        )
    else:
        longest = config.data.max_prompt_tokens
        source = f"guessed: rows spread evenly over {prompt + 1}..{prompt + longest} tokens (data.max_prompt_tokens)"
    steps = min(longest, 64)
    tokens = tuple(prompt + -(-longest * (at + 1) // steps) for at in range(steps))
    return Lengths(tokens, (1.0,) * steps, f"{source}; give yours with {WHERE}")


def lengths_notes(config: RunConfig, lengths: Lengths) -> list[str]:
    """What of the lengths cannot come up in the run."""
    if not isinstance(config, PPORunConfig):
        return []
    prompt, response = config.data.max_prompt_tokens, config.rollout.sampling.max_new_tokens
    if max(lengths.tokens) <= prompt + response:
        return []
    return [
        f"{WHERE}: up to {max(lengths.tokens)} tokens, but rows of this run end at data.max_prompt_tokens + "
        f"rollout.sampling.max_new_tokens = {prompt} + {response}"
    ]


def _of_lines(path: Path) -> Sequence[int]:
    words = path.read_text(encoding="utf-8", errors="replace").split()
    wrong = next((word for word in words if not word.isdigit() or int(word) < 2), None)
    if wrong is not None:
        raise ConfigError(f"{WHERE}: {path} holds {wrong!r}; {FORMS}; lengths are at least 2")
    return [int(word) for word in words]


def _of_samples(path: Path) -> Sequence[int]:
    """Lengths of the samples that a run wrote down."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            found.append(int(row["prompt_tokens"]) + int(row["response_tokens"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{WHERE}: {path}:{number} has no prompt_tokens and response_tokens; {FORMS}") from error
    return found
