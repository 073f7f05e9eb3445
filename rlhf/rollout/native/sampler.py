"""From logits to tokens and their log-probs.

Legend: V vocabulary rows (padding included), N rows of the batch.
"""

from torch import Tensor

from rlhf.config.rollout import SamplingConfig
from rlhf.rollout.draw import Cuts, at, block_sums, draw, largest


def sample(logits: Tensor, vocab_size: int, uniforms: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Tokens (int64 [N]) and their log-probs (float32 [N]).

    logits: [N, V], V a multiple of VOCAB_MULTIPLE, overwritten; columns from vocab_size on are padding.
    uniforms: float64 [N] in [0, 1); unused at temperature 0, which takes the most likely token.
    Log-probs are under softmax(logits / temperature), at temperature 0 under softmax(logits); the cuts by top-k,
    top-p and min-p choose among tokens but do not renormalise log-probs.
    """
    logits = logits.float()
    logits[:, vocab_size:] = float("-inf")
    if sampling.temperature not in (0.0, 1.0):
        logits.div_(sampling.temperature)
    logits.sub_(logits.amax(1, keepdim=True))
    weights = logits.exp()
    sums = block_sums(weights)
    if sampling.temperature == 0.0:
        tokens = largest(logits)
    else:
        cuts = Cuts.alike(sampling.top_k, sampling.top_p, sampling.min_p, weights.shape[1], weights.device)
        tokens = draw(weights, sums, uniforms, cuts)
    return tokens, (at(logits, tokens).double() - sums[:, -1].log()).float()
