"""Treats a real server badly and says whether its promises held: kills, hostile clients, overload.

Run it as `python tools/chaos COMMAND`; docs/testing.md says what each command promises.
"""
