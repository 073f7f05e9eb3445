"""Server arguments that SGLang has, by its files; a stand-in of them where it is not installed."""

import importlib.util
import sys
from pathlib import Path

import pytest

from rlhf.build.generation import open_engine
from rlhf.config.sglang import SGLangConfig
from rlhf.errors import ConfigError
from rlhf.rollout.sglang.arguments import check_installed, check_names, known_arguments
from tests.rollout.sglang.tiny import needs_sglang


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter in whose environment an SGLang of four arguments lies."""
    package = tmp_path / "lib" / "python3.99" / "site-packages" / "sglang" / "srt" / "arg_groups"
    package.mkdir(parents=True)
    names = ("page_size", "max_prefill_tokens", "quantize_prefill_tokens", "enable_metrics")
    (package / "field_order.py").write_text(f'"""Order."""\n\nPOSITIONAL_FIELD_ORDER = {names!r}\n')
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.touch(mode=0o755)
    return str(program)


def test_an_unknown_argument_is_refused_with_the_nearest_one(python: str) -> None:
    assert len(known_arguments(python)) == 4
    check_names(SGLangConfig(python=python, extra_args=("page_size=16", "enable_metrics=true")))
    with pytest.raises(
        ConfigError,
        match=r"max_prefil_tokens: unknown key; the nearest valid key is .*extra_args\.max_prefill_tokens; use",
    ):
        check_names(SGLangConfig(python=python, extra_args=("page_size=16", "max_prefil_tokens=9")))


def test_an_engine_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else found(name))
    with pytest.raises(ConfigError, match=r"open_engine: engine: sglang given.*run scripts/setup\.sh core sglang"):
        open_engine("no/such/folder", engine="sglang")
    check_installed(SGLangConfig(python=sys.executable))
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.python: /no/python is no program"):
        check_installed(SGLangConfig(python="/no/python"))


def test_where_no_sglang_is_found_nothing_is_known_to_be_wrong(tmp_path: Path) -> None:
    assert known_arguments(str(tmp_path / "python")) == frozenset()
    check_names(SGLangConfig(python=str(tmp_path / "python"), extra_args=("max_prefil_tokens=9",)))


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_sglang)])
def test_the_installed_sglang_has_every_argument_that_is_set_or_named_here(mark: None, tmp_path: Path) -> None:
    from rlhf.config.sglang import _HERE
    from tests.rollout.sglang.test_server_args import args_of

    known = known_arguments()
    assert len(known) > 300
    every = {
        "chunked_prefill_size": 1,
        "cuda_graph_max_batch": 1,
        "attention_backend": "fa3",
        "prefill_attention_backend": "fa3",
        "decode_attention_backend": "fa3",
    }
    assert {*args_of("cuda", **every), *args_of("cpu"), *_HERE} <= known
