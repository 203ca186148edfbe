"""Connections that break: who may come back, who is lost, who is refused. Channels are pretended, processes absent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.forwarding import label_of, order_in
from resihp.protocol.framing import Envelope, encode
from resihp.protocol.inventory import DeviceInventory, NodeInventory
from resihp.protocol.resumable import Conversation
from resihp.wrapper.supervisor.agents.links import RETURN_WINDOW_S, AgentLinks

RECONNECT_S = 0.2
NOTHING = m.Inventory()


class PretendedLauncher:
    nodes = ("n1", "n2")
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.killed: list[str] = []

    def kill(self, node: str) -> None:
        self.killed.append(node)


def through_a_socket(envelope: Envelope[Any], receives: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(envelope), type=receives)


class PretendedChannel:
    """What the agent says is put into `inbox`; None closes. `posted`: what the links sent."""

    peer = "10.1.2.3:40000"

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.posted: list[Envelope[Any]] = []
        self.aborted = False

    async def recv(self) -> Any:
        return await self.inbox.get()

    def post(self, envelope: Envelope[Any]) -> None:
        if self.aborted:
            raise ConnectionResetError
        self.posted.append(through_a_socket(envelope, Envelope[m.AgentOrder]))

    def say(self, number: int, message: Any, acknowledged: int = 0) -> None:
        """One envelope of an agent that keeps no conversation."""
        self.inbox.put_nowait(Envelope(number=number, acknowledged=acknowledged, message=message))

    def abort(self) -> None:
        self.aborted = True
        self.inbox.put_nowait(None)

    def orders(self) -> list[Any]:
        return [envelope.message for envelope in self.posted if envelope.message is not None]


class PretendedAgent:
    """An agent's side of the handshake and the conversation, through any number of connections."""

    def __init__(self, node: str = "n1", pid: int = 10, *, lease: int = 0, inventory: m.Inventory = NOTHING) -> None:
        self.node = node
        self.pid = pid
        self.lease = lease
        self.inventory = inventory
        self.promised = 0
        self.conversation: Conversation[Any] | None = None
        self.epoch = 0
        self.heard: list[Any] = []
        self.channel = PretendedChannel()

    def join(self) -> m.Join:
        return m.Join(
            node=self.node,
            host="h",
            pid=self.pid,
            devices=2,
            epoch=self.epoch,
            term=self.promised,
            peer_port=7000 + self.pid,
            lease=self.lease,
        )

    @property
    def received(self) -> int:
        return self.conversation.received if self.conversation else 0

    def connected(self, channel: PretendedChannel) -> None:
        """The supervisor has said whom it leads: follow it, or go on as before."""
        self.channel = channel
        lead = channel.posted[0].message
        assert isinstance(lead, m.Lead)
        assert channel.posted[0].number == 0
        if self.conversation is None or lead.term > self.promised:
            self.promised, self.conversation = lead.term, Conversation()
            self.conversation.post(self.inventory)
            self.conversation.connect(self._put)
        else:
            self.conversation.connect(self._put)
            channel.inbox.get_nowait()  # the Join, which has come already
        self.read()

    def _put(self, envelope: Envelope[Any]) -> None:
        self.channel.inbox.put_nowait(through_a_socket(envelope, Envelope[m.AgentMessage]))

    def read(self) -> None:
        """Take in what has come."""
        assert self.conversation is not None
        self.epoch = max(1, self.epoch)
        for envelope in self.channel.posted:
            order = self.conversation.take(envelope)
            if order is not None and not isinstance(order, m.Lead):
                self.heard.append(order)
            if isinstance(order, m.ToWorkers) and (label := label_of(order_in(order))).type == "Go":
                self.epoch = label.epoch
        self.channel.posted.clear()

    def rosters(self) -> list[m.Roster]:
        return [order for order in self.heard if isinstance(order, m.Roster)]

    def say(self, message: Any) -> None:
        assert self.conversation is not None
        self.conversation.post(message)

    @property
    def acknowledged(self) -> int:
        assert self.conversation is not None
        return self.conversation.acknowledged


