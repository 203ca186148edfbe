"""What `resihp doctor` asks of Slurm, and of the nodes of the allocation that we are in: which check asks what.

What an answer means is said by `slurm_settings`, `site` and `nodes`. Slurm's settings are asked for once; that it does
not answer at all is said once, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from slurm.client import Slurm
from slurm.drains.spool import folder_of
from slurm.errors import SlurmError, SlurmRefusedError
from slurm.survey import Survey
from wrapper.commands.doctor import nodes as doctor_nodes
from wrapper.commands.doctor import site, slurm_settings
from wrapper.commands.doctor.machine import CheckResult, Outcome
from wrapper.config.schema import Configuration, read
from wrapper.config.values import ports_of
from wrapper.job_files import user_name
from wrapper.job_folder import home
from wrapper.launch.allocation import batch_script, find, job_id, no_kill_seen
from wrapper.launch.batch_script import warning_would_be_lost

Check = Callable[[], Iterable[CheckResult]]


class SlurmChecks:
    """`by_name` has them in the order of the report. Each may be called from a thread of its own."""

    def __init__(
        self, slurm: Slurm, survey: Survey, environment: Mapping[str, str], job_file: Path | None = None
    ) -> None:
        self._slurm = slurm
        self._survey = survey
        self._environment = environment
        self._job_file = job_file
        self._lock = threading.Lock()
        self._answered: Mapping[str, str] | None = None
        self._silence: SlurmError | None = None

    def by_name(self) -> dict[str, Check]:
        checks: dict[str, Check] = {
            "slurm": self._version,
            "node death": self._node_death,
            "requeue": self._requeue,
            "firewall": lambda: slurm_settings.firewall(self._settings(), self._wanted().slurm.ports),
            "drain": self._rights,
            "partition": self._partition,
            "limits": self._limits,
            "submission": self._submission,
            "munge": lambda: slurm_settings.munge(self._survey, self._settings()),
            "nodes": self._nodes,
        }
        return {name: self._guarded(name, check) for name, check in checks.items()}

    def _guarded(self, name: str, check: Check) -> Check:
        """No answer is unknown; that there is none at all is said once, as a finding about Slurm itself."""

        def guarded() -> Iterable[CheckResult]:
            try:
                if name not in ("slurm", "nodes"):
                    self._settings()
                return list(check())
            except SlurmError as error:
                if self._silence and name != "slurm":
                    return [CheckResult(check=name, outcome="skipped", text="Slurm does not answer")]
                if isinstance(error, SlurmRefusedError) and error.permission and name in ("partition", "limits"):
                    text = f"{error}; a job does not need to be told"
                    return [CheckResult(check=name, outcome="skipped", text=text)]
                outcome: Outcome = "failed" if isinstance(error, SlurmRefusedError) else "unknown"
                return [CheckResult(check=name, outcome=outcome, text=str(error), advice=slurm_settings.NO_ANSWER)]

        return guarded

    def _settings(self) -> Mapping[str, str]:
        """Asked once, by whoever comes first; no answer is none for all."""
        with self._lock:
            if self._silence is not None:
                raise self._silence
            if self._answered is None:
                try:
                    self._answered = self._survey.settings()
                except SlurmError as error:
                    self._silence = error
                    raise
            return self._answered

    def _wanted(self) -> Configuration:
        return read({}, self._job_file)

    # --- the checks -------------------------------------------------------------------------------------------

    def _version(self) -> Iterable[CheckResult]:
        self._settings()
        yield from slurm_settings.version(self._slurm)
        yield from slurm_settings.offers(self._slurm.version(), self._settings(), self._survey)

    def _rights(self) -> Iterable[CheckResult]:
        spool = folder_of(self._wanted().slurm.spool)
        yield from slurm_settings.rights(self._survey, self._settings(), user_name(), spool)
        yield from slurm_settings.releases_nodes(self._slurm.version(), self._settings())

    def _node_death(self) -> Iterable[CheckResult]:
        settings = self._settings()
        yield from slurm_settings.survival(settings)
        if "nodes" in settings.get("PrivateData", "").lower():
            yield from site.visibility(settings, self._survey.is_operator(user_name(), settings))

    def _partition(self) -> Iterable[CheckResult]:
        configuration = self._wanted()
        job = site.wanted(configuration)
        views = self._survey.partitions()
        yield from slurm_settings.partitions(views, configuration.slurm.partition)
        for name in slurm_settings.chosen(views, configuration.slurm.partition):
            if kinds := [view for view in views if view.name == name and view.up]:
                yield from site.shape(kinds, self._survey.rules(name), job)

    def _limits(self) -> Iterable[CheckResult]:
        settings = self._settings()
        enforced = settings.get("AccountingStorageEnforce", "").lower().split(",")
        if not {"limits", "safe"} & set(enforced):
            text = "accounting limits no jobs here (AccountingStorageEnforce)"
            return [CheckResult(check="limits", outcome="ok", text=text)]
        configuration = self._wanted()
        section = configuration.slurm
        views = self._survey.partitions()
        there = {view.name for view in views}
        names = [name for name in slurm_settings.chosen(views, section.partition) if name in there]
        if not names:
            return [CheckResult(check="limits", outcome="skipped", text="no partition to look at")]
        rules, cluster = self._survey.rules(names[0]), settings["ClusterName"]
        found = self._survey.limits(user_name(), section.account, section.qos, rules, cluster)
        return site.limits(found, site.wanted(configuration))

    def _requeue(self) -> Iterable[CheckResult]:
        yield from slurm_settings.requeue(self._settings())
        yield from site.exit_codes(self._settings())

    def _submission(self) -> Iterable[CheckResult]:
        yield from slurm_settings.submission(self._survey, self._wanted())
        yield from site.plugins(self._settings())
        yield from site.inherited(self._settings())

    def _nodes(self) -> Iterable[CheckResult]:
        if not job_id(self._environment):
            yield from doctor_nodes.outside()
            return
        found = find(self._environment, self._slurm)
        script = batch_script(self._slurm, found.job_id)
        if (lost := warning_would_be_lost(self._environment, script)) is not None:
            yield CheckResult(check="warning", outcome="warning", text=f"job {found.job_id}: {lost}")
        if not no_kill_seen(self._environment, script):
            text = f"job {found.job_id}: no --no-kill in its batch script: if a node fails, Slurm ends the whole job"
            advice = "resihp submit sets it; or #SBATCH --no-kill"
            yield CheckResult(check="node death", outcome="warning", text=text, advice=advice)
        wanted = self._wanted()
        ports, interface = ports_of(wanted.slurm.ports), wanted.network.interface
        yield from doctor_nodes.examine(found, self._slurm, self._survey, home(), ports=ports, interface=interface)
