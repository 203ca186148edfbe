"""The worker's end of the socket to its agent: orders in, reports and beats out.

One thread beats and listens, one sends; the main thread hands over what it has to say and fetches orders when it is
ready for them: an agent that is slow or stopped never holds up training. Some things act at once, whatever the main
thread does: a `Park` that does not wait for the iteration wakes it from a blocked collective; a `Halt` at once and the
end of the socket (the agent is gone: nobody could fence it) end the process. Used by `resihp.executor.trainer`; decides
nothing else.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Literal

from resihp.errors import CommunicatorError, ProtocolError, ResihpError, UsageError
from resihp.faults import Fault, Phase
from resihp.process import AGENT_FD, end_by
from resihp.protocol import messages as m
from resihp.protocol.framing import LocalChannel
from resihp.protocol.rendezvous import Attendance

BEAT_S = 1.0
LAST_WORDS_S = 10.0
"""How long a process that ends by an exception waits for its agent to take the news."""
AGENT_GONE_STATUS = 70
"""Exit status of a worker whose agent vanished (EX_SOFTWARE of sysexits.h)."""

Activity = Literal["starting", "compute", "communication", "parked", "checkpoint", "idle"]


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _disregard(number: int, frame: FrameType | None) -> None:
    """For this process alone: a program that it starts has the default again, and so has a fork."""


def _hear_again() -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _disregard:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_hear_again)


class InjectedFaultError(ResihpError):
    """The exception that a `raise` fault raises in the user's thread."""


