"""What all sides of the PPO benchmark do: the prompts, the sizes, and how a step's time is told."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rlhf.data.tokenizer import load_tokenizer
from tools.benchmarks.work import NEW_TOKENS, PROMPT_TOKENS, WORKS, Work, numbers

PHASES = ("generate", "score", "train")
"""Sampling (with the weights' way into the engine); old, reference log-probs, values and rewards; updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOWork:
    """One PPO step: its sizes, without the model."""

    num_prompts: int
    samples: int
    minibatch: int
    microbatch: int
    lr: float
    new_tokens: int = NEW_TOKENS
    kl_coef: float = 0.05

    @property
    def responses(self) -> int:
        """Of one step."""
        return self.num_prompts * self.samples


def ppo_work(kind: str, *, quick: bool) -> PPOWork:
    """The work of a kind; quick is a small part of it."""
    work = WORKS[kind]
    if quick:
        return PPOWork(num_prompts=8, samples=2, minibatch=8, microbatch=8, lr=work.lr, new_tokens=16)
    return PPOWork(
        num_prompts=work.num_prompts,
        samples=work.samples,
        minibatch=work.minibatch,
        microbatch=work.microbatch,
        lr=work.lr,
    )


def write_work(kind: str, sizes: PPOWork, model: Path, target: Path) -> Path:
    """A JSON file for the sides: sizes, and prompts as text and as the token ids that the text gives.

    Prompts are made of words that are one token each, so that text and ids say the same to every side.
    """
    tokenizer = load_tokenizer(model)
    texts = _texts(WORKS[kind], tokenizer.get_vocab(), sizes.num_prompts)
    ids = [tokenizer(text).input_ids for text in texts]
    assert {len(row) for row in ids} == {PROMPT_TOKENS}, "a word of the prompts is not one token"
    target.write_text(json.dumps({**asdict(sizes), "texts": texts, "ids": ids}), encoding="utf-8")
    return target


def _texts(work: Work, vocab: dict[str, int], count: int) -> list[str]:
    drawn = numbers(count * PROMPT_TOKENS)
    if work.name == "tiny":
        words = [f"t{17 + number % (work.vocab_size - 17)}" for number in drawn]
    else:  # byte-level BPE writes the blank before a word as this letter
        whole = sorted(token[1:] for token in vocab if token[0] == "\u0120" and _is_word(token[1:]))
        words = [whole[number % len(whole)] for number in drawn]
    rows = [words[at : at + PROMPT_TOKENS] for at in range(0, len(words), PROMPT_TOKENS)]
    return [("" if work.name == "tiny" else " ") + " ".join(row) for row in rows]


def _is_word(text: str) -> bool:
    return 3 <= len(text) <= 8 and text.isascii() and text.isalpha()


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What a side's measured steps took: seconds of each, warm-up left out."""

    total: tuple[float, ...]
    phases: dict[str, tuple[float, ...]]
    """Seconds by name, PHASES at least; finer ones for our own profile."""
    peak_mib: int

    def phase(self, name: str) -> float:
        """Median seconds of a phase."""
        return median(self.phases[name])
