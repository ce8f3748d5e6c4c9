"""Makes the reference in docs/reference from code, and what the site needs besides.

Run it as `python tools/docs reference`, or with `--check` to hear which pages differ.
"""
