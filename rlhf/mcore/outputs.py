"""What a model says of response tokens: log-probs and entropy of a policy, values of a critic.

R = response tokens of a microbatch.
"""

from dataclasses import dataclass

from torch import Tensor

from rlhf.families.spec import Head
from rlhf.mcore.model import MegatronModel, head_weight
from rlhf.mcore.vocab_parallel import KEPT_ELEMENTS, chunk_tokens_for, vocab_parallel_logprobs


@dataclass(frozen=True, slots=True)
class PolicyOutputs:
    """Of a language model. Same on all tp ranks."""

    logprobs: Tensor
    """float32 [R], log-probability of each response token under the temperature."""
    entropy: Tensor
    """float32 [R], in nats, of the distribution that each response token was drawn from; NaN if not asked for."""


@dataclass(frozen=True, slots=True)
class ValueOutputs:
    """Of a value model. Same on all tp ranks."""

    values: Tensor
    """float32 [R], value of the state before each response token."""


def policy_outputs(
    model: MegatronModel, hidden: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool = True
) -> PolicyOutputs:
    """Apply the language-model head to hidden [R, H]. Collective over tp; last stage only."""
    assert model.head is Head.LM, "a value model has no log-probs"
    assert model.groups.collection is not None, "policy_outputs is for ranks of the model's pool"
    weight = head_weight(model)
    logprobs, entropy = vocab_parallel_logprobs(
        hidden,
        weight,
        targets,
        tp_group=model.groups.collection.tp,
        vocab_size=model.spec.vocab_size,
        temperature=temperature,
        chunk_tokens=chunk_tokens_for(len(weight)),
        keep_logits=len(hidden) * len(weight) <= KEPT_ELEMENTS,
        with_entropy=with_entropy,
    )
    return PolicyOutputs(logprobs, entropy)


def value_outputs(model: MegatronModel, hidden: Tensor) -> ValueOutputs:
    """Apply the value head to hidden [R, H], in fp32. No communication; last stage only."""
    assert model.head is Head.VALUE, "a language model has no values"
    return ValueOutputs((hidden.float() @ head_weight(model).float().T)[:, 0])
