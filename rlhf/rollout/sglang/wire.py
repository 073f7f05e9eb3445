"""What a leader rank and the host process of its engine say to each other, and the host to SGLang's schedulers.

Imports nothing of the project but its errors: the host may run in another environment than the job.
"""

import pickle
import tempfile
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a process that fails should not need the import to say so
    import torch


class Errand(Protocol):
    """Something to be done inside each scheduler process, on its shard of the model. Picklable."""

    def run(self, model: "torch.nn.Module") -> Any:
        """Do it; what it returns (picklable) or raises goes back to the leader rank.

        Every tensor-parallel rank of the engine runs its own errand; none may wait for another.
        """
        ...


class SchedulerErrand(Protocol):
    """An errand outside of an update on the scheduler itself."""

    def run_in(self, scheduler: Any) -> Any:
        """As `Errand.run`."""
        ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where processes of an engine on several hosts meet; see `rlhf/rollout/sglang/multi_host/meeting.py`."""

    address: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Party:
    """One host's part of an engine on several."""

    node: int
    """Which of them, in the order of tp ranks; the first leads."""
    titles: tuple[str, ...]
    """What each is called in messages."""
    meeting: Meeting
    listening: int | None = None
    """Descriptor of the socket of the meeting; on the first."""


@dataclass(frozen=True, slots=True)
class Order:
    """How the host is to start its engine."""

    parent: int
    """Process id of the leader rank; the host dies with it."""
    server_args: dict[str, Any]
    """Of SGLang."""
    cpu: bool
    """No GPU: the shim for CPUs comes first."""
    by_seed: bool = True
    """Schedulers draw by our sampler, not by SGLang's."""
    party: Party | None = None
    """Where the engine lies on several hosts."""
    decode: bytes = b""
    """Pickled `rlhf.rollout.stopping.Decode`, for the schedulers; empty: no strings can end a response."""


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to do, for the host."""

    number: int
    verb: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One response to be sampled, or continued. Tokens are packed, since lists are pickled integer by integer."""

    number: int
    """Comes back with the response."""
    prompt: bytes
    begun: bytes
    """What there is of the response."""
    sampling: dict[str, Any]
    """SGLang's parameters, of the tokens that are missing."""
    shares_prompt: bool
    """Others with the same prompt are at work, or come soon."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life while responses grow."""

    new_tokens: int
    """Of responses that have not ended, as far as the host knows: SGLang tells it every 50 tokens of each."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a request: its value, or what went wrong."""

    number: int
    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Times:
    """When things happened to a request, in seconds of CLOCK_MONOTONIC, one clock for all processes of a host."""

    received: float = nan
    """By the host; NaN, as below: not known."""
    begun: float = nan
    """Its scheduler took it out of the queue."""
    first_token: float = nan
    ended: float = nan
    """The host had its whole answer."""


@dataclass(frozen=True, slots=True)
class Response:
    """One answer of the engine."""

    number: int
    """Of its `Ask`."""
    tokens: bytes
    """New ones, packed."""
    logprobs: bytes
    """float32."""
    reason: str
    """stop, length or abort."""
    versions: tuple[tuple[str, int], ...]
    """(weight version, how many tokens in a row it made)."""
    cached_tokens: int = 0
    """Of the prompt, that were in the prefix cache."""
    times: Times = Times()
    error: str = ""
    """Why SGLang did not answer; nothing else means anything then."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Responses that ended since the last message."""

    responses: tuple[Response, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an errand came to on one scheduler."""

    value: Any = None
    error: str = ""


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as int32."""
    return array("i", tokens).tobytes()


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """As float32."""
    return array("f", logprobs).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """What was packed."""
    return array("i", packed).tolist()


def write_outcome(tp_rank: int, outcome: Outcome) -> None:
    """Leave an outcome for the host, on a scheduler."""
    path = _outcome_path(tp_rank)
    path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".part").rename(path)


def take_outcomes(tp_size: int) -> list[Outcome]:
    """The outcomes of all schedulers, in the host, once SGLang says that they are through."""
    found = []
    for path in map(_outcome_path, range(tp_size)):
        if not path.exists():
            found.append(Outcome(error="the scheduler left no answer"))
            continue
        found.append(pickle.loads(path.read_bytes()))
        path.unlink()
    return found


def _outcome_path(tp_rank: int) -> Path:
    """In the engine's own folder for temporary files, which its processes share and no other process uses."""
    return Path(tempfile.gettempdir()) / f"outcome_{tp_rank}"