class Scene:
    """Links with what they tell in lists."""

    def __init__(
        self, lead: m.Lead | None = None, roster: bool = False, incarnations: dict[str, str] | None = None
    ) -> None:
        self.events: list[Any] = []
        self.joined: list[m.Join] = []
        self.acknowledged: list[tuple[str, int]] = []
        self.deposed: list[str] = []
        self.launcher = PretendedLauncher()
        self.tasks: set[asyncio.Task[None]] = set()
        launcher: Any = self.launcher
        self.links = AgentLinks(
            launcher,
            self.events.append,
            self.start,
            reconnect_s=RECONNECT_S,
            lead=lead,
            joined=self._joined,
            acknowledged=lambda node, number: self.acknowledged.append((node, number)),
            deposed=self.deposed.append,
            roster=roster,
            incarnations=incarnations,
        )

    def _joined(self, join: m.Join) -> None:
        assert api.AgentJoined not in self.told(join.node), "the event comes after it"
        self.joined.append(join)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task

    async def arrive(self, join: m.Join, received: int = 0) -> PretendedChannel:
        """Somebody connects; raises what the connection is refused with."""
        channel: Any = PretendedChannel()
        task = self.start(self.links.converse(channel, Envelope(acknowledged=received, message=join), join))
        await asyncio.sleep(0)
        if task.done():
            self.tasks.discard(task)
            assert channel.orders() == ([] if self.deposed else [m.Release(grace_s=0.0)])
            task.result()
        return channel  # type: ignore[no-any-return]

    async def connect(self, agent: PretendedAgent) -> None:
        """Connect an agent, as it does it itself, until its inventory has come."""
        agent.connected(await self.arrive(agent.join(), agent.received))
        await asyncio.sleep(0)
        agent.read()

    async def turns(self) -> None:
        """A few of the loop: what was said is read, and what follows from it is told."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Until all that was started has come to its end, and what that started."""
        while pending := [task for task in self.tasks if not task.done()]:
            await asyncio.wait(pending)

    def lost(self) -> list[str]:
        return [event.node for event in self.events if isinstance(event, api.AgentLost)]

    def told(self, node: str = "") -> list[type]:
        """Kinds of events, of one node if it is named."""
        return [type(event) for event in self.events if not node or getattr(event, "node", node) == node]

    def refusals(self) -> list[str]:
        """Why connections that were admitted first were given up."""
        return [str(error) for task in self.tasks if (error := task.exception())]


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nobody waits for its clock, which stands still while anything is done: however busy the machine is."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def jump(timeout: float | None) -> Any:
            ready = select(0 if timeout is not None else None)
            if not ready and timeout:
                self._now += timeout
            return ready

        selector.select = jump

    def time(self) -> float:
        return self._now


async def scene_of(scene: Callable[[Scene], Awaitable[None]], **how: Any) -> None:
    await scene(Scene(**how))


