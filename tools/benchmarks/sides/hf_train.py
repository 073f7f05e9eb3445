"""Side `transformers`: forward and backward of padded batches. `... hf_train MODEL_FOLDER THREADS`; no more than torch.

Made as fast as we know how: rows are sorted by length; padding is at the right end, where causal attention needs no
mask; the head is applied to the positions that predict responses, not to all; AdamW is fused.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

from tools.benchmarks.side import Handler, serve

TINY_LR = 1e-12
"""Steps are taken, but the weights stay where they are, so that all runs do the same."""


def batches_of(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Rows sorted by length, cut so that rows times the longest of them stay within the budget."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def start() -> tuple[Handler, Mapping[str, str]]:
    """Load the model and make its optimizer."""
    import torch  # noqa: PLC0415  # imports are reported as the side's own
    import transformers  # noqa: PLC0415
    from torch.nn.functional import cross_entropy, pad  # noqa: PLC0415

    torch.set_num_threads(int(sys.argv[2]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=TINY_LR, weight_decay=0.0, fused=True)

    def backward(rows: list[list[int]], responses: list[int], denominator: int) -> float:
        longest = max(map(len, rows))
        ids = torch.stack([pad(torch.tensor(row), (0, longest - len(row))) for row in rows])
        at = [(i, p) for i, row in enumerate(rows) for p in range(len(row) - responses[i] - 1, len(row) - 1)]
        index, position = torch.tensor(at).T
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[index, position])
        loss = cross_entropy(logits, ids[index, position + 1], reduction="sum") / denominator
        loss.backward()
        return float(loss.detach())

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        rows, responses = request["rows"], request["responses"]
        began = time.perf_counter()
        batches = batches_of([len(row) for row in rows], request["microbatch_tokens"])
        optimizer.zero_grad(set_to_none=False)
        loss = sum(
            backward([rows[i] for i in batch], [responses[i] for i in batch], sum(responses)) for batch in batches
        )
        model_s = time.perf_counter() - began
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {
            "step_s": time.perf_counter() - began,
            "model_s": model_s,
            "loss": loss,
            "grad_norm": float(norm),
            "passes": len(batches),
            "padded_tokens": sum(len(batch) * max(len(rows[i]) for i in batch) for batch in batches),
        }

    return handle, {"transformers": transformers.__version__, "torch of transformers": torch.__version__}


if __name__ == "__main__":
    serve(start)
