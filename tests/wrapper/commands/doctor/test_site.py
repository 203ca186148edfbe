"""A site's settings against a job: what would break it is named, what would not is not."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.slurm.limits import Limit, Limits
from resihp.slurm.survey import PartitionRules, PartitionView
from resihp.wrapper.commands.doctor import site, slurm_settings
from resihp.wrapper.commands.doctor.machine import CheckResult
from resihp.wrapper.commands.doctor.site import Wanted
from resihp.wrapper.config.sources import read
from tests.slurm.fake_slurm import FakeSlurm
from tests.slurm.fake_survey import SETTINGS, FakeSurvey, partition

RULES = FakeSurvey().rule
JOB = Wanted(nodes=4, gpus_per_node=8, seconds=86400.0, warning_s=300.0, replacements=0, particular=False)


def job(**changes: Any) -> Wanted:
    return msgspec.structs.replace(JOB, **changes)


def rules(**changes: Any) -> PartitionRules:
    return msgspec.structs.replace(RULES, **changes)


def said(found: list[CheckResult]) -> list[tuple[str, str]]:
    return [(finding.outcome, finding.text) for finding in found]


MIXED = [partition(gpu_types=("a100",)), partition(nodes=2, gpus=4, gpu_types=("h100",))]


@pytest.mark.parametrize(
    ("views", "rule", "wanted", "outcome", "words"),
    [
        ([partition()], rules(), JOB, "", ""),
        (MIXED, rules(), JOB, "", ""),
        (MIXED, rules(), job(nodes=5), "failed", "gpu: 4 of its 6 nodes have 8 GPUs, but the job requests 5 nodes"),
        (MIXED, rules(), job(gpus_per_node=4), "warning", "different types (a100, h100)"),
        (MIXED, rules(), job(gpus_per_node=4, particular=True), "", ""),
        (MIXED, rules(), job(gpus_per_node=4, nodes=1), "", ""),
        (MIXED, rules(), job(gpus_per_node=4, nodes=1, replacements=1), "warning", "different types"),
        ([partition()], rules(max_nodes=3), JOB, "failed", "at most 3 nodes (MaxNodes)"),
        ([partition()], rules(min_nodes=5), JOB, "failed", "at least 5 nodes (MinNodes): a request for 4"),
        ([partition()], rules(min_nodes=4), JOB, "", ""),
        (
            [partition()],
            rules(min_nodes=4),
            job(replacements=1),
            "warning",
            "a replacement requests one: it would wait",
        ),
        ([partition()], rules(min_nodes=4), job(replacements=1, replaced_elsewhere=True), "", ""),
        ([partition()], rules(max_seconds=3600.0), JOB, "failed", "at most 60 min (MaxTime): a request for 24 h"),
        ([partition(default_seconds=300.0)], rules(), job(seconds=None), "failed", "over and over"),
        ([partition(default_seconds=300.0)], rules(), JOB, "", ""),
        ([partition()], rules(max_seconds=300.0), job(seconds=None), "failed", "gets 5 min (DefaultTime)"),
    ],
)
def test_a_partition_and_a_job(
    views: list[PartitionView], rule: PartitionRules, wanted: Wanted, outcome: str, words: str
) -> None:
    found = said(list(site.shape(views, rule, wanted)))
    assert [each[0] for each in found] == ([outcome] if outcome else [])
    assert all(words in text for _, text in found), found


@pytest.mark.parametrize(
    ("name", "least", "outcome", "words"),
    [
        ("gpu", 1, "ok", "gpu: takes jobs of one node"),
        ("gpu", 2, "failed", "gpu: takes no job of one node (MinNodes)"),
        ("gpus", 1, "failed", "gpus: not among the partitions you may use: gpu"),
    ],
)
def test_the_partition_of_replacements(name: str, least: int, outcome: str, words: str) -> None:
    found = said(list(site.replacement_partition([partition()], name, lambda _: rules(min_nodes=least))))
    assert [each[0] for each in found] == [outcome]
    assert found[0][1].startswith(words)


def limit(kind: str, per: str, most: float) -> Limit:
    return Limit(whose="QOS q", setting=f"x={most:g}", kind=kind, per=per, most=most)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bound", "wanted", "outcome", "words"),
    [
        (limit("nodes", "job", 4), JOB, "ok", "the job exceeds no limit"),
        (limit("nodes", "job", 4), job(replacements=2), "ok", ""),
        (limit("nodes", "user", 4), job(replacements=2), "warning", "waits while this job uses all of it"),
        (limit("gpus", "group", 31), JOB, "failed", "requests 32 GPUs, but QOS q allows 31 GPUs to all its jobs"),
        (limit("jobs", "user", 1), JOB, "ok", ""),
        (limit("jobs", "user", 1), job(replacements=1), "warning", "1 running job per user"),
        (limit("jobs", "user", 0), JOB, "failed", "0 running jobs"),
        (limit("time", "job", 3600), JOB, "failed", "requests 24 h, but QOS q allows 60 min per job"),
        (limit("time", "job", 3600), job(seconds=None), "ok", ""),
        (limit("cpus", "job", 1), JOB, "ok", ""),
    ],
)
def test_a_limit_and_a_job(bound: Limit, wanted: Wanted, outcome: str, words: str) -> None:
    (found,) = site.limits(Limits(account="lab", qos="q", found=(bound,)), wanted)
    assert (found.outcome, words in found.text) == (outcome, True), found


def test_limits_that_are_not_shown_are_not_said_to_be_kept() -> None:
    (found,) = site.limits(Limits(account="lab", qos="q", found=(), unseen="top"), JOB)
    assert (found.outcome, "account top" in found.text) == ("skipped", True)


@pytest.mark.parametrize(("text", "codes"), [("", []), ("93", [93]), ("1,4-6,93", [1, 4, 5, 6, 93]), ("x,7-y", [])])
def test_exit_codes_in_slurm_conf(text: str, codes: list[int]) -> None:
    assert site.codes(text) == codes


def test_exit_codes_that_do_no_harm_are_not_told() -> None:
    assert list(site.exit_codes({"RequeueExit": "75,142", "RequeueExitHold": "75"})) == []


@pytest.mark.parametrize(
    ("every", "but", "told"),
    [
        ("", "", True),
        ("ALL", "", True),
        ("NONE", "", False),
        ("CPU,NOFILE", "", True),
        ("NOFILE", "", False),
        ("", "MEMLOCK", True),
        ("", "CPU,MEMLOCK", False),
    ],
)
def test_limits_of_a_shell(every: str, but: str, told: bool) -> None:
    settings = {"PropagateResourceLimits": every, "PropagateResourceLimitsExcept": but}

    def soft(kind: int) -> int:
        return 1800 if kind == resource.RLIMIT_CPU else resource.RLIM_INFINITY

    assert bool(list(site.inherited(settings, soft))) == told
    assert list(site.inherited(settings, lambda kind: resource.RLIM_INFINITY)) == []


@pytest.mark.parametrize(
    ("version", "outcome", "words"),
    [
        ((21, 8, 3), "warning", "21.08.3 is older than the releases that resihp was tested with, 22.05 to 26.05"),
        ((22, 5, 8), "ok", "22.05.8"),
        ((24, 11, 5), "ok", "24.11.5"),
        ((26, 11, 0), "warning", "26.11.0 is newer"),
    ],
)
def test_releases_that_nobody_tried_are_told_in_a_line(version: tuple[int, int, int], outcome: str, words: str) -> None:
    *_, last = slurm_settings.version(FakeSlurm(version=version))
    assert (last.outcome, words in last.text) == (outcome, True), last


def test_what_newer_releases_offer() -> None:
    def told(version: tuple[int, int, int], survey: FakeSurvey, **settings: str) -> str:
        return " ".join(found.text for found in slurm_settings.offers(version, SETTINGS | settings, survey))

    assert "--requeue" not in told((24, 11, 5), FakeSurvey())
    assert "--segment" in told((24, 11, 5), FakeSurvey(), TopologyPlugin="topology/block")
    assert "--segment" not in told((22, 5, 8), FakeSurvey(), TopologyPlugin="topology/block")
    assert "keeps its nodes" in told((25, 11, 0), FakeSurvey())
    refusing = FakeSurvey()
    refusing.refusal = "Requested operation not supported on this system"
    assert "not allowed at this site" in told((26, 5, 5), refusing)
    assert "auth/slurm in place of munge" in told((26, 5, 5), FakeSurvey(), AuthType="auth/slurm")
    assert "control groups v2" in told((26, 5, 5), FakeSurvey(), CgroupPlugin="cgroup/v2")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"RequeueExit": "1-3,93", "RequeueExitHold": "4"},
            ["Slurm requeues a job that resihp ended for good", "(SPECIAL_EXIT)"],
        ),
        ({"RequeueExit": "142", "RequeueExitHold": ""}, []),
    ],
)
def test_exit_codes_after_which_slurm_runs_or_keeps_a_job_all_the_same(
    settings: dict[str, str], words: list[str]
) -> None:
    found = said(list(site.exit_codes(settings)))
    assert [outcome for outcome, _ in found] == ["warning"] * len(words)
    assert all(each in text for each, (_, text) in zip(words, found, strict=True)), found


def test_states_of_nodes_that_a_user_may_not_see() -> None:
    hidden = {"PrivateData": "jobs,nodes"}
    [(outcome, text)] = said(list(site.visibility(hidden, operator=False)))
    assert (outcome, text.startswith("PrivateData=nodes: ")) == ("warning", True)
    assert list(site.visibility(hidden, operator=True)) == list(site.visibility({}, operator=False)) == []


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ("", ["--requeue", "--gpus-per-node=8", "--exclusive", "--mem=0"]),
        ("exclusive = false\ngpu_type = 'h100'\n", ["--requeue", "--gpus-per-node=h100:8"]),
        (
            "exclusive = false\nrequeue = 'expedite'\nqos = 'long'\nextra = ['--mail-type=END']\n",
            ["--requeue=expedite", "--gpus-per-node=8", "--qos=long", "--mail-type=END"],
        ),
    ],
)
def test_slurm_is_asked_about_the_very_job_of_the_file(tmp_path: Path, section: str, options: list[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"[job]\nnodes = 2\ngpus_per_node = 8\ntime = '2h'\n[slurm]\nspares = 1\n{section}")
    survey = FakeSurvey()
    [finding] = slurm_settings.submission(survey, read({}, path, site=()))
    assert (finding.outcome, finding.text.partition(",")[0]) == ("ok", "a job of 3 nodes")
    of_every_job = {"--no-kill", "--nodes=3", "--ntasks-per-node=1", "--time=0-02:00:00", "--signal=B:USR2@300"}
    assert sorted(survey.options) == sorted(of_every_job | set(options))


@pytest.mark.parametrize(
    ("version", "accounting", "told"),
    [((22, 5, 8), "none", True), ((22, 5, 8), "slurmdbd", False), ((24, 11, 5), "none", False)],
)
def test_how_many_nodes_can_be_given_back(version: tuple[int, int, int], accounting: str, told: bool) -> None:
    settings = {"AccountingStorageType": f"accounting_storage/{accounting}"}
    assert bool(list(slurm_settings.releases_nodes(version, settings))) == told


def test_a_limit_that_is_a_share_is_told_in_nodes() -> None:
    views = [partition(name="gpu", nodes=120), partition(name="gpu", nodes=80), partition(name="cpu", nodes=900)]
    (finding,) = site.drained_share(views, "gpu", 0.02)
    assert finding.text == "gpu: jobs have at most 4 of its 200 nodes drained at a time ([site] drained, 2 %)"
    assert list(site.drained_share(views, "gpu", None)) == list(site.drained_share(views, "none", 0.02)) == []
