"""Deficit round robin over clients (Shreedhar and Varghese, SIGCOMM 1995), with debts, as an answer's length is not known."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ..policy import INF
from ..ports import View
from .sharing import Client, Sharing, exact


class DRR(Sharing):
    """Clients take turns; at its turn a client is given `quantum` x weight of credit, and its requests are admitted while it
    has some left. A prompt is paid at admission and an answer token by token, with VTC's prices, so that credit may go below
    0: then the client is passed over, with a quantum at each turn, until it is above 0 again. Rounds cost no time: the engine
    never stands still for credit. Whose queue becomes empty loses its credit and keeps its debt, and comes back at the end.

    The turn is settled when a request is admitted, so that how often it is asked for does not matter. quantum is in prices;
    nothing is published for it: the smaller, the nearer to VTC, and no fairer than one prompt and one answer.
    """

    def __init__(
        self,
        quantum: float = 1024.0,
        input_price: float = 1.0,
        output_price: float = 2.0,
        weights: Mapping[Hashable, float] | None = None,
    ) -> None:
        super().__init__(weights)
        if not 0.0 < quantum < INF:
            raise ValueError(f"quantum={quantum} must be > 0 and finite")
        for name, price in (("input_price", input_price), ("output_price", output_price)):
            if not 0.0 <= price < INF:
                raise ValueError(f"{name}={price} must be >= 0 and finite")
        self.quantum = quantum
        self.input_price = input_price
        self.output_price = output_price
        self._ring: list[Client] = []  # backlogged clients from the one whose turn it is
        self._open = False  # whether the first of them has been given its quantum of this turn
        self._grants: dict[Client, float] = {}

    def prices(self, weight: float) -> tuple[float, float]:
        return exact(self.input_price), exact(self.output_price)

    def cost(self, client: Client) -> float:
        """What `client` has had."""
        return client.served

    def grant(self, client: Client) -> float:
        """What `client` is given at its turn."""
        grant = self._grants.get(client)
        if grant is None:
            grant = self._grants[client] = max(exact(self.quantum * client.weight), 2.0**-20)
        return grant

    def credit(self, client: Client) -> float:
        """What `client` may still have in its turn; negative: its debt. `Client.adjusted` is what it was given."""
        return client.adjusted - self.cost(client)

    def pick(self) -> Client:
        return self._turn()[0][0]

    def _turn(self) -> tuple[list[Client], list[int]]:
        """The ring from whose turn it is, and how often each is given a quantum to come to that."""
        ring = self._ring
        if self._open:
            if self.credit(ring[0]) > 0.0:
                return ring, [0] * len(ring)
            ring = [*ring[1:], ring[0]]
        cost, grant = self.cost, self.grant
        rounds = [max(int((cost(c) - c.adjusted) // grant(c)) + 1, 1) for c in ring]
        num = min(rounds)
        at = rounds.index(num)
        given = [num if place <= at else num - 1 for place in range(len(ring))]
        return [*ring[at:], *ring[:at]], [*given[at:], *given[:at]]

    def steps_to_turn(self, view: View) -> float:
        """Debts only grow: the pick is another once its own credit, with what it is given, is used up."""
        ring, given = self._turn()
        first = ring[0]
        cost = first.served_a_step
        left = self.credit(first) + given[0] * self.grant(first)
        return left // cost if cost > 0.0 else INF

    def admitting(self, client: Client) -> None:
        ring, given = self._turn()
        if ring[0] is not client:
            return
        self._ring, self._open = ring, True
        for other, num in zip(self._ring, given, strict=True):
            other.adjusted += num * self.grant(other)

    def left(self, client: Client) -> None:
        if self._ring[0] is client:
            self._open = False
        self._ring.remove(client)
        client.adjusted = min(client.adjusted, self.cost(client))

    def joining(self, client: Client, arrives: bool) -> None:
        self._ring.append(client)
