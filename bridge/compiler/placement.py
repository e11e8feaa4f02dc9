"""Which of a mesh's processes run a program, and how its numbers name them.

A program counts its devices as replicas or as partitions; a device's id is the rank of the
process that drives it. Nothing here depends on the rank of the process that compiles.
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
    """

    replicas: int
    partitions: int
    ranks: tuple[int, ...]

    @property
    def spread(self) -> bool:
        """Whether more than one process runs the program."""
        return len(self.ranks) > 1


# A program for one device of a process that is alone.
ALONE = Placement(1, 1, (0,))


def parse(text: str) -> Placement:
    """The placement that the plugin wrote as "replicas partitions rank rank …"; ALONE for "".

    Raises:
        CompileError: it is not one that a program of this mesh can have.
    """
    if not text:
        return ALONE
    replicas, partitions, *ranks = map(int, text.split())
    if replicas * partitions != len(ranks) or (replicas > 1 and partitions > 1):
        raise CompileError(
            f"{replicas} replicas of {partitions} partitions on {len(ranks)} devices: a mesh of processes runs "
            "one replica, or else one partition, in each"
        )
    return Placement(replicas, partitions, tuple(ranks))
