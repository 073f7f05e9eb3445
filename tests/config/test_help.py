"""The text of --help, and the docstrings it is made of."""

from dataclasses import fields, is_dataclass

import pytest

from rlhf.config.help import help_text
from rlhf.config.load import TRAINERS
from rlhf.config.schema import field_docs, field_types, keys_of


def sections(cls: type) -> list[type]:
    below = [kind for kind in field_types(cls).values() if is_dataclass(kind)]
    return [cls, *(found for kind in below for found in sections(kind))]


SECTIONS = sorted({found for cls in TRAINERS.values() for found in sections(cls)}, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_field_has_a_docstring(cls):
    docs = field_docs(cls)
    assert not [f.name for f in fields(cls) if len(docs.get(f.name, "")) < 5]


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_section_is_frozen_and_keyword_only(cls):
    assert cls.__dataclass_params__.frozen
    assert all(f.kw_only for f in fields(cls))
    assert hasattr(cls, "__slots__")


def test_every_key_is_listed_with_type_default_and_docstring():
    text = help_text(TRAINERS)
    words = " ".join(text.split())
    for cls in TRAINERS.values():
        for key in keys_of(cls):
            assert f"  {key.path}  ({key.type_name}, " in text
            assert key.doc in words
    assert "  ppo.clip_eps  (number, default 0.2)" in text
    assert "  actor.model.path  (text, required)" in text
    assert "  eval.sampling.temperature  (number, default 0)" in text
    assert '  trainer  (text, default "sft")' in text


def test_a_key_that_both_trainers_share_is_listed_once():
    assert help_text(TRAINERS).count("  actor.optim.lr  (") == 1