def play(scene: Callable[[Scene], Awaitable[None]], **how: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scene(Scene(**how))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def spawn(rank: int) -> m.Spawn:
    start = m.Start(
        rank=rank,
        node="n1",
        device=rank,
        world_size=1,
        nodes=("n1",),
        faults=(),
        checkpoint_folder="",
        checkpoint_every=0,
        resume=False,
    )
    return m.Spawn(workers=(start,), environment={})


def go(epoch: int) -> m.Go:
    return m.Go(epoch=epoch, next_iteration=1, finish=None)


def running(rank: int, pid: int = 70) -> m.RunningWorker:
    return m.RunningWorker(rank=rank, device=0, pid=pid)


# --- who follows --------------------------------------------------------------------------------------------------


def test_the_term_comes_first_and_the_agent_is_part_of_the_job_with_its_inventory() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent(inventory=m.Inventory(workers=(running(3),), epoch=4))
        machine = NodeInventory(serial="S1", devices=(DeviceInventory(device=0, uuid="GPU-0"),))
        join = msgspec.structs.replace(agent.join(), machine=machine)
        channel = await it.arrive(join)
        assert channel.posted == [Envelope(message=m.Lead(term=2, node="n2", log=17))]
        assert it.events == []
        assert it.joined == []
        agent.connected(channel)
        await asyncio.sleep(0)
        told = api.AgentJoined(node="n1", host="h", devices=2, inventory=agent.inventory, machine=machine)
        assert it.events == [told]
        assert it.joined == [join]
        assert it.links.connected(it.links._links) == {"n1"}
        agent.channel.abort()
        await it.settle()
        assert it.links.connected(it.links._links) == frozenset()

    play(scene, lead=m.Lead(term=2, node="n2", log=17))


def test_what_comes_before_the_inventory_is_refused_or_not_told() -> None:
    async def scene(it: Scene) -> None:
        channel = await it.arrive(PretendedAgent().join())
        channel.say(0, m.Beat(workers=()))
        channel.say(1, m.FromWorker(rank=0, body=encode(m.Finished(iteration=1))))
        await it.settle()
        assert it.lost() == ["n1"]
        assert it.told() == [api.AgentLost]
        assert it.refusals() == ["agent of node n1: FromWorker before its inventory"]

    play(scene)


def test_a_worker_whose_reports_cannot_be_read_is_hung_up_on_and_nobody_else() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent(inventory=m.Inventory(workers=(running(3, 73), running(4, 74))))
        await it.connect(agent)
        fine = encode(m.Finished(iteration=1))
        no_report = msgspec.msgpack.encode({"type": "Finished", "iteration": "seven"})
        for rank, body in ((3, fine), (3, no_report), (3, b"\xc1"), (3, fine), (4, fine)):
            agent.say(m.FromWorker(rank=rank, body=body))
        await asyncio.sleep(0)
        said = [event.rank for event in it.events if isinstance(event, api.WorkerSaid)]
        assert said == [3, 4], "what comes after it does not count"
        agent.read()
        [hang_up] = agent.heard
        assert (hang_up.rank, "malformed message: Expected `int`" in hang_up.reason) == (3, True)
        agent.say(m.Exited(rank=3, pid=73, status=70))
        await asyncio.sleep(0)
        assert it.told()[-1] is api.WorkerExited
        assert it.links.connected(it.links._links) == {"n1"}
        agent.channel.abort()
        await it.settle()

    play(scene, lead=m.Lead(term=2, node="n2", log=17))


def test_an_order_is_encoded_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    monkeypatch.setattr(
        "resihp.wrapper.supervisor.agents.links.encode", lambda order: encoded.append(order) or encode(order)
    )

    async def scene(it: Scene) -> None:
        agents = [PretendedAgent("n1", 10, inventory=m.Inventory(workers=(running(0), running(1))))]
        agents.append(PretendedAgent("n2", 20, inventory=m.Inventory(workers=(running(2),))))
        for agent in agents:
            await it.connect(agent)
        it.links.order((0, 1, 2), go(6))
        for agent, ranks in zip(agents, ((0, 1), (2,)), strict=True):
            agent.read()
            assert agent.heard == [m.ToWorkers(ranks=ranks, body=encode(go(6)))]
            agent.channel.abort()
        assert encoded == [go(6)]
        await it.settle()

    play(scene, lead=m.Lead(term=2, node="n2", log=17))


def test_an_inventory_counts_once() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        agent.say(m.Inventory())
        await it.settle()
        assert it.told().count(api.AgentJoined) == len(it.joined) == 1
        assert it.refusals() == ["agent of node n1: unexpected Inventory"]

    play(scene)


def test_ranks_of_the_inventory_are_the_nodes_own() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent(inventory=m.Inventory(workers=(running(3, 73), running(4, 0)), ended=((2, -9),)))
        await it.connect(agent)
        assert list(it.links.live_ranks) == [3, 4]
        agent.say(m.Spawned(rank=4, device=1, pid=74))
        agent.say(m.Exited(rank=3, pid=73, status=1))
        agent.say(m.Exited(rank=2, pid=72, status=-9))
        await asyncio.sleep(0)
        assert it.told() == [api.AgentJoined, api.WorkerSpawned, api.WorkerExited, api.WorkerExited]
        assert list(it.links.live_ranks) == [4]
        it.links.order((2, 3, 4, 5), go(6))
        agent.read()
        assert agent.heard == [m.ToWorkers(ranks=(2, 3, 4), body=encode(go(6)))], "nobody knows of rank 5"
        agent.say(m.Exited(rank=5, pid=75, status=0))
        await it.settle()
        assert it.refusals() == ["agent of node n1: sent a message of rank 5, which is not its own"]

    play(scene, lead=m.Lead(term=2, node="n2", log=17))


def test_agent_of_a_later_term_deposes_the_supervisor() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        late = PretendedAgent("n2", 20)
        late.promised = 3
        with pytest.raises(ProtocolError, match="follows a supervisor of term 3, ours is 2"):
            await it.arrive(late.join())
        assert it.deposed == ["agent of node n2: follows a supervisor of term 3, ours is 2"]
        assert it.told("n2") == []
        agent.channel.abort()
        await it.settle()

    play(scene, lead=m.Lead(term=2, node="n2", log=17))


def test_agent_of_the_term_before_begins_a_new_conversation_whatever_it_has_received() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        agent.promised, agent.epoch, agent.conversation = 1, 9, Conversation()
        agent.conversation.received = 40  # from the supervisor that is gone
        await it.connect(agent)
        assert it.told() == [api.AgentJoined]
        assert agent.acknowledged == 0
        it.links.acknowledge()
        agent.read()
        assert agent.acknowledged == 1
        agent.channel.abort()
        await it.settle()

    play(scene, lead=m.Lead(term=2, node="n2", log=17))


def test_agent_that_has_promised_and_not_told_its_inventory_goes_on_where_it_was() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        channel = await it.arrive(agent.join())
        channel.abort()  # the inventory is lost
        agent.connected(channel)
        await asyncio.sleep(0)
        assert it.events == []
        await it.connect(agent)
        assert it.told() == [api.AgentJoined]
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_what_was_said_before_an_agent_first_came_waits_for_it() -> None:
    """A supervisor that winds down before somebody is back tells them when they come, however often they try."""

    async def scene(it: Scene) -> None:
        it.links.release(3.0)
        agent = PretendedAgent()
        (await it.arrive(agent.join())).abort()  # with the term on its way
        await asyncio.sleep(0)
        await it.connect(agent)
        agent.read()
        assert agent.heard == [m.Release(grace_s=3.0)]
        agent.channel.abort()
        await it.settle()

    play(scene, lead=m.Lead(term=2, node="n2", log=17))


def test_agent_that_joined_and_says_it_has_not_is_refused() -> None:
    """It has lost what it was told, and with that the state that its node is thought to be in."""

    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        agent.promised -= 1
        with pytest.raises(ProtocolError, match="has lost its state"):
            await it.arrive(agent.join())
        agent.channel.abort()
        await it.settle()
        assert it.lost() == ["n1"]

    play(scene, lead=m.Lead(term=2, node="n2", log=17))


def test_a_lease_lets_a_node_in_that_nobody_knew() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent("n9", 90, lease=2)
        await it.connect(agent)
        assert it.events == [api.AgentJoined(node="n9", host="h", devices=2, lease=2, inventory=NOTHING)]
        it.links.spawn("n9", spawn(5))
        agent.read()
        assert agent.heard == [spawn(5)]
        it.links.drop("n9")
        with pytest.raises(ProtocolError, match="was left out"):
            await it.arrive(agent.join())
        await it.settle()
        assert it.launcher.killed == ["n9"]

    play(scene)


def test_agents_are_told_of_each_other_when_that_changes() -> None:
    async def scene(it: Scene) -> None:
        agents = [PretendedAgent(node, pid) for node, pid in (("n2", 20), ("n10", 30), ("n1", 10))]

        def peers(*nodes: tuple[str, int]) -> tuple[m.Peer, ...]:
            return tuple(m.Peer(node=node, host="10.1.2.3", port=7000 + pid) for node, pid in nodes)

        for agent in agents:
            agent.lease = agent.node == "n10"
            it.links.enlist(agent.node)
            await it.connect(agent)
            if agent.node != "n10":
                it.links.beat()
        it.links.beat()
        for agent in agents:
            agent.read()
        first, *others = (agent.rosters() for agent in agents)
        assert first == [m.Roster(peers=peers(("n2", 20)), whole=True), m.Roster(peers=peers(("n10", 30), ("n1", 10)))]
        assert others == [[m.Roster(peers=peers(("n2", 20), ("n10", 30), ("n1", 10)), whole=True)]] * 2
        it.links.drop("n2")
        it.links.beat()
        it.links.beat()
        for agent in agents[1:]:
            agent.read()
            assert agent.rosters()[1:] == [m.Roster(peers=(), left=("n2",))]
            agent.channel.abort()
        await it.settle()

    play(scene, roster=True)


def test_without_succession_nobody_is_told_of_others() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.drop("n2")
        it.links.beat()
        agent.read()
        assert agent.rosters() == []
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_acknowledgements_are_passed_on_as_they_come() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        numbers = [it.links.post("n1", m.Replicate(after=n, records=())) for n in range(3)]
        assert numbers == [1, 2, 3]
        assert it.links.post("n2", m.Replicate(after=0, records=())) == 1, "kept for when it comes"
        assert it.links.post("n7", m.Replicate(after=0, records=())) == 0
        agent.read()
        assert agent.conversation is not None
        agent.conversation.acknowledge()
        await asyncio.sleep(0)
        assert it.acknowledged[-1] == ("n1", 3)
        assert {node for node, _ in it.acknowledged} == {"n1"}
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_beats_are_not_kept_for_those_who_are_away() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.beat()
        agent.read()
        assert agent.heard == [m.Alive()]
        agent.channel.abort()
        await asyncio.sleep(0)
        for _ in range(100):
            it.links.beat()
        await it.connect(agent)
        agent.read()
        assert agent.heard == [m.Alive()]
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_waiting_for_all_to_close_ends_with_the_last_one_or_with_the_time() -> None:
    async def scene(it: Scene) -> None:
        agents = [PretendedAgent(), PretendedAgent("n2", 20)]
        for agent in agents:
            await it.connect(agent)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await it.links.all_closed(0.05)
        assert loop.time() - begun >= 0.05
        waiting = it.start(it.links.all_closed(5.0))
        agents[0].channel.inbox.put_nowait(None)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        agents[1].channel.inbox.put_nowait(None)
        await waiting
        assert loop.time() - begun < 2.0
        await it.settle()

    play(scene)


def test_waiting_for_all_to_be_gone_does_not_wait_for_those_who_never_came_or_were_left_out() -> None:
    async def scene(it: Scene) -> None:
        await asyncio.wait_for(it.links.all_ended(), 0.5)
        agents = [PretendedAgent(), PretendedAgent("n2", 20)]
        for agent in agents:
            await it.connect(agent)
        it.links.drop("n2")
        waiting = it.start(it.links.all_ended())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        agents[0].channel.inbox.put_nowait(None)
        await asyncio.wait_for(waiting, 5.0)
        await it.settle()

    play(scene)


def test_agent_of_a_node_that_leaves_in_order_is_told_to_end() -> None:
    async def scene(it: Scene) -> None:
        agents = [PretendedAgent(), PretendedAgent("n2", 20)]
        for agent in agents:
            await it.connect(agent)
        it.links.spawn("n2", spawn(1))
        agents[1].read()
        it.links.drop("n2", in_order=True)
        it.links.order((1,), go(4))
        agents[1].read()
        assert agents[1].heard[-1] == m.Release(grace_s=0.0)
        assert not agents[1].channel.aborted
        for agent in agents:
            agent.channel.inbox.put_nowait(None)
        await it.settle()
        assert it.lost() == ["n1"]

    play(scene)


# --- connections that break ---------------------------------------------------------------------------------------


def test_agent_that_comes_back_in_time_is_not_lost() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        it.links.order((0,), go(4))
        agent.read()
        agent.channel.abort()
        await asyncio.sleep(RECONNECT_S / 4)
        await it.connect(agent)
        await asyncio.sleep(2 * RECONNECT_S)
        assert it.lost() == []
        assert it.told() == [api.AgentJoined]
        it.links.signal_node("n1", 9)
        agent.read()
        assert agent.heard[-1] == m.KillNode(signal=9)
        agent.channel.abort()
        await it.settle()
        assert it.lost() == ["n1"]

    play(scene)


Broken = Callable[[Scene, list[PretendedAgent]], Awaitable[None]]


def with_a_herd(scene: Broken) -> None:
    """Twenty agents whose connections broke together, on a virtual clock; all but the last one are to be back."""

    async def whole(it: Scene) -> None:
        agents = [PretendedAgent(f"n{number}", number) for number in range(20, 40)]
        for agent in agents:
            agent.lease = 1
            await it.connect(agent)
        for agent in agents:
            agent.channel.abort()
        await scene(it, agents[:-1])
        assert it.lost() == [agents[-1].node]
        for agent in agents[:-1]:
            agent.channel.abort()
        await it.settle()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene_of(whole))


