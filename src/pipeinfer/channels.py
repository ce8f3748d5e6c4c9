"""Which messages travel on which channel of the bus; a frame of any other is not read.

Knows the messages, and neither who sends them nor how (docs/architecture.md has the table).
"""

from __future__ import annotations

from typing import Any, Union

from pipeinfer.messages import (
    Abort,
    Accepted,
    Admitted,
    Begin,
    CacheReset,
    Delivered,
    Digests,
    Done,
    Ended,
    Fault,
    Fenced,
    GroupFault,
    GroupStatus,
    HandOver,
    Heartbeat,
    Hello,
    Open,
    Plan,
    Prepare,
    Prepared,
    PromptScores,
    PromptTokens,
    RankStatus,
    Ready,
    Recover,
    Recovered,
    Refused,
    ResetCache,
    Result,
    StopHit,
    Submit,
    Text,
    Tokens,
    Work,
)

# Who sends on each, and who hears it.
CHANNEL_USERS = {
    "requests": "gateway to tokenizer",
    "work": "tokenizer to scheduler",
    "plan": "scheduler to all engine ranks of its group",
    "result": "engine to scheduler",
    "tokens": "scheduler to detokenizer",
    "stops": "detokenizer to scheduler",
    "text": "tokenizer and detokenizer to gateway",
    "telemetry": "every stage to whoever listens",
    "group": "who serves, who has ended, who must end: stages and supervisors to one another",
    "recovery": "a new process and its neighbours; who asks for what a lost group had",
}

CHANNELS: dict[str, Any] = {
    "requests": Union[Submit, ResetCache, Abort, Done],
    "work": Union[Work, HandOver, ResetCache, Abort, Done],
    "plan": Union[Begin, Prepare, Plan],
    "result": Union[Hello, Ready, Prepared, Admitted, PromptScores, Result, Digests, Fault],
    "tokens": Union[Open, PromptTokens, Tokens, Refused, CacheReset, Abort, Done],
    "stops": StopHit,
    "text": Union[Accepted, Refused, CacheReset, Text],
    "telemetry": Heartbeat,
    "group": Union[GroupStatus, RankStatus, Ended, Fenced, GroupFault],
    "recovery": Union[Recover, Recovered, HandOver, Delivered],
}
