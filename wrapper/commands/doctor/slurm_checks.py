"""Checks of `resihp doctor` that query Slurm and the nodes of the current allocation.

`slurm_settings`, `site` and `nodes` interpret the answers. Slurm's settings are queried only once, and a Slurm that
does not answer at all is reported only once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from resihp.slurm.client import Slurm
from resihp.slurm.drains.spool import folder_of
from resihp.slurm.errors import SlurmError, SlurmRefusedError
from resihp.slurm.survey import Survey
from resihp.wrapper.commands.doctor import nodes as doctor_nodes
from resihp.wrapper.commands.doctor import site, slurm_settings
from resihp.wrapper.commands.doctor.machine import CheckResult, Outcome
from resihp.wrapper.config.schema import Configuration
from resihp.wrapper.config.sources import read
from resihp.wrapper.config.values import ports_of, share_of
from resihp.wrapper.job_files.registered import user_name
from resihp.wrapper.job_folder import home
from resihp.wrapper.launch.allocation import batch_script, find, job_id, no_kill_seen
from resihp.wrapper.launch.batch_script import warning_would_be_lost
from resihp.wrapper.slurm_tasks.exclusion_lists import to_avoid

Check = Callable[[], Iterable[CheckResult]]


class SlurmChecks:
    """Checks that query Slurm. `by_name` returns them in the order of the report; each may run in its own thread."""

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
        """Return the check with errors of Slurm turned into results.

        If Slurm gives no answer, the result is `unknown`. A Slurm that never answers is reported once, as a result
        about Slurm itself.
        """

        def guarded() -> Iterable[CheckResult]:
            try:
                if name not in ("slurm", "nodes"):
                    self._settings()
                return list(check())
            except SlurmError as error:
                if self._silence and name != "slurm":
                    return [CheckResult(check=name, outcome="skipped", text="Slurm does not answer")]
                if isinstance(error, SlurmRefusedError) and error.permission and name in ("partition", "limits"):
                    text = f"{error}; a job does not need it"
                    return [CheckResult(check=name, outcome="skipped", text=text)]
                outcome: Outcome = "failed" if isinstance(error, SlurmRefusedError) else "unknown"
                return [
                    CheckResult(check=name, outcome=outcome, text=str(error), advice=slurm_settings.NO_ANSWER_ADVICE)
                ]

        return guarded

    def _settings(self) -> Mapping[str, str]:
        """Return Slurm's settings. The first caller queries them; if that fails, all callers get its error."""
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
        job = site.requested_resources(configuration)
        views = self._survey.partitions()
        yield from slurm_settings.partitions(views, configuration.slurm.partition)
        for name in slurm_settings.chosen(views, configuration.slurm.partition):
            yield from site.drained_share(views, name, share_of(configuration.site.drained))
            if kinds := [view for view in views if view.name == name and view.up]:
                yield from site.shape(kinds, self._survey.rules(name), job)
        if job.replacements and job.replaced_elsewhere:
            name = configuration.slurm.replacement_partition
            yield from site.replacement_partition(views, name, self._survey.rules)

    def _limits(self) -> Iterable[CheckResult]:
        settings = self._settings()
        enforced = settings.get("AccountingStorageEnforce", "").lower().split(",")
        if not {"limits", "safe"} & set(enforced):
            text = "accounting limits are not enforced here (AccountingStorageEnforce)"
            return [CheckResult(check="limits", outcome="ok", text=text)]
        configuration = self._wanted()
        section = configuration.slurm
        views = self._survey.partitions()
        partition_names = {view.name for view in views}
        names = [name for name in slurm_settings.chosen(views, section.partition) if name in partition_names]
        if not names:
            return [CheckResult(check="limits", outcome="skipped", text="no partition to check")]
        rules, cluster = self._survey.rules(names[0]), settings["ClusterName"]
        account_limits = self._survey.limits(user_name(), section.account, section.qos, rules, cluster)
        return site.limits(account_limits, site.requested_resources(configuration))

    def _requeue(self) -> Iterable[CheckResult]:
        yield from slurm_settings.requeue(self._settings())
        yield from site.exit_codes(self._settings())

    def _submission(self) -> Iterable[CheckResult]:
        try:
            avoided = to_avoid(self._slurm, self._slurm.cluster(), time.time())
        except SlurmError:
            avoided = ()  # as for resihp submit, which then excludes no node either
        yield from slurm_settings.submission(self._survey, self._wanted(), avoided)
        yield from site.plugins(self._settings())
        yield from site.inherited(self._settings())

    def _nodes(self) -> Iterable[CheckResult]:
        if not job_id(self._environment):
            yield from doctor_nodes.outside()
            return
        allocation = find(self._environment, self._slurm)
        script = batch_script(self._slurm, allocation.job_id)
        if (lost_warning := warning_would_be_lost(self._environment, script)) is not None:
            yield CheckResult(check="warning", outcome="warning", text=f"job {allocation.job_id}: {lost_warning}")
        if not no_kill_seen(self._environment, script):
            text = (
                f"job {allocation.job_id}: no --no-kill in its batch script: if a node fails, Slurm ends the whole job"
            )
            advice = "resihp submit sets it; or #SBATCH --no-kill"
            yield CheckResult(check="node death", outcome="warning", text=text, advice=advice)
        configuration = self._wanted()
        ports, interface = ports_of(configuration.slurm.ports), configuration.network.interface
        yield from doctor_nodes.examine(allocation, self._slurm, self._survey, home(), ports=ports, interface=interface)