def test_agents_that_all_broke_off_are_given_time_while_they_come_back_one_by_one() -> None:
    async def scene(it: Scene, others: list[PretendedAgent]) -> None:
        for agent in others:
            await asyncio.sleep(RECONNECT_S / 2)
            await it.connect(agent)
        assert it.lost() == []
        await asyncio.sleep(2 * RECONNECT_S)  # nobody comes back any more

    with_a_herd(scene)


@pytest.mark.parametrize("noticed_after_s", [0.0, RECONNECT_S / 2])
def test_agents_that_took_a_stopped_supervisor_for_dead_have_time_to_come_back(noticed_after_s: float) -> None:
    """That their connections broke may be read before the clock is looked at."""

    async def scene(it: Scene, others: list[PretendedAgent]) -> None:
        await asyncio.sleep(noticed_after_s)
        it.links.were_stopped()
        await asyncio.sleep(RETURN_WINDOW_S / 2)
        assert it.lost() == []
        for agent in others:
            await it.connect(agent)
        await asyncio.sleep(RETURN_WINDOW_S / 2 + RECONNECT_S)  # that is how long it takes at most

    with_a_herd(scene)


def test_nothing_is_lost_when_the_connection_is_cut() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        agent.read()
        agent.say(m.Spawned(rank=0, device=0, pid=77))
        await asyncio.sleep(0)
        it.links.order((0,), go(1))
        it.links.cut("n1")  # with the Go in flight
        agent.say(m.FromWorker(rank=0, body=encode(m.Confirm(epoch=2, digest=""))))
        it.links.order((0,), go(2))
        await asyncio.sleep(0)
        await it.connect(agent)
        agent.read()
        assert [label_of(order_in(order)).epoch for order in agent.heard[1:]] == [1, 2]
        assert agent.epoch == 2
        assert it.told() == [api.AgentJoined, api.WorkerSpawned, api.WorkerSaid]
        await asyncio.sleep(2 * RECONNECT_S)
        assert it.lost() == []
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_break_before_the_first_order_is_heard_is_survived() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        agent.channel.abort()
        await asyncio.sleep(0)
        agent.epoch = 0  # it has heard nothing, so it joins as it did before
        await it.connect(agent)
        agent.read()
        assert agent.heard == [spawn(0)]
        assert it.told() == [api.AgentJoined]
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_agent_may_be_back_before_the_break_is_noticed() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        agent.read()
        stale = agent.channel
        assert agent.conversation is not None
        agent.conversation.disconnect()
        agent.say(m.Spawned(rank=0, device=0, pid=77))
        connecting = it.start(it.connect(agent))
        asyncio.get_running_loop().call_soon(stale.inbox.put_nowait, Envelope(number=1, message=m.Beat(workers=())))
        await connecting
        assert stale.aborted
        await asyncio.sleep(2 * RECONNECT_S)
        assert it.lost() == []
        assert it.told() == [api.AgentJoined, api.WorkerSpawned], "the old connection is not read any more"
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_two_short_breaks_are_not_one_long_one() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        agent.channel.abort()
        await asyncio.sleep(0.7 * RECONNECT_S)
        await it.connect(agent)
        agent.channel.abort()
        await asyncio.sleep(0.7 * RECONNECT_S)
        assert it.lost() == []
        await it.connect(agent)
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_agent_that_acknowledges_nothing_for_too_long_is_lost() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        large = m.Halt(reason=Random(1).randbytes(1 << 19).hex())  # half of it is left when it travels
        for _ in range(80):
            it.links.order((0,), large)
            assert it.lost() == [], "not told while the controller's actions are carried out"
        await it.settle()
        assert it.lost() == ["n1"]
        assert agent.channel.aborted

    play(scene)


