"""Asks a real server for very much, very mixed, and says whether anything of it stays behind.

Run it as `python tools/soak run`; docs/testing.md says what it promises.
"""
