"""What people see of the whole pipeline while they look: figures, steps, requests and prefixes.

Costs nothing while nobody looks. Knows heartbeats and what stages answer on `control`.
"""
