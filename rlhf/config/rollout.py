"""How responses are sampled, and by which engine on which ranks."""

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from rlhf.config.checks import at_least, between, more_than, one_of, refuse
from rlhf.config.sglang import BY_SEED, SGLangConfig

BUILT_IN = ("native", "sglang")
"""Engines of this package."""

SLEEPS = ("kv", "all", "none")
ON_LOSS = ("stop", "replace")

MIN_TEMPERATURE = 1e-3
"""Below it float32's rounding of logits, divided by the temperature, is no longer small beside a log-prob."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Distribution that response tokens are drawn from."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Keeps the smallest set of tokens with at least this share of what top_k leaves; 1 keeps all."""
    top_k: int = 0
    """Keeps the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keeps tokens at least this share as likely as the most likely one; 0 keeps all."""
    max_new_tokens: int = 256
    """Longest response, in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, beside the tokenizer's end-of-sequence token."""
    stop: tuple[str, ...] = ()
    """Strings that end a response: it ends with the token that completes one, which stays in the response."""
    ignore_eos: bool = False
    """Nothing ends a response early: each has max_new_tokens tokens. For benchmarks and tests."""

    def __post_init__(self) -> None:
        at_least("sampling.temperature", self.temperature, 0.0)
        if self.temperature == inf:
            refuse("sampling.temperature: inf given; needs a number that logits can be divided by; change it")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            refuse(
                f"sampling.temperature: {self.temperature} given; needs 0 (the most likely token) or at least "
                f"{MIN_TEMPERATURE}; change it"
            )
        more_than("sampling.top_p", self.top_p, 0.0)
        between("sampling.top_p", self.top_p, 0.0, 1.0)
        at_least("sampling.top_k", self.top_k, 0)
        between("sampling.min_p", self.min_p, 0.0, 1.0)
        at_least("sampling.max_new_tokens", self.max_new_tokens, 1)
        if odd := [token for token in self.stop_token_ids if not 0 <= token < 2**31]:
            refuse(f"sampling.stop_token_ids: {odd} given; needs ids of the model's tokenizer; change it")
        if isinstance(self.stop, str):
            refuse(f"sampling.stop: the text {self.stop!r} given; needs a list of strings; put it in brackets")
        elif "" in self.stop:
            refuse("sampling.stop: an empty string given, which would end each response at once; remove it")
        for name in ("stop_token_ids", "stop"):
            if self.ignore_eos and (given := getattr(self, name)):
                refuse(
                    f"sampling.{name}: {given} given, but ignore_eos lets nothing end a response early; "
                    "unset one of them"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """The rollout pool: `dp` engines of `tp` ranks each, from first_rank on."""

    engine: str = "native"
    """native (embedded, any device), sglang, or the import path `package.module:factory` of another engine."""
    tp: int = 1
    """Ranks of one engine."""
    dp: int = 1
    """Engines."""
    first_rank: int = 0
    """First rank of the pool."""
    stride: int = 1
    """Ranks of one engine lie so far apart: engines of tp2 on 4 ranks are 0 1 | 2 3 with 1, and 0 2 | 1 3 with 2. Where
    training has a larger tp on the same ranks, training tp / rollout.tp moves the fewest bytes at a sync, since every
    rank then keeps its own shard as a part of its engine's. Source: HybridFlow's micro data-parallel groups
    (arXiv:2409.19256, section 5.3)."""
    max_running: int = 64
    """Most responses one engine decodes at a time; the others wait."""
    kv_cache_tokens: int = 65536
    """Room for keys and values in one engine, in tokens."""
    batching: str = "dynamic"
    """dynamic (a row begins as soon as another has ended), or buckets: where latency must be even, an engine answers a
    batch of at most max_running rows of one length bucket, and no row joins before the last one has ended."""
    bucket_tokens: tuple[int, ...] = (64, 256, 1024, 4096)
    """Prompt lengths at which buckets end, ascending; longer prompts share one more. With batching = buckets."""
    oversample: float = 0.0
    """Share of prompts that a training rollout asks beyond ppo.prompts_per_step, such as 0.25: it ends when as many as
    the step needs have all their responses, whichever these are. What becomes of the others: tail."""
    tail: str = "wait"
    """Of prompts whose responses are not whole when enough others are: wait (there are none, with oversample = 0), drop
    (what was sampled is thrown away), or continue (goes on after the next weight update, each token with the version
    that sampled it)."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Of training rollouts."""
    sleep: str = "kv"
    """What an engine gives back while models train: kv (keys and values), all (its weights too, which then come whole
    at each sync, also before an evaluation) or none. Where actor and engines share GPUs that are full, take all; where
    engines have a pool of their own, none."""
    on_loss: str = "stop"
    """What becomes of an engine of which a process died, was stopped or hangs: stop (the job ends with 3) or replace
    (it is started anew, gets the current weights, and its rows are answered all the same)."""
    max_losses: int = 3
    """Engines replaced in one start of the job; one more ends it."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    """Of the engine sglang alone."""

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "max_running", "kv_cache_tokens"):
            at_least(f"rollout.{name}", getattr(self, name), 1)
        at_least("rollout.first_rank", self.first_rank, 0)
        one_of("rollout.sleep", self.sleep, SLEEPS)
        one_of("rollout.on_loss", self.on_loss, ON_LOSS)
        at_least("rollout.max_losses", self.max_losses, 1)
        if at_least("rollout.stride", self.stride, 1) and self.dp % self.stride:
            refuse(
                f"rollout.stride: {self.stride} given, but rollout.dp = {self.dp}; needs a divisor, since so many "
                "engines lie side by side; change one"
            )
        if self.engine not in BUILT_IN and ":" not in self.engine:
            refuse(f"rollout.engine: {self.engine!r} given; needs native, sglang or package.module:factory; change it")
        if self.engine == "sglang" and self.tp % self.sglang.ep:
            refuse(
                f"rollout.sglang.ep: {self.sglang.ep} given, but rollout.tp = {self.tp}; needs a divisor; change one"
            )
        if self.sampling.max_new_tokens >= self.kv_cache_tokens:
            refuse(
                f"rollout.kv_cache_tokens: {self.kv_cache_tokens} cannot hold one response of "
                f"sampling.max_new_tokens = {self.sampling.max_new_tokens} and its prompt; raise the first"
            )

        self._check_routes()

    def _check_routes(self) -> None:
        one_of("rollout.batching", self.batching, ("dynamic", "buckets"))
        if not self.bucket_tokens or any(a >= b for a, b in pairwise((0, *self.bucket_tokens))):
            refuse(
                f"rollout.bucket_tokens: {list(self.bucket_tokens)} given; needs prompt lengths in ascending order; "
                "write rollout.bucket_tokens=[64,256,1024]"
            )
        between("rollout.oversample", self.oversample, 0.0, 4.0)
        if one_of("rollout.tail", self.tail, ("wait", "drop", "continue")) and (self.tail == "wait") != (
            self.oversample == 0.0
        ):
            refuse(
                f"rollout.tail: {self.tail} given with rollout.oversample = {self.oversample}; needs wait where a step "
                "asks no more prompts than it learns from, else drop or continue; change one"
            )

    def check_draws(self, where: str, sampling: SamplingConfig) -> None:
        """Refuse what SGLang's own sampler cannot do beside batch-invariant kernels: its scheduler would end itself."""
        alone = self.sglang.sampling_backend != BY_SEED
        if self.engine == "sglang" and self.sglang.deterministic and alone:
            for name, given in (("min_p", sampling.min_p > 0), ("top_k", sampling.top_k == 1)):
                if given and sampling.temperature:
                    refuse(
                        f"{where}.{name}: {getattr(sampling, name)} given, which SGLang's own sampler cannot draw with "
                        f"rollout.sglang.deterministic; needs ours; set rollout.sglang.sampling_backend={BY_SEED}"
                    )

    @property
    def ranks(self) -> range:
        """The pool."""
        return range(self.first_rank, self.first_rank + self.tp * self.dp)

    @property
    def engines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each engine in the order of its tp ranks; the first leads it."""
        block = self.tp * self.stride
        firsts = [first for start in self.ranks[::block] for first in range(start, start + self.stride)]
        return tuple(tuple(range(first, first + block, self.stride)) for first in firsts)
