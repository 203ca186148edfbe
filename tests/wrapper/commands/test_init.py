"""What `resihp init` writes can be submitted as it is, says what Slurm said, and replaces nothing unasked."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from resihp.errors import ResihpError, UsageError
from resihp.slurm.survey import Survey
from resihp.wrapper.cli import app
from resihp.wrapper.commands import init
from resihp.wrapper.commands.init import PLACEHOLDER_COMMAND, JobFileChoice, choose, job_text
from resihp.wrapper.commands.submit import submit
from resihp.wrapper.config.sources import read
from tests.slurm.fake_slurm import FakeSlurm
from tests.slurm.fake_survey import FakeSurvey, partition


@pytest.fixture
def survey(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSurvey:
    """CPU nodes by default, and four nodes of eight GPUs."""
    fake = FakeSurvey(partition("cpu", gpus=0, nodes=100), partition("gpu", default=False))
    monkeypatch.setattr(init, "connect", lambda: fake)
    return fake


def resihp(*arguments: str) -> Result:
    done = CliRunner().invoke(app, ["init", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def script(path: Path = Path("job.toml")) -> str:
    """What `resihp submit --dry-run` makes of it."""

    def nobody() -> FakeSlurm:
        raise AssertionError("a dry run asks Slurm nothing")

    return submit(path, dry_run=True, chain=1, slurm=nobody, notice=lambda text: None).script


def chosen(survey: Survey | None = None, **wanted: object) -> JobFileChoice:
    return choose(survey, read({}), **wanted)  # type: ignore[arg-type]


# --- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("survey")
def test_what_slurm_has_is_written_and_can_be_submitted() -> None:
    done = resihp()
    assert done.stdout.split() == ["job.toml", "job.sbatch"]
    assert "resihp submit job.toml --dry-run" in done.stderr
    found = read({}, Path("job.toml"))
    assert (found.job.nodes, found.job.gpus_per_node, found.slurm.partition) == (2, 8, "gpu")
    assert found.job.time == 24 * 3600
    for line in ("#SBATCH --partition=gpu", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --no-kill"):
        assert line in script().splitlines()
        assert line in Path("job.sbatch").read_text().splitlines()
    assert "partition gpu has 4 nodes of 8 GPUs" in Path("job.toml").read_text()


def directives(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("#SBATCH", "export", "exec"))]


@pytest.mark.usefixtures("survey")
def test_the_batch_script_is_what_submit_would_submit() -> None:
    resihp()
    assert directives(Path("job.sbatch").read_text()) == directives(script())


@pytest.mark.usefixtures("survey")
def test_every_line_is_explained() -> None:
    resihp()
    before = ""
    for line in Path("job.toml").read_text().splitlines():
        if re.match(r"(# )?\w+ = ", line):
            assert before.startswith("# "), line
            assert not re.match(r"# \w+ = ", before) or line.startswith("# "), line
        before = line


@pytest.mark.usefixtures("survey")
def test_what_is_only_suggested_is_valid_too(tmp_path: Path) -> None:
    resihp()
    text = re.sub(r"(?m)^# (?=\w+ = |\[\w+\]$)", "", Path("job.toml").read_text())
    path = tmp_path / "all.toml"
    path.write_text(text)
    found = read({}, path)
    assert found.metrics.port == 9400
    assert found.hooks.command
    assert found.job.memory_per_device == 80 * 10**9
    left = {"adapt", "container", "detect", "progress", "site"}
    assert set(tomllib.loads(text)) == set(type(found).model_fields) - left


@pytest.mark.parametrize(
    ("limit", "time", "warning"),
    [(None, 86400, 300), (1800.0, 1800, 300), (400.0, 400, 100), (90000.0, 86400, 300), (130.0, 130, 60)],
)
def test_the_time_limit_is_the_partition_s(limit: float | None, time: float, warning: float, fresh_home: Path) -> None:
    wanted = chosen(FakeSurvey(partition(seconds=limit)))
    Path("job.toml").write_text(job_text(wanted))
    found = read({}, Path("job.toml"))
    assert (found.job.time, found.slurm.warning) == (time, warning)
    script()


def test_without_slurm_usual_values_are_written_and_that_is_said(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "connect", lambda: None)
    done = resihp()
    assert "no Slurm on this machine: the files have default values" in done.stderr
    assert read({}, Path("job.toml")).slurm.partition == ""
    assert "#SBATCH --partition" not in script()


def test_a_slurm_that_does_not_answer_is_said(survey: FakeSurvey) -> None:
    survey.unavailable = True
    done = resihp()
    assert "Unable to contact slurm controller" in done.stderr
    assert "Slurm did not answer" in Path("job.toml").read_text()
    script()


# --- what is asked for ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("survey")
def test_options_and_a_command() -> None:
    options = ["--nodes", "3", "--gpus-per-node", "4", "--time", "90m", "--partition", "gpu"]
    Path("train it.py").write_text("")
    resihp(*options, "--", "python", "train it.py", "--title", 'é "x" \\ #1')
    found = read({}, Path("job.toml"))
    assert (found.job.nodes, found.job.gpus_per_node, found.job.time) == (3, 4, 5400)
    assert found.job.command == ("python", "train it.py", "--title", 'é "x" \\ #1')
    script()


def test_a_training_script_that_is_here_is_taken(fresh_home: Path) -> None:
    assert chosen().command == PLACEHOLDER_COMMAND
    Path("main.py").write_text("")
    assert chosen().command == ("python", "main.py")
    Path("train.py").write_text("")
    assert chosen().command == ("python", "train.py")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"nodes": 5}, r"--nodes 5: partition gpu has 4; sinfo -p gpu"),
        ({"gpus_per_node": 16}, r"--gpus-per-node 16: nodes of partition gpu have 8"),
        ({"seconds": 200000.0}, r"--time: partition gpu allows 48 h"),
        ({"partition": "gpus"}, r"not among the partitions you may use: cpu, gpu"),
    ],
)
def test_what_slurm_does_not_have_is_refused(wanted: dict[str, object], message: str, survey: FakeSurvey) -> None:
    with pytest.raises(UsageError, match=message):
        chosen(survey, **wanted)


def test_which_partition(fresh_home: Path) -> None:
    def name(*views: object, named: str | None = None) -> str:
        return chosen(FakeSurvey(*views), partition=named).partition  # type: ignore[arg-type]

    assert name(partition("a"), partition("b", default=False, nodes=99)) == "", "the default one, which needs no name"
    assert name(partition("a"), partition("b", default=False), named="b") == "b"
    assert name(partition("a", up=False), partition("b", default=False)) == "b"
    assert name(partition("a", gpus=0)) == ""
    small = partition("a", default=False, gpus=4, nodes=1)
    assert chosen(FakeSurvey(small, partition("a", default=False, nodes=2))).gpus_per_node == 8


def test_only_partitions_that_the_site_allows(fresh_home: Path) -> None:
    etc = fresh_home / "etc.toml"
    etc.write_text("[site]\npartitions = ['b']\n")
    site = read({}, site=(etc,), authority=etc)
    assert choose(FakeSurvey(partition("a"), partition("b", default=False)), site).partition == "b"


def test_nodes_without_gpus_are_said(fresh_home: Path) -> None:
    wanted = chosen(FakeSurvey(partition("cpu", gpus=0)))
    assert wanted.gpus_per_node == 1
    assert "has no GPUs" in wanted.notices[0]


def test_nodes_whose_gpus_slurm_tells_in_an_unknown_way_are_taken_for_usual_ones(fresh_home: Path) -> None:
    odd = partition("h100", gpus=0, unreadable="slurm: cannot read generic resources in sinfo's output: 'gpu:h100:8:s'")
    wanted = chosen(FakeSurvey(odd))
    assert (wanted.partition, wanted.gpus_per_node) == ("", 8)
    assert "cannot read generic resources" in wanted.notices[0]


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("survey")
@pytest.mark.parametrize("name", ["job.toml", "job.sbatch"])
def test_files_that_are_there_are_kept(name: str) -> None:
    Path(name).write_text("mine")
    with pytest.raises(UsageError, match=rf"{name}: already there; --force replaces"):
        resihp()
    assert [path.name for path in Path().iterdir() if path.is_file()] == [name]
    assert Path(name).read_text() == "mine"
    resihp("--force")
    assert Path(name).read_text() != "mine"
    script()


@pytest.mark.usefixtures("survey")
def test_a_link_that_leads_nowhere_is_there() -> None:
    Path("job.toml").symlink_to("gone/job.toml")
    with pytest.raises(UsageError, match=r"job\.toml: already there; --force replaces"):
        resihp()


@pytest.mark.usefixtures("survey")
def test_another_folder_and_json(fresh_home: Path) -> None:
    done = resihp("--json", "--folder", "my jobs/1")
    answer = json.loads(done.stdout)
    assert answer == {
        "schema": 1,
        "files": ["my jobs/1/job.toml", "my jobs/1/job.sbatch"],
        "next": ["resihp submit 'my jobs/1/job.toml' --dry-run"],
    }
    assert all(Path(file).is_file() for file in answer["files"])
    script(Path("my jobs/1/job.toml"))


@pytest.mark.usefixtures("survey")
def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(UsageError, match=r"/proc/x: cannot be written"):
        resihp("--folder", "/proc/x")


@pytest.mark.usefixtures("survey")
def test_nothing_is_written_that_would_be_refused(fresh_home: Path) -> None:
    (fresh_home / "resihp.toml").write_text("[slurm]\nreservaton = 'x'\n")
    with pytest.raises(ResihpError, match="did you mean reservation"):
        resihp()
    (fresh_home / "resihp.toml").unlink()
    with pytest.raises(UsageError, match="not valid Unicode, a job file cannot hold it"):
        job_text(chosen(command=("x\udc80",)))
    assert not Path("job.toml").exists()


@pytest.mark.parametrize("time", ["soon", "0h"])
def test_a_time_that_is_none(time: str, survey: FakeSurvey) -> None:
    with pytest.raises(UsageError, match=f"--time '{time}'"):
        resihp("--time", time)


@pytest.mark.usefixtures("survey")
def test_a_script_that_is_not_there_is_said(fresh_home: Path) -> None:
    done = resihp("--", "python", "train.py")
    assert f"train.py: no such script in {fresh_home}; put it there, or correct command" in done.stderr
    Path("train.py").write_text("")
    assert "no such script" not in resihp("--force", "--", "python", "train.py").stderr
