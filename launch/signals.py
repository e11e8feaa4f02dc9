"""The end of a command that waits for processes of its own."""

import signal


class Stopped(Exception):
    """SIGTERM or SIGINT came; `number` says which."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def watch() -> None:
    """Turn the first SIGTERM or SIGINT into Stopped; later ones do not disturb the end."""

    def stopped(number, _frame):
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    for each in numbers:
        signal.signal(each, stopped)
