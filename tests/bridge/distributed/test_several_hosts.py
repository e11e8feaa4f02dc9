"""A mesh over several hosts: what goes wrong between them, and two hosts that share nothing but a cable.

That every collective gives the right result between hosts is tested where it is on one (test_random_programs.py,
test_messages.py). Where nothing else is said the hosts are parts of this machine between which all goes through the network.
"""

import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from collective_cases import Case, program
from mesh_processes import environment
from test_mesh_failures import NOTICED_SECONDS, compile_only, limit_files, run_and_time, run_case
from test_messages import kill_while_others_wait

from bridge.ports import free_port

ALL_REDUCE = Case("all_reduce", (1000,), "f32", ((0, 1, 2, 3),))
PAIRS = Case("all_reduce", (4,), "f32", ((0, 1), (2, 3)))


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_killed_rank_is_noticed_on_all_hosts(new_mesh, victim):
    """Within two seconds, by its number, its process and the collective."""
    mesh = new_mesh(4, hosts=2)
    mesh.run(run_case, case=ALL_REDUCE)
    others = sorted({0, 1, 2, 3} - {victim})
    for rank in others:
        mesh.ranks[rank].ask(run_and_time, {"case": ALL_REDUCE})
    time.sleep(0.5)
    pid, killed = mesh.ranks[victim].process.pid, time.monotonic()
    mesh.kill(victim)
    for rank in others:
        message, _ = mesh.ranks[rank].answer().value
        assert time.monotonic() - killed < NOTICED_SECONDS
        assert f"rank {victim} (process {pid}" in message and "has ended" in message, message
        assert "all_reduce sum f32[1000] (collective 2 of group [0, 1, 2, 3])" in message


def test_ranks_of_two_hosts_that_disagree(new_mesh):
    """Every rank says who did what."""
    mesh = new_mesh(2, hosts=2)
    for rank, shape in enumerate(((4, 8), (5, 8))):
        mesh.ranks[rank].ask(run_case, {"case": ALL_REDUCE.of(shape=shape, groups=((0, 1),))})
    for answer in [rank.answer() for rank in mesh.ranks]:
        assert "rank 0 does all_reduce sum f32[4, 8]; rank 1 does all_reduce sum f32[5, 8]" in answer.error


def test_another_host_hears_of_a_failure(new_mesh):
    """What two ranks of one host disagreed on is what a rank of another one hears when it wants something of them."""
    mesh = new_mesh(4, hosts=2)
    mesh.run(run_case, case=ALL_REDUCE)
    mesh.ranks[0].ask(run_case, {"case": PAIRS})
    mesh.ranks[1].ask(run_case, {"case": PAIRS.of(shape=(5,))})
    assert all("disagree" in mesh.ranks[rank].answer().error for rank in (0, 1))
    message, seconds = mesh.run(run_and_time, [3], case=ALL_REDUCE)[0]
    assert seconds < NOTICED_SECONDS
    assert "the mesh has failed; rank" in message and "disagree" in message


def test_a_rank_that_is_late_on_another_host(new_mesh):
    """Past the deadline the error names it."""
    mesh = new_mesh(2, hosts=2, TT_TPU_COLLECTIVE_TIMEOUT="2")
    case = ALL_REDUCE.of(groups=((0, 1),))
    mesh.run(run_case, case=case)
    message, seconds = mesh.run(run_and_time, [0], case=case)[0]
    assert 2 <= seconds < 4
    assert "rank 1 did not come and is on another host" in message and "TT_TPU_COLLECTIVE_TIMEOUT" in message


