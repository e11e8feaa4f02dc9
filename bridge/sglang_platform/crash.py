"""The end of a server that has lost a process: all others end too, nothing stays behind, and the cause is the last line.

SGLang's own way out ends in SIGKILL for everything, itself included, whatever that leaves. Here each process
that starts others watches them, and all write into one ledger: who was lost, why a process failed, and which
files go with the server. The process that answers HTTP keeps it in memory without a name, and acts on it.
"""

import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from bridge.errors import BridgeError
from bridge.plugin_functions import await_lost_rank

_LEDGER = "TT_TPU_SERVER_LEDGER"
_SHARED_MEMORY = Path("/dev/shm")
# Seconds: for the main thread to take up a signal; for killed processes to be gone; for what happens at the same time
# on several ranks, or in several threads, to be known here too.
_SIGNAL, _GONE, _AT_ONCE = 2.0, 10.0, 0.5

# Kinds of notes, the best explanation first.
_CAUSES = ("killed", "failed", "lost")

_watched: dict[BaseProcess, tuple[str, int]] = {}  # what each is, and its pidfd
_lost_elsewhere, _told_to_stop = threading.Event(), threading.Event()
_over = threading.Event()

logger = logging.getLogger(__name__)


# ---- The ledger


def prepare() -> None:
    """In the process that answers HTTP, before it starts others: they find the ledger through this process."""
    # They look at CUDA and at Python's stacks, for a minute.
    for dump in ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_PYSPY_DUMP_BEFORE_CRASH"):
        os.environ.setdefault(dump, "0")
    if not _is_server():
        descriptor = os.memfd_create("tt-tpu-ledger")
        os.environ[_LEDGER] = f"/proc/{os.getpid()}/fd/{descriptor}"
    if threading.current_thread() is threading.main_thread():
        # Until SGLang has its own handlers.
        for number, handler in ((signal.SIGTERM, _stop_before_ready), (signal.SIGQUIT, lambda *_: end())):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handler)


def _is_server() -> bool:
    return os.environ.get(_LEDGER, "").startswith(f"/proc/{os.getpid()}/")


def note(kind: str, text: str) -> None:
    """Write a line: "killed", "failed" or "lost" and why, "file" and its path, "process" and its number."""
    with contextlib.suppress(KeyError, OSError), open(os.environ[_LEDGER], "a") as ledger:
        ledger.write(json.dumps([kind, text]) + "\n")


def _notes(*kinds: str) -> list[str]:
    """What was noted of these kinds, the first kind first."""
    try:
        lines = [json.loads(line) for line in Path(os.environ[_LEDGER]).read_text().splitlines()]
    except (KeyError, OSError):
        return []
    return [text for kind in kinds for noted, text in lines if noted == kind]


def note_files(ports: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER PortArgs.init_new: the sockets of a server's processes, and the file of their loads."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    for address in vars(ports).values():
        if isinstance(address, str) and address.startswith("ipc:///"):
            note("file", address.removeprefix("ipc://"))
    note("file", shm_path_for(ports.instance_id))


def enter_scheduler(*_args: Any, **_kwargs: Any) -> None:
    """BEFORE configure_scheduler_process: SGLang names queues in shared memory after the processes that make them; and
    those on other machines are watched from here."""
    from sglang.srt.runtime_context import get_parallel

    note("process", str(os.getpid()))
    if get_parallel().nnodes > 1:
        threading.Thread(target=_wait_for_lost_rank, args=(os.getppid(),), daemon=True, name="watch other machines").start()


def _wait_for_lost_rank(server: int) -> None:
    lost = await_lost_rank()
    _told_to_stop.wait(_AT_ONCE)
    if _told_to_stop.is_set():
        return
    note("killed", lost)
    _lost_elsewhere.set()
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGQUIT)


def expect_the_end(_scheduler: Any, _request: Any) -> None:
    """BEFORE Scheduler.handle_shutdown: the first machine's server is stopped, and all ranks have been told; none is lost."""
    _told_to_stop.set()


