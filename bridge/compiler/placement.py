"""Which devices run a program: processes of a mesh, and how the program's numbers name them, or several chips here.

A program counts its devices as replicas or as partitions; in a mesh of processes a device's id
is the rank of the process that drives it. Nothing here depends on the rank of the one that compiles.
"""

from dataclasses import dataclass

from bridge.errors import CompileError


@dataclass(frozen=True)
class Placement:
    """A program's devices.

    Attributes:
        replicas: how many run the whole program, each on inputs of its own.
        partitions: how many run one part each of one program. One of both numbers is 1.
        ranks: the ranks in the order in which the program counts its replicas or partitions.
        here: how many chips of one process run the program together; the inner plugin divides it.
    """

    replicas: int
    partitions: int
    ranks: tuple[int, ...]
    here: int = 1

    @property
    def spread(self) -> bool:
        """Whether more than one process runs the program."""
        return len(self.ranks) > 1


# A program for one device of a process that is alone.
ALONE = Placement(1, 1, (0,))
_HERE = "here"


def parse(text: str) -> Placement:
    """The placement that the plugin wrote: "replicas partitions rank rank …", "here chips", or "" for ALONE.

    Raises:
        CompileError: it is not one that a program of this mesh can have.
    """
    if not text:
        return ALONE
    first, *others = text.split()
    if first == _HERE:
        return Placement(1, 1, (0,), int(others[0]))
    replicas, partitions, *ranks = map(int, (first, *others))
    if replicas * partitions != len(ranks) or (replicas > 1 and partitions > 1):
        raise CompileError(
            f"{replicas} replicas of {partitions} partitions on {len(ranks)} devices: a mesh of processes runs "
            "one replica, or else one partition, in each"
        )
    return Placement(replicas, partitions, tuple(ranks))
