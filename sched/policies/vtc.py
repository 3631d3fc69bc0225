"""Virtual token counter: the client that has been served least goes first (Sheng et al., OSDI 2024)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ..policy import INF
from ..ports import View
from .sharing import Client, Sharing, exact


class VTC(Sharing):
    """A counter for each client: its prompt tokens x `input_price`, charged at admission, and its output tokens x
    `output_price`, each as it is generated, over its weight. The least counter goes first; ties by first arrival.

    Who comes while none of its own requests waits is lifted to the least counter of those that wait, or, when nobody does, to
    that of the client whose queue was the last to become empty (the released code leaves the second out). So for two clients
    that both always wait the service differs by at most 2 max(input_price x longest prompt, output_price x KV pool). Prices
    over weight are rounded to 2^-20. Left out: the profiled cost function, and adapters.
    """

    def __init__(
        self, input_price: float = 1.0, output_price: float = 2.0, weights: Mapping[Hashable, float] | None = None
    ) -> None:
        super().__init__(weights)
        for name, price in (("input_price", input_price), ("output_price", output_price)):
            if not 0.0 <= price < INF:
                raise ValueError(f"{name}={price} must be >= 0 and finite")
        self.input_price = input_price
        self.output_price = output_price

    def prices(self, weight: float) -> tuple[float, float]:
        return exact(self.input_price / weight), exact(self.output_price / weight)

    def counter(self, client: Client) -> float:
        """What `client` has been served over its weight, with its lifts."""
        return client.adjusted + client.served

    def pick(self) -> Client:
        return min(self.backlogged, key=lambda c: (self.counter(c), c.serial))

    def steps_to_turn(self, view: View) -> float:
        first = self.pick()
        mine, rate = self.counter(first), first.served_a_step
        steps = INF
        for other in self.backlogged:
            faster = rate - other.served_a_step
            if faster > 0.0:
                steps = min(steps, (self.counter(other) - mine) // faster)
        return steps

    def joining(self, client: Client, arrives: bool) -> None:
        if not arrives:
            return
        if self.backlogged:
            least = min(map(self.counter, self.backlogged))
        elif self.last_left is not None:
            least = self.counter(self.last_left)
        else:
            return
        client.adjusted += max(least - self.counter(client), 0.0)