def note_failure(run: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND what a scheduler does: SGLang logs why it fails; for an error of ours one line does, without a traceback."""
    try:
        return run(scheduler, *args, **kwargs)
    except Exception as error:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        if parallel.nnodes > 1:
            _lost_elsewhere.wait(2 * _AT_ONCE)  # which is why, then
        ours = isinstance(error, BridgeError)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        who = _rank_name(parallel.tp_rank, parallel.dp_rank or 0, parallel.num_dp_ranks)
        note("failed", f"{who}: {first if ours else f'{type(error).__name__}: {first}'}")
        if not ours:
            raise
        logger.error("%s", error)
        os.kill(os.getppid(), signal.SIGQUIT)
        os._exit(1)


def _rank_name(rank: int, replica: int, replicas: int) -> str:
    return f"rank {rank}" + (f" of replica {replica}" if replicas > 1 else "")


# ---- Watching


@contextlib.contextmanager
def watch_scheduler(configure: Callable, server_args: Any, gpu_id: int) -> Iterator[None]:
    """AROUND numa_utils.configure_subprocess, in which SGLang starts one scheduler."""
    from sglang.srt.runtime_context import get_device, get_parallel

    parallel, device = get_parallel(), get_device()
    local_size = parallel.tp_size // parallel.nnodes
    replica, rank = divmod((gpu_id - device.base_gpu_id) // device.gpu_id_step, local_size)
    before = set(active_children())
    with configure(server_args, gpu_id):
        yield
    for process in set(active_children()) - before:
        _watch(process, _rank_name(rank + parallel.node_rank * local_size, replica, parallel.num_dp_ranks))


def watch_detokenizers(started: tuple[list, list[str]], *_args: Any, **_kwargs: Any) -> None:
    """AFTER Engine._launch_detokenizer_subprocesses."""
    for process, name in zip(*started, strict=True):
        _watch(process, f"the {name.replace('_', ' ')}")


def wait_ready(wait: Callable, readers: list, processes: list) -> list:
    """AROUND _wait_for_scheduler_ready, which knows too late who was lost, and ends in a traceback."""
    for process in processes:
        _watch(process, "the data parallel controller")  # what is not watched yet
    try:
        return wait(readers, processes)
    except (RuntimeError, EOFError) as error:
        end(str(error))
        raise


def pass_on(_controller: Any, *_args: Any) -> None:
    """BEFORE DataParallelController.launch_dp_schedulers: a scheduler below this process asks it to end, and it the server."""
    signal.signal(signal.SIGQUIT, lambda *_: _ask_for_the_end())


def _watch(process: BaseProcess, name: str) -> None:
    if process in _watched:
        return
    with contextlib.suppress(ProcessLookupError):
        _watched[process] = name, os.pidfd_open(process.pid)
        threading.Thread(target=_wait_for_end_of, args=(process,), daemon=True, name=f"watch {name}").start()


def _wait_for_end_of(process: BaseProcess) -> None:
    _ended(_watched[process][1], None)
    if _way_out(process) and not _over.is_set():
        _ask_for_the_end()


def _ended(pidfd: int, milliseconds: int | None = 0) -> bool:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(milliseconds))


def _way_out(process: BaseProcess) -> str:
    """How a process that has ended did so, "" if well."""
    deadline = time.monotonic() + _AT_ONCE
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.01)  # another thread, of SGLang, has asked the kernel and is about to write it down
    status = process.exitcode
    if status is None:
        return "has ended"
    if status >= 0:
        return f"has ended with status {status}" if status else ""
    why = ", as by the kernel when memory runs out" if status == -signal.SIGKILL else ""
    name = next((each.name for each in signal.Signals if each == -status), f"signal {-status}")
    return f"was ended by {name}{why}"


def _note_lost() -> None:
    """Note the watched processes that have ended: by a signal, which is a cause, or with a status, which has one."""
    for process, (name, pidfd) in list(_watched.items()):
        how = _way_out(process) if _ended(pidfd) else ""
        if how:
            note("killed" if how.startswith("was") else "lost", f"{name} (process {process.pid}) {how}")


def _ask_for_the_end() -> None:
    """Of the process that answers HTTP, with SIGQUIT, as SGLang's own processes do."""
    if _is_server():
        os.kill(os.getpid(), signal.SIGQUIT)
        time.sleep(_SIGNAL)
        end()
    else:
        _note_lost()
        os.kill(os.getppid(), signal.SIGQUIT)


# ---- The end


def kill_process_tree(kill: Callable, parent_pid: int | None, include_parent: bool = True, **options: Any) -> None:
    """AROUND kill_process_tree, SGLang's way out of everything: the server's own tree ends as here, with a cause."""
    if not _is_server() or parent_pid not in (None, os.getpid()):
        kill(parent_pid, include_parent, **options)
    elif not _over.is_set():
        _note_lost()  # SGLang, which waits for its schedulers itself, may be the first to see that one was killed
        if _notes(*_CAUSES) or (include_parent and parent_pid is not None):
            end()
        else:
            _clean_up()


def end(cause: str = "") -> None:
    """End all processes of this server, this one last, with status 1 and the cause as the last line.

    Args:
        cause: where the ledger has none.
    """
    if _over.is_set():
        return
    _over.set()
    _note_lost()
    _clean_up()
    told = [*_notes(*_CAUSES), cause, "a process of the server failed; its log above says why"]
    os.write(sys.stderr.fileno(), f"error: {next(filter(None, told))}; the server has ended\n".encode())
    os._exit(1)


def stop_when_told(*_args: Any, **_kwargs: Any) -> None:
    """BEFORE launch_dummy_health_check_server, on a machine that is not the first: SGLang's own SIGTERM waits there for the
    first one to end, which may go on. The servers of the others end too, since they lose a rank."""
    signal.signal(signal.SIGTERM, lambda *_: _stop(0))


def _stop_before_ready(number: int, _frame: Any) -> None:
    _stop(128 + number)


def _stop(status: int) -> None:
    _clean_up()
    os._exit(status)


def _clean_up() -> None:
    _over.set()
    _kill_others()
    _remove_files()


def _kill_others() -> None:
    """Kill the processes below this one, but for those with a session of their own (compile services) and Python's
    resource tracker: they end by themselves when nobody needs them, and clean up before."""
    below = psutil.Process().children(recursive=True)
    for process in list(below):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) != os.getsid(0) or "resource_tracker" in " ".join(process.cmdline()):
                below.remove(process)
            else:
                process.kill()
    psutil.wait_procs(below, timeout=_GONE)
    with contextlib.suppress(Exception):  # no part of Python's interface, and no more than tidiness
        resource_tracker._resource_tracker._stop()  # waits until it has removed semaphores and the like, and said so


def _remove_files() -> None:
    """Remove what the server's processes have left in shared memory and in the folder for temporary files."""
    queues = [f"sgl_shm_*_{pid}_*" for pid in _notes("process")]
    for path in [*map(Path, _notes("file")), *(path for queue in queues for path in _SHARED_MEMORY.glob(queue))]:
        path.unlink(missing_ok=True)
