"""The README names what there is to set."""

import argparse

from bridge import settings
from bridge.sglang_platform import flags


class Asked(dict):
    """An empty environment that remembers which variables it was asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def get(self, name, default=None):
        self.names.append(name)
        return default


def test_every_environment_variable_is_in_the_table(root):
    """Each variable that the settings read has a row in the README."""
    asked = Asked()
    settings.load(asked)
    rows = [line for line in (root / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert [name for name in asked.names if not any(f"`{name}`" in row.split(" | ")[0] for row in rows)] == []


def test_every_flag_is_in_the_table(root):
    """Each flag that the platform adds to SGLang's has a row in the README."""
    parser = argparse.ArgumentParser(add_help=False)
    flags.add_flags(None, parser)
    text = (root / "README.md").read_text()
    assert [flag for flag in parser.format_usage().split() if flag.startswith("[--") and f"| `{flag[1:]} " not in text] == []
