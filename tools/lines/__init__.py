"""Counts lines of code: what is left of Python files without blanks, comments and docstrings.

Run it as `python tools/lines [CHECKOUT]`.
"""
