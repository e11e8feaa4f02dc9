"""Messages between ranks: torch's send, recv, isend, irecv and batch_isend_irecv on chips of different processes."""

import os
import signal
import time
from pathlib import Path

import pytest

NOTICED_SECONDS = 2.0
MEBI = 1 << 20


def values(torch, rank: int, shape: tuple[int, ...], dtype: str):
    """What `rank` sends: whole numbers that every type can hold, on the CPU."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank) % (2 if dtype == "bool" else 100)).reshape(shape).to(getattr(torch, dtype))


def send_and_receive(chip, dtype: str, shapes: list[tuple[int, ...]]):
    """The blocking calls, first one way and then the other."""
    torch = chip.torch
    for shape in shapes:
        own = values(torch, chip.rank, shape, dtype).to("tpu")
        came = torch.zeros(shape, dtype=own.dtype, device="tpu")
        if chip.rank == 0:
            torch.distributed.send(own, 1)
        torch.distributed.recv(came, 1 - chip.rank)
        if chip.rank == 1:
            torch.distributed.send(own, 0)
        assert torch.equal(came.cpu(), values(torch, 1 - chip.rank, shape, dtype)), shape


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int64", "uint8", "bool"])
def test_what_was_sent_comes(torch_meshes, dtype, hosts):
    """Every type and shape comes as it was sent: scalars, one element, odd ones, none at all, more than a piece."""
    shapes = [(), (1,), (3, 5), (0,), (4, 0), (3, MEBI + 1)]
    torch_meshes(2, hosts).run(send_and_receive, dtype=dtype, shapes=shapes)


def exchange(chip, count: int, sends_first: bool):
    """`count` messages each way, all of them under way at once, with a collective in the midst."""
    torch = chip.torch
    distributed, peer = torch.distributed, 1 - chip.rank
    own = [values(torch, chip.rank + 10 * i, (1000 + i,), "int32").to("tpu") for i in range(count)]
    came = [torch.zeros_like(each) for each in own]
    total = torch.ones(3, device="tpu")
    works = [distributed.isend(each, peer) for each in own] if sends_first else []
    works += [distributed.irecv(each, peer) for each in came]
    distributed.all_reduce(total)
    works += [] if sends_first else [distributed.isend(each, peer) for each in own]
    for work in works:
        work.wait()
    assert total.cpu().tolist() == [2.0] * 3
    for i, each in enumerate(came):
        assert torch.equal(each.cpu(), values(torch, peer + 10 * i, (1000 + i,), "int32")), i


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("sends_first", [False, True])
def test_many_messages_both_ways_at_once(torch_meshes, sends_first, hosts):
    """Messages between two ranks come in their order, both ways at once, whoever starts with sends, while collectives go on."""
    torch_meshes(2, hosts).run(exchange, count=12, sends_first=sends_first)


def cross_tags(chip):
    """Two messages that are received in the other order than they were sent in, one after the other."""
    torch = chip.torch
    distributed = torch.distributed
    if chip.rank == 0:
        for work in [distributed.isend(torch.full((4,), 10.0 + tag % 7, device="tpu"), 1, tag=tag) for tag in (1, 2**31 - 1)]:
            work.wait()
        return
    for tag in (2**31 - 1, 1):
        came = torch.zeros(4, device="tpu")
        distributed.recv(came, 0, tag=tag)
        assert came.cpu().tolist() == [10.0 + tag % 7] * 4


def test_tags(torch_meshes):
    """A message comes to the receive with its tag, whichever of them was started first."""
    torch_meshes(2).run(cross_tags)


def poll_for_the_end(chip):
    """Ask again and again whether a message has been sent, without ever waiting for it."""
    torch, peer = chip.torch, 1 - chip.rank
    works = [torch.distributed.isend(torch.full((2,), float(i), device="tpu"), peer, tag=i) for i in range(3)]
    begun = [work.is_completed() for work in works]
    torch.distributed.barrier()
    came = [torch.zeros(2, device="tpu") for _ in works]
    for i, each in enumerate(came):
        torch.distributed.recv(each, peer, tag=i)
    deadline = time.monotonic() + 20
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(0.01)
    return begun, [work.is_completed() for work in works], [each.cpu().tolist() for each in came]


def test_a_send_says_when_it_is_done(torch_meshes):
    """is_completed() is false until the receiver has asked for the message, and true soon after it has it."""
    for answer in torch_meshes(2).run(poll_for_the_end):
        assert answer == ([False] * 3, [True] * 3, [[float(i)] * 2 for i in range(3)])


def pass_round(chip):
    """A ring of all ranks, then one of each column of two by two, in batches whose sends come first."""
    torch = chip.torch
    distributed = torch.distributed
    column = distributed.device_mesh.init_device_mesh("tpu", (2, 2)).get_group(0)

    def swap(to: int, source: int, group=None):
        own, came = torch.full((5,), float(chip.rank), device="tpu"), torch.zeros(5, device="tpu")
        operations = [distributed.P2POp(distributed.isend, own, to, group), distributed.P2POp(distributed.irecv, came, source, group)]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        return came.cpu()[0].item()

    before = (chip.rank - 1) % 4
    assert swap((chip.rank + 1) % 4, before) == before
    other = (chip.rank + 2) % 4
    assert swap(other, other, column) == other


def test_batches_in_a_ring_and_in_a_group(new_mesh):
    """batch_isend_irecv keeps torch's promise that the order of sends and receives does not matter; in groups too."""
    new_mesh(4, LIBTT_TPU_COMPAT="1").run(pass_round)


