import pytest

from coordd_tools.bench.jobs import (
    SIZES,
    AllreduceJob,
    IdleJob,
    PipelineJob,
    SetsJob,
    StartupJob,
    StepJob,
    dumps,
    loads,
)

TWO = {"engines": ("coordd", "gloo"), "rounds": 2, "seed": 3}
JOBS = [
    StepJob(**TWO, models=("gpt",), steps=5),
    AllreduceJob(**TWO),
    SetsJob(**TWO),
    IdleJob(**TWO, seconds=1.5),
    StartupJob(**TWO),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.noun)
def test_a_job_survives_the_way_to_its_ranks(job):
    assert loads(dumps(job)) == job


def test_the_sizes_go_from_four_bytes_to_64_mib_in_powers_of_four():
    assert SIZES[:3] == (4, 4096, 16384)
    assert SIZES[-1] == 64 << 20


@pytest.mark.parametrize("job", JOBS[:3], ids=lambda job: job.noun)
def test_engines_share_one_group_where_they_can(job):
    assert job.groups() == [job]


@pytest.mark.parametrize("job", JOBS[3:], ids=lambda job: job.noun)
def test_engines_take_turns_with_groups_where_a_process_is_what_is_measured(job):
    groups = job.groups()
    assert [group.engines for group in groups] == [("coordd",), ("gloo",)] * 2
    assert {group.rounds for group in groups} == {1}


def test_pipelines_share_one_group_for_their_times_and_have_one_each_for_their_memory():
    job = PipelineJob(**TWO, microbatches=4)
    assert loads(dumps(job)) == job
    first, *watched = job.groups()
    assert first == job
    assert [(group.engines, group.watched, group.microbatches) for group in watched] == [
        (("coordd",), True, 4),
        (("gloo",), True, 4),
    ]
