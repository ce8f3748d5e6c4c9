"""What a row's masks have cost: counts that the compiler keeps of each matcher, never times.

So the same row costs the same whoever counts, on any machine. Of matchers that share a lexer, the
one that needs a state of it first pays for it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from llguidance import LLMatcher

# Units: of one mask, of the tokens that follow it. They order grammars by cost, and are no times: a
# unit of ambiguous rules takes 0.05 to 0.3 microseconds, of a lexer that is being built about ten
# (docs/benchmarks.md). Fitted with vocabularies of 49,000 and 262,000 tokens.
UNITS_PER_ITEM = 2.0  # of the parser
UNITS_PER_FUEL = 1 / 40  # of the lexer
UNITS_PER_NODE = 1 / 250  # of the tree of all tokens

_NO_TOKEN = 1 << 30  # whatever the vocabulary
_STATISTICS = re.compile(r'\nParser: \{\n((?:  "\w+": \d+,?\n)+)\}')
_COUNT = re.compile(r'"(\w+)": (\d+)')


class MaskCost(NamedTuple):
    """Since a matcher was made from its grammar. items: of its parser; fuel: of its lexer; nodes of
    the tree of tokens that it has walked."""

    items: int = 0
    fuel: int = 0
    nodes: int = 0

    @property
    def units(self) -> int:
        return round(
            self.items * UNITS_PER_ITEM + self.fuel * UNITS_PER_FUEL + self.nodes * UNITS_PER_NODE
        )

    def since(self, before: MaskCost) -> MaskCost:
        return MaskCost(
            self.items - before.items, self.fuel - before.fuel, self.nodes - before.nodes
        )


def mask_cost(matcher: LLMatcher) -> MaskCost:
    """All that `matcher` has cost, and what it was copied from. Takes about 0.1 ms: the library
    tells its counts in the message of an error alone, which a copy is made to have."""
    copy = matcher.deep_copy()
    copy.consume_token(_NO_TOKEN)
    found = _STATISTICS.search(copy.get_error())
    counts = dict(_COUNT.findall(found[1])) if found else {}
    items, fuel, nodes = (
        int(counts.get(name, 0)) for name in ("all_items", "lexer_cost", "trie_nodes_walked")
    )
    return MaskCost(items, fuel, nodes)
