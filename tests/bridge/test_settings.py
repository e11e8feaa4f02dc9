"""Environment variables are read once, and a bad value is said to be one."""

from dataclasses import fields
from pathlib import Path

import pytest

from bridge.errors import SettingsError
from bridge.settings import Settings, load, parse_size


def test_nothing_set_gives_the_defaults():
    """An empty environment is the default of every field but those that ask the machine."""
    settings = load({})
    assert settings.compat is False and settings.backend == "auto"
    assert settings.emulated_memory == 32 << 30
    assert 1 <= settings.compile_workers <= 2


def test_an_empty_variable_counts_as_unset():
    """`VARIABLE= command` in a shell means no setting."""
    empty = dict.fromkeys(("LIBTT_TPU_COMPAT", "TT_TPU_BACKEND", "TT_TPU_EMULATED_MEMORY", "TPU_LIBRARY_PATH"), "")
    assert load(empty) == load({})


def test_every_field_can_be_set():
    """Each variable changes its field."""
    given = {
        "LIBTT_TPU_COMPAT": "1",
        "TT_TPU_BACKEND": "Emulated",
        "TT_TPU_EMULATED_CHIPS": "4",
        "TT_TPU_EMULATED_MEMORY": "512M",
        "TT_TPU_INNER_PLUGIN": "/a/plugin.so",
        "TPU_LIBRARY_PATH": "/b/libtpu.so",
        "TT_TPU_COMPILE_WORKERS": "7",
        "TT_TPU_CACHE_DIR": "/c",
        "TT_TPU_LOG": "debug",
        "TT_TPU_PALLAS": "error",
        "TT_TPU_COLLECTIVE_TIMEOUT": "7",
        "LIBTT_SYMMETRIC_DRAM_MB": "64",
        "TT_VISIBLE_DEVICES": "3",
        "TT_MESH_GRAPH_DESC_PATH": "/e.textproto",
        "TORCH_TPU_BASE_PORT": "8071",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TT_METAL_MOCK_CLUSTER_DESC_PATH": "/d.yaml",
    }
    settings, default = load(given), load({})
    for field in fields(Settings):
        assert getattr(settings, field.name) != getattr(default, field.name), field.name
    assert settings.backend == "emulated" and settings.emulated_memory == 512 << 20
    assert settings.cache_dir == Path("/c")


@pytest.mark.parametrize(
    ("text", "size"),
    (("1024", 1024), ("8G", 8 << 30), ("8GB", 8 << 30), ("8GiB", 8 << 30), ("1.5g", 3 << 29), ("512 M", 512 << 20), ("2T", 2 << 40)),  # fmt: skip
)
def test_sizes(text, size):
    """Sizes take bytes or a unit, in powers of 1024."""
    assert parse_size(text, "X") == size


@pytest.mark.parametrize(
    ("variable", "value"),
    (
        ("LIBTT_TPU_COMPAT", "maybe"),
        ("TT_TPU_BACKEND", "cuda"),
        ("TT_TPU_EMULATED_CHIPS", "0"),
        ("TT_TPU_EMULATED_CHIPS", "-1"),
        ("TT_TPU_EMULATED_CHIPS", "two"),
        ("TT_TPU_EMULATED_MEMORY", "lots"),
        ("TT_TPU_EMULATED_MEMORY", "-8G"),
        ("TT_TPU_EMULATED_MEMORY", "0"),
        ("TT_TPU_COMPILE_WORKERS", "1.5"),
        ("TT_TPU_LOG", "loud"),
        ("TT_TPU_PALLAS", "guess"),
    ),
)
def test_a_bad_value_is_named(variable, value):
    """The error names the variable and the value."""
    with pytest.raises(SettingsError) as raised:
        load({variable: value})
    assert variable in str(raised.value) and value in str(raised.value)
