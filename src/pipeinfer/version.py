"""The version of pipeinfer.

Alone, so that a build or any stage can read it; knows nothing else.
"""

__version__ = "0.1.0"
