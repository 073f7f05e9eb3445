"""The benchmarks behind tools/bench.py."""
