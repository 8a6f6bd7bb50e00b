"""Several requests of one prompt: it is computed once, and they share its blocks."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_runner.request import Request


@dataclass(slots=True, eq=False)
class PromptGroup:
    """The completions of one prompt. The first to be queued leads: it computes the prompt, and the others wait
    outside the line until a step that computes the end of it is scheduled, so that they can hit its blocks.

    req_id, size: name of the prompt and number of its completions. salt: sets blocks apart that nobody else may
    hit, and that no user can guess. is_computed: nobody has to wait any more.
    """

    req_id: str
    size: int
    salt: str = field(default_factory=lambda: secrets.token_hex(16), init=False)
    is_computed: bool = field(default=False, init=False)
    leader: Request | None = field(default=None, init=False, repr=False)
    held: list[Request] = field(default_factory=list, init=False, repr=False)

    def holds_back(self, request: Request) -> bool:
        """Whether the request must wait for the leader; with no leader it becomes that. One that must is held."""
        if self.leader is None:
            self.leader = request
        if self.is_computed or self.leader is request:
            return False
        self.held.append(request)
        return True

    def take_held(self) -> list[Request]:
        """Those who wait, who are held no longer."""
        held, self.held = self.held, []
        return held
