"""Changes one small thing in the code at a time, and asks the tests whether they notice.

Run it as `python tools/mutants run --seed 0 --count 300`; areas.py says which code, exclusions.py
what is never changed, and why. The exit code is 1 if fewer than --least percent were killed.
"""

from harness.command_line import Tool

TOOL = Tool(
    name="mutants",
    description="Small changes of the code that the tests must notice.",
    commands={"run": "draws mutants and runs the tests on each", "list": "draws and shows them"},
    schema="pipeinfer-mutants/1",
    silent=("list",),
    settings=False,
    long=("mutants", "survivors"),
)
