"""The backend is chosen by what is there, and what is missing is said."""

import dataclasses
from pathlib import Path

import pytest

from bridge import backend, chips
from bridge.errors import BackendError
from bridge.settings import Settings


@pytest.fixture
def no_chips(monkeypatch):
    monkeypatch.setattr(chips, "silicon", lambda: ())


def test_auto_without_chips_is_emulated(no_chips):
    """Without silicon the emulated chip stands in, on the tested inner plugin."""
    found = backend.resolve(Settings())
    assert found.name == "emulated" and found.inner_library.is_file()
    assert found.inner_version == backend.INNER_PLUGINS["emulated"].tested
    assert "emulated p150" in found.platform_version


def test_auto_with_chips_wants_libtt(monkeypatch):
    """With silicon auto never falls back to emulation: a missing libtt is an error that says how to get it."""
    monkeypatch.setattr(chips, "silicon", lambda: (chips.Chip(0, "p150", 32 << 30, Path("/dev/tenstorrent/0")),))
    with pytest.raises(BackendError, match="jax-tt-plugin"):
        backend.resolve(Settings())


def test_libtt_without_chips_is_an_error(no_chips):
    """TT_TPU_BACKEND=libtt on a machine without chips says so."""
    with pytest.raises(BackendError, match="no chip under /dev/tenstorrent"):
        backend.resolve(Settings(backend="libtt"))


def test_a_plugin_that_is_not_built_is_an_error(monkeypatch, tmp_path):
    """The error says what to run."""
    monkeypatch.setattr(backend, "PLUGIN", tmp_path / "libtt_tpu_pjrt.so")
    with pytest.raises(BackendError, match="pip install"):
        backend.resolve(Settings())


@pytest.mark.parametrize("change", ({"distribution": "no-such-plugin"}, {"tested": "0.0.1"}, {"library": "other.so"}))
def test_an_inner_plugin_that_does_not_fit_is_an_error(no_chips, monkeypatch, change):
    """Missing, of an untested version or without its library: each names the distribution that is wanted."""
    changed = dataclasses.replace(backend.INNER_PLUGINS["emulated"], **change)
    monkeypatch.setitem(backend.INNER_PLUGINS, "emulated", changed)
    with pytest.raises(BackendError, match=f"{changed.distribution}==|{changed.distribution} "):
        backend.resolve(Settings())


def test_an_inner_plugin_by_path(no_chips, tmp_path):
    """TT_TPU_INNER_PLUGIN is used as it is where it is a file, and refused where it is none."""
    library = tmp_path / "plugin.so"
    with pytest.raises(BackendError, match="TT_TPU_INNER_PLUGIN"):
        backend.resolve(Settings(inner_plugin=library))
    library.touch()
    assert backend.resolve(Settings(inner_plugin=library)).inner_library == library


def test_the_fingerprint_tells_plugins_apart(no_chips, tmp_path):
    """Another inner plugin has another fingerprint; the same one has the same."""
    library = tmp_path / "plugin.so"
    library.write_text("x")
    first = backend.resolve(Settings())
    assert first.fingerprint == backend.resolve(Settings()).fingerprint
    assert first.fingerprint != backend.resolve(Settings(inner_plugin=library)).fingerprint


def test_the_configuration_holds_what_the_plugin_reads(no_chips):
    """One key=value a line, with the fingerprint and the memory of one chip."""
    found = backend.resolve(Settings(emulated_memory=1 << 30))
    lines = dict(line.split("=", 1) for line in backend.plugin_config(found, Settings()).splitlines())
    assert lines["memory_bytes"] == str(1 << 30) and lines["fingerprint"] == found.fingerprint
    assert lines["backend"] == "emulated" and Path(lines["inner_library"]).is_file()
