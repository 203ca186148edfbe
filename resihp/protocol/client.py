"""The worker's end of the socket to its agent: receives orders, sends reports and heartbeats.

A slow or stopped agent never blocks training: one thread receives orders and sends heartbeats, another thread sends
reports, and the main thread only uses queues. Three events take effect at once, in the middle of the main thread's
work. A `Park` that does not wait for the iteration interrupts a blocked collective. A `Halt` with `at_once` ends the
process. So does the end of the socket, because without its agent the process could not be fenced. This module decides
nothing else. Used by `resihp.executor.supervised`.
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
from resihp.protocol.channels import LocalChannel
from resihp.protocol.rendezvous import Attendance

BEAT_S = 1.0
LAST_WORDS_S = 10.0
"""Seconds for which a process that ends by an exception waits until its agent has received the report."""
AGENT_GONE_STATUS = 70
"""Exit status of a worker that has lost its agent (EX_SOFTWARE of sysexits.h)."""

Activity = Literal["starting", "compute", "communication", "parked", "checkpoint", "idle"]


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal in this process only: programs that it starts, and processes that it forks, have the default
    handler."""


def _restore_defaults() -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_restore_defaults)


class InjectedFaultError(ResihpError):
    """Raised in the user's thread by an injected fault of kind `raise`."""


