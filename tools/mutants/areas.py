"""Which code is changed, and which tests must notice: five areas, each with a list of tests.

Tests stand in the order in which they run: the fast ones that look closest come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORIES = (
    "tests/pipeline/test_stories.py::test_stories_reach_every_kind_of_event_and_end_well",
    "tests/pipeline/test_stories.py::test_without_surprises_there_are_pages_for_what_is_planned",
)
LEFT_OUT = (
    # Judges by a clock: on a busy machine it may fail whatever the code does.
    "tests/detokenizer/test_stop_strings.py::test_the_cost_of_a_token_does_not_grow_with_the_held_text",
)


@dataclass(frozen=True)
class Area:
    """Modules below src/pipeinfer, as patterns; `but`: those of them that belong elsewhere.

    tests: modules, single tests, or folders for all that is in them and not named before.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    but: tuple[str, ...] = ()

    def in_order(self) -> list[str]:
        """The tests, each once. pytest itself would sort what is in a folder."""
        found: dict[str, None] = {}
        for test in self.tests:
            folder = ROOT / test
            inside = sorted(folder.glob("test_*.py")) if folder.is_dir() else ()
            found |= dict.fromkeys(str(path.relative_to(ROOT)) for path in inside)
            found |= {} if inside else {test: None}
        return list(found)

    def files(self, root: Path = ROOT) -> Iterator[Path]:
        """Relative to the checkout `root`."""
        source = root / "src/pipeinfer"
        left_out = {path for pattern in self.but for path in source.glob(pattern)}
        for pattern in self.modules:
            for path in sorted(source.glob(pattern)):
                if path not in left_out and path.read_text(encoding="utf-8").strip():
                    yield path.relative_to(root)


RECOVERY = (
    "core.py",
    "scheduler/epochs.py", "scheduler/recovery.py", "gateway/ledger.py",
    "runtime/stage.py", "tokenizer/routing.py",
)  # fmt: skip

AREAS = {
    "scheduler": Area(
        ("scheduler/*.py",),
        (
            "tests/scheduler/test_policies.py",
            "tests/scheduler/test_request_state.py",
            "tests/scheduler/test_request_phases.py",
            "tests/scheduler/test_quarantine.py",
            "tests/scheduler/test_requests_that_end.py",
            "tests/scheduler/test_scheduler_recovery.py",
            "tests/scheduler/test_scheduler_core.py",
            "tests/scheduler",
            "tests/distributed/test_ranks_agree.py",
            "tests/pipeline/test_take_over_simulated.py",
            *STORIES,
        ),
        (*RECOVERY, "scheduler/stage.py"),
    ),
    "memory": Area(
        ("memory/*.py",),
        (
            "tests/memory/test_pages.py",
            "tests/memory/test_memory_manager.py",
            "tests/memory/test_prefix_cache.py",
            "tests/memory/test_memory_machine.py::"
            "test_every_row_reads_the_kv_of_its_own_tokens[4-radix]",
            "tests/memory/test_memory_machine.py::"
            "test_every_row_reads_the_kv_of_its_own_tokens[16-naive]",
            STORIES[0],
        ),
    ),
    "detokenizer": Area(
        ("detokenizer/*.py",),
        ("tests/detokenizer", "tests/pipeline/test_recovery_simulated.py", STORIES[0]),
        ("detokenizer/stage.py",),
    ),
    "recovery": Area(
        RECOVERY,
        (
            "tests/scheduler/test_epochs.py",
            "tests/scheduler/test_ranks.py",
            "tests/scheduler/test_groups_that_sleep.py",
            "tests/tokenizer/test_routing.py",
            "tests/scheduler/test_quarantine.py",
            "tests/test_core.py",
            "tests/gateway/test_gateway_ledger.py",
            "tests/scheduler/test_scheduler_recovery.py",
            "tests/runtime/test_incarnations.py",
            "tests/distributed/test_ranks_agree.py",
            "tests/scheduler/test_hand_over.py",
            "tests/gateway/test_gateway_core.py",
            "tests/tokenizer/test_tokenizer_core.py",
            "tests/pipeline/test_recovery_simulated.py",
            "tests/pipeline/test_take_over_simulated.py",
            STORIES[0],
        ),
    ),
    "gateway core": Area(
        tuple(
            f"gateway/{name}.py"
            for name in (
                "api_keys",
                "core",
                "health",
                "sessions",
            )
        ),
        (
            "tests/gateway/test_gateway_core.py",
            "tests/gateway/test_gateway_ledger.py",
            "tests/gateway/test_health.py",
            "tests/gateway/test_api_keys.py",
            "tests/gateway/test_sessions.py",
            "tests/gateway/test_gateway_http.py",
            "tests/gateway/test_key_limits_http.py",
            "tests/gateway/test_gateway_endpoints.py",
            "tests/pipeline/test_recovery_simulated.py",
            STORIES[0],
        ),
    ),
}