def test_exits_are_acknowledged_at_once_and_the_rest_on_demand() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        agent.read()
        before = agent.acknowledged
        agent.say(m.Spawned(rank=0, device=0, pid=77))
        await asyncio.sleep(0)
        agent.read()
        assert agent.acknowledged == before
        it.links.acknowledge()
        agent.read()
        assert agent.acknowledged == before + 1
        agent.say(m.Exited(rank=0, pid=77, status=0))
        await asyncio.sleep(0)
        agent.read()
        assert agent.acknowledged == before + 2
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_agent_that_stays_away_is_lost_and_then_refused() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        agent.channel.inbox.put_nowait(None)
        await it.settle()
        assert it.lost() == ["n1"]
        with pytest.raises(ProtocolError, match="was left out"):
            await it.arrive(agent.join())

    play(scene)


@pytest.mark.parametrize(
    ("node", "epoch", "pid", "received", "reason"),
    [
        ("n1", 3, 10, 2, "is of epoch 3, but 4 is due after the messages that it has received"),
        ("n1", 0, 10, 2, "is of epoch 0, but 4 is due"),
        ("n1", 4, 10, 1, "is of epoch 4, but 1 is due"),
        ("n1", 4, 10, 3, "has received 3 of 2 messages, and the others are not all kept"),
        ("n1", 4, 11, 2, "process 11 where 10 is expected"),
        ("n3", 0, 12, 0, "not a node of this job"),
    ],
)
def test_stale_and_strange_agents_are_refused(node: str, epoch: int, pid: int, received: int, reason: str) -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        it.links.order((0,), go(4))
        join = m.Join(node=node, host="h", pid=pid, devices=2, epoch=epoch, term=agent.promised)
        with pytest.raises(ProtocolError, match=reason):
            await it.arrive(join, received)
        assert it.lost() == []
        assert not agent.channel.aborted, "strangers do no harm to the one that is there"
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_an_agent_that_was_started_again_is_refused_although_it_has_the_same_process_id() -> None:
    """As the first process of a container has at each start."""

    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        join = msgspec.structs.replace(agent.join(), incarnation="first")
        agent.connected(await it.arrive(join))
        await asyncio.sleep(0)
        assert it.events == [api.AgentJoined(node="n1", host="h", devices=2, inventory=NOTHING, incarnation="first")]
        with pytest.raises(ProtocolError, match="was started again"):
            await it.arrive(msgspec.structs.replace(join, incarnation="second"))
        assert it.links.connected(it.links._links) == {"n1"}
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_a_leader_that_never_met_the_agent_knows_from_the_journal_which_one_may_promise() -> None:
    """Else it would count for two leaders of a term, and with an empty copy of the journal for all that was decided."""

    async def scene(it: Scene) -> None:
        strange = msgspec.structs.replace(PretendedAgent().join(), incarnation="second")
        with pytest.raises(ProtocolError, match="agent of node n1: was started again"):
            await it.arrive(strange)
        assert it.joined == []
        agent = PretendedAgent(pid=11)
        agent.connected(await it.arrive(msgspec.structs.replace(agent.join(), incarnation="first")))
        await asyncio.sleep(0)
        assert it.links.connected(it.links._links) == {"n1"}
        agent.channel.abort()
        await it.settle()

    play(scene, lead=m.Lead(term=2, node="n2", log=17), incarnations={"n1": "first"})


