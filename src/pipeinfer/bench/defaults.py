"""How much `pipeinfer bench` measures if nobody says otherwise; its flags name these numbers, too.

Imports nothing.
"""

STREAMS = 8  # at a time, if no load is asked for
REQUESTS = 64  # of a point
ROUNDS = 4  # requests of each stream, at least
