import importlib
import inspect
import math
from types import SimpleNamespace

import pytest

from megatron_patches.patch import Edit, Patch, PatchError, Shim, source_sha
from tests.megatron_patches import faulty, user_of_faulty

HERE = "tests.megatron_patches.faulty"


@pytest.fixture(autouse=True)
def _fresh_module() -> None:
    """Each test starts with the faults in place."""
    importlib.reload(faulty)
    importlib.reload(user_of_faulty)


def sha(function) -> str:
    return source_sha(inspect.getsource(function))


def right_area(radius: float) -> float:
    return math.pi * radius**2


def area_patch(**changes) -> Patch:
    fields = {"target": f"{HERE}:area", "source_sha": sha(faulty.area), "replacement": right_area}
    return Patch(**{**fields, "why": "forgets the square", "drop_when": "squared", **changes})


def shifted_edit(**changes) -> Edit:
    fields = {"target": f"{HERE}:shifted", "source_sha": sha(faulty.shifted), "changes": (("x +", "x -"),)}
    return Edit(**{**fields, "why": "wrong way", "drop_when": "turned", **changes})


def math_shim(**changes) -> Shim:
    lines = source_sha("import math\nreturn math.pi * radius")
    fields = {"module": HERE, "name": "math", "value": SimpleNamespace(pi=3), "mentions": "math", "lines_sha": lines}
    return Shim(**{**fields, "why": "too exact", "drop_when": "pi is 3", **changes})


def test_patch_replaces_and_a_second_apply_changes_nothing() -> None:
    patch = area_patch()
    patch.apply()
    patch.apply()
    assert faulty.area is right_area


def test_patch_replaces_a_method() -> None:
    area_patch(target=f"{HERE}:Counter.count", source_sha=sha(faulty.Counter.count), replacement=lambda self: 7).apply()
    assert faulty.Counter().count() == 7


def test_changed_source_is_refused_and_left_alone() -> None:
    original = faulty.area
    with pytest.raises(PatchError, match=r"faulty:area: source is .* written for 000000000000.*forgets the square"):
        area_patch(source_sha="0" * 12).apply()
    assert faulty.area is original


@pytest.mark.parametrize("target", ["tests.megatron_patches.gone:area", f"{HERE}:gone", f"{HERE}:Gone.count"])
def test_missing_target_is_refused(target: str) -> None:
    with pytest.raises(PatchError, match="not found"):
        area_patch(target=target).apply()


def test_edit_reaches_names_imported_elsewhere_and_still_sees_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = shifted_edit()
    edit.apply()
    edit.apply()
    assert user_of_faulty.shifted(3) == -7
    monkeypatch.setattr(faulty, "OFFSET", 1)
    assert user_of_faulty.shifted(3) == 2


def test_edit_changes_a_class_method() -> None:
    start = faulty.Counter.__dict__["start"].__func__
    shifted_edit(target=f"{HERE}:Counter.start", source_sha=sha(start), changes=(("OFFSET", "OFFSET + 1"),)).apply()
    assert faulty.Counter.start() == 11


def test_edit_of_changed_source_is_refused() -> None:
    with pytest.raises(PatchError, match="written for"):
        shifted_edit(source_sha="0" * 12).apply()


def test_edit_whose_words_are_not_there_is_refused() -> None:
    with pytest.raises(PatchError, match="does not contain"):
        shifted_edit(changes=(("y +", "y -"),)).apply()


def test_shim_gives_one_module_another_global_and_leaves_the_rest() -> None:
    shim = math_shim()
    shim.apply()
    shim.apply()
    assert faulty.area(2.0) == 6.0
    assert math.pi != 3


def test_shim_is_refused_when_a_line_about_its_word_changed() -> None:
    with pytest.raises(PatchError, match="written for"):
        math_shim(lines_sha=source_sha("import math")).apply()