def test_epochs_of_an_earlier_supervisor_are_known_from_the_first_join() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent(inventory=m.Inventory(workers=(running(0),), epoch=6))
        agent.promised, agent.epoch = 1, 5
        await it.connect(agent)
        it.links.order((0,), go(7))
        for epoch in (1, 4, 6, 7):
            join = msgspec.structs.replace(agent.join(), epoch=epoch)
            with pytest.raises(ProtocolError, match=f"is of epoch {epoch}, but 5 is due"):
                await it.arrive(join)
        agent.channel.abort()
        await it.connect(agent)
        agent.read()
        assert agent.epoch == 7
        agent.channel.abort()
        await it.connect(agent)
        agent.channel.abort()
        await it.settle()
        assert it.told() == [api.AgentJoined, api.AgentLost]

    play(scene, lead=m.Lead(term=2, node="n2", log=17))


def test_agent_without_workers_in_the_plan_may_come_back_all_the_same() -> None:
    async def scene(it: Scene) -> None:
        first, other = PretendedAgent(), PretendedAgent("n2", 20)
        await it.connect(first)
        await it.connect(other)
        it.links.spawn("n1", spawn(0))
        it.links.order((0,), go(7))
        other.channel.abort()
        await asyncio.sleep(0)
        await it.connect(other)
        assert other.epoch == 1
        first.channel.abort()
        other.channel.abort()
        await it.settle()

    play(scene)


