"""Seals on what the schedulers of an engine on several hosts pickle for one another: none without one is unpickled.

SGLang and torch send pickles over gloo and NCCL, whose connections prove nothing. Once `seal_pickles` has been called
in a process, the functions that do so there run ours: each pickle travels behind a head and an HMAC-SHA-256 of both by
the engine's token. Whoever has not the token can neither make one nor bring one again, on this group or on another.
Tensors pass as they did. Imports SGLang where it is called.
"""

import hashlib
import hmac
import importlib
import inspect
import pickle
import struct
from collections.abc import Callable
from functools import reduce
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.errors import EngineError

WHERE = "sglang engine on several hosts"
_HEAD = struct.Struct("<IQ")
"""The sender's rank, and how many it has sealed for the group."""
_TAG = hashlib.sha256().digest_size
EXTRA = _TAG + _HEAD.size
"""How many bytes a seal adds."""
_SIZE = struct.Struct("<q")

_C10D, _COMMON = "torch.distributed.distributed_c10d", "sglang.srt.utils.common"
_COORDINATOR = "sglang.srt.distributed.parallel_state:GroupCoordinator"
_QUEUE = "sglang.srt.distributed.device_communicators.shm_broadcast:MessageQueue"
KNOWN = {
    f"{_C10D}:_object_to_tensor": "06adb0c0b06c",
    f"{_C10D}:_tensor_to_object": "cee5afd0fdc0",
    f"{_COMMON}:broadcast_pyobj": "ed29d8e429b5",
}
"""Functions that ours stand in for, and the sha256 (12 digits) of the source that was read before."""
REFUSED = (
    f"{_COMMON}:point_to_point_pyobj",
    f"{_COORDINATOR}.recv_object",
    f"{_COORDINATOR}.send_recv_tensor_dict",
    f"{_QUEUE}.create_from_handle",
)
"""Functions that unpickle what comes from another process, and that no engine of ours uses: of pipeline stages, and of
a queue that `server_args.ENVIRONMENT` switches off."""


class Seals:
    """What one process seals and opens; all of an engine's processes have the same token."""

    def __init__(self, token: str) -> None:
        self._key = hmac.digest(token.encode(), b"pickles between schedulers", "sha256")
        self._sealed: dict[str, int] = {}
        self._opened: dict[tuple[str, int], int] = {}

    def seal(self, body: bytes, *, group: str, sender: int) -> bytes:
        """The body behind a seal of this process, which is rank `sender`; for the members of a group."""
        number = self._sealed[group] = self._sealed.get(group, 0) + 1
        head = _HEAD.pack(sender, number)
        return self._tag(group, head, body) + head + body

    def open(self, sealed: bytes, *, group: str, sender: int | None = None) -> bytes:
        """The body, once it is known who sealed it for this group, and that it has not come before.

        sender: Who it must be; None: any member.

        Raises:
            EngineError: It bears no valid seal.
        """
        head, body = sealed[_TAG:EXTRA], sealed[EXTRA:]
        if len(sealed) < EXTRA or not hmac.compare_digest(sealed[:_TAG], self._tag(group, head, body)):
            raise _refusal(group, "without a valid seal")
        found, number = _HEAD.unpack(head)
        if sender is not None and found != sender:
            raise _refusal(group, f"of rank {found} in the place of rank {sender}'s")
        if number <= self._opened.get((group, found), 0):
            raise _refusal(group, f"of rank {found} that came before (number {number})")
        self._opened[group, found] = number
        return body

    def _tag(self, group: str, head: bytes, body: bytes) -> bytes:
        name = group.encode()
        made = hmac.new(self._key, struct.pack("<I", len(name)) + name + head, "sha256")
        made.update(body)
        return made.digest()


def _refusal(group: str, what: str) -> EngineError:
    return EngineError(
        f"{WHERE}: a pickle {what} came over group {group!r}; needs one that a process of this engine has sealed; it "
        "was not unpickled. Somebody else speaks on the network of this job: keep strangers off it"
    )


