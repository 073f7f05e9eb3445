"""How likely one of k tries solves a problem, estimated from n tries."""


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples solves a problem.

    Args:
        num_samples: Samples drawn, at least k.
        num_solved: Those that solved it.
        k: Tries, at least 1.

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k), as the product of its appendix A,
    which needs no large numbers.
    """
    assert 1 <= k <= num_samples, f"pass_at_k: k = {k} of {num_samples} samples"
    if num_samples - num_solved < k:
        return 1.0
    missed = 1.0
    for i in range(num_samples - num_solved + 1, num_samples + 1):
        missed *= 1.0 - k / i
    return 1.0 - missed
