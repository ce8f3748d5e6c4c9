"""What a stage's process ends with, for whoever started it."""

ORDERLY, FAILED, MISCONFIGURED = 0, 1, 2