# --- the end ------------------------------------------------------------------------------------------------------


def test_dropped_node_is_ended_and_never_heard_again() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        agent.say(m.Spawned(rank=0, device=0, pid=77))
        it.links.drop("n1")
        assert it.links.live_ranks == ()
        await it.settle()
        assert it.launcher.killed == ["n1"]
        assert it.told() == [api.AgentJoined]
        it.links.agent_ended("n1", -9)
        await it.settle()
        assert it.lost() == []

    play(scene)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (-9, "its agent was killed by SIGKILL"),
        (3, "its agent exited with status 3"),
        (
            4,
            "its agent never reached the supervisor at 127.0.0.1; check the network between the nodes: `ip address`, "
            "[network] interface",
        ),
        (None, "its agent is gone"),
    ],
)
def test_agents_exit_is_told_after_what_it_had_sent(status: int | None, reason: str) -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.agent_ended("n1", status)
        agent.say(m.SpawnFailed(reason="disk full"))
        agent.channel.inbox.put_nowait(None)
        await it.settle()
        assert it.told() == [api.AgentJoined, api.SpawnRefused, api.AgentLost]
        assert it.events[-1].reason == reason

    play(scene)


def test_refusal_to_start_one_worker_names_it() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        it.links.spawn("n1", spawn(0))
        agent.say(m.SpawnFailed(reason="no memory", rank=0))
        agent.channel.inbox.put_nowait(None)
        await it.settle()
        assert it.events[1] == api.SpawnRefused(node="n1", reason="no memory", rank=0)

    play(scene)


