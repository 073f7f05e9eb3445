"""Server arguments that SGLang has, by its files; a stand-in of them where it is not installed."""

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlhf.build.generation import open_engine
from rlhf.config.sglang import KV_CACHE_DTYPES, SCHEDULE_POLICIES, SGLangConfig
from rlhf.errors import ConfigError
from rlhf.rollout.sglang.arguments import (
    check_arguments,
    check_installed,
    check_names,
    known_arguments,
    known_kinds,
)
from tests.rollout.sglang.tiny import needs_sglang

MORE = ("order", "mode", "parsed", "odd")
DECLARED = """
class Memory(Struct):
    page_size: A[Optional[int], Arg(help="Tokens.", resolvable=True)] = None
    enable_metrics: A[bool, "Count."] = False
    max_prefill_tokens: A[Union[int, List[str]], "Most."] = 1
    order: A[str, Arg(choices=ORDERS)] = "lru"
    attention_backend: A[Optional[str], Arg(choices=["fa3", "triton"])] = None
    mode: A[Optional[Literal["a", "b"]], "Which."] = None
    parsed: A[Optional[str], Arg(type_parser=json.loads)] = None
    odd: A[Optional[Strange], "?"] = None
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter in whose environment an SGLang of few arguments lies."""
    package = tmp_path / "lib" / "python3.99" / "site-packages" / "sglang" / "srt" / "arg_groups"
    package.mkdir(parents=True)
    names = ("page_size", "max_prefill_tokens", "quantize_prefill_tokens", "enable_metrics", *MORE)
    (package / "field_order.py").write_text(f'"""Order."""\n\nPOSITIONAL_FIELD_ORDER = {names!r}\n')
    (package / "choices.py").write_text('ORDERS = ["lru", "lfu"]\n')
    (package / "fields").mkdir()
    (package / "fields" / "memory.py").write_text(DECLARED)
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.touch(mode=0o755)
    return str(program)


def test_an_unknown_argument_is_refused_with_the_nearest_one(python: str) -> None:
    assert len(known_arguments(python)) == 8
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("page_size=16", ""),
        ("page_size=abc", "page_size=abc given, which YAML reads as str; SGLang needs int"),
        ("page_size=16.5", "reads as float; SGLang needs int"),
        ("page_size=true", "reads as bool; SGLang needs int"),
        ("page_size={a: 1}", "reads as dict; SGLang needs int"),
        ("enable_metrics=yes", ""),
        ("enable_metrics=1", "reads as int; SGLang needs bool"),
        ("max_prefill_tokens=[a]", ""),
        ("max_prefill_tokens=1.5", "reads as float; SGLang needs List or int"),
        ("order=lfu", ""),
        ("order=lur", "order=lur given; SGLang needs one of lru, lfu"),
        ("mode=b", ""),
        ("mode=c", "SGLang needs one of a, b"),
        ("parsed={a: 1}", ""),
        ("odd=3", ""),
    ],
)
def test_a_value_that_sglang_would_not_take_is_refused_before_anything_is_started(
    python: str, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_arguments(SGLangConfig(python=python, extra_args=(text,)))


def test_attention_kernels_are_those_of_the_installed_sglang(python: str, tmp_path: Path) -> None:
    check_arguments(SGLangConfig(python=python, attention_backend="fa3"))
    with pytest.raises(
        ConfigError, match=r"rollout\.sglang\.attention_backend: 'fa33' given; needs one of auto, fa3, triton"
    ):
        check_arguments(SGLangConfig(python=python, attention_backend="fa33"))
    check_arguments(SGLangConfig(python=str(tmp_path / "none"), attention_backend="fa33"))


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_sglang)])
def test_of_the_installed_sglangs_arguments_nearly_all_say_what_fits(mark: None) -> None:
    kinds = known_kinds()
    assert len(kinds) > 0.9 * len(known_arguments())
    assert {"fa3", "flashinfer", "triton", "torch_native"} <= set(kinds["attention_backend"].choices)
    assert kinds["page_size"].kinds == {"int"}
    assert {*SCHEDULE_POLICIES} <= set(kinds["schedule_policy"].choices)
    assert {*KV_CACHE_DTYPES} <= set(kinds["kv_cache_dtype"].choices)
