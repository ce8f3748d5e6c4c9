"""Token ids of fixed requests, of this checkout or of another one, and a comparison of two runs.

Run it as `python tools/same_tokens COMMAND`; docs/testing.md says what the runs hold.
"""
