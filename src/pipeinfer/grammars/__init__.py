"""Grammars for structured outputs: which tokens each row may sample next.

No module here imports torch. Only the modules that compile import llguidance; gateway, scheduler
and detokenizer import none of those.
"""
