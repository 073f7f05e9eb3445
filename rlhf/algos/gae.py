"""Generalised advantage estimation over response tokens.

Rows are ragged: R = response tokens of all rows end to end, B = responses. Knows no process group.
"""

import torch
from torch import Tensor

from rlhf.algos.shapes import check_lengths, check_tokens


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a batch of responses.

    Args:
        rewards: float32 [R]. Reward of each token, KL penalty already subtracted.
        values: float32 [R]. Critic's value of the state before each token.
        lengths: int64 [B] on the CPU. Tokens of each response; 0 is allowed.
        gamma: Discount per token, in [0, 1].
        gae_lambda: 1 gives Monte-Carlo returns, 0 one-step TD.

    Returns:
        (advantages [R], returns [R]), float32, where returns = advantages + values. No gradient flows.

    Raises:
        ShapeError: The tensors do not hold one entry for each token.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16. The state after a response's last token has value 0, since
    a response is a finished episode. The sum is taken by doubling: after pass k each token holds the discounted sum of
    its next 2^k TD errors, so that log2 of the longest response passes over the flat tensor replace a loop over tokens.
    """
    check_lengths("gae", lengths)
    check_tokens("gae", lengths, rewards=rewards, values=values)
    with torch.no_grad():
        left = tokens_left(lengths).to(rewards.device)
        values = values.float()
        deltas = rewards.float() + gamma * shifted(values, 1, left) - values
        advantages, span, decay = deltas, 1, gamma * gae_lambda
        longest = int(lengths.max()) if lengths.numel() else 0
        while span < longest:
            advantages = advantages + decay * shifted(advantages, span, left)
            span, decay = 2 * span, decay * decay
        return advantages, advantages + values


def tokens_left(lengths: Tensor) -> Tensor:
    """int64 [R]: how many tokens of its row come after each token."""
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    return ends - 1 - torch.arange(ends.numel())


def shifted(values: Tensor, by: int, left: Tensor) -> Tensor:
    """[R]: the value `by` tokens later in the same row, 0 where the row has ended; left as of `tokens_left`."""
    later = torch.zeros_like(values)
    later[:-by] = values[by:]
    return torch.where(left >= by, later, 0.0)
