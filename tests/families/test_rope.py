"""Rotary frequencies by hand and against transformers."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.families.registry import hf_config
from rlhf.families.rope import rotary_frequencies
from rlhf.families.spec import RopeScaling
from tests.families.test_registry import spec


def test_llama3_scaling_keeps_high_divides_low_and_blends_between():
    scaling = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_positions=100)
    plain = rotary_frequencies(replace(spec("llama"), rope_theta=1e4))
    scaled = rotary_frequencies(replace(spec("llama"), rope_theta=1e4, rope_scaling=scaling))
    # wavelengths 6.3, 63, 628, 6283; kept below 50, divided above 100, blended at 63: (100 / 62.83 - 1) / (2 - 1)
    blend = 100 / (2 * math.pi / 0.1) - 1
    expected = plain * torch.tensor([1.0, blend + (1 - blend) / 4, 0.25, 0.25])
    torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_frequencies_are_those_that_transformers_makes_of_our_config(scaled, tmp_path):
    ours = spec("llama", scaled=scaled)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(ours)))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).model.rotary_emb.inv_freq
    assert torch.equal(rotary_frequencies(ours), theirs)
    assert torch.equal(rotary_frequencies(spec("llama")), theirs) == (not scaled)  # the scaling is on
