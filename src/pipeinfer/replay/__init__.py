"""Replays what a stage recorded: one stage alone, every message in its place.

Run it as `pipeinfer replay COMMAND`; docs/replay.md says how to read what it prints.
"""
