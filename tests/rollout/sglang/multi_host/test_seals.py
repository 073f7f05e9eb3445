"""Pickles between an engine's schedulers on several hosts: none without a seal is unpickled."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.errors import EngineError
from rlhf.rollout.sglang.multi_host import seals
from rlhf.rollout.sglang.multi_host.seals import EXTRA, Seals
from tests.rollout.sglang.tiny import needs_sglang


def opens(sealed: bytes, *, group: str = "tp", sender: int | None = None, token: str = "secret") -> bytes:
    """In another process that has opened nothing yet."""
    return Seals(token).open(sealed, group=group, sender=sender)


def test_what_was_sealed_is_opened_by_those_with_the_token_on_that_group_alone():
    sealed = Seals("secret").seal(b"body", group="tp", sender=3)
    assert len(sealed) == EXTRA + 4
    assert opens(sealed) == opens(sealed, sender=3) == b"body"
    for other in ({"token": "other"}, {"group": "world"}):
        with pytest.raises(EngineError, match=r"without a valid seal .* not unpickled"):
            opens(sealed, **other)
    with pytest.raises(EngineError, match="of rank 3 in the place of rank 2's"):
        opens(sealed, sender=2)


def test_a_seal_fits_no_other_bytes():
    sealed = Seals("secret").seal(b"body", group="tp", sender=3)
    forged = [sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :] for i in range(len(sealed))]
    for one in (*forged, sealed[:-1], sealed + b"x", b"", b"body", bytes(EXTRA + 4)):
        with pytest.raises(EngineError, match="without a valid seal"):
            opens(one)
    with pytest.raises(EngineError, match="without a valid seal"):  # names of groups are told from what follows them
        opens(Seals("secret").seal(b"body", group="t", sender=3), group="tp")


def test_what_came_once_does_not_come_again_nor_what_is_older():
    sender, receiver = Seals("secret"), Seals("secret")
    first, second, third = (sender.seal(bytes([i]), group="tp", sender=1) for i in range(3))
    elsewhere = sender.seal(b"x", group="world", sender=1)
    assert receiver.open(first, group="tp") == b"\0"
    assert receiver.open(third, group="tp") == b"\2"  # the second was for others of the group
    for old in (first, second, third):
        with pytest.raises(EngineError, match="of rank 1 that came before"):
            receiver.open(old, group="tp")
    assert receiver.open(elsewhere, group="world") == b"x"


def test_another_torch_than_the_one_that_was_read_is_refused():
    target = "torch.distributed.distributed_c10d:_tensor_to_object"
    function = seals._function(target)
    with pytest.raises(EngineError, match=rf"{target} has the source \w+, not 0123; .*constraints.txt"):
        seals._check(target, function, "0123")
    seals._check(target, function, seals.KNOWN[target])
    with pytest.raises(EngineError, match="_gone is not there"):
        seals._function(f"{target}_gone")


@needs_sglang[0]
@needs_sglang[1]
def test_three_processes_understand_one_another_and_refuse_what_a_stranger_sends(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.rollout.sglang.multi_host.seal_ranks",
        tmp_path / "meeting",
        tmp_path / "evil",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("evil*"))
