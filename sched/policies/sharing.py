"""Sharing: an engine among clients, by per-client queues and by what each client has been served.

What is generated is charged to clients by the step, whatever number of their requests run: a step costs O(clients), not
O(batch).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from heapq import heappop, heappush

from ..policy import INF, Policy
from ..ports import View
from ..request import Phase, Request

RUNS = (Phase.PREFILLING, Phase.DECODING)


def exact(price: float) -> float:
    """`price` to the nearest multiple of 2^-20: sums below 2^33 are exact, and who is level with another stays so."""
    return round(price * (1 << 20)) / (1 << 20)


class Client:
    """Somebody, or a class of requests, that shares the engine; weight: its share, > 0.

    admissions, inputs, outputs: requests, prompt tokens and output tokens charged so far. They are whole numbers, so that k
    steps at once are charged to the bit as k single ones. prices: of a prompt token and of an output token. adjusted: what a
    policy adds. num_waiting: requests off the batch. num_decoding: rows whose every token is charged.
    """

    __slots__ = (
        "adjusted", "admissions", "inputs", "name", "num_decoding", "num_waiting", "outputs", "prices", "queue", "serial",
        "weight",
    )  # fmt: skip

    def __init__(self, name: Hashable, weight: float, serial: int, prices: tuple[float, float]) -> None:
        self.name = name
        self.weight = weight
        self.prices = prices
        self.serial = serial  # order of first arrival, the last tie-breaker
        self.adjusted = 0.0
        self.admissions = self.inputs = self.outputs = 0
        self.num_waiting = self.num_decoding = 0
        self.queue: list[tuple[float, int, Request]] = []

    @property
    def served(self) -> float:
        """What it has been served, at its prices."""
        return self.prices[0] * self.inputs + self.prices[1] * self.outputs

    @property
    def served_a_step(self) -> float:
        """What it is served in a decode step."""
        return self.prices[1] * self.num_decoding

    def first(self) -> Request:
        """Its first waiting request by arrival. Who has left from the middle goes when it surfaces."""
        queue = self.queue
        while (phase := queue[0][2].phase) in RUNS or phase > Phase.SWAPPED:
            heappop(queue)
        return queue[0][2]


class Sharing(Policy):
    """Offers the first request of the client that `pick` names, as long as it is let in; non-preemptive and work-conserving.

    Within a client first come, first served; who has been preempted for KV keeps its place and is not charged again. Such a
    victim is the latest to arrive of all, whosever it is. weights: by client; else the weight of its first request.
    """

    needs = frozenset({"client"})

    def __init__(self, weights: Mapping[Hashable, float] | None = None) -> None:
        self.weights = dict(weights or {})
        self.clients: dict[Hashable, Client] = {}
        self.backlogged: dict[Client, None] = {}  # with somebody who waits
        self.last_left: Client | None = None  # whose queue was the last to become empty
        self._served: dict[Client, None] = {}  # with rows whose every token is charged
        self._new: dict[Request, None] = {}  # admitted, and not seen to decode yet
        self._rows: dict[Request, None] = {}  # decoding, each token charged
        self._ahead: dict[Request, int] = {}  # decoding on tokens paid ahead: the decode step at which these are used up
        self._due: list[tuple[int, int, Request]] = []  # a heap of these steps, stale ones among them
        self._paid: dict[Request, int] = {}  # output tokens charged when it was last admitted
        self._step = 0
        self._view: View | None = None

    # --- for the policy to say ----------------------------------------------------------------------------------------

    @abstractmethod
    def pick(self) -> Client:
        """Whose turn it is, of `backlogged`. Pure."""

    @abstractmethod
    def steps_to_turn(self, view: View) -> float:
        """Decode steps for which `pick` keeps its answer while nobody comes, goes, or decodes anew. Early is right."""

    def prices(self, weight: float) -> tuple[float, float]:
        """Of a prompt token and of an output token of a client of this weight, each `exact`."""
        return 0.0, 0.0

    def group(self, req: Request) -> Hashable:
        """What `req` is counted under."""
        return req.client

    def ahead(self, req: Request) -> int:
        """Output tokens of `req` that are charged when it is first admitted."""
        return 0

    def admitting(self, client: Client) -> None:
        """A request of `client` is being admitted, and not charged yet. `pick` names `client`, but where a guard decides."""

    def joining(self, client: Client, arrives: bool) -> None:
        """A request of `client` arrives, or has been preempted, and none of its others waits."""

    def left(self, client: Client) -> None:
        """Nobody of `client` waits any more."""

    def ended(self, client: Client, num_tokens: int) -> None:
        """A request of `client` that was admitted has ended with `num_tokens` generated tokens."""

    # --- what the scheduler asks --------------------------------------------------------------------------------------

    def key(self, req: Request, view: View) -> float:
        return req.arrival

    def order(self, waiting: Iterable[Request], view: View) -> Iterator[Request]:
        offered = None
        while self.backlogged and (req := self.pick().first()) is not offered:  # else it did not fit: nobody goes before it
            yield req
            offered = req

    def stable(self, view: View) -> tuple[int, float]:
        if self._new:
            return 1, INF
        steps = self.steps_to_turn(view) if len(self.backlogged) > 1 else INF
        if self._due:
            steps = min(steps, self._due[0][0] - view.step)
        return max(int(min(steps, 1 << 40)), 1), INF

    def on_arrival(self, req: Request) -> None:
        self._enqueue(self._client(req), req, arrives=True)

    def on_schedule(self, req: Request, view: View) -> None:
        self._view = view
        client = self._client(req)
        if req not in self._paid:
            self.admitting(client)
            client.admissions += 1
            client.inputs += req.prompt_len
            self._paid[req] = self.ahead(req)
            client.outputs += self._paid[req]
        self._new[req] = None
        self._dequeue(client)

    def on_preempt(self, req: Request, view: View) -> None:
        client = self._client(req)
        if req in self._rows:
            self._uncount(client, req)
            self._paid[req] = view.generated(req)
        else:
            self._ahead.pop(req, None)
            self._new.pop(req, None)
        self._enqueue(client, req, arrives=False)

    def on_steps(self, num_steps: int, view: View) -> None:
        steps, self._step = view.step - self._step, view.step  # of decoding
        for client in self._served:
            client.outputs += steps * client.num_decoding
        due = self._due
        while due and (due[0][0] <= view.step or self._ahead.get(due[0][2]) != due[0][0]):
            at, _, req = heappop(due)
            if self._ahead.get(req) == at:
                del self._ahead[req]
                self._count(req, view.step - at)
        for req in [r for r in self._new if r.phase == Phase.DECODING]:
            del self._new[req]
            more = view.generated(req) - self._paid[req]
            if more >= 0:
                self._count(req, more)
            else:
                self._ahead[req] = view.step - more
                heappush(due, (view.step - more, req._entry, req))

    def on_finish(self, req: Request) -> None:
        client = self._client(req)
        paid = self._paid.pop(req, None)
        if req in self._rows:
            self._uncount(client, req)
        elif req in self._ahead or req in self._new:
            self._ahead.pop(req, None)
            self._new.pop(req, None)
        else:
            self._dequeue(client)
        if paid is not None and self._view is not None:
            num_tokens = self._view.generated(req)
            client.outputs -= max(paid - num_tokens, 0)
            self.ended(client, num_tokens)

    # --- the books ----------------------------------------------------------------------------------------------------

    def _client(self, req: Request) -> Client:
        name = self.group(req)
        client = self.clients.get(name)
        if client is None:
            weight = self.weights.get(name, req.weight)
            if not 0.0 < weight < INF:
                raise ValueError(f"client {name!r} has the weight {weight}, it must be > 0 and finite")
            client = self.clients[name] = Client(name, weight, len(self.clients), self.prices(weight))
        return client

    def _enqueue(self, client: Client, req: Request, arrives: bool) -> None:
        if not client.num_waiting:
            self.joining(client, arrives)
        heappush(client.queue, (req.arrival, req._entry, req))
        client.num_waiting += 1
        self.backlogged[client] = None

    def _dequeue(self, client: Client) -> None:
        client.num_waiting -= 1
        if not client.num_waiting:
            del self.backlogged[client]
            self.last_left = client
            self.left(client)

    def _count(self, req: Request, tokens: int) -> None:
        """From here on each token of `req` is charged, and `tokens` at once."""
        client = self._client(req)
        client.outputs += tokens
        client.num_decoding += 1
        self._served[client] = None
        self._rows[req] = None

    def _uncount(self, client: Client, req: Request) -> None:
        del self._rows[req]
        client.num_decoding -= 1
        if not client.num_decoding:
            del self._served[client]