def seal_pickles(token: str) -> None:
    """From now on this process seals what it pickles for others of its groups, and opens only what was sealed.

    Before its first group is used. Whoever has imported the functions concerned by name runs ours too. Twice is once.

    Raises:
        EngineError: The installed torch or SGLang has other functions than those that this was written for.
    """
    sealed = _SealedPickles(Seals(token))
    ours: dict[str, Callable[..., Any]] = {
        f"{_C10D}:_object_to_tensor": sealed.object_to_tensor,
        f"{_C10D}:_tensor_to_object": sealed.tensor_to_object,
        f"{_COMMON}:broadcast_pyobj": sealed.broadcast_pyobj,
    }
    functions = {target: _function(target) for target in (*KNOWN, *REFUSED)}
    if any(function.__code__ is _instead.__code__ for function in functions.values()):
        return
    for target, known in KNOWN.items():
        _check(target, functions[target], known)
    for target, function in functions.items():
        _take_over(function, ours.get(target) or _refuse(target))


class _SealedPickles:
    """In the place of torch's and SGLang's functions, with their parameters."""

    def __init__(self, seals: Seals) -> None:
        self._seals = seals

    def object_to_tensor(self, obj: Any, device: torch.device, group: Any) -> tuple[Tensor, Tensor]:
        """An object as bytes [N] that may be resized, and N [1]."""
        made = _tensor(self._seals.seal(pickle.dumps(obj), group=_name(group), sender=dist.get_rank()))
        return made.to(device), torch.tensor([made.numel()], dtype=torch.int64, device=device)

    def tensor_to_object(self, tensor: Tensor, tensor_size: Tensor, group: Any) -> Any:
        """The object; of whichever member of the group."""
        sealed = tensor.cpu().numpy().tobytes()[: int(tensor_size)]
        return pickle.loads(self._seals.open(sealed, group=_name(group)))

    def broadcast_pyobj(
        self, data: list[Any], rank: int, dist_group: Any = None, src: int = 0, force_cpu_device: bool = True
    ) -> list[Any]:
        """The list of rank `src` (both of the whole world), by two broadcasts; by one if it is empty, as SGLang's."""
        device = torch.device("cpu" if force_cpu_device or not torch.cuda.is_available() else "cuda")
        group = _name(dist_group)

        def pass_on(body: bytes, size: int) -> bytes:
            sealed = (
                _tensor(self._seals.seal(body, group=group, sender=src))
                if rank == src
                else torch.empty(EXTRA + size, dtype=torch.uint8)
            ).to(device)
            dist.broadcast(sealed, src=src, group=dist_group)
            return body if rank == src else self._seals.open(sealed.cpu().numpy().tobytes(), group=group, sender=src)

        body = pickle.dumps(data) if rank == src and data else b""
        (size,) = _SIZE.unpack(pass_on(_SIZE.pack(len(body)), _SIZE.size))
        if size:
            body = pass_on(body, size)
        return data if rank == src else pickle.loads(body) if body else []


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()  # whose storage is its own: torch pads it


def _name(group: Any) -> str:
    """The same on all members of a group, and of no other group."""
    found = dist.group.WORLD if group is None else group
    assert found is not None, "groups have been made"
    return str(found.group_name)


def _function(target: str) -> FunctionType:
    module_name, _, path = target.partition(":")
    try:
        found = reduce(getattr, path.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise _changed(target, "is not there") from error
    if not isinstance(found, FunctionType) or found.__closure__:
        raise _changed(target, "is no plain function")
    return found


def _check(target: str, function: FunctionType, known: str) -> None:
    found = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]
    if found != known:
        raise _changed(target, f"has the source {found}, not {known}")


def _changed(target: str, what: str) -> EngineError:
    return EngineError(
        f"{WHERE}: {target} {what}; needs the function that pickles were sealed for; install the versions of "
        "constraints.txt, or read it and mend rlhf/rollout/sglang/multi_host/seals.py"
    )


def _refuse(target: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise EngineError(f"{WHERE}: {target} was called; needs a way on which pickles are sealed, which it is not")

    return refuse


def _take_over(function: FunctionType, ours: Callable[..., Any]) -> None:
    """The function stays the object that others have imported by name, and does what ours does."""
    function.__code__ = _instead.__code__
    function.__defaults__, function.__kwdefaults__ = None, {"ours": ours}


def _instead(*args: Any, ours: Callable[..., Any], **kwargs: Any) -> Any:
    return ours(*args, **kwargs)
