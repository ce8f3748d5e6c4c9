"""Measures pipeinfer: throughput, latency, start-up, and what each stage costs.

Run it as `python tools/bench COMMAND`; docs/benchmarks.md says what each number means.
"""
