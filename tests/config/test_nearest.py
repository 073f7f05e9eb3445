"""Which valid key is taken to be meant by an unknown one."""

from rlhf.config.nearest import nearest, unknown_key

VALID = ("name", "actor", "actor.optim", "actor.optim.lr", "critic", "critic.optim", "critic.optim.lr", "ppo.clip_eps")


def test_a_misspelt_key_is_looked_for_in_its_own_section_first():
    assert nearest("critic.optim.lrr", VALID) == ["critic.optim.lr"]


def test_the_same_name_elsewhere_comes_with_the_likest_path_first():
    assert nearest("critc.optim.lr", VALID) == ["critic.optim.lr", "actor.optim.lr"]


def test_nothing_alike_lists_the_section():
    assert nearest("zzz", VALID) == []
    assert "section actor.optim has lr;" in unknown_key("actor.optim.zzz", VALID)


def test_a_key_of_another_trainer_is_called_so():
    assert "another trainer" in unknown_key("sft.batch", VALID, {"sft.batch"})
