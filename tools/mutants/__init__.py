"""Changes one small thing in the code at a time, and asks the tests whether they notice.

Run it as `python tools/mutants run --seed 0 --count 300`; docs/testing.md says which code and why.
"""
