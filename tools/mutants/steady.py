"""A plugin of pytest: Hypothesis draws the same examples in every run, and remembers none.

Else the same mutant would be killed in one run and live in the next.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("steady", derandomize=True, database=None, deadline=None)
settings.load_profile("steady")
