"""Static batching: request-level scheduling, a new batch only when the last is done (FasterTransformer)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .batching import Batching, whole

if TYPE_CHECKING:
    from ..ports import View


class Static(Batching):
    """Admits only into an empty engine. Finished rows are answered at once but keep computing to the batch's end."""

    whole_prompts = True
    mixes = False
    fixed_batch = True

    def may_admit(self, view: View) -> bool:
        return view.num_running == 0

    def chunk(self, left: int, budget_left: int, fresh: bool) -> int:
        return whole(left, budget_left, fresh)
