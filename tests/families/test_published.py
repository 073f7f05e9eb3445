"""Published shapes give the published number of parameters, exactly."""

from math import prod

import pytest

from rlhf.families.published import PUBLISHED, find_published
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head

# Parameters of the published checkpoints, as their safetensors headers count them (a tied lm head once).
TOTALS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


def test_the_published_totals_come_out_to_the_parameter() -> None:
    counted = {
        one.name: sum(prod(tensor.shape) for tensor in logical_tensors(one.spec, head=Head.LM)) for one in PUBLISHED
    }
    assert counted == TOTALS


def test_names_and_ids_find_one_model_each() -> None:
    ids = [key for one in PUBLISHED for key in (one.name, *one.hub_ids)]
    assert len({key.lower() for key in ids}) == len(ids)
    found = find_published("Qwen/Qwen3-8B")
    assert found is not None
    assert found is find_published("qwen3-8b")
    assert found.spec.max_positions == 40960
    assert find_published("meta-llama/meta-llama-3-70b-instruct") is find_published("llama3-70b")
    assert find_published("someone/else") is None


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("qwen3-30b-a3b", (128, 4, False, 40960, 1e6, 1e-6)),
        ("mixtral-8x7b", (128, 8, False, 32768, 1e6, 1e-5)),
        ("mistral-7b-v0.1", (128, 8, False, 32768, 1e4, 1e-5)),
        ("mistral-7b", (128, 8, False, 32768, 1e6, 1e-5)),
        ("llama3-8b", (128, 8, False, 8192, 500000.0, 1e-5)),
        ("llama3-405b", (128, 8, False, 131072, 500000.0, 1e-5)),
        ("qwen3-0.6b", (128, 8, True, 40960, 1e6, 1e-6)),  # head_dim is not hidden / heads
        ("smollm2-135m", (64, 3, True, 8192, 1e5, 1e-5)),
    ],
)
def test_numbers_that_no_total_shows(name: str, numbers: tuple) -> None:
    found = find_published(name)
    assert found is not None
    spec = found.spec
    assert (
        *(spec.head_dim, spec.num_kv_heads, spec.tied_embeddings),
        *(spec.max_positions, spec.rope_theta, spec.norm_eps),
    ) == numbers
    assert (spec.rope_scaling is not None) == (name == "llama3-405b")
    assert spec.max_length == (4096 if name == "mistral-7b-v0.1" else spec.max_positions)


@pytest.mark.parametrize(("name", "numbers"), [("qwen3-235b-a22b", (128, 8, 1536)), ("mixtral-8x7b", (8, 2, 14336))])
def test_experts_of_published_models(name: str, numbers: tuple) -> None:
    found = find_published(name)
    assert found is not None
    spec = found.spec
    assert (spec.num_experts, spec.experts_per_token, spec.moe_ffn_size) == numbers
    assert spec.norm_topk_prob