def fork(chip):
    """Leave a child that outlives this process, as those of a data loader may."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)


def test_a_child_does_not_stand_for_its_rank(new_mesh):
    """A rank that was killed is noticed although a child that it has forked lives on."""
    mesh = new_mesh(2, hosts=2)
    case = ALL_REDUCE.of(groups=((0, 1),))
    mesh.run(run_case, case=case)
    mesh.run(fork, [1])
    mesh.kill(1)
    message, seconds = mesh.run(run_and_time, [0], case=case)[0]
    assert seconds < NOTICED_SECONDS and "rank 1 (process" in message and "has ended" in message


def interrupt(chip):
    """A signal for every thread of this process, each of which is in some wait."""
    import signal

    signal.signal(signal.SIGUSR1, lambda *_: None)
    for thread in os.listdir("/proc/self/task"):
        subprocess.run([sys.executable, "-c", f"import os; os.kill({thread}, 10)"], check=True)


def test_a_signal_ends_nothing(new_mesh):
    """Whoever is interrupted while it waits goes on waiting."""
    mesh = new_mesh(2, hosts=2)
    case = ALL_REDUCE.of(groups=((0, 1),))
    mesh.run(run_case, case=case)
    mesh.run(interrupt)
    mesh.run(run_case, case=case)


def leave_after(chip, cases: list[Case]):
    """The cases this rank takes part in, and nothing after them."""
    for case in cases:
        if any(chip.rank in group for group in case.groups):
            inputs = case.inputs(chip.world, 0)
            (result,) = chip.run(program([case]), inputs[chip.rank])
            np.testing.assert_array_equal(result, case.expected(inputs)[chip.rank])


def test_a_rank_that_has_done_its_part_may_end(new_mesh):
    """Groups of the others go on between the hosts."""
    mesh = new_mesh(4, hosts=2)
    mesh.run(leave_after, cases=[ALL_REDUCE])
    mesh.ranks[1].close()
    mesh.run(leave_after, [0, 2], cases=[Case("all_gather", (300_000,), "i32", ((0, 2), (1, 3)))])


def use_two_groups(chip, times: int):
    """By turns with the other host's first and second rank; rank 1 is slow to read what the first one sent."""
    groups = [((0, 2), (1, 3)), ((0, 3), (1, 2))]
    cases = [Case("all_gather", (200_000,), "i32", group) for group in groups]
    loaded = [chip.compile(program([case])) for case in cases]
    for turn in range(times):
        own = next(group for group in cases[turn % 2].groups if chip.rank in group)
        (result,) = chip.run(loaded[turn % 2], np.full(200_000, turn * 10 + chip.rank, np.int32))
        np.testing.assert_array_equal(result, np.repeat([turn * 10 + rank for rank in own], 200_000))
        time.sleep(0.01 * (chip.rank == 1))


def test_groups_that_use_a_buffer_by_turns(new_mesh):
    """What a rank sends for one group does not overwrite, on the other host, what is still being read for another."""
    new_mesh(4, hosts=2).run(use_two_groups, times=60)


# ---- Ranks that cannot be joined


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TORCH_TPU_TOPOLOGY": "2,2,1"}, "has a mesh of 2x2x1, rank 0 of 4x1x1"),
        ({"TT_MESH_GRAPH_DESC_PATH": __file__}, "has another mesh graph descriptor than rank 0"),
        ({"TORCHELASTIC_RUN_ID": "another"}, "belongs to another launch than rank 0"),
    ],
    ids=["another mesh", "another descriptor", "another launch"],
)
def test_hosts_that_cannot_be_joined(new_mesh, variables, said):
    """An error on every rank, of each host, before anything is loaded."""
    mesh = new_mesh(4, ({}, {}, variables, variables), hosts=2)
    for answer in mesh.answers(compile_only, case=ALL_REDUCE).values():
        assert "cannot join the mesh" in answer.error and said in answer.error


def test_a_host_that_never_comes(new_mesh):
    """The ranks that are there say which ones are missing."""
    mesh = new_mesh(4, hosts=2, TT_TPU_COLLECTIVE_TIMEOUT="2")
    for answer in mesh.answers(compile_only, [0, 1], case=ALL_REDUCE).values():
        assert "rank(s) 2, 3 of 4 did not come in time" in answer.error


def test_a_first_host_that_never_comes(new_mesh):
    """The others say where they looked for it."""
    mesh = new_mesh(2, hosts=2, TT_TPU_COLLECTIVE_TIMEOUT="2")
    (answer,) = mesh.answers(compile_only, [1], case=ALL_REDUCE).values()
    assert "rank 0 did not listen at 127.0.0.1:" in answer.error and "in time" in answer.error


