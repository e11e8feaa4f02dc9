"""The server's arguments."""

import argparse
import json
import socket
from types import SimpleNamespace

import pytest

from bridge.errors import CheckpointError, MeshError, SettingsError
from bridge.sglang_platform import flags


def arguments(tmp_path, **given):
    (tmp_path / "config.json").touch()
    usual = {"page_size": 64, "kv_cache_dtype": "auto", "chunked_prefill_size": 64, "model_path": str(tmp_path)}
    return argparse.Namespace(**usual | given)


@pytest.mark.parametrize("page_size", [None, 32, 64, 128])
def test_page_sizes_of_the_chip_pass(tmp_path, page_size):
    """32, 64 and 128 are served, and no page size given is."""
    flags.check(arguments(tmp_path, page_size=page_size, chunked_prefill_size=128))


@pytest.mark.parametrize(
    "given, named",
    [
        ({"page_size": 16}, ["--page-size 16", "32, 64, 128"]),
        ({"page_size": 1}, ["--page-size 1", "32, 64, 128"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["--kv-cache-dtype fp8_e5m2", "bfloat16"]),
        ({"page_size": 128}, ["--chunked-prefill-size 64", "128"]),
        ({"page_size": None, "chunked_prefill_size": 96}, ["--chunked-prefill-size 96", "64"]),
        ({"tpu_compile_tokens": [64, 50]}, ["--tpu-compile-tokens 50", "32"]),
        ({"attn_dp_size": 2, "tp_size": 2}, ["--attn-dp-size 2"]),
        ({"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}, ["--enable-dp-attention"]),
        ({"tp_size": 2, "nnodes": 2}, ["--nnodes 2", "--dist-init-addr"]),
        ({"dp_size": 2, "nnodes": 2, "dist_init_addr": "a:1"}, ["--dp-size 2", "--nnodes 2", "one machine"]),
        ({"tp_size": 4, "nnodes": 3, "dist_init_addr": "a:1"}, ["--tp-size 4", "--nnodes 3"]),
        ({"disaggregation_mode": "prefill"}, ["--disaggregation-mode prefill"]),
        ({"speculative_algorithm": "EAGLE"}, ["--speculative-algorithm EAGLE"]),
        ({"return_hidden_states_mode": "last"}, ["--return-hidden-states-mode last"]),
        ({"is_embedding": True}, ["--is-embedding True"]),
    ],
    ids=str,
)
def test_what_the_chip_cannot_serve_is_refused(tmp_path, given, named):
    """The message names the argument as given, and what is possible instead."""
    with pytest.raises(SettingsError) as error:
        flags.check(arguments(tmp_path, **given))
    assert all(part in str(error.value) for part in named)


def model_with(tmp_path, heads, kv_heads):
    given = arguments(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads, "num_key_value_heads": kv_heads}))
    return given


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 3), (8, 2, 2), (8, 2, 4), (8, 2, 8), (9, 3, 1)])
def test_heads_that_can_be_divided_pass(tmp_path, heads, kv_heads, size):
    """Key/value heads are shared out, or copied where there are fewer of them than chips."""
    given = model_with(tmp_path, heads, kv_heads)
    given.tp_size = size
    flags.check(given)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "fitting"), [(9, 3, 2, "use 1, 3, 9"), (12, 4, 6, "use 1, 2, 4, 12")])
def test_heads_that_cannot_be_divided_are_refused(tmp_path, heads, kv_heads, size, fitting):
    """The message says which sizes are possible."""
    given = model_with(tmp_path, heads, kv_heads)
    given.tp_size = size
    with pytest.raises(SettingsError, match=fitting):
        flags.check(given)


def test_a_number_of_chips_that_no_mesh_has_is_refused(tmp_path):
    """Before a model is looked at."""
    given = arguments(tmp_path)
    given.tp_size = 7
    with pytest.raises(MeshError, match="7 chips"):
        flags.check(given)


def test_chips_of_several_machines_that_no_mesh_has_are_refused(tmp_path):
    """Before a model is looked at."""
    given = arguments(tmp_path, tp_size=6, nnodes=2, dist_init_addr="a:1")
    with pytest.raises(MeshError, match="6 chips of board p150 in 2 host"):
        flags.check(given)


@pytest.mark.parametrize(("replicas", "size"), [(2, 1), (2, 2), (3, 4)])
def test_replicas_pass(tmp_path, replicas, size):
    """However many chips a replica has; emulated chips are as many as are asked for."""
    given = model_with(tmp_path, 8, 2)
    given.dp_size, given.tp_size = replicas, size
    flags.check(given)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    """A model folder without config.json is named before anything is loaded."""
    given = arguments(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json") as error:
        flags.check(given)
    assert str(tmp_path) in str(error.value)


def test_a_command_line_that_cannot_be_served_ends_with_one_message(tmp_path):
    """From the command line a refusal is the exit message, not an exception's traceback."""
    with pytest.raises(SystemExit, match="--page-size 16"):
        flags.read_flags(lambda *_: None, object, arguments(tmp_path, page_size=16))


def test_a_port_in_use_is_refused(tmp_path):
    """Before anything is loaded, with the port in the message."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {port} of 127.0.0.1"):
            flags.read_flags(lambda *_: None, object, arguments(tmp_path, host="127.0.0.1", port=port))


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere/at/all"])
def test_a_folder_that_is_not_there_is_refused(tmp_path, path):
    """What is written as a path is not looked for on a model hub."""
    given = arguments(tmp_path)
    given.model_path = path
    with pytest.raises(CheckpointError, match="no model folder"):
        flags.check(given)


def parsed(tmp_path, *words):
    parser = argparse.ArgumentParser()
    for name in ("--cuda-graph-bs-decode", "--cuda-graph-bs-prefill"):
        parser.add_argument(name, type=int, nargs="+")
    flags.add_flags(None, parser)
    given = vars(parser.parse_args(words))
    return flags.read_flags(lambda _cls, result: result, object, arguments(tmp_path, **given))


def test_the_flags_become_graph_sizes(tmp_path):
    """--tpu-compile-bs and --tpu-compile-tokens are SGLang's sizes of decode and prefill graphs."""
    given = parsed(tmp_path, "--tpu-compile-bs", "4", "1", "--tpu-compile-tokens", "64")
    assert (given.cuda_graph_bs_decode, given.cuda_graph_bs_prefill) == ([4, 1], [64])


@pytest.mark.parametrize("word", ["0", "-1", "four", "1.5"])
def test_a_size_must_be_a_number_above_zero(tmp_path, word):
    """Wrong usage, as argparse has it: status 2."""
    with pytest.raises(SystemExit) as error:
        parsed(tmp_path, "--tpu-compile-bs", word)
    assert error.value.code == 2


def test_sizes_that_were_asked_for_are_compiled():
    """Sizes are sorted, each once, prompts in whole tiles; those that SGLang fills in by itself are not compiled."""
    config = SimpleNamespace(decode=SimpleNamespace(bs=[4, 1, 4]), prefill=SimpleNamespace(bs=[100, 64]))
    asked = SimpleNamespace(_cuda_graph_config_locked={("decode", "bs"), ("prefill", "bs")})
    assert flags.buckets(asked, config) == ([1, 4], [64, 128])
    assert flags.buckets(SimpleNamespace(), config) == ([1, 4], [64])
