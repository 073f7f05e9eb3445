"""What of SGLang's is named here, in the files of the installed one: also what GPUs alone call. Nothing is imported."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rlhf.rollout.sglang
from tests.rollout.sglang.tiny import needs_sglang

pytestmark = needs_sglang
OURS = Path(rlhf.rollout.sglang.__file__).parent
"""Our files."""


@cache
def theirs(module: str) -> ast.Module:
    """A module of SGLang's, parsed."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    path = Path(str(spec.origin)).parent.joinpath(*module.split(".")[1:])
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def names_of(tree: ast.Module) -> set[str]:
    """What a module defines or imports by name; `*` where it imports all of another."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    found |= {
        one.asname or one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names
    }
    return found | {
        one.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for one in node.targets
        if isinstance(one, ast.Name)
    }


def class_of(module: str, name: str) -> ast.ClassDef:
    return next(node for node in theirs(module).body if isinstance(node, ast.ClassDef) and node.name == name)


def fields_of(module: str, name: str) -> set[str]:
    """Fields of a class, those of its bases in the same module included."""
    made = class_of(module, name)
    own = {one.target.id for one in made.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    bases = [base.id for base in made.bases if isinstance(base, ast.Name)]
    known = {node.name for node in theirs(module).body if isinstance(node, ast.ClassDef)}
    return own.union(*(fields_of(module, base) for base in bases if base in known))


def imports() -> Iterator[tuple[str, str, ast.Module]]:
    """(module of SGLang's, name, our file) of every import."""
    for path in sorted(OURS.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                yield from ((str(node.module), one.name, tree) for one in node.names)


def test_every_name_that_is_imported_is_there() -> None:
    found = 0
    for module, name, _ in imports():
        spec_of_module = name in {"scheduler", "engine", "tokenizer_manager"}  # modules themselves
        names = {name} if spec_of_module and theirs(f"{module}.{name}").body else names_of(theirs(module))
        assert name in names or "*" in names, f"{module} has no {name}"
        found += 1
    assert found > 15


def test_requests_are_made_of_fields_that_they_have() -> None:
    asked = 0
    for module, name, tree in imports():
        if not name.endswith("ReqInput"):
            continue
        calls = [
            n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name
        ]
        for call in calls:
            assert {word.arg for word in call.keywords} <= fields_of(module, name), name
            assert not call.args
            asked += 1
    assert asked >= 9


@pytest.mark.parametrize(
    ("module", "of", "method", "arguments"),
    [
        ("tokenizer_control_mixin", "TokenizerControlMixin", "release_memory_occupation", ["obj", "request"]),
        ("tokenizer_control_mixin", "TokenizerControlMixin", "resume_memory_occupation", ["obj", "request"]),
        ("tokenizer_control_mixin", "TokenizerControlMixin", "begin_weight_update", ["obj", "request"]),
        ("tokenizer_control_mixin", "TokenizerControlMixin", "end_weight_update", ["obj", "request"]),
        ("tokenizer_control_mixin", "TokenizerControlMixin", "flush_cache", ["timeout_s"]),
        ("schedule_batch", "Req", "update_finish_state", ["new_accepted_len"]),
        ("schedule_batch", "Req", "_check_str_based_finish", ["new_accepted_len"]),
        ("schedule_batch", "FINISH_ABORT", "__init__", ["message", "status_code", "err_type"]),
    ],
)
def test_methods_that_are_called_or_replaced_have_these_arguments(
    module: str, of: str, method: str, arguments: list[str]
) -> None:
    made = class_of(f"sglang.srt.managers.{module}", of)
    function = next(
        one for one in made.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == method
    )
    assert [one.arg for one in function.args.args] == ["self", *arguments]


def test_an_engine_starts_its_detokenizer_where_ours_starts_none() -> None:
    made = class_of("sglang.srt.entrypoints.engine", "Engine")
    (function,) = [
        one for one in made.body if isinstance(one, ast.FunctionDef) and one.name == "_launch_detokenizer_subprocesses"
    ]
    assert {"server_args", "port_args", "run_detokenizer_process_func"} <= {one.arg for one in function.args.args}
    for module in ("entrypoints.engine", "managers.tokenizer_manager"):
        assert "kill_process_tree" in names_of(theirs(f"sglang.srt.{module}"))


def test_memory_has_the_tags_that_are_given_back() -> None:
    from rlhf.rollout.sglang.memory import KV_CACHE, WEIGHTS

    tree = theirs("sglang.srt.constants")
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert (values["GPU_MEMORY_TYPE_KV_CACHE"], values["GPU_MEMORY_TYPE_WEIGHTS"]) == (KV_CACHE, WEIGHTS)


def test_batch_invariant_attention_is_what_sglang_admits_for_it() -> None:
    from rlhf.config.sglang import INVARIANT_ATTENTION

    tree = theirs("sglang.srt.arg_groups.choices")
    (admitted,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DETERMINISTIC_ATTENTION_BACKEND_CHOICES"
    ]
    assert {*INVARIANT_ATTENTION} - {"auto"} <= {*admitted}
