"""PPO's losses with a run's numbers filled in, as the models ask for them."""

from torch import Tensor

from rlhf.algos.losses import cross_entropy_loss, entropy_bonus, policy_loss, value_loss
from rlhf.config.algorithm import PPOConfig, ValueLossConfig
from rlhf.data.batch import PolicyRows, ValueRows
from rlhf.mcore.outputs import PolicyOutputs, ValueOutputs
from rlhf.mcore.train_step import LossFn
from rlhf.models.minibatches import LossMaker


def make_policy_loss(config: PPOConfig) -> LossMaker[PolicyRows]:
    """Clipped surrogate minus the entropy bonus. Source: arXiv:1707.06347, eq. 9 without its value term."""

    def with_denominator(denominator: float) -> LossFn[PolicyRows]:
        def loss(outputs: PolicyOutputs, rows: PolicyRows) -> tuple[Tensor, dict[str, Tensor]]:
            mask = rows.loss_mask.values
            surrogate, sums = policy_loss(
                outputs.logprobs,
                rows.old_logprobs.values,
                rows.advantages.values,
                mask,
                clip_eps=config.clip_eps,
                denominator=denominator,
            )
            entropy = outputs.entropy if config.entropy_coef else outputs.entropy.detach()  # no gradient to compute
            bonus, entropy_sums = entropy_bonus(entropy, mask, denominator=denominator)
            total = surrogate - config.entropy_coef * bonus if config.entropy_coef else surrogate
            return total, {**sums, **entropy_sums, "loss": total.detach()}

        return loss

    return with_denominator


def make_value_loss(config: ValueLossConfig, *, returns_std: float) -> LossMaker[ValueRows]:
    """Clipped value loss. Source: as in OpenAI baselines' PPO2; arXiv:2005.12729, section 3.

    `returns_std`: standard deviation of the returns of all steps before this one, which a relative clip is measured in;
    0, as in the first step, leaves the values free.
    """
    reach = {"none": 0.0, "absolute": config.clip_eps, "relative": config.clip_eps * returns_std}[config.clip]
    huber_delta = config.huber_delta if config.kind == "huber" else 0.0

    def with_denominator(denominator: float) -> LossFn[ValueRows]:
        def loss(outputs: ValueOutputs, rows: ValueRows) -> tuple[Tensor, dict[str, Tensor]]:
            total, sums = value_loss(
                outputs.values,
                rows.values.values,
                rows.returns.values,
                rows.loss_mask.values,
                clip_eps=reach,
                denominator=denominator,
                huber_delta=huber_delta,
            )
            return total, {**sums, "loss": total.detach()}

        return loss

    return with_denominator


def make_answer_loss(denominator: float) -> LossFn[PolicyRows]:
    """Cross entropy of the answers, for supervised fine-tuning."""

    def loss(outputs: PolicyOutputs, rows: PolicyRows) -> tuple[Tensor, dict[str, Tensor]]:
        total, sums = cross_entropy_loss(outputs.logprobs, rows.loss_mask.values, denominator=denominator)
        return total, {**sums, "loss": total.detach()}

    return loss
