"""What becomes of a mesh when one of its ranks ends, hangs or does something else than the others."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
from collective_cases import Case, program

PAIR = ((0, 1),)
NOTICED_SECONDS = 2.0


def run_case(chip, case: Case, times: int = 1, pause: float = 0.0):
    """The case, over and over; how many seconds the last one took."""
    inputs = case.inputs(chip.world, 0)
    loaded = chip.compile(program([case]))
    for _ in range(times):
        start = time.monotonic()
        try:
            chip.run(loaded, inputs[chip.rank])
        finally:
            seconds = time.monotonic() - start
        time.sleep(pause)
    return seconds


def run_and_time(chip, case: Case, times: int = 1):
    """As run_case; the error's text and the seconds from the call to it, too."""
    start = time.monotonic()
    try:
        run_case(chip, case, times)
    except Exception as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def compile_only(chip, case: Case):
    """Compile, and meet the other ranks."""
    chip.compile(program([case]))


ALL_REDUCE = Case("all_reduce", (4, 8), "f32", PAIR)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (ALL_REDUCE.of(shape=(5, 8)), ("rank 0 does all_reduce sum f32[4, 8]", "rank 1 does all_reduce sum f32[5, 8]")),
        (ALL_REDUCE.of(element="i32"), ("rank 0 does all_reduce sum f32[4, 8]", "rank 1 does all_reduce sum i32[4, 8]")),
        (ALL_REDUCE.of(reduction="maximum"), ("all_reduce sum f32[4, 8]", "all_reduce maximum f32[4, 8]")),
        (ALL_REDUCE.of(op="all_gather"), ("rank 0 does all_reduce sum f32[4, 8]", "rank 1 does all_gather f32[4, 8]")),
        (ALL_REDUCE.of(groups=((1, 0),)), ("rank 0 does all_reduce sum f32[4, 8]", "same groups")),
    ],
)
def test_ranks_that_disagree(new_mesh, other, said):
    """Another operation, shape, type, reduction or order of the group is an error on all ranks that says who did what."""
    mesh = new_mesh(2)
    mesh.run(run_case, case=ALL_REDUCE)
    for rank, case in enumerate((ALL_REDUCE, other)):
        mesh.ranks[rank].ask(run_case, {"case": case})
    for answer in [rank.answer() for rank in mesh.ranks]:
        assert "collective 2 of group [0, 1]" in answer.error
        assert all(words in answer.error for words in said), answer.error


def test_a_failed_mesh_stays_failed(new_mesh):
    """After an error the next collective says at once what the first one was."""
    mesh = new_mesh(2)
    for rank, case in enumerate((ALL_REDUCE, ALL_REDUCE.of(shape=(3,)))):
        mesh.ranks[rank].ask(run_case, {"case": case})
    assert all(rank.answer().error for rank in mesh.ranks)
    for answer in mesh.answers(run_case, case=ALL_REDUCE).values():
        assert "the mesh has failed" in answer.error and "disagree" in answer.error


def test_a_killed_rank_is_noticed(new_mesh):
    """Who waits for a rank that was killed hears within two seconds which one it was, and in what."""
    mesh = new_mesh(4)
    case = Case("all_reduce", (1000,), "f32", ((0, 1, 2, 3),))
    mesh.run(run_case, case=case)
    for rank in (0, 1, 3):
        mesh.ranks[rank].ask(run_and_time, {"case": case})
    time.sleep(0.5)
    pid, killed = mesh.ranks[2].process.pid, time.monotonic()
    mesh.kill(2)
    for rank in (0, 1, 3):
        message, _ = mesh.ranks[rank].answer().value
        assert time.monotonic() - killed < NOTICED_SECONDS
        assert f"rank 2 (process {pid}) has ended" in message, message
        assert "all_reduce sum f32[1000] (collective 2 of group [0, 1, 2, 3])" in message


def test_a_rank_that_ends_by_itself_is_noticed(new_mesh):
    """A rank that leaves early is no different from one that was killed."""
    mesh = new_mesh(2)
    mesh.run(run_case, case=ALL_REDUCE)
    mesh.ranks[0].ask(run_and_time, {"case": ALL_REDUCE})
    mesh.ranks[1].close()
    message, _ = mesh.ranks[0].answer().value
    assert "rank 1 (process " in message and "has ended" in message


def test_a_rank_that_is_late_is_named(new_mesh):
    """Past the deadline the error names who did not come, and the setting."""
    mesh = new_mesh(2, TT_TPU_COLLECTIVE_TIMEOUT="2")
    mesh.run(run_case, case=ALL_REDUCE)
    message, seconds = mesh.run(run_and_time, [0], case=ALL_REDUCE)[0]
    assert 2 <= seconds < 4
    assert "rank 1 did not come and is in no collective" in message and "TT_TPU_COLLECTIVE_TIMEOUT" in message


def test_ranks_that_wait_for_each_other(new_mesh):
    """Two groups entered in different orders are a deadlock, which ends with the deadline and says where both are."""
    mesh = new_mesh(3, TT_TPU_COLLECTIVE_TIMEOUT="2")
    first = Case("all_reduce", (4,), "f32", ((0, 1, 2),))
    permute = Case("collective_permute", (4,), "f32", pairs=((0, 1),))
    mesh.run(run_case, case=first)
    mesh.ranks[0].ask(run_case, {"case": permute})
    mesh.ranks[1].ask(run_case, {"case": first})
    errors = [mesh.ranks[rank].answer().error for rank in (0, 1)]
    assert any("is in a collective of group" in error for error in errors), errors


