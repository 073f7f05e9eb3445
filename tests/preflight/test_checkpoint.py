"""Bytes of a checkpoint against sizes counted by hand."""

import pytest

from rlhf.config.checkpoint import CheckpointConfig
from rlhf.config.model import FrozenRoleConfig, ModelConfig, TrainedRoleConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.preflight.checkpoint import render_checkpoint, saved_bytes
from rlhf.preflight.roles import ModelRole

SPEC = ModelSpec(
    family="llama",
    vocab_size=128,
    hidden_size=64,
    ffn_size=192,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_positions=64,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
)
LAYER = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 192 + 2 * 64  # attention, output, MLP, norms
EMBED = HEAD = 128 * 64
TOTAL = 4 * LAYER + EMBED + HEAD + 64


def role(parallel: ParallelConfig, *, dtype: str = "float32", freeze: tuple[str, ...] = ()) -> ModelRole:
    config = TrainedRoleConfig(model=ModelConfig(path="a", dtype=dtype), parallel=parallel, freeze=freeze)
    return ModelRole("actor", config, SPEC, Head.LM)


@pytest.mark.parametrize(("dtype", "item", "state"), [("float32", 4, 8), ("bfloat16", 2, 12)])
def test_a_checkpoint_is_weights_and_moments_and_masters(dtype, item, state):
    (one,) = saved_bytes([role(ParallelConfig(dp=2), dtype=dtype)])
    assert (one.weights, one.optimizer) == (TOTAL * item, TOTAL * state)
    assert TOTAL * (item + state) / 2 <= one.of_rank <= TOTAL * (item + state) / 2 * 1.01  # padding


def test_the_fullest_stage_counts_and_frozen_weights_have_no_moments():
    (one,) = saved_bytes([role(ParallelConfig(pp=2, layers_per_stage=(3, 1)), freeze=("model.embed_tokens.weight",))])
    assert one.optimizer == (TOTAL - EMBED) * 8
    first = 3 * LAYER * 12 + EMBED * 4
    assert first <= one.of_rank <= first * 1.01


def test_a_role_that_is_not_trained_is_not_saved_and_the_settings_are_told():
    trained = role(ParallelConfig())
    config = FrozenRoleConfig(model=ModelConfig(path="a"))
    held = saved_bytes([trained, ModelRole("reference", config, SPEC, Head.LM)])
    assert [one.role for one in held] == ["actor"]
    text = render_checkpoint(held, CheckpointConfig(every_steps=5, keep_last=3, keep_every=20))
    assert text.startswith("one checkpoint: ")
    assert "saved every 5 steps and on a stop request; the newest 3 and each 20th stay" in text
    assert "on a stop request only" in render_checkpoint(held, CheckpointConfig())