def exchange_large(chip, mebibytes: int):
    """The peak of memory above what it was before, in MiB; the message's own place is part of it."""
    torch = chip.torch

    def resident(field: str) -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)) >> 10

    peer = 1 - chip.rank
    own, came = torch.full((mebibytes << 18,), chip.rank + 1.0, device="tpu"), torch.zeros(mebibytes << 18, device="tpu")
    assert own[0].item() == chip.rank + 1 and came[0].item() == 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    for work in (torch.distributed.irecv(came, peer), torch.distributed.isend(own, peer)):
        work.wait()
    assert came[-1].item() == peer + 1
    peak = resident("VmHWM") - before
    assert (came == peer + 1).all().item()
    return peak


def test_memory_does_not_grow_with_a_message(torch_meshes):
    """A message of 256 MiB needs its place at the receiver, and no second one at either end."""
    for peak in torch_meshes(2).run(exchange_large, mebibytes=256):
        assert peak < 256 + 64


# ---- What goes wrong


def receive(chip, source: int, shape: tuple[int, ...]):
    """The text of the error, and how long after the call it came."""
    torch, start = chip.torch, time.monotonic()
    came = torch.zeros(shape, device="tpu")
    try:
        torch.distributed.irecv(came, source).wait()
        came.cpu()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def send(chip, destination: int, shape: tuple[int, ...]):
    """As `receive`."""
    torch, start = chip.torch, time.monotonic()
    try:
        torch.distributed.isend(torch.ones(shape, device="tpu"), destination).wait()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def start_receive(chip, source: int, shape: tuple[int, ...]):
    """Leave a receive under way; its tensor is kept."""
    chip.came = chip.torch.zeros(shape, device="tpu")
    chip.torch.distributed.irecv(chip.came, source)


def use_received(chip):
    """What comes of the tensor of `start_receive`."""
    try:
        return f"came: {chip.came.sum().item()}"
    except RuntimeError as error:
        return str(error)


def warm_up(chip):
    """Meet the other ranks."""
    chip.torch.distributed.barrier()