class AgentClient:
    """This worker's conversation with its agent. Thread-safe where noted; everything else is the main thread's."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._channel = LocalChannel(sock)
        start = self._channel.recv(m.WorkerOrder)
        if not isinstance(start, m.Start):
            raise ProtocolError(f"agent: first frame is {type(start).__name__}, expected Start")
        self.start = start
        self.park_epoch = 0
        """Newest epoch that somebody asked this rank to park for at once."""
        self.pause_epoch = 0
        """The same, after the iteration under way."""
        self.save_number = 0
        """Newest order to write a checkpoint after the iteration under way."""
        self.epoch = 0
        self.iteration = 0
        self.primitives = 0
        self.activity: Activity = "starting"
        self.declared = False
        self._orders: queue.SimpleQueue[m.WorkerOrder] = queue.SimpleQueue()
        self._probes: queue.SimpleQueue[m.Probe] = queue.SimpleQueue()
        self._announced: queue.SimpleQueue[m.Probe] = queue.SimpleQueue()
        self._later: list[m.Probe] = []
        self._slow: dict[tuple[str, str] | None, m.Slow] = {}
        """Of links between two nodes, and, under None, of this device."""
        self._fault_answers: queue.SimpleQueue[m.FaultGo] = queue.SimpleQueue()
        self._spent: set[int] = set()
        self._wake: Callable[[], None] = lambda: None
        self._ask_device: Callable[[], tuple[bool, float]] = lambda: (False, 0.0)
        self._beaten = 0
        """Primitives at the last beat."""
        self._deaf = False
        self._absent: Callable[[Fault], bool] = lambda fault: False
        self._attended: dict[m.MeetingId, Attendance] = {}
        self._outbox: queue.SimpleQueue[m.WorkerMessage | m.MeetingMessage | threading.Event] = queue.SimpleQueue()
        for work in (self._listen, self._deliver):
            threading.Thread(target=self._named, args=(work,), name="resihp-agent", daemon=True).start()

    # --- to the agent -----------------------------------------------------------------------------------------

    def send(self, message: m.WorkerMessage | m.MeetingMessage) -> None:
        """Hand over one message, in order, without waiting. Any thread. A vanished agent ends the process."""
        self._outbox.put(message)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed over has been sent; False if it took too long."""
        sent = threading.Event()
        self._outbox.put(sent)
        return sent.wait(timeout_s)

    def _deliver(self) -> None:
        while True:
            message = self._outbox.get()
            if isinstance(message, threading.Event):
                message.set()
                continue
            try:
                self._channel.send(message)
            except OSError:
                os._exit(AGENT_GONE_STATUS)

    @staticmethod
    def _named(work: Callable[[], None]) -> None:
        with suppress(OSError), open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
            name.write("resihp-agent")  # so that `top -H` and our own benchmark can tell it from the user's threads
        work()

    def declare(self, declaration: m.Declare) -> None:
        self.declared = True
        self.send(declaration)

    def attend(self, meeting: m.MeetingId, groups: Sequence[str], patience_s: float) -> Attendance:
        """Take part in a meeting: say something there, and hear what others say in these groups. Main thread."""
        attended = {each: held for each, held in self._attended.items() if not held.left}
        attendance = attended[meeting] = Attendance(meeting, self.send, patience_s)
        self._attended = attended
        self.send(m.Attend(meeting=meeting, groups=tuple(groups)))
        return attendance

    # --- from the agent ---------------------------------------------------------------------------------------

    def on_park(self, wake: Callable[[], None]) -> None:
        """`wake` is called in the listening thread when a `Park` arrives; it must unblock the main thread."""
        self._wake = wake

    def on_beat(self, ask_device: Callable[[], tuple[bool, float]]) -> None:
        """`ask_device` is asked in the listening thread whether the device waits for peers, whatever its host is in,
        and for how many seconds it has not answered. It must not wait for a device that is stuck."""
        self._ask_device = ask_device

    def _beat(self) -> m.Progress:
        """Nobody asks what a rank is in that has come further since the last beat."""
        stands, self._beaten = self.primitives == self._beaten, self.primitives
        activity, unanswered_s = self.activity, 0.0
        if activity == "compute" and stands:
            waits, unanswered_s = self._ask_device()
            activity = "communication" if waits else activity
        return m.Progress(
            epoch=self.epoch,
            iteration=self.iteration,
            primitives=self.primitives,
            activity=activity,
            unanswered_s=unanswered_s,
        )

    def next_order(self) -> m.WorkerOrder:
        """Block until the next order to the main thread. A `hang` or `raise` fault may strike here (standby ranks)."""
        while True:
            order = self._orders.get()
            if isinstance(order, m.FaultGo):
                self._suffer(order)
            else:
                return order

    def park_asked(self, epoch: int) -> bool:
        """Whether an epoch newer than `epoch` was announced, to park for at once."""
        return self.park_epoch > epoch

    def pause_asked(self, epoch: int) -> bool:
        """Whether an epoch newer than `epoch` was announced, to park for after the iteration."""
        return max(self.pause_epoch, self.park_epoch) > epoch

    def due_probe(self) -> m.Probe | None:
        """A probe that was asked for and is still to be answered. Main thread."""
        try:
            return self._probes.get_nowait()
        except queue.Empty:
            return None

    def due_link_probes(self, iteration: int | None = None) -> list[m.Probe]:
        """Probes that were announced for the end of this iteration or of one before; without one, all. Main thread."""
        while not self._announced.empty():
            self._later.append(self._announced.get_nowait())
        due = [asked for asked in self._later if iteration is None or (asked.after_iteration or 0) <= iteration]
        self._later = [asked for asked in self._later if asked not in due]
        return due

    def speed(self) -> float:
        """How fast an injected fault has this device be now."""
        return self._speed(None)

    def link_speed(self, a: str, b: str) -> float:
        """How fast an injected fault has the link between two nodes be now, one of them this rank's."""
        return self._speed((min(a, b), max(a, b)))

    def _speed(self, of: tuple[str, str] | None) -> float:
        slow = self._slow.get(of)
        if slow is None or (slow.until is not None and self.iteration >= slow.until) or self.iteration % slow.every:
            return 1.0
        return slow.speed

    def _listen(self) -> None:
        next_beat = time.monotonic()
        while True:
            patience_s = next_beat - time.monotonic()
            if patience_s <= 0:
                beat = self._beat()
                if self._outbox.empty():  # an agent that does not take reports gets no beats on top of them
                    self.send(beat)
                next_beat = time.monotonic() + BEAT_S
                continue
            if not select.select([self._socket], [], [], patience_s)[0]:
                continue
            try:
                order = self._channel.recv(m.WorkerOrder)
            except (OSError, EOFError, ProtocolError):
                os._exit(AGENT_GONE_STATUS)
            if isinstance(order, m.Park) and order.after_iteration:
                self.pause_epoch = max(self.pause_epoch, order.epoch)
            elif isinstance(order, m.Park):
                self.park_epoch = max(self.park_epoch, order.epoch)
                self._wake()
            elif isinstance(order, m.Halt) and order.at_once:
                if self._deaf:
                    end_by(signal.SIGTERM)
                continue  # else the agent's own signal does what the script has arranged
            elif isinstance(order, m.Published):
                if (attendance := self._attended.get(order.meeting)) is not None:
                    attendance.hear(order.said)
                continue
            elif isinstance(order, m.SaveNext):
                self.save_number = max(self.save_number, order.number)
                continue
            elif isinstance(order, m.Slow):
                self._slow[order.link] = order
                continue
            elif isinstance(order, m.Probe):
                queue = self._probes if order.after_iteration is None else self._announced
                queue.put(order)  # fetched between two iterations, or with the next order
            if isinstance(order, m.FaultGo) and self._waiting_for == order.fault:
                self._fault_answers.put(order)
            else:
                self._orders.put(order)

    # --- signals ----------------------------------------------------------------------------------------------

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Disregard signals that would end the process, unless the script has its own use for them. Main thread.

        Slurm sends them to every process of a job that is to stop. What is to be saved before it does, the supervisor
        decides; when it ends a worker, it says so (`Halt`).
        """
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        unused = [number for number, handler in before.items() if handler is signal.SIG_DFL]
        for number in unused:
            signal.signal(number, _disregard)
            signal.siginterrupt(number, False)
        self._deaf = signal.SIGTERM in unused
        try:
            yield
        finally:
            self._deaf = False
            for number in unused:
                if signal.getsignal(number) is _disregard:
                    signal.signal(number, signal.SIG_DFL)

    # --- faults on purpose ------------------------------------------------------------------------------------

    _waiting_for: int | None = None

    def arm(self, absent: Callable[[Fault], bool]) -> None:
        """`absent(fault)` tells whether the fault's target has no work in the present plan."""
        self._absent = absent

    def faults_at(self, iteration: int, phase: Phase) -> None:
        """Called when the main thread enters `phase` of `iteration`: report due faults, wait, suffer them.

        Raises InjectedFaultError for `raise`; CommunicatorError when asked to park while it waits.
        """
        for fault in self.start.faults:
            if fault.id in self._spent or (fault.iteration, fault.phase) != (iteration, phase):
                continue
            if fault.hits(self.start.rank, self.start.node) or self._absent(fault):
                self._ask(fault)

    def _ask(self, fault: Fault) -> None:
        epoch = max(self.epoch, self.park_epoch)
        self._waiting_for = fault.id
        self.send(m.FaultDue(fault=fault.id))
        while True:
            try:
                answer = self._fault_answers.get(timeout=0.05)
            except queue.Empty:
                if self.park_asked(epoch):
                    self._waiting_for = None
                    raise CommunicatorError("asked to park while a fault was due") from None
                continue
            if answer.fault == fault.id:
                break
        self._waiting_for = None
        self._spent.add(fault.id)
        self._suffer(answer)

    def _suffer(self, go: m.FaultGo) -> None:
        if not go.fire:
            return
        fault = next((fault for fault in self.start.faults if fault.id == go.fault), None)
        if fault is not None and fault.kind == "raise":
            raise InjectedFaultError(f"fault injected: {fault}")
        self.activity = "compute"
        while True:  # hang: stuck in user code, alive and beating
            time.sleep(3600)


_client: AgentClient | None = None


def attach() -> AgentClient | None:
    """The client of this process, or None when it was not started by an agent."""
    global _client
    if _client is None and AGENT_FD in os.environ:
        _client = AgentClient(socket.socket(fileno=int(os.environ[AGENT_FD])))
    return _client


def report_exception(error: BaseException) -> None:
    """Tell the supervisor that the user's script is about to end with `error`. Called by the fork server's child."""
    client = attach()
    if client is None:
        return
    if isinstance(error, UsageError) and not client.declared:
        client.send(m.Refuse(reason=str(error)))
        client.flush(LAST_WORDS_S)
        return
    text = _text_of(error).strip().splitlines()
    client.send(
        m.Raised(
            iteration=client.iteration,
            error=f"{type(error).__name__}: {text[0][:500] if text else ''}".rstrip(": "),
            traceback="".join(traceback.format_exception(error))[-16000:],
        )
    )
    client.flush(LAST_WORDS_S)


def _text_of(error: BaseException) -> str:
    """The text of an exception, which may itself fail to make one."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the script's own code
        return "<exception str() failed>"
