"""`resihp submit`: the script that comes of a job file, what is refused before, and what a refusal tells."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest

from resihp.errors import ConfigurationError, LayoutError, ResihpError, UsageError
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.errors import SlurmUnavailableError, SlurmUsageError
from resihp.wrapper.commands.submit import name_of, submit
from resihp.wrapper.config.schema import Configuration
from resihp.wrapper.exit_codes import exit_code_of
from resihp.wrapper.job_folder import home
from tests.slurm.fake_slurm import FakeSlurm

JOB = f"[job]\nnodes = 4\ngpus_per_node = 2\ntime = '2h'\ncommand = ['{sys.executable}', 'train.py']\n"
LAYOUT = "[layout]\ntp = 2\npp = 2\n"


@pytest.fixture
def job_file(fresh_home: Path) -> Path:
    (fresh_home / "train.py").write_text("")
    path = fresh_home / "job.toml"
    path.write_text(JOB + LAYOUT)
    return path


def printed(job_file: Path, more: str = "", chain: int = 1) -> str:
    job_file.write_text(JOB + LAYOUT + more)
    script = submit(job_file, dry_run=True, chain=chain, slurm=unreachable, notice=pytest.fail).script
    return script


def unreachable() -> FakeSlurm:
    raise AssertionError("a dry run asks Slurm nothing")


def submitted(job_file: Path, slurm: FakeSlurm, chain: int = 1) -> tuple[list[str], list[str]]:
    told: list[str] = []
    return submit(job_file, dry_run=False, chain=chain, slurm=lambda: slurm, notice=told.append).ids, told


def test_a_dry_run_prints_the_script_and_keeps_nothing(job_file: Path) -> None:
    script = printed(job_file, "[slurm]\npartition = 'gpu'\nspares = 1\nwarning = '10m'\nextra = ['--mail-type=END']\n")
    lines = script.splitlines()
    for line in (
        "#SBATCH --nodes=5",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --time=0-02:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --signal=B:USR2@600",
        "#SBATCH --mail-type=END",
        "#SBATCH --no-kill",
        "#SBATCH --requeue",
        "#SBATCH --exclusive",
    ):
        assert lines.count(line) == 1, line
    assert shlex.split(lines[-1])[-3:] == ["run", "--config", str(job_file)]
    assert not (job_file.parent / "home").exists()


def test_a_script_for_one_node_explains_itself_as_such(job_file: Path) -> None:
    several = printed(job_file)
    job_file.write_text(JOB.replace("nodes = 4", "nodes = 1") + "[layout]\ntp = 2\n")
    alone = submit(job_file, dry_run=True, chain=1, slurm=unreachable, notice=pytest.fail).script
    assert "#SBATCH --nodes=1\n" in alone
    for script, others_go_on in ((several, True), (alone, False)):
        assert ("# When a node dies, Slurm keeps the job running on the others.\n" in script) == others_go_on


def test_nodes_where_jobs_failed_lately_are_left_out(job_file: Path) -> None:
    exclusions = Exclusions(home(), "fake")
    for node in ("n3", "n5", "gone"):
        exclusions.add(node, "Xid 79", time.time() + 60)
    exclusions.add("n1", "mended", time.time() - 60)
    slurm = FakeSlurm(["n1", "n3", "n5"])
    _, told = submitted(job_file, slurm)
    assert "excludes n3, n5, as your jobs avoid them; see resihp node list" in told
    ((_, _, options),) = slurm.submissions
    assert options == ("--exclude=n3,n5",)


def test_where_that_cannot_be_known_the_job_is_submitted_all_the_same(job_file: Path) -> None:
    slurm = FakeSlurm(["n1"])
    slurm.refuse["cluster"] = "no answer"
    ids, told = submitted(job_file, slurm)
    assert len(ids) == 1
    assert any("the list of nodes to avoid is unknown" in line for line in told)


def test_options_in_the_environment_are_kept_and_said(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_CONSTRAINT", "h100")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "60")
    _, told = submitted(job_file, FakeSlurm(["n1"]))
    said = "SBATCH_CONSTRAINT, SBATCH_TIMELIMIT"
    assert f"your environment has options for sbatch, which come before those of job.toml: {said}" in told


@pytest.mark.parametrize("variable", ["SLURM_CLUSTERS", "SBATCH_CLUSTERS"])
def test_another_cluster_in_the_environment_is_refused(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    slurm = FakeSlurm(["n1"])
    monkeypatch.setenv(variable, "fake")
    submitted(job_file, slurm)
    monkeypatch.setenv(variable, "other")
    with pytest.raises(ConfigurationError, match=f"{variable}=other: resihp submits to .* fake; .* sbatch -M other"):
        submitted(job_file, slurm)
    assert len(slurm.submissions) == 1


def test_gpus_of_one_type_are_asked_for(job_file: Path) -> None:
    assert "#SBATCH --gpus-per-node=h100:2\n" in printed(job_file, "[slurm]\ngpu_type = 'h100'\n")
    for odd in ("h100:4", "a,b", "4", "-x", "h 100"):
        with pytest.raises(ConfigurationError, match=r"\[slurm\] gpu_type.*sinfo -o %G"):
            printed(job_file, f"[slurm]\ngpu_type = '{odd}'\n")


def test_a_job_that_is_to_end_is_not_requeued(job_file: Path) -> None:
    script = printed(job_file, "[slurm]\non_warning = 'end'\nexclusive = false\nextra = ['--cpus-per-task=8']\n")
    assert "#SBATCH --no-requeue" in script
    assert "#SBATCH --requeue" not in script
    assert "#SBATCH --exclusive" not in script
    assert "#SBATCH --mem" not in script


@pytest.mark.parametrize(("extra", "told"), [("--mem=4G", True), ("--cpus-per-gpu=8", False)])
def test_a_part_of_a_node_needs_a_number_of_cpus(job_file: Path, extra: str, told: bool) -> None:
    job_file.write_text(JOB + LAYOUT + f"[slurm]\nexclusive = false\nextra = ['{extra}']\n")
    _, said = submitted(job_file, FakeSlurm(["n1"]))
    assert any("give all workers of a node one CPU" in line for line in said) == told


def test_setup_and_environment_come_before_the_command(job_file: Path) -> None:
    job_file.write_text(
        JOB + "setup = ['module load cuda/12', 'ulimit -l unlimited']\n"
        "environment = ['NCCL_DEBUG=INFO', \"GREETING=it's two words\"]\n" + LAYOUT
    )
    script = submit(job_file, dry_run=True, chain=1, slurm=unreachable, notice=pytest.fail).script
    before, _, command = script.rstrip("\n").rpartition("\n")
    assert before.endswith(
        "\n\nmodule load cuda/12\nulimit -l unlimited\nexport NCCL_DEBUG=INFO\nexport GREETING='it'\"'\"'s two words'\n"
    )
    assert command.startswith("exec ")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("setup", "a\\nb", "one line of shell"),
        ("setup", "#SBATCH --nodes=9", "no comment"),
        ("environment", "NCCL_DEBUG", "NAME=VALUE"),
        ("environment", "SLURM_JOB_ID=3", "cannot be set here"),
        ("environment", "A-B=3", "NAME=VALUE"),
    ],
)
def test_lines_that_would_spoil_the_script_are_refused(job_file: Path, key: str, value: str, words: str) -> None:
    job_file.write_text(JOB + f'{key} = ["{value}"]\n' + LAYOUT)
    with pytest.raises(ConfigurationError, match=words):
        submit(job_file, dry_run=True, chain=1, slurm=unreachable, notice=pytest.fail)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train gpt.py", "--x", "other.py"], "train_gpt"),
        (["python", "-m", "my.training"], "my.training"),
        (["./run.sh"], "run.sh"),
    ],
)
def test_a_job_is_named_after_its_script(job_file: Path, command: list[str], name: str) -> None:
    named = Configuration.model_validate({"job": {"command": command}})
    assert name_of(named) == name
    assert name_of(Configuration.model_validate({"job": {"command": command, "name": "gpt"}})) == "gpt"


def test_a_command_may_begin_with_the_script_but_not_with_a_launcher(job_file: Path) -> None:
    def script_of(command: str) -> str:
        job_file.write_text(f"[job]\nnodes = 2\ncommand = {command}\n")
        return submit(job_file, dry_run=True, chain=1, slurm=unreachable, notice=lambda _: None).script

    assert "#SBATCH --job-name=train\n" in script_of("['train.py', '--lr', '1']")
    with pytest.raises(UsageError, match=r"^elsewhere\.py: no such script in"):
        script_of("['elsewhere.py']")
    with pytest.raises(UsageError, match=r"^torchrun: .* in a job file, begin command with the script"):
        script_of("['torchrun', '--nproc-per-node', '2', 'train.py']")


def test_an_expedited_requeue_is_asked_for_where_slurm_knows_it(job_file: Path) -> None:
    job_file.write_text(JOB + LAYOUT + "[slurm]\nrequeue = 'expedite'\n")
    slurm = FakeSlurm(version=(26, 5, 5))
    submitted(job_file, slurm)
    ((_, script, _),) = slurm.submissions
    assert script.read_text().splitlines().count("#SBATCH --requeue=expedite") == 1
    older = FakeSlurm(version=(24, 11, 5))
    with pytest.raises(ConfigurationError, match=r"expedite needs Slurm 25\.11 or later, and this is 24\.11\.5; set"):
        submitted(job_file, older)
    assert older.submissions == []


def test_options_that_srun_does_not_know_are_refused_before_the_job_waits(job_file: Path) -> None:
    job_file.write_text(JOB + LAYOUT + "[slurm]\nstep_extra = ['--nonsense']\n")
    slurm = FakeSlurm()
    with pytest.raises(SlurmUsageError, match=r"step_extra: srun: unrecognized option '--nonsense'"):
        submitted(job_file, slurm)
    assert slurm.submissions == []


def test_the_script_of_a_submitted_job_stays_with_a_copy_of_its_file(job_file: Path) -> None:
    slurm = FakeSlurm()
    ids, told = submitted(job_file, slurm)
    ((job_id, script, options),) = slurm.submissions
    assert (ids, options) == ([job_id], ())
    assert script.is_relative_to(job_file.parent / "home" / "submitted")
    copy = script.with_name("job.toml")
    assert copy.read_text() == job_file.read_text()
    assert f"--config {copy}" in script.read_text()
    assert told[0] == f"submitted job {job_id}: 4 nodes of 2 GPUs; script {script}"
    here = job_file.parent
    assert told[1] == (
        f"output: {here}/train-{job_id}.out; once it runs, its folder is {here}/home/jobs/{job_id}, "
        f"with logs in {here}/home/jobs/{job_id}/logs"
    )
    assert told[2] == (
        f"resihp jobs shows whether it is queued, squeue --start --jobs={job_id} when it may start; then: "
        f"resihp status {job_id} --watch, and resihp logs {job_id} -f"
    )
    assert told[-1] == f"to end it: scancel {job_id}"


def test_output_and_folder_are_where_the_script_says(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESIHP_HOME")
    extra = "[slurm]\nextra = ['--output=/logs/%x.%A.%N.txt', '--chdir=/scratch/me']\n"
    job_file.write_text(JOB.replace("[job]\n", "[job]\nname = 'gpt'\n") + LAYOUT + extra)
    (job_id,), told = submitted(job_file, FakeSlurm())
    assert (
        f"output: /logs/gpt.{job_id}.%N.txt; once it runs, its folder is /scratch/me/.resihp/jobs/{job_id}," in told[1]
    )


def test_a_chain_is_one_script_submitted_several_times(job_file: Path) -> None:
    job_file.write_text(JOB + LAYOUT + "[checkpoint]\nevery = 5\nfolder = 'saved'\n")
    slurm = FakeSlurm()
    ids, told = submitted(job_file, slurm, chain=3)
    assert len(ids) == 3
    assert len({script for _, script, _ in slurm.submissions}) == 1
    text = slurm.submissions[0][1].read_text()
    assert [options for _, _, options in slurm.submissions] == [
        (),
        (f"--dependency=afterany:{ids[0]}",),
        (f"--dependency=afterany:{ids[1]}",),
    ]
    assert "singleton" not in text, "other chains of the same name are no concern of this one"
    assert "name" not in "".join(line for line in text.splitlines() if not line.startswith("#SBATCH"))
    assert "export RESIHP_SLURM__ON_WARNING=end" in text
    assert "--resume-or-start" in text
    assert told[0].startswith(f"submitted a chain of 3 jobs, each 4 nodes of 2 GPUs: {', '.join(ids)}")


@pytest.mark.parametrize(
    ("more", "chain", "error", "message"),
    [
        ("", 3, ConfigurationError, r"--chain: jobs of a chain share their checkpoints; set folder in \[checkpoint\]"),
        ("[slurm]\nwarning = '2h'\n", 1, ConfigurationError, "leaves too little time to train"),
        ("[slurm]\npartition = 'a b'\n", 1, ConfigurationError, r"\[slurm\] partition"),
        ("[container]\nruntime = 'apptainer'\n", 1, ConfigurationError, "no image is set"),
    ],
)
def test_what_would_fail_after_hours_in_the_queue_is_refused(
    job_file: Path, more: str, chain: int, error: type[ResihpError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        printed(job_file, more, chain)
    assert exit_code_of(caught.value) == 2


def test_a_layout_or_program_that_cannot_be_is_refused(job_file: Path) -> None:
    job_file.write_text(JOB + "[layout]\ntp = 4\n")
    with pytest.raises(LayoutError, match="tp=4: a tensor-parallel group stays inside a node"):
        submitted(job_file, FakeSlurm())
    job_file.write_text((JOB + LAYOUT).replace("train.py", "gone.py"))
    with pytest.raises(UsageError, match=r"gone\.py: no such script"):
        submitted(job_file, FakeSlurm())
    assert not (job_file.parent / "home").exists()


@pytest.mark.parametrize(
    ("said", "mended_by"),
    [
        ("invalid partition specified: gpu2", r"sinfo -o '%P %a %l %D' lists partitions; set partition in \[slurm\]"),
        ("Batch job submission failed: Invalid qos specification", r"sacctmgr show .*; set qos in \[slurm\]"),
        (
            "Batch job submission failed: Requested node configuration is not available",
            r"sinfo -o '%P %D %c %m %G %f' lists the nodes; change \[job\]",
        ),
        (
            "Batch job submission failed: Requested operation not supported on this system",
            r'enable_expedited_requeue is not set at this site; set requeue to "usual" in \[slurm\]',
        ),
        ("Batch job submission failed: the moon is full", r"resihp submit .*job\.toml --dry-run prints the script"),
    ],
)
def test_a_refusal_names_the_command_that_tells_more(job_file: Path, said: str, mended_by: str) -> None:
    slurm = FakeSlurm()
    slurm.refuse["submit"] = said
    with pytest.raises(SlurmUsageError, match=mended_by) as caught:
        submitted(job_file, slurm)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{job_file}: ")
    assert exit_code_of(caught.value) == 2


def test_a_refusal_for_want_of_nodes_names_those_that_are_excluded(job_file: Path) -> None:
    Exclusions(home(), "fake").add("n1", "Xid 79", time.time() + 60)
    slurm = FakeSlurm(["n1"])
    slurm.refuse["submit"] = "Batch job submission failed: Requested node configuration is not available"
    with pytest.raises(SlurmUsageError, match=r"may not run on n1: .* node exclude NODE --remove permits a node"):
        submitted(job_file, slurm)


def test_no_answer_is_not_a_refusal(job_file: Path) -> None:
    slurm = FakeSlurm()
    slurm.unavailable = True
    with pytest.raises(
        SlurmUnavailableError, match="may have been submitted anyway, check with squeue --me --name=train"
    ):
        submitted(job_file, slurm)