def message_sockets() -> list[str]:
    """Sockets of messages on this host."""
    return [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@tt-tpu-message" in line]


def kill_while_others_wait(mesh) -> tuple[int, list[str]]:
    """Kill rank 2, from which rank 0 waits for a message and to which rank 1 waits to send one.

    Returns:
        Its process's number, and what the two hear, which must be within NOTICED_SECONDS.
    """
    mesh.run(warm_up)
    mesh.ranks[0].ask(receive, {"source": 2, "shape": (4, 8)})
    mesh.ranks[1].ask(send, {"destination": 2, "shape": (4, 8)})
    time.sleep(1)
    pid, killed = mesh.ranks[2].process.pid, time.monotonic()
    mesh.kill(2)
    messages = [mesh.ranks[rank].answer().value[0] for rank in (0, 1)]
    assert time.monotonic() - killed < NOTICED_SECONDS
    return pid, messages


def test_a_killed_rank_is_noticed_by_those_who_wait(new_mesh):
    """Who waits for a message from a rank that is killed, or to send to it, hears within two seconds which one it was; nothing is left."""
    mesh = new_mesh(3, LIBTT_TPU_COMPAT="1")
    pid, (received, sent) = kill_while_others_wait(mesh)
    assert f"rank 2 (process {pid}) has ended" in received and f"rank 2 (process {pid}) has ended" in sent
    # Each says what it was doing, or what the first one to notice was doing.
    assert "receive of f32[4, 8] from rank 2 on rank 0" in received
    assert "send of a message from rank 1 to rank 2" in sent
    mesh.close()
    assert message_sockets() == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_the_midst_of_a_message(new_mesh, victim):
    """The other end of a message that is half there hears of the end; no part of it is taken for the whole."""
    mesh = new_mesh(2, LIBTT_TPU_COMPAT="1")
    mesh.run(warm_up)
    mesh.run(start_receive, [1], source=0, shape=(16 * MEBI,))
    receiver = mesh.ranks[1].process.pid
    os.kill(receiver, signal.SIGSTOP)  # so that the sender's socket fills
    mesh.ranks[0].ask(send, {"destination": 1, "shape": (16 * MEBI,)})
    time.sleep(1)
    killed = time.monotonic()
    mesh.kill(victim)
    if victim == 0:
        os.kill(receiver, signal.SIGCONT)
        message = mesh.run(use_received, [1])[0]
    else:
        message = mesh.ranks[0].answer().value[0]
    assert time.monotonic() - killed < NOTICED_SECONDS
    assert f"rank {victim} (process " in message and "ended" in message, message


def test_a_message_that_nobody_sends(new_mesh):
    """Past the deadline the receiver's error names the sender, the tensor and the setting; every rank hears of it."""
    mesh = new_mesh(2, LIBTT_TPU_COMPAT="1", TT_TPU_COLLECTIVE_TIMEOUT="2")
    mesh.run(warm_up)
    message, seconds = mesh.run(receive, [0], source=1, shape=(3,))[0]
    assert 2 <= seconds < 4
    assert "receive of f32[3] from rank 1 on rank 0: rank 1 (process " in message
    assert "did nothing for 2 s (TT_TPU_COLLECTIVE_TIMEOUT)" in message
    message, _ = mesh.run(send, [1], destination=0, shape=(3,))[0]
    assert "the mesh has failed" in message and "receive of f32[3] from rank 1 on rank 0" in message


def test_ends_that_disagree(new_mesh):
    """A message of another size than the receiver's tensor is an error at both ends that says who has what."""
    mesh = new_mesh(2, LIBTT_TPU_COMPAT="1")
    mesh.run(warm_up)
    mesh.ranks[0].ask(receive, {"source": 1, "shape": (4,)})
    mesh.ranks[1].ask(send, {"destination": 0, "shape": (5,)})
    for rank in mesh.ranks:
        message, _ = rank.answer().value
        assert "receive of f32[4] from rank 1 on rank 0: it sends f32[5]: both must have the same type and number" in message
