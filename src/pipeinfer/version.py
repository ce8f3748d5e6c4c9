"""The version, alone so that any stage can read it without importing anything."""

__version__ = "0.1.0"
