"""What our part of a scheduler does to SGLang's requests, on stand-ins; `test_draw.py` has the sampler itself."""

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlhf.rollout.sglang.inside.sampling import BACKEND, BEGUN, STOP, draw_by_seed, end_before_abort, stop_by_strings


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


class Req:
    """A request of SGLang's."""

    def __init__(self, stop: list[str], *, prompt: str, begun: str = "", output: str = "") -> None:
        numbers = [ord(letter) - ord("a") for letter in prompt + begun]
        self.origin_input_ids, self.output_ids = numbers, [ord(letter) - ord("a") for letter in output]
        self.sampling_params = SimpleNamespace(custom_params={STOP: stop, BEGUN: len(begun)} if stop else None)
        self.finished_reason = self.finished_len = self.to_finish = None

    def finished(self) -> bool:
        return self.finished_reason is not None

    def update_finish_state(self, new_accepted_len: int = 1) -> None:
        """As SGLang's: what is to be aborted is, whatever its last token; `e` ends the others."""
        if self.to_finish is not None:
            self.finished_reason, self.to_finish = self.to_finish, None
        elif ord("e") - ord("a") in self.output_ids[-new_accepted_len:]:
            self.finished_reason = "stop"

    def _check_str_based_finish(self, new_accepted_len: int = 1) -> bool:
        raise AssertionError("SGLang's own search needs a tokenizer")


class SamplingBatchInfo:
    @classmethod
    def from_schedule_batch(cls, batch: object, vocab_size: int) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=vocab_size, device="cpu", sampling_seed=None)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Modules of SGLang that a scheduler has; what was registered as a sampler, by backend."""
    registered: dict[str, object] = {}
    kinds = {"Req": type("Req", (Req,), {}), "SamplingBatchInfo": type("Info", (SamplingBatchInfo,), {})}
    content = {
        "sglang.srt.layers.sampler": {"register_sampler_backend": registered.__setitem__},
        "sglang.srt.managers.schedule_batch": {
            "Req": kinds["Req"],
            "FINISH_MATCHED_STR": lambda matched: ("stop", matched),
        },
        "sglang.srt.sampling.sampling_batch_info": {"SamplingBatchInfo": kinds["SamplingBatchInfo"]},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.managers", "sglang.srt.sampling", *content):
        module = ModuleType(name)
        vars(module).update(content.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    return {**kinds, "registered": registered}


def test_seeds_of_requests_are_kept_and_our_sampler_is_registered(sglang: dict) -> None:
    draw_by_seed()
    assert list(sglang["registered"]) == [BACKEND]
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in (7, -(2**63), None)]
    info = sglang["SamplingBatchInfo"].from_schedule_batch(SimpleNamespace(reqs=reqs), 300)
    assert info.vocab_size == 300
    assert torch.equal(info.sampling_seed, torch.tensor([7, -(2**63), 0]))


@pytest.mark.parametrize(
    ("stop", "prompt", "begun", "output", "ends"),
    [
        (["cd"], "x", "", "abcd", 4),
        (["cd"], "x", "", "abc", None),
        (["zz", "d"], "x", "", "abcd", 4),
        (["cd"], "x", "abc", "d", 1),  # it began before the interruption
        (["cd"], "xc", "", "d", None),  # and not in the prompt
        (["bcde"], "abc", "bc", "de", 2),
        ([], "x", "", "abcd", None),
    ],
)
def test_a_request_ends_where_its_response_completes_a_string(
    sglang: dict, stop: list[str], prompt: str, begun: str, output: str, ends: int | None
) -> None:
    stop_by_strings(pickle.dumps(letters))
    req = sglang["Req"](stop, prompt=prompt, begun=begun, output=output)
    assert req._check_str_based_finish(1) == (ends is not None)
    assert req.finished_len == ends
    assert req.finished_reason == (("stop", stop[0]) if ends else None)


def test_a_string_inside_of_what_came_in_one_step_ends_the_response_there(sglang: dict) -> None:
    stop_by_strings(pickle.dumps(letters))
    req = sglang["Req"](["c"], prompt="x", output="abcde")
    assert req._check_str_based_finish(4)
    assert req.finished_len == 3


@pytest.mark.parametrize(
    ("output", "new", "status", "stopped"),
    [
        ("abe", 1, None, True),
        ("abc", 1, None, False),
        ("aec", 1, None, False),
        ("abe", 1, 500, False),  # SGLang gave it up by itself
        ("abe", 0, None, False),  # nothing came
    ],
)
def test_a_request_that_is_stopped_at_its_end_has_ended(
    sglang: dict, output: str, new: int, status: int | None, stopped: bool
) -> None:
    end_before_abort()
    req = sglang["Req"]([], prompt="x", output=output)
    req.to_finish = abort = SimpleNamespace(status_code=status)
    req.update_finish_state(new)
    assert req.finished_reason == ("stop" if stopped else abort)
    assert req.to_finish is None
    going_on = sglang["Req"]([], prompt="x", output="ab")
    going_on.update_finish_state()
    assert not going_on.finished()