def test_a_port_in_use(new_mesh):
    """The error names the port and the setting, and the other host does not wait for longer than it must."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = f"127.0.0.1:{port}"
        mesh = new_mesh(2, hosts=2, TORCH_TPU_SLICEBUILDER_ADDRESSES=place, TT_TPU_COLLECTIVE_TIMEOUT="3")
        answers = mesh.answers(compile_only, case=ALL_REDUCE)
    assert f"cannot listen at port {port}" in answers[0].error and "TORCH_TPU_BASE_PORT" in answers[0].error
    assert "cannot join the mesh" in answers[1].error


def test_too_little_shared_memory_on_one_host(new_mesh):
    """The ranks of the other one hear of it too."""
    mesh = new_mesh(4, hosts=2)
    mesh.run(limit_files, [2])
    for answer in mesh.answers(compile_only, case=ALL_REDUCE).values():
        assert "too little shared memory: the mesh needs " in answer.error


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE=3 with LOCAL_WORLD_SIZE=2: start as many processes on each host"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}, "number the ranks of one host after each other"),
        ({"WORLD_SIZE": "130", "LOCAL_WORLD_SIZE": "65"}, "at most 64 processes can be joined"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": "1", "TORCH_TPU_SLICEBUILDER_ADDRESSES": "nowhere.invalid:1"}, "nowhere.invalid"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "TORCH_TPU_SLICEBUILDER_ADDRESSES": "nowhere"}, "HOST:PORT"),
    ],
    ids=["unequal hosts", "ranks in turn", "too many", "an unknown host", "no port"],
)  # fmt: skip
def test_what_cannot_be_a_mesh_is_refused(new_mesh, variables, said):
    """Before anybody waits for anything."""
    mesh = new_mesh(1, (variables,))
    mesh.ranks[0].ask(compile_only, {"case": ALL_REDUCE})
    assert said in mesh.ranks[0].answer(20).error


# ---- Messages


def test_a_rank_of_another_host_killed_before_it_sends(new_mesh):
    """Who waits for a message, or to send one, hears within two seconds which rank has ended."""
    pid, messages = kill_while_others_wait(new_mesh(4, hosts=2, LIBTT_TPU_COMPAT="1"))
    assert all(f"rank 2 (process {pid} on 127.0.0.1) has ended" in message for message in messages), messages


# ---- Network namespaces


@pytest.fixture
def namespaces():
    """Two network namespaces with a cable between them: what starts a process in each, their addresses, and a way to cut the cable.

    Skipped without `ip` or the right to make a namespace, which not every machine gives.
    """
    names = [f"tt-tpu-{os.getpid()}-{i}" for i in range(2)]
    ends = [f"tt{os.getpid() % 100_000}{end}" for end in "ab"]
    addresses = ["10.213.7.1", "10.213.7.2"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    if shutil.which("ip") is None:
        pytest.skip("there is no `ip`")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
            for name, end, address in zip(names, ends, addresses, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no right to make network namespaces: {error.stderr}")
        yield [("ip", "netns", "exec", name) for name in names], addresses, lambda: ip("-n", names[0], "link", "set", ends[0], "down")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_a_cable_that_is_cut(new_mesh, namespaces):
    """Hosts that cannot reach each other any more are noticed by both, in the midst of a collective, within twenty seconds."""
    before, addresses, cut = namespaces
    place = f"{addresses[0]}:{free_port()}"
    mesh = new_mesh(4, hosts=2, before=tuple(before), TORCH_TPU_SLICEBUILDER_ADDRESSES=place)
    mesh.run(run_case, case=ALL_REDUCE)
    for rank in mesh.ranks:
        rank.ask(run_and_time, {"case": ALL_REDUCE.of(shape=(500_000,)), "times": 1_000_000})
    time.sleep(1)
    cut()
    start = time.monotonic()
    for rank in mesh.ranks:
        message, _ = rank.answer().value
        assert "has ended" in message and "all_reduce" in message, message
    assert time.monotonic() - start < 20


PROGRAM = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,tpu:tpu_dist")
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.arange(5.0, device="tpu") + rank
    dist.all_reduce(own)
    came = torch.zeros(3, device="tpu")
    works = [dist.irecv(came, (rank - 2) % world), dist.isend(torch.full((3,), float(rank), device="tpu"), (rank + 2) % world)]
    for work in works:
        work.wait()
    print(f"rank {rank} of {world}: {own.cpu().tolist()}, {came.cpu().tolist()}", flush=True)
    dist.destroy_process_group()
"""


def test_torchrun_over_two_hosts(namespaces, tmp_path):
    """torchrun's own commands, one on each host, with nothing else set than which cable Gloo is to use."""
    before, addresses, _ = namespaces
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    variables = environment(tmp_path, 1, LIBTT_TPU_COMPAT="1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"):
        del variables[name]
    started = []
    for node, prefix in enumerate(before):
        end = f"tt{os.getpid() % 100_000}{'ab'[node]}"
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
        command += ["--nproc-per-node", "2", "--master-addr", addresses[0], "--master-port", "29500", str(script)]
        own = variables | {"GLOO_SOCKET_IFNAME": end}
        started.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    said = "".join(outputs)
    for rank in range(4):
        assert f"rank {rank} of 4: {[6.0 + 4 * i for i in range(5)]}, {[float((rank - 2) % 4)] * 3}" in said, said
