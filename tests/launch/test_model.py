"""What is known of a model before anything starts."""

import json

import pytest

from bridge.errors import CheckpointError
from launch import model


def write_model(folder, config: str | dict, weights: bool = True):
    """A folder with a config.json, given as text or as an object, and a file in place of weights."""
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        (folder / "model.safetensors").touch()
    return str(folder)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}, 512),
        ({"architectures": ["Gemma"], "text_config": {"max_position_embeddings": 256}}, 256),
        ({"architectures": ["LlamaForCausalLM"]}, None),
    ],
)
def test_context_length(tmp_path, config, context):
    """The context length is config.json's, or its text model's."""
    assert model.find(write_model(tmp_path / "m", config)).context == context


def test_name_on_a_hub():
    """A name with one slash that is no folder is left to SGLang."""
    assert model.find("Qwen/Qwen3-8B") == model.Model("Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("config", "word"),
    [("{", "JSON"), ("[]", "architectures"), ("{}", "architectures"), ('{"architectures": []}', "architectures")],
)
def test_unusable_config(tmp_path, config, word):
    """A config.json that describes no model is refused."""
    with pytest.raises(CheckpointError, match=word):
        model.find(write_model(tmp_path / "m", config))


def test_no_weights(tmp_path):
    """A folder without weights is refused."""
    with pytest.raises(CheckpointError, match="weights"):
        model.find(write_model(tmp_path / "m", {"architectures": ["LlamaForCausalLM"]}, weights=False))


def test_no_config(tmp_path):
    """A folder without config.json is refused, and so is a file, and a place where nothing is."""
    with pytest.raises(CheckpointError, match="config.json"):
        model.find(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        model.find(str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="no model"):
        model.find(str(tmp_path / "nothing"))