class AgentClient:
    """A worker's connection to its agent. Only the main thread may call its methods, unless a method allows any
    thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._channel = LocalChannel(sock)
        start = self._channel.recv(m.WorkerOrder)
        if not isinstance(start, m.Start):
            raise ProtocolError(f"agent: first frame is {type(start).__name__}, expected Start")
        self.start = start
        self.park_epoch = 0
        """Newest epoch in an order to park at once."""
        self.pause_epoch = 0
        """Newest epoch in an order to park after the iteration in progress."""
        self.save_number = 0
        """Number of the newest order to write a checkpoint after the iteration in progress (`SaveNext`)."""
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
        """Injected slowness, by the link's two nodes in ascending order; that of this device has the key None."""
        self._fault_answers: queue.SimpleQueue[m.FaultGo] = queue.SimpleQueue()
        self._spent: set[int] = set()
        self._wake: Callable[[], None] = lambda: None
        self._ask_device: Callable[[], tuple[bool, float]] = lambda: (False, 0.0)
        self._beaten = 0
        """Value of `primitives` at the last heartbeat."""
        self._deaf = False
        self._absent: Callable[[Fault], bool] = lambda fault: False
        self._attended: dict[m.MeetingId, Attendance] = {}
        self._outbox: queue.SimpleQueue[m.WorkerMessage | m.MeetingMessage | threading.Event] = queue.SimpleQueue()
        for work in (self._listen, self._deliver):
            threading.Thread(target=self._named, args=(work,), name="resihp-agent", daemon=True).start()

    # --- to the agent -----------------------------------------------------------------------------------------

    def send(self, message: m.WorkerMessage | m.MeetingMessage) -> None:
        """Queue one message without waiting; messages are sent in order. Any thread. The process ends if the agent is
        lost."""
        self._outbox.put(message)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued messages have been sent; return False if this takes longer than `timeout_s`."""
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
            name.write(
                "resihp-agent"
            )  # so that `top -H` and our own benchmark can distinguish it from the user's threads
        work()

    def declare(self, declaration: m.Declare) -> None:
        self.declared = True
        self.send(declaration)

    def attend(self, meeting: m.MeetingId, groups: Sequence[str], patience_s: float) -> Attendance:
        """Join a rendezvous, subscribing to `groups`. No wait in it takes longer than `patience_s` from now. Main
        thread."""
        attended = {old: attendance for old, attendance in self._attended.items() if not attendance.left}
        attendance = attended[meeting] = Attendance(meeting, self.send, patience_s)
        self._attended = attended
        self.send(m.Attend(meeting=meeting, groups=tuple(groups)))
        return attendance

    # --- from the agent ---------------------------------------------------------------------------------------

    def on_park(self, wake: Callable[[], None]) -> None:
        """Set the function that the listening thread calls when a `Park` arrives; it must unblock the main thread."""
        self._wake = wake

    def on_beat(self, ask_device: Callable[[], tuple[bool, float]]) -> None:
        """Set the function that queries the device for a heartbeat. The listening thread calls it.

        It returns whether the device waits for peers, independently of its host, and the seconds for which the device
        has not answered. It must not block on a device that hangs.
        """
        self._ask_device = ask_device

    def _beat(self) -> m.Progress:
        """Return the next heartbeat. The device is queried only if the rank has made no progress since the previous
        heartbeat."""
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
        """Block until the next order to the main thread arrives. On a standby rank, a `hang` or `raise` fault takes
        effect here."""
        while True:
            order = self._orders.get()
            if isinstance(order, m.FaultGo):
                self._carry_out(order)
            else:
                return order

    def park_asked(self, epoch: int) -> bool:
        """Return whether an order to park at once has arrived for an epoch newer than `epoch`."""
        return self.park_epoch > epoch

    def pause_asked(self, epoch: int) -> bool:
        """Return whether an order to park, at once or after the iteration, has arrived for an epoch newer than
        `epoch`."""
        return max(self.pause_epoch, self.park_epoch) > epoch

    def due_probe(self) -> m.Probe | None:
        """Return and remove the oldest probe that is not answered yet, or None. Main thread."""
        try:
            return self._probes.get_nowait()
        except queue.Empty:
            return None

    def due_link_probes(self, iteration: int | None = None) -> list[m.Probe]:
        """Return and remove the link probes announced for the end of `iteration` or of an earlier one; all if None.
        Main thread."""
        while not self._announced.empty():
            self._later.append(self._announced.get_nowait())
        due = [probe for probe in self._later if iteration is None or (probe.after_iteration or 0) <= iteration]
        self._later = [probe for probe in self._later if probe not in due]
        return due

    def speed(self) -> float:
        """Return the present relative speed of this device under injected faults; 1 without a fault."""
        return self._speed(None)

    def link_speed(self, a: str, b: str) -> float:
        """Return the present relative speed of the link between nodes `a` and `b` under injected faults. One of them is
        this rank's node."""
        return self._speed((min(a, b), max(a, b)))

    def _speed(self, link: tuple[str, str] | None) -> float:
        slow = self._slow.get(link)
        if slow is None or (slow.until is not None and self.iteration >= slow.until) or self.iteration % slow.every:
            return 1.0
        return slow.speed

    def _listen(self) -> None:
        next_beat = time.monotonic()
        while True:
            patience_s = next_beat - time.monotonic()
            if patience_s <= 0:
                beat = self._beat()
                if self._outbox.empty():  # no heartbeats while the agent does not accept reports
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
                continue  # otherwise the script handles the signal that the agent sends as well
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
        """Ignore the signals that would end the process, except those that the script handles itself. Main thread.

        Slurm sends these signals to every process of a job that must stop. The supervisor decides which state is saved
        before the end; it ends a worker by `Halt`.
        """
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        unused = [number for number, handler in before.items() if handler is signal.SIG_DFL]
        for number in unused:
            signal.signal(number, _ignore)
            signal.siginterrupt(number, False)
        self._deaf = signal.SIGTERM in unused
        try:
            yield
        finally:
            self._deaf = False
            for number in unused:
                if signal.getsignal(number) is _ignore:
                    signal.signal(number, signal.SIG_DFL)

    # --- injected faults --------------------------------------------------------------------------------------

    _waiting_for: int | None = None

    def arm(self, absent: Callable[[Fault], bool]) -> None:
        """Set the function that returns whether a fault's target has no work in the present plan."""
        self._absent = absent

    def faults_at(self, iteration: int, phase: Phase) -> None:
        """Report the faults that are due when the main thread enters `phase` of `iteration`; wait for the answer and
        carry it out.

        Raises InjectedFaultError for a fault of kind `raise`; CommunicatorError if an order to park arrives during the
        wait.
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
        self._carry_out(answer)

    def _carry_out(self, go: m.FaultGo) -> None:
        if not go.fire:
            return
        fault = next((fault for fault in self.start.faults if fault.id == go.fault), None)
        if fault is not None and fault.kind == "raise":
            raise InjectedFaultError(f"fault injected: {fault}")
        self.activity = "compute"
        while True:  # hang: stuck in user code, alive and sending heartbeats
            time.sleep(3600)


_client: AgentClient | None = None


def attach() -> AgentClient | None:
    """Return the client of this process; None if no agent started the process."""
    global _client
    if _client is None and AGENT_FD in os.environ:
        _client = AgentClient(socket.socket(fileno=int(os.environ[AGENT_FD])))
    return _client


def report_exception(error: BaseException) -> None:
    """Report to the supervisor that the user's script is about to end with `error`. Called in the child of the fork
    server."""
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
    """Return the text of an exception. The exception's own `__str__` may fail."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the script's own code
        return "<exception str() failed>"
