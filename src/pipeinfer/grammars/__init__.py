"""What an output must be: grammars, and which tokens they allow next.

Knows no request, no stage and no torch. Only what compiles imports llguidance; gateway, scheduler
and detokenizer never do.
"""
