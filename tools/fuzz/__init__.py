"""Feeds hostile bytes to what strangers can reach, and keeps every input that broke something.

Run it as `python tools/fuzz TARGET --seconds N --seed S`; docs/testing.md says what holds.
"""