def test_signal_that_an_agent_got_is_told() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        agent.say(m.Signalled(signal=15))
        await asyncio.sleep(0)
        assert it.events[1] == api.AgentSignalled(node="n1", signal=15)
        agent.channel.abort()
        await it.settle()

    play(scene)


def test_agent_that_speaks_for_anothers_rank_is_dropped() -> None:
    async def scene(it: Scene) -> None:
        agent = PretendedAgent()
        await it.connect(agent)
        agent.say(m.Exited(rank=5, pid=1, status=0))
        await it.settle()
        (refusal,) = it.refusals()
        assert "rank 5, which is not its own" in refusal
        assert api.WorkerExited not in it.told()

    play(scene)


# --- rendezvous ---------------------------------------------------------------------------------------------------


def test_workers_meet_over_their_agents_once_they_were_told_to_build() -> None:
    async def scene(it: Scene) -> None:
        n1, n2 = PretendedAgent("n1"), PretendedAgent("n2")
        await it.connect(n1)
        await it.connect(n2)
        meeting = m.MeetingId(epoch=2)
        said = (m.Said("world", "0/0", b"address"),)
        n2.say(m.Attend(meeting=meeting, groups=("world",)))
        n1.say(m.Publish(meeting=meeting, said=said))
        await it.turns()
        n2.read()
        assert n2.heard == [], "nobody was told to"
        it.links.order([], go(2))
        n2.say(m.Attend(meeting=meeting, groups=("world",)))
        n1.say(m.Publish(meeting=meeting, said=said))
        await it.turns()
        n2.read()
        assert n2.heard == [m.Published(meeting=meeting, said=said)]

    play(scene)


def test_words_to_peers_are_not_lost_with_a_connection() -> None:
    async def scene(it: Scene) -> None:
        n1, n2 = PretendedAgent("n1"), PretendedAgent("n2")
        await it.connect(n1)
        await it.connect(n2)
        it.links.order([], go(2))
        meeting = m.MeetingId(epoch=2)
        n2.say(m.Attend(meeting=meeting, groups=("world",)))
        await it.turns()
        n2.channel.inbox.put_nowait(None)
        await it.turns()
        n1.say(m.Publish(meeting=meeting, said=(m.Said("world", "0/0", b"address"),)))
        await it.turns()
        assert n2.heard == []
        await it.connect(n2)
        assert [type(each) for each in n2.heard] == [m.Published]

    play(scene)
