"""Side `sglang itself`: SGLang's own engine in one process, driven directly. `... sglang_bare MODEL_FOLDER THREADS`.

It reads the folder by itself, samples by its own sampler, and has the arguments that ours gives to an engine on a CPU.
Of ours it takes the stand-ins for the kernels that a CPU lacks, without which SGLang does not start there, and how they
get into its processes.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from rlhf.rollout.sglang.cpu import cpu_args, cpu_environment, install_cpu_shim
from rlhf.rollout.sglang.inside.entries import Entry
from tools.benchmarks.measure import family, processor_s, timed
from tools.benchmarks.side import Handler, serve
from tools.benchmarks.work import KV_TOKENS, MOST_RUNNING


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process."""
    from sglang.srt.managers import scheduler  # noqa: PLC0415

    # Its load, for routers: a file in /dev/shm that outlives a side that is killed.
    scheduler.create_load_snapshot_writer = lambda *_, **__: None
    scheduler.run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """SGLang's detokenizer process."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process  # noqa: PLC0415

    run_detokenizer_process(*args, **kwargs)


def start() -> tuple[Handler, Mapping[str, str]]:
    """Start the engine."""
    threads = int(sys.argv[2])
    os.environ |= cpu_environment(1, leader=0, threads=threads, cores=sorted(os.sched_getaffinity(0)))
    install_cpu_shim()
    import sglang  # noqa: PLC0415  # imports are reported as the side's own
    from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415

    class BareEngine(Engine):  # type: ignore[misc]  # without annotations
        run_scheduler_process_func = Entry(run_scheduler, True, os.getpid())
        run_detokenizer_process_func = Entry(run_detokenizer, True, os.getpid())

    engine = BareEngine(
        model_path=sys.argv[1],
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        sampling_backend="pytorch",
        grammar_backend="none",
        max_running_requests=MOST_RUNNING,
        max_total_tokens=KV_TOKENS,
        random_seed=1,
        sleep_on_idle=True,
        log_level="warning",
        **cpu_args(),
    )

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        sampling = {
            "temperature": 0.0 if request["greedy"] else 1.0,
            "max_new_tokens": request["new_tokens"],
            "ignore_eos": True,
        }
        prompts: list[list[int]] = request["prompts"]
        found: list[Any] = []
        engine.flush_cache()  # each run would find the prompts of the one before
        pids = family(os.getpid())
        before = [processor_s(pid) for pid in pids]
        seconds = timed(
            lambda: found.extend(engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True))
        )
        own, *rest = (processor_s(pid) - then for pid, then in zip(pids, before, strict=True))
        responses = [list(one["output_ids"]) for one in found]
        return {"seconds": seconds, "responses": responses, "processor_s": {"front": own, "rest": sum(rest)}}

    return handle, {"sglang": sglang.__version__}


if __name__ == "__main__":
    serve(start)
