"""What a stage's process ends with, for whoever started it.

The last is a configuration that no further start would mend.
"""

ORDERLY, FAILED, MISCONFIGURED = 0, 1, 2
