"""Sizes of a layout as a command line has them: `tp8,pp4,dp8`, `tp8,first_rank64`."""

import re
from collections.abc import Collection
from dataclasses import dataclass, fields

from rlhf.config.parallel import ParallelConfig
from rlhf.errors import ConfigError

LAYERS = "layers"
"""Counts of pipeline stages (of chunks with vpp), as in `pp4,layers18/20/20/22`."""

_ENTRY = re.compile(r"([a-z_]+?)=?(\d+(?:/\d+)*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """`dp` engines of tp ranks each, from first_rank on."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    """Ranks of an engine that share the experts of each layer, each with whole ones; divides tp."""
    first_rank: int = 0
    stride: int = 1
    """Ranks of an engine lie so far apart; see rollout.stride."""

    @property
    def ranks(self) -> range:
        """The pool."""
        return range(self.first_rank, self.first_rank + self.tp * self.dp)


def read_sizes(text: str, known: Collection[str], *, where: str) -> dict[str, tuple[int, ...]]:
    """Numbers by key, of one or more parts each.

    Raises:
        ConfigError: An entry is not KEYnumber, its key is not known or comes twice, or a size is 0.
    """
    found: dict[str, tuple[int, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(entry)
        key = match[1] if match else ""
        if match is None or key not in known or ("/" in match[2]) > (key == LAYERS):
            raise ConfigError(
                f"{where}: {entry!r} in {text!r}; needs one of {', '.join(known)} and a number, such as tp8; change it"
            )
        if key in found:
            raise ConfigError(f"{where}: {key} comes twice in {text!r}; needs it once; leave one out")
        found[key] = tuple(int(number) for number in match[2].split("/"))
        if key != "first_rank" and min(found[key]) < 1:
            raise ConfigError(f"{where}: {entry!r} in {text!r}; needs at least 1; change it")
    if not found:
        raise ConfigError(f"{where}: {text!r} holds no sizes; needs some, such as tp8,pp4,dp8; give them")
    return found


def read_parallel(text: str, num_layers: int, *, where: str) -> ParallelConfig:
    """A training layout. Layers that pp does not divide are spread, the first stages with one more, unless told.

    Raises:
        ConfigError: See `read_sizes`, or the sizes do not fit one another or the layers.
    """
    known = [one.name for one in fields(ParallelConfig) if one.type in (int, "int")]
    found = read_sizes(text, [*known, LAYERS], where=where)
    stages = found.pop(LAYERS, ())
    numbers = {key: value[0] for key, value in found.items()}
    chunks = numbers.get("pp", 1) * numbers.get("vpp", 1)
    if chunks > num_layers:
        raise ConfigError(f"{where}: pp*vpp = {chunks} for {num_layers} layers; needs a layer for each; lower them")
    if not stages and num_layers % chunks:
        more, each = num_layers % chunks, num_layers // chunks
        stages = (each + 1,) * more + (each,) * (chunks - more)
    if stages and (len(stages) != chunks or sum(stages) != num_layers):
        raise ConfigError(
            f"{where}: {LAYERS}{'/'.join(map(str, stages))} given; needs pp*vpp = {chunks} counts that add up to "
            f"{num_layers} layers; change them"
        )
    try:
        return ParallelConfig(**numbers, layers_per_stage=stages)
    except ConfigError as error:
        raise ConfigError(str(error).replace("parallel.", f"{where}.")) from error


def read_engines(text: str, trained: range, *, where: str) -> EngineSizes:
    """A rollout pool. Without dp: as many engines as the training ranks hold from first_rank on, at least one.

    Raises:
        ConfigError: See `read_sizes`.
    """
    known = [one.name for one in fields(EngineSizes)]
    numbers = {key: value[0] for key, value in read_sizes(text, known, where=where).items()}
    first = numbers.setdefault("first_rank", trained.start)
    tp = numbers.get("tp", 1)
    numbers.setdefault("dp", max(1, (trained.stop - first) // tp))
    if tp % numbers.get("ep", 1):
        raise ConfigError(f"{where}: ep{numbers['ep']} does not divide tp{tp}; needs a divisor; change one")
    return EngineSizes(**numbers)
