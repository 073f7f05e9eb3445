"""What transformers and the definitions say: greedy responses, log-probs, and exact distributions of one token."""

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor

from rlhf.config.rollout import SamplingConfig


def greedy(model: transformers.PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The most likely response of so many tokens; nothing ends it earlier."""
    rows = torch.tensor([list(prompt)])
    out = model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def logprobs(
    model: transformers.PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Of the response's tokens, in one forward pass."""
    rows = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(rows).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, rows[0, len(prompt) :, None])[:, 0]


def shortfalls(
    model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> Tensor:
    """By how much a logit exceeds that of the token taken, of every token of all responses; 0 where it is greedy."""
    rows = [torch.tensor([*prompt, *response]) for prompt, response in zip(prompts, responses, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # behind a row, where it sees none of it
    lengths = torch.tensor([len(row) for row in rows])
    begins = torch.tensor([len(prompt) for prompt in prompts])
    with torch.no_grad():
        seen = torch.arange(padded.shape[1]) < lengths[:, None]
        logits = model(padded, attention_mask=seen.long()).logits[:, :-1]
    short = logits.amax(-1) - logits.gather(-1, padded[:, 1:, None])[..., 0]
    places = torch.arange(1, padded.shape[1])
    return short[(places >= begins[:, None]) & (places < lengths[:, None])]


def distribution(model: transformers.PreTrainedModel, prompt: Sequence[int], sampling: SamplingConfig) -> Tensor:
    """Of the next token, float64 [vocabulary]: temperature, then top-k, then top-p, then min-p."""
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt)])).logits[0, -1].double()
    probs = (logits / sampling.temperature).softmax(0)
    kept = probs.argsort(descending=True)[: sampling.top_k or len(probs)].tolist()
    total, mass, nucleus = float(probs[kept].sum()), 0.0, []
    for token in kept:
        if mass >= sampling.top_p * total:
            break
        nucleus.append(token)
        mass += float(probs[token])
    nucleus = [token for token in nucleus if probs[token] >= sampling.min_p * probs.max()]
    cut = torch.zeros_like(probs)
    cut[nucleus] = probs[nucleus]
    return cut / cut.sum()


def chi_square(tokens: Tensor, probs: Tensor) -> tuple[float, int]:
    """The statistic of drawn tokens against a distribution, and its degrees of freedom.

    Tokens that are expected less than 8 times are counted as one; a token that cannot be drawn makes it infinite.
    """
    counts = tokens.bincount(minlength=len(probs)).double()
    if bool(counts[probs == 0].any()):
        return float("inf"), 1
    expected = probs * len(tokens)
    rare = expected < 8
    found = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    return float(((found - wanted) ** 2 / wanted).sum()), max(1, len(wanted) - 1)
