"""A simulated Slurm for a simulated job, and the rules for the job's requests to Slurm.

The simulated Slurm answers late, twice, or never, and refuses requests. A replacement node joins, or does not join, or
arrives when it is no longer needed. Acts only on the job's requests. Called by `world` and `actions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from resihp.controller import interface as api
from resihp.record.journal import (
    AnyEntry,
    DrainAnswered,
    DrainDecided,
    FailureFound,
    NodeJoined,
    NodeLost,
    NodeReleased,
    PlanInEffect,
    ReplacementAsked,
    ReplacementChanged,
    SlurmSaw,
)
from resihp.simulator.invariants.violations import expect
from resihp.simulator.machines.sim_node import SimNode
from resihp.simulator.scenarios.scenario import SIGTERM, SIGUSR2

if TYPE_CHECKING:
    from resihp.simulator.world import World

KILL_WAIT_S = 30.0
"""Seconds from Slurm's signal to the end of a job to the kill of its processes."""
FINAL_STATES = ("refused", "cancelled", "ended", "withdrawn")
RIVAL_STATES = ("asked", "pending", "running", "joined", "withdrawn")
"""States of a request beside which no other may be made for the same lost node."""


class Allocation:
    """Slurm as seen by the job, and the rules for the job's requests."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.blamed: dict[int, FailureFound] = {}
        self.lost: list[str] = []
        self.drains: dict[int, str] = {}
        self.drained = 0
        """Number of real drains among all measures in `drains`; the others are only exclusions."""
        self.vacated: set[str] = set()
        self.deaths: dict[str, str] = {}
        """Description of each node's loss, worded like the cause of a failure, by node."""
        self.answered: set[tuple[int, str, str]] = set()
        """(drain, step, outcome) of each answer in the journal."""
        self.released: set[str] = set()
        self.refusals: dict[str, int] = {}
        self.tries: dict[str, int] = {}
        self.requests: dict[int, str] = {}
        """State of each replacement request according to the journal, by its number."""
        self.turned_down = 0
        """Number of requests that Slurm did not accept, and which therefore do not count."""
        self.instead: dict[int, str] = {}
        self.guests: dict[str, int] = {}
        """Nodes that were given to a replacement request, with the number of the request."""
        self.ending: set[str] = set()
        """Nodes in `guests` whose agents were told that their Slurm job is ending."""
        self.present: set[str] = set()
        """Nodes in `guests` that the job has accepted."""

    # --- Slurm's side ---------------------------------------------------------------------------------------------

    def carry_out(self, action: api.AnyAction) -> None:
        rng, world = self.world.rng, self.world
        match action:
            case api.DrainNode():
                rungs: list[tuple[Any, Any]] = [("slurm", "done"), ("exclusion", "done")]
                if action.measure == "exclude":
                    rungs = [("exclusion", rng.choice(["done", "unknown"]))]
                elif rng.random() < 0.5:
                    rungs = [("slurm", rng.choice(["refused", "unknown"])), ("spool", rng.choice(["done", "refused"]))]
                for step, outcome in rungs[: rng.choice([0, 1, 2, 2, 2])]:
                    answered = api.DrainStep(drain=action.drain, node=action.node, step=step, outcome=outcome, text="")
                    self._later([answered] * rng.choice([1, 1, 2]))
            case api.ReleaseNode():
                if rng.random() < 0.9:
                    answer: Any = rng.choice(["done", "refused", "refused", "unknown"])
                    self._later([api.ReleaseAnswered(node=action.node, outcome=answer, text="")])
            case api.AskReplacement():
                self._give(action.replacement)
            case api.CancelReplacement():
                if rng.random() < 0.5:
                    self._later([self._news(action.replacement, "ended")])
            case api.WatchNode():
                for state in ("down", "idle")[: rng.randint(0, 2)]:
                    self._later([api.SlurmSees(node=action.node, state=state, reason="")])
            case _:
                world.log.append((world.now, f"{action} has no effect"))

    def _later(self, events: Iterable[api.AnyEvent]) -> None:
        rng = self.world.rng
        for event in events:
            self.world.at(rng.choice([0.01, rng.uniform(0, 2), rng.uniform(0, 15)]), self.world.feed, event)

    def _news(self, number: int, state: Any, node: str | None = None) -> api.ReplacementNews:
        slurm_job = None if state == "refused" else str(100 + number)
        return api.ReplacementNews(replacement=number, state=state, slurm_job=slurm_job, node=node, text="")

    def _give(self, number: int) -> None:
        """Draw the outcome of a replacement request. A request that is made twice counts once."""
        rng, world = self.world.rng, self.world
        if f"r{number}" in world.nodes:
            return
        fate = rng.choices(["joins", "early", "refused", "ended", "pending", "silent", "old"], [8, 2, 2, 1, 1, 1, 1])[0]
        if fate == "refused":
            self._later([self._news(number, "refused")])
        elif fate == "ended":
            self._later([self._news(number, "pending"), self._news(number, "ended")])
        elif fate == "pending":
            self._later([self._news(number, "pending")])
        elif fate in ("joins", "early", "old"):
            name = f"r{number}" if fate != "old" or not self.lost else self.lost[-1]
            if fate != "early":
                self._later([self._news(number, "pending"), self._news(number, "running", name)])
            if name not in world.nodes:
                world.nodes[name] = SimNode(name, [], world.scenario.gpus_per_node)
                self.guests[name] = number
                world.at(rng.uniform(0.5, 6.0), self._join, world.nodes[name], number)
            else:
                event = api.AgentJoined(node=name, host=name, devices=1, lease=number)
                world.at(rng.uniform(0.5, 6.0), world.feed, event)

    def _join(self, node: SimNode, number: int) -> None:
        world = self.world
        node.joined = True
        hardware = world.rng.choice(["A"] * 8 + ["", "B"])
        host = f"host-{node.name}"
        joined = api.AgentJoined(node=node.name, host=host, devices=node.devices, lease=number, hardware=hardware)
        world.network.up(node, joined)
        world.at(world.rng.uniform(0.0, 1.0), world.agents.beat, node)
        if world.rng.random() < 0.25:
            world.at(world.rng.choice([world.rng.uniform(0, 3), world.rng.uniform(3, 20)]), self._end, node, number)

    def _end(self, node: SimNode, number: int) -> None:
        """End the Slurm job of a guest: its agent is told by a signal, and `KILL_WAIT_S` later it is killed."""
        rng, world = self.world.rng, self.world
        if not node.alive or world.end is not None:
            return
        self.ending.add(node.name)
        world.network.up(node, api.AgentSignalled(node=node.name, signal=rng.choice([SIGTERM, SIGUSR2])))
        self._later([self._news(number, rng.choice(["ended", "withdrawn"]), node.name)])
        world.at(KILL_WAIT_S, world.agents.kill_node, node, rng.random() < 0.5)

    # --- rules ----------------------------------------------------------------------------------------------------

    def is_refusal(self, name: str) -> bool:
        """Return whether the node does not belong to the job, so that dropping it means refusing it."""
        return self.is_stranger(name) or name in self.lost

    def is_stranger(self, name: str) -> bool:
        """Return whether the node was given to a replacement request and the job has not accepted it."""
        return name in self.guests and name not in self.present

    def judge(self, action: api.AnyAction) -> None:
        """Check an action before it is carried out. Raises Violation."""
        match action:
            case api.Log():
                self._check_entry(action.entry)
            case api.DrainNode():
                expect(self.drains.get(action.drain) == action.node, f"{action} is not in the journal")
                expect(len(action.reason) < 150 and self.world.settings.job in action.reason, f"reason {action.reason}")
            case api.ReleaseNode():
                self._check_release(action)
            case api.AskReplacement():
                open_states = ("asked", "pending", "running") if self.world.takeovers else ("asked",)
                expect(self.requests.get(action.replacement) in open_states, f"{action} is not in the journal")
                expect(set(self.lost) <= set(action.exclude), f"{action} would take back {self.lost}")
            case api.CancelReplacement():
                expect(self.requests.get(action.replacement) in FINAL_STATES, f"{action} of a request still wanted")
            case _:
                pass

    def _check_release(self, action: api.ReleaseNode) -> None:
        scenario, name = self.world.scenario, action.node
        expect(name in self.lost, f"{action} of a node that is not lost")
        expect(name != scenario.batch_node and name not in self.guests, f"{action} cannot be")
        expect(name not in self.released, f"{action} twice")
        self.tries[name] = self.tries.get(name, 0) + 1
        most = 4 * (1 + len(self.world.takeovers))
        expect(self.tries[name] <= most, f"{action} for the {self.tries[name]}th time")
        alive = {node for node in self.world.nodes if node not in self.lost and node not in self.guests}
        expect(set(action.keep) == alive | {scenario.batch_node}, f"{action} keeps others than {sorted(alive)}")

    def _check_entry(self, entry: AnyEntry) -> None:
        match entry:
            case DrainDecided():
                self._check_drain(entry)
            case DrainAnswered():
                key = (entry.drain, entry.step, entry.outcome)
                expect(key not in self.answered, f"{entry} twice")
                self.answered.add(key)
            case NodeReleased():
                if entry.outcome == "done":
                    self.released.add(entry.node)
                self.refusals[entry.node] = self.refusals.get(entry.node, 0) + (entry.outcome != "done")
                expect(self.refusals[entry.node] <= 1, f"{entry} again")
            case FailureFound():
                self.blamed[entry.failure] = entry
                expect(entry.node not in self.vacated, f"{entry}, though the node was vacated on purpose")
            case NodeLost():
                self.lost.append(entry.node)
                self.deaths[entry.node] = f"node {entry.node}: {entry.reason}"
                if entry.how == "vacated":
                    self.vacated.add(entry.node)
                    scenario = self.world.scenario
                    has_reason = entry.node in self.ending or scenario.on_drain == "vacate"
                    expect(has_reason and entry.node != scenario.batch_node, f"{entry} unrequested")
            case NodeJoined():
                self._check_arrival(entry)
            case ReplacementAsked():
                self._check_request(entry)
            case ReplacementChanged():
                before = self.requests[entry.replacement]
                expect(before not in FINAL_STATES, f"{entry} after it was {before}")
                expect(
                    before != "joined" or entry.state in ("joined", "ended", "withdrawn"), f"{entry} after it joined"
                )
                self.requests[entry.replacement] = entry.state
                self.turned_down += entry.state == "refused" and entry.slurm_job is None
            case PlanInEffect() | SlurmSaw():
                pass
            case _:
                pass

    def _check_drain(self, entry: DrainDecided) -> None:
        """Check that a node is drained only once, and for a failure for which the settings allow a drain."""
        scenario = self.world.scenario
        failure = self.blamed.get(entry.failure)
        expect(failure is not None and failure.node == entry.node, f"{entry} without a verdict")
        assert failure is not None
        expect(failure.component in ("node", "device"), f"{entry} because of a {failure.component}")
        expect(entry.node != scenario.batch_node, f"{entry} drains the batch host")
        expect(entry.node not in self.drains.values(), f"{entry} twice")
        if entry.measure == "drain":
            self.drained += 1
            expect(self.drained <= scenario.drains, f"{entry} is one too many")
            again = entry.grounds == "died again" and entry.node in scenario.died_before
            expect(entry.grounds == "hardware" or again, f"{entry} without evidence that it is broken")
            expect(again or failure.cause != self.deaths.get(entry.node), f"{entry} because it died")
        expect(entry.drain == len(self.drains) + 1, f"{entry} after {len(self.drains)}")
        self.drains[entry.drain] = entry.node

    def _check_arrival(self, entry: NodeJoined) -> None:
        """Check a node that joins: of the right kind of hardware, and, if there is a plan, either late or requested."""
        expect(entry.hardware != "B", f"{entry}, which is of another kind")
        if entry.node in self.lost and entry.node not in self.guests:  # the node was lost and has joined late
            expect(entry.node not in self.released, f"{entry}, which was given back")
            self.lost.remove(entry.node)
            for counts in (self.tries, self.refusals):  # the node may be lost and released once more
                counts.pop(entry.node, None)
            return
        if self.world.rules.plan is not None:
            expect(entry.node in self.guests, f"{entry}, which was not requested")
            expect(self.requests.get(self.guests[entry.node]) in ("asked", "pending", "running"), f"{entry}")
            self.present.add(entry.node)

    def _check_request(self, entry: ReplacementAsked) -> None:
        job = self.world.controller.job
        expect(len(self.requests) - self.turned_down < self.world.scenario.replacements, f"{entry} is one too many")
        expect(entry.replacement == len(self.requests) + 1, f"{entry} after {len(self.requests)}")
        expect(entry.node in self.lost and entry.node not in self.guests, f"{entry} of a node that is not lost")
        rivals = [n for n, node in self.instead.items() if node == entry.node and self.requests[n] in RIVAL_STATES]
        expect(not rivals, f"{entry} beside {rivals}")
        assert job.record.first_plan is not None
        wanted = max(len(job.record.first_plan.layout.active), self.world.settings.ranks_asked)
        expect(len(job.record.active) < wanted, f"{entry} although no node is missing")
        expect(job.training and job.transition is None, f"{entry} during a transition")
        self.requests[entry.replacement] = "asked"
        self.instead[entry.replacement] = entry.node

    def check_end(self, exit_code: int) -> None:
        """Check that no replacement request stays in the queue, unless the job ends with 75 and is requeued."""
        unfinished = [number for number, state in self.requests.items() if state in ("asked", "pending", "running")]
        expect(not unfinished or exit_code == 75, f"requests {unfinished} are left behind")