@pytest.mark.parametrize(
    ("per_rank", "said"),
    [
        (({"TT_TPU_COLLECTIVE_TIMEOUT": "15"}, {"RANK": "0", "TT_TPU_COLLECTIVE_TIMEOUT": "15"}), "already"),
        (({}, {}, {"RANK": "1"}), "two processes say that they are rank 1"),
        (({}, {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}), "rank 1 has WORLD_SIZE=3, rank 0 has 2"),
        (({}, {"TORCH_TPU_TOPOLOGY": "1,2,1"}), "rank 1 has a mesh of 1x2x1, rank 0 of 2x1x1"),
        (({}, {"TT_TPU_INNER_PLUGIN": "copy"}), "use one installation"),
    ],
)
def test_ranks_that_cannot_be_joined(new_mesh, tmp_path, per_rank, said):
    """A rank twice, other numbers of them, another mesh or another version is an error on every rank before anything is loaded."""
    if len(per_rank) == 2 and "TT_TPU_INNER_PLUGIN" in per_rank[1]:
        per_rank = ({}, {"TT_TPU_INNER_PLUGIN": str(_copy_of_inner_plugin(tmp_path))})
    mesh = new_mesh(len(per_rank), per_rank)
    answers = mesh.answers(compile_only, case=ALL_REDUCE)
    assert all("cannot join the mesh" in answer.error for answer in answers.values()), answers
    assert any(said in answer.error for answer in answers.values()), answers


def _copy_of_inner_plugin(folder: Path) -> Path:
    import shutil

    from service_client import inner_library

    return Path(shutil.copy(inner_library(), folder / "plugin.so"))


def test_a_rank_that_never_comes(new_mesh):
    """The ranks that are there say which one is missing."""
    mesh = new_mesh(3, TT_TPU_COLLECTIVE_TIMEOUT="2")
    for answer in mesh.answers(compile_only, [0, 1], case=ALL_REDUCE).values():
        assert "rank(s) 2 of 3 did not come in time" in answer.error


def limit_files(chip):
    """From now on this process cannot make a file, or shared memory, of more than 64 KiB."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def test_too_little_shared_memory(new_mesh):
    """Where the memory cannot be had, all ranks say how much is needed."""
    mesh = new_mesh(2)
    mesh.run(limit_files, [0])
    for answer in mesh.answers(compile_only, case=ALL_REDUCE).values():
        assert "too little shared memory: the mesh needs " in answer.error and " KiB" in answer.error


def test_numbers_that_are_none(new_mesh):
    """A RANK that the mesh has not is an error that names the variable."""
    mesh = new_mesh(1, ({"WORLD_SIZE": "1", "RANK": "1"},))
    assert "RANK" in mesh.answers(compile_only, case=ALL_REDUCE)[0].error


def left_behind(folder: Path) -> list[str]:
    """Files of meshes in shared memory and in `folder`."""
    shared = [path.name for path in Path("/dev/shm").iterdir() if "tt-tpu" in path.name]
    return shared + [str(path) for path in folder.glob("tt-tpu-*")]


def wait_until_clean(folder: Path) -> None:
    """Within five seconds nothing of a mesh is left; the compile service needs one of them to see that all have gone."""
    deadline = time.monotonic() + 5
    while left_behind(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(folder) == []


def test_ranks_killed_at_random_moments(new_mesh, tmp_path, pytestconfig):
    """Whenever a rank is killed, every other one is out with an error within five seconds, and nothing is left."""
    moments = random.Random(0)
    case = Case("all_reduce", (200_000,), "f32", ((0, 1, 2),))
    for _ in range(pytestconfig.getoption("--random-kills")):
        mesh = new_mesh(3)
        mesh.run(compile_only, case=case)
        victim = moments.randrange(3)
        for rank in mesh.ranks:
            rank.ask(run_and_time, {"case": case, "times": 1_000_000})
        time.sleep(moments.uniform(0, 1))
        mesh.kill(victim)
        killed = time.monotonic()
        for rank in set(range(3)) - {victim}:
            message, _ = mesh.ranks[rank].answer().value
            assert f"rank {victim} " in message and "ended" in message, message
        assert time.monotonic() - killed < 5
        mesh.close()
        wait_until_clean(tmp_path)


def wait_until_met() -> None:
    """Until a rank has connected to rank 0: two sockets with one name, of which a listener alone has one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@tt-tpu-mesh" in line]
        if len(sockets) > len(set(sockets)):
            return
        time.sleep(0.05)
    raise AssertionError("the ranks did not meet")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_the_others_meet(new_mesh, tmp_path, victim):
    """A rank that has come and is killed before all have is missed at once, and nothing is left."""
    mesh = new_mesh(3)
    for rank in (0, 1):
        mesh.ranks[rank].ask(compile_only, {"case": ALL_REDUCE})
    wait_until_met()
    mesh.kill(victim)
    assert f"rank {victim} ended before all had come" in mesh.ranks[1 - victim].answer(10).error
    mesh.close()
    wait_until_clean(tmp_path)


def test_results_are_whole_after_many(new_mesh):
    """Results of a thousand collectives in a row stay right: no buffer is written while another rank reads it."""
    mesh = new_mesh(4)
    mesh.run(run_many, times=1000)


def run_many(chip, times: int):
    """Collectives of different groups, one after the other, each with numbers of its own."""
    groups = [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3))]
    cases = [Case("all_gather", (64,), "i32", group) for group in groups]
    loaded = [chip.compile(program([case])) for case in cases]
    for turn in range(times):
        case = cases[turn % 3]
        own = next(group for group in case.groups if chip.rank in group)
        (result,) = chip.run(loaded[turn % 3], np.full(64, turn * 10 + chip.rank, np.int32))
        np.testing.assert_array_equal(result, np.repeat([turn * 10 + rank for rank in own], 64))
