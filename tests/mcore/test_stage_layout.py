"""Which layers Megatron builds in a chunk, as its modules ask for it."""

import pytest

from rlhf.mcore.transformer_config import StageLayout

COUNTS = (1, 3, 2, 1, 2, 4)
"""Of six chunks on two stages: layers 0 | 4 5 | 7 8 on the first, 1-3 | 6 | 9-12 on the second."""


@pytest.mark.parametrize(("stage", "starts", "counts"), [(0, [0, 4, 7], [1, 2, 2]), (1, [1, 6, 9], [3, 1, 4])])
def test_a_chunk_begins_where_the_chunk_before_it_on_the_other_stage_ends(stage, starts, counts) -> None:
    layout = StageLayout(COUNTS, pp=2, pp_rank=stage)
    assert [layout.get_layer_offset(vp_stage=chunk) for chunk in range(3)] == starts
    assert [layout.get_num_layers_to_build(vp_stage=chunk) for chunk in range(3)] == counts


def test_asking_for_a_stage_without_its_chunk_fails_where_there_are_several() -> None:
    chunked, plain = StageLayout(COUNTS, pp=2, pp_rank=1), StageLayout(COUNTS, pp=6, pp_rank=2)
    with pytest.raises(AssertionError, match="which chunk"):
        chunked.get_layer_offset()
    with pytest.raises(AssertionError, match="which chunk"):
        chunked.get_num_layers_to_build()
    assert (plain.get_layer_offset(), plain.get_num_layers_to_build()) == (4, 2)
