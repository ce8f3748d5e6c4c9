"""Changes one small thing in the code at a time, and asks the tests whether they notice.

Run it as `python tools/mutants run --seed 0 --count 300`; areas.py says which code,
exclusions.py what is never changed, and why.
"""
