"""Clusters in virtual time: the real router and scheduler, with a step-time model as the engine.

Run it as `python tools/simulate`; docs/simulate.md is its page.
"""
